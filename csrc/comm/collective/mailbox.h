/* Tensors sent from one rank to another, matched by group, source and tag.
 *
 * Sending never waits: the bytes are copied.  A receive is a letterbox that its owner
 * puts up; what arrives goes into the first that it fits, in the order in which they
 * were put up, and what arrives too early is kept.  Whoever waits for a letterbox sorts
 * in what arrives, for all of them.
 *
 * Ownership  A letterbox and its tensor are the caller's memory, borrowed from put up
 *            until it is over or taken down.  A mailbox borrows its comm, all of whose
 *            messages it takes: destroy it first.
 * Threads    any.
 */
#ifndef SMP_COMM_COLLECTIVE_MAILBOX_H
#define SMP_COMM_COLLECTIVE_MAILBOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/kernels/dtype.h"
#include "comm/collective/kernels/kind.h"
#include "comm/comm.h"
#include "common/status.h"

#define SMP_ANY_SOURCE (-1)

typedef struct smp_mailbox smp_mailbox;

/* What must be alike on both sides. */
typedef struct {
    uint64_t  group; /* its id */
    int64_t   tag;
    smp_dtype dtype;
    smp_kind  kind;
    size_t    count; /* of dtype */
} smp_address;

typedef struct smp_letterbox {
    smp_address want;   /* set before it is put up, like the two below */
    int         source; /* rank of the comm, or SMP_ANY_SOURCE */
    void       *out;

    smp_status  status; /* once it is over; SMP_ERR_MISMATCH: as `got` says */
    smp_address got;
    int         from; /* the rank that sent it, or that is lost; or SMP_ANY_SOURCE */

    bool                  over; /* the mailbox's own, like next */
    struct smp_letterbox *next;
} smp_letterbox;

/* SMP_ERR_NO_MEMORY. */
smp_status smp_mailbox_create(smp_comm *comm, smp_mailbox **out);

/* All letterboxes are over or taken down.  Takes NULL. */
void smp_mailbox_destroy(smp_mailbox *mailbox);

/* Errors of smp_comm_send(). */
smp_status smp_mailbox_send(smp_mailbox *mailbox, int dest, const smp_address *address,
                            const void *in);

void smp_letterbox_put_up(smp_mailbox *mailbox, smp_letterbox *box);

/* Waits until it is over or until_ns (smp_clock_ns): true, it is.  Statuses:
 * SMP_ERR_MISMATCH; SMP_ERR_CLOSED: the source has ended; SMP_ERR_PEER_LOST and other
 * errors of smp_comm_receive(): it is lost, or any rank where any may send. */
bool smp_letterbox_wait(smp_mailbox *mailbox, smp_letterbox *box, int64_t until_ns);

/* Nothing more goes into it.  Whether it is over.  Also of one that is over, or down.
 */
bool smp_letterbox_take_down(smp_mailbox *mailbox, smp_letterbox *box);

#endif
