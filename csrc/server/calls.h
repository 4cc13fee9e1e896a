/* The numbers of calls: the program alone decides them, never the timing.
 *
 * A call's number follows from its caller's (a task is itself a call; the step function
 * is one for each microbatch), its module, the count of earlier calls of that module by
 * that caller, and the phase.  So the number is the same in every run of the program,
 * under every schedule, and on all ranks running the same.  Calls of other modules do
 * not change it.
 *
 * Two calls of a step have the same number once in 2^63 pairs of them.
 *
 * Threads  None: one task's.
 */
#ifndef SMP_SERVER_CALLS_H
#define SMP_SERVER_CALLS_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "server/schedule.h"

/* The step function's, on one microbatch. */
uint64_t smp_call_of_root(int32_t microbatch);

/* Call number `time`, from 0, of this module by this caller. */
uint64_t smp_call_of(uint64_t caller, uint64_t module, uint32_t time, smp_phase phase);

/* The backward of a call. */
uint64_t smp_call_of_backward(uint64_t forward);

/* One task's counts of calls, by module; all zero: none yet. */
typedef struct {
    struct smp_call_count *counts; /* owned: a hash table with open addresses */
    size_t                 room;   /* a power of two, or 0 */
    size_t                 used;
} smp_calls;

/* Counts a call of the module; *before: the count until now.  SMP_ERR_NO_MEMORY. */
smp_status smp_calls_count(smp_calls *calls, uint64_t module, uint32_t *before);

void smp_calls_fini(smp_calls *calls);

#endif
