/* The backlog: messages received and not yet acted on.
 *
 * Requests and responses wait here until chosen (server/choice.h).  A message of a
 * later step, perhaps begun by a faster rank, waits for that step.
 *
 * Ownership  The backlog owns the messages in it; keep takes, take gives.  A message
 *            has an envelope: smp_message_envelope() is not NULL.
 * Threads    None: the holder of the server's baton, or the main thread between steps.
 */
#ifndef SMP_SERVER_BACKLOG_H
#define SMP_SERVER_BACKLOG_H

#include <stddef.h>
#include <stdint.h>

#include "comm/messaging/comm.h"
#include "common/status.h"

typedef struct smp_backlog smp_backlog;

/* SMP_ERR_NO_MEMORY. */
smp_status smp_backlog_create(smp_backlog **out);

/* Frees the messages in it, too.  Takes NULL. */
void smp_backlog_destroy(smp_backlog *backlog);

/* Takes the message, whatever it returns.  SMP_ERR_NO_MEMORY: the message is freed. */
smp_status smp_backlog_keep(smp_backlog *backlog, smp_message *message);

size_t smp_backlog_count(const smp_backlog *backlog);

/* Message i < count, in no order; *arrival: its number in the order of arrival.
 * Borrowed until the backlog changes. */
const smp_message *smp_backlog_at(const smp_backlog *backlog, size_t i,
                                  uint64_t *arrival);

/* Moves message i out; others may have another place then. */
smp_message *smp_backlog_take(smp_backlog *backlog, size_t i);

/* Moves the response to `call` out; NULL: it has not come. */
smp_message *smp_backlog_take_response(smp_backlog *backlog, uint64_t call);

/* Moves all out, linked by `next` in the order of their arrival; NULL: none. */
smp_message *smp_backlog_take_all(smp_backlog *backlog);

/* Frees the messages of steps up to `step`. */
void smp_backlog_drop(smp_backlog *backlog, uint32_t step);

#endif
