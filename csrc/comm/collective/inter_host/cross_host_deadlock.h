/* Two ranks of different hosts that wait for each other in two groups.
 *
 * Each tells the other that it is stuck (comm/collective/checks/deadlock.h), with its
 * token, and with the other's token where it has heard that (PARCEL_STUCK).  Whoever
 * hears its own token back, and still has it, is sure:  it was stuck when the other one
 * wrote that, for nothing has been issued since it told its token; the other one was
 * stuck then, or it would not have written; the other one had not called what this one
 * waits for, or it would have known the call that it was told of; nor has this one
 * called what the other waits for, until now.  So at that moment each could come on
 * only after the other had.  It answers once more, with which the other is sure, too,
 * and gives up.
 *
 * Longer rings over several hosts are left to the time-out.
 *
 * Threads  one at a time.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_CROSS_HOST_DEADLOCK_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_CROSS_HOST_DEADLOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/collective/inter_host/hierarchical.h"
#include "common/status.h"

/* What was last told to a member. */
typedef struct {
    uint64_t token;
    uint64_t heard;
} smp_told;

typedef struct {
    smp_told *told; /* owned: [members] */
    uint64_t
        token; /* with which this rank was stuck at the latest look; 0: it was not */
    int64_t looked_ns;
    char    text[288]; /* "waits for rank 1, which waits in group 'b' (barrier 1) for
                          rank 0" */
} smp_cross_host_deadlock;

/* SMP_ERR_NO_MEMORY.  fini takes one that is all zero. */
smp_status smp_cross_host_init(smp_cross_host_deadlock *deadlock, int members);
void       smp_cross_host_fini(smp_cross_host_deadlock *deadlock);

/* This rank is stuck in the operation: tells those of other hosts that it waits for,
 * and hears what they say; cheap if called often.  True: one of them waits for this
 * one, as `text` says. */
bool smp_cross_host_look(smp_cross_host_deadlock *deadlock, smp_hierarchical *hier,
                         uint64_t token);

/* The same at once, if it has looked before: somebody has left, perhaps because it was
 * sure. */
bool smp_cross_host_look_again(smp_cross_host_deadlock *deadlock,
                               smp_hierarchical        *hier);

/* Another wait begins. */
static inline void
smp_cross_host_forget(smp_cross_host_deadlock *deadlock)
{
    deadlock->token = 0;
}

#endif
