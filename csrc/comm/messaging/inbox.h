/* Messages from the progress thread, for the receiving thread.
 *
 * Ownership  put takes a message, get gives it.
 * Threads    put: any.  get: the receiving thread.
 */
#ifndef SMP_COMM_MESSAGING_INBOX_H
#define SMP_COMM_MESSAGING_INBOX_H

#include <stdatomic.h>
#include <stddef.h>

#include "comm/memory/message.h"
#include "common/lock.h"

typedef struct {
    _Atomic size_t   count;    /* an empty inbox costs a load */
    smp_lock         lock;     /* guards messages */
    smp_message_list messages; /* owned */
} smp_inbox;

void smp_inbox_init(smp_inbox *inbox);

/* Frees the messages left in it. */
void smp_inbox_fini(smp_inbox *inbox);

/* The count is seq_cst: a doorbell may be rung after it. */
void smp_inbox_put(smp_inbox *inbox, smp_message *message);

/* The oldest message, or NULL. */
smp_message *smp_inbox_get(smp_inbox *inbox);

#endif
