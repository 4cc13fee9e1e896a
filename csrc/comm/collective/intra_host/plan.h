/* An operation's ranges and its way, before its begin and once all members have shown
 * their calls.
 *
 * Threads  one at a time, as comm/collective/intra_host/collective.h.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_PLAN_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "comm/collective/intra_host/collective_state.h"

/* The ranges of op->call from member to member, and the length of rows, if any. */
void smp_plan_ranges(smp_collective *op);

/* The way for at most `most` elements between two members: SLOTS, SPLIT, or MEMORY. */
void smp_plan_way(smp_collective *op, size_t most);

/* Between devices: MEETING, DEVICE, or READING. */
void smp_plan_on_devices(smp_collective *op);

/* The way is DEVICE from step `first` on. */
void smp_plan_rounds(smp_collective *op, size_t first);

/* Goes by memory if the others' tensors are mapped, as op->ins and op->outs tell.  All
 * members come to the same answer, for each knows the places of all tensors. */
void smp_plan_mapped(smp_collective *op);

/* With the split sizes of all members, an all-to-all can be planned. */
void smp_plan_all_to_all(smp_collective *op, size_t most);

/* The split sizes of a member, in its slot of the step. */
const uint64_t *smp_plan_counts(const smp_collective *op, int member);

/* A member's part of an all-reduce of `count` elements; parts begin on cache lines of a
 * slot. */
smp_range smp_plan_part(const smp_collective *op, size_t count, int member);

#endif
