/* The order of microbatches at modules with changing buffers (BatchNorm).
 *
 * Such a module has a gate.  A microbatch may enter when every earlier one is past: it
 * has called the module as often as the traced one did, or its forward is over.  Once a
 * microbatch has called it more often (data decide how often), the trace's number is
 * not believed any more.
 *
 * Threads  None: the holder of the server's baton.
 */
#ifndef SMP_SERVER_TURNS_H
#define SMP_SERVER_TURNS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

typedef struct smp_turns smp_turns;

/* expected: by gate, how often a microbatch calls the module; 0: not known.  Copied. */
smp_status smp_turns_create(int32_t ngates, const int32_t *expected, smp_turns **out);
void       smp_turns_destroy(smp_turns *turns);

/* A step begins. */
smp_status smp_turns_begin(smp_turns *turns, int32_t microbatches);

bool smp_turns_may_enter(const smp_turns *turns, int32_t gate, int32_t microbatch);

/* The microbatch has called the module once more. */
void smp_turns_left(smp_turns *turns, int32_t gate, int32_t microbatch);

/* The forward of the microbatch is over: it calls no module for the first time. */
void smp_turns_forward_done(smp_turns *turns, int32_t microbatch);

#endif
