/* Tensors sent from one rank to another, matched by group, source and tag.
 *
 * Sending never waits: the bytes are copied.  A receive is posted by its owner.  A
 * message goes into the first fitting posted receive, in the order of their posts, and
 * an unexpected message is kept.  A thread waiting for a posted receive sorts in
 * arrivals, for all receives.
 *
 * Ownership  A posted receive and its tensor are the caller's memory, borrowed from its
 *            post until it is over or cancelled.  A mailbox borrows its comm, and takes
 *            all its messages: destroy the mailbox first.
 * Threads    any.
 */
#ifndef SMP_COMM_COLLECTIVE_MAILBOX_H
#define SMP_COMM_COLLECTIVE_MAILBOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/kernels/dtype.h"
#include "comm/collective/kernels/kind.h"
#include "comm/messaging/comm.h"
#include "common/status.h"

#define SMP_ANY_SOURCE (-1)

typedef struct smp_mailbox smp_mailbox;

/* The address, alike on both sides. */
typedef struct {
    uint64_t  group; /* its id */
    int64_t   tag;
    smp_dtype dtype;
    smp_kind  kind;
    size_t    count; /* of dtype */
} smp_address;

typedef struct smp_posted_receive {
    smp_address want;   /* set before it is posted, like the two below */
    int         source; /* rank of the comm, or SMP_ANY_SOURCE */
    void       *out;

    smp_status  status; /* once it is over; SMP_ERR_MISMATCH: as `got` says */
    smp_address got;
    int         from; /* the sender or the lost rank; or SMP_ANY_SOURCE */

    bool                       over; /* the mailbox's own, like next */
    struct smp_posted_receive *next;
} smp_posted_receive;

/* SMP_ERR_NO_MEMORY. */
smp_status smp_mailbox_create(smp_comm *comm, smp_mailbox **out);

/* All posted receives are over or cancelled.  Takes NULL. */
void smp_mailbox_destroy(smp_mailbox *mailbox);

/* Errors of smp_comm_send(). */
smp_status smp_mailbox_send(smp_mailbox *mailbox, int dest, const smp_address *address,
                            const void *in);

void smp_receive_post(smp_mailbox *mailbox, smp_posted_receive *receive);

/* Waits until it is over or until_ns (smp_clock_ns): true, it is.  Statuses:
 * SMP_ERR_MISMATCH; SMP_ERR_CLOSED: the source has ended; SMP_ERR_PEER_LOST and other
 * errors of smp_comm_receive(): it is lost, or any rank where any may send. */
bool smp_receive_wait(smp_mailbox *mailbox, smp_posted_receive *receive,
                      int64_t until_ns);

/* Nothing more goes into the receive.  Returns whether it is over.  It may be over, or
 * cancelled, before. */
bool smp_receive_cancel(smp_mailbox *mailbox, smp_posted_receive *receive);

#endif
