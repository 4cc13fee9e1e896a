/* Which call is which: numbers that the program alone decides, never the timing.
 *
 * A call's number follows from its caller's (a task is itself a call; the step function
 * is one for each microbatch), from the module that it calls, from how often that
 * caller has called that module before, and from the phase.  So it is the same in every
 * run of the program, under every schedule, and on all ranks that run the same.  Calls
 * of other modules do not change it.
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

/* How often one task has called what; all zero: nothing yet. */
typedef struct {
    struct smp_call_count *counts; /* owned: a hash table with open addresses */
    size_t                 room;   /* a power of two, or 0 */
    size_t                 used;
} smp_calls;

/* Counts a call of the module; *before: how many there were.  SMP_ERR_NO_MEMORY. */
smp_status smp_calls_count(smp_calls *calls, uint64_t module, uint32_t *before);

void smp_calls_fini(smp_calls *calls);

#endif
