/* One operation of a group, as steps of its members
 * (comm/collective/intra_host/epoch_barrier.h); how it goes is in collective_state.h.
 *
 * Threads  one at a time.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_COLLECTIVE_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_COLLECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/call.h"
#include "comm/collective/intra_host/collective_state.h"
#include "comm/collective/intra_host/epoch_barrier.h"
#include "common/status.h"

/* SMP_ERR_NO_MEMORY.  fini takes an all-zero one. */
smp_status smp_collective_init(smp_collective *op, smp_epoch_barrier *barrier);
void       smp_collective_fini(smp_collective *op);

/* Begins an operation: fills the slot of the epoch barrier's next step.
 * SMP_ERR_INVALID: no such operation, reduction, root, or count. */
smp_status smp_collective_begin(smp_collective *op, const smp_call *call,
                                uint64_t sequence);

/* By device: gives it the work of the present step, before the step is posted.
 * SMP_ERR_SYSTEM, with op->why. */
smp_status smp_collective_prepare(smp_collective *op);

/* By device: the operation is over before its time, perhaps. */
void smp_collective_finish(smp_collective *op);

/* A part of an operation of a larger group, with these members on one host.  Their
 * calls are known to agree. */
typedef struct {
    smp_operation
        operation; /* SMP_ALL_GATHER: each has one range for others, SMP_ALL_TO_ALL: one
                      for each other, and SMP_REDUCE_SCATTER: one to reduce */
    const void        *in;
    void              *out;
    size_t             most;     /* elements of the longest range; the same on all */
    const smp_partial *partials; /* of SMP_REDUCE_SCATTER; borrowed until it is over */
    int                npartials;
} smp_local_part;

/* Begins it, with op->pulls and op->pushes filled by the caller; `notice` is the larger
 * operation's in the slots. */
void smp_collective_begin_part(smp_collective *op, const smp_call *call,
                               const smp_local_part *part, const smp_notice *notice);

/* Reads the notices of the first step of a part, posted by all. */
void smp_collective_see(smp_collective *op);

/* Whether all members' calls agree, once they have posted the first step; else names
 * the different calls. */
bool smp_collective_agreed(smp_collective *op, smp_refusal *refusal);

/* Reads the members' slots or memory; *whole: the step is done.  SMP_ERR_SYSTEM:
 * *member's memory cannot be read; for this member itself, its device failed (op->why).
 * SMP_ERR_PEER_LOST, SMP_ERR_CLOSED: it has no memory any more.  The status of
 * *member's giving up: its memory is not for others to use any more. */
smp_status smp_collective_collect(smp_collective *op, bool *whole, int *member);

/* Bytes of `out` written by all members, if op->writes. */
size_t smp_collective_written(const smp_collective *op);

/* Goes to the next step and fills its slot; false: there is none. */
bool smp_collective_next(smp_collective *op);

#endif
