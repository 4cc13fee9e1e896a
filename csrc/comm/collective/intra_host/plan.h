/* What an operation moves, and which way it goes, before it is begun and once all
 * members have said what they call.
 *
 * Threads  one at a time, as comm/collective/intra_host/collective.h.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_PLAN_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "comm/collective/intra_host/collective_state.h"

/* What goes from member to member of op->call, and how long rows are, if it has any. */
void smp_plan_ranges(smp_collective *op);

/* The way for at most `most` elements between two members: SLOTS, SPLIT, or MEMORY. */
void smp_plan_way(smp_collective *op, size_t most);

/* Between devices, all steps have the same way. */
void smp_plan_on_devices(smp_collective *op, size_t most);

/* Goes by memory if what the others need is mapped, as op->ins and op->outs tell.  All
 * members come to the same answer, for each knows where all tensors lie. */
void smp_plan_mapped(smp_collective *op);

/* With the split sizes of all members, an all-to-all can be planned. */
void smp_plan_all_to_all(smp_collective *op, size_t most);

/* The split sizes that a member has said: in its slot of the step. */
const uint64_t *smp_plan_counts(const smp_collective *op, int member);

/* The part of an all-reduce of `count` elements that a member reduces; parts begin on
 * cache lines of a slot. */
smp_range smp_plan_part(const smp_collective *op, size_t count, int member);

#endif
