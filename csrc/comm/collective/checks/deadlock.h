/* Rings of ranks of one host, each of which waits in a group for the next one, which
 * waits in another group: two groups entered in opposite order, and longer ones.
 *
 * A rank is *stuck* in a step of a group (comm/collective/intra_host/epoch_barrier.h)
 * while one thread of its process waits there without a limit, all its other threads
 * sleep until an order is over, and no other order is queued (comm/collective/queue.c
 * finds that out). It shows a token on its control block meanwhile: how many orders it
 * has issued.
 *
 * Proof that nobody in a ring ever comes on.  Each is seen stuck twice, in the same
 * step and with the same token, and seen twice not to have posted the step for which
 * the one before it waits; T is a moment between the first look at all of them and the
 * second. The token has not changed, so between the looks none has issued an order, and
 * each came back to its wait if a signal's handler took it away.  After T, one of the
 * missing steps comes first.  Its rank had no order queued for it at T, so it issues
 * one; for that its thread must leave its wait; and for that all must have posted the
 * step it waits for, the next rank of the ring among them: an earlier one than the
 * first.
 *
 * What ends such a wait otherwise are errors: a time-out, a death, a signal's handler
 * that raises.  (A handler that itself enters a group is not thought of.)
 *
 * When a rank is sure it says so on its control block, and leaves once all of the ring
 * have said so: so all of them fail with the same ring, not only the first.
 *
 * Threads  one at a time; what others show is read without a lock.
 */
#ifndef SMP_COMM_COLLECTIVE_CHECKS_DEADLOCK_H
#define SMP_COMM_COLLECTIVE_CHECKS_DEADLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/comm.h"
#include "comm/memory/control_block.h"
#include "common/status.h"

/* A rank that is stuck. */
typedef struct {
    int                rank;    /* of the comm */
    smp_control_block *control; /* borrowed from the comm */
    uint64_t           id;      /* of the group */
    uint64_t           step;
    uint64_t           token;
} smp_stuck;

typedef struct {
    smp_stuck *ring;  /* owned, as all below: [ranks of the comm]; this rank, whom it
                         waits for, ... the last waits for this one */
    smp_stuck *found; /* the ring of the latest look */
    smp_stuck *seen;  /* ranks on the way to it, */
    int       *from;  /* ... and whence: places in `seen` */
    int        n;     /* in the ring; 0: none has been found */
    int64_t    first_ns;
    int64_t    looked_ns;
    bool       is_sure; /* then `text` says it in words: "waits for rank 1, which waits
                           in group 'b' (barrier 1) for rank 0", or its beginning */
    char text[288];
} smp_deadlock;

/* SMP_ERR_NO_MEMORY.  fini takes one that is all zero. */
smp_status smp_deadlock_init(smp_deadlock *deadlock, const smp_comm *comm);
void       smp_deadlock_fini(smp_deadlock *deadlock);

/* Another wait begins. */
void smp_deadlock_forget(smp_deadlock *deadlock);

/* Looks whether this rank, which is stuck, is in a ring; cheap if called often.  True:
 * it is, and the others know it too. */
bool smp_deadlock_look(smp_deadlock *deadlock, const smp_comm *comm);

/* What a control block's owner calls in its group, in words; cut off.  False: nothing
 * yet. */
bool smp_control_block_describe(const smp_control_block *control, char *name,
                                size_t name_bytes, char *call, size_t call_bytes);

#endif
