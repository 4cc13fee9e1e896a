/* Random delays where threads and ranks hand something over, for tests.
 *
 * Random timing shows a result's dependence on timing sooner.  Off unless the
 * environment has SMP_JITTER, the seed of the delays.  A call then does nothing, spins
 * for microseconds, or sleeps for up to a fifth of a millisecond.  It does not yield: a
 * yield costs milliseconds beside a busy process.
 *
 * Threads  init: before other threads call jitter.  jitter: any, also with locks held.
 */
#ifndef SMP_COMMON_JITTER_H
#define SMP_COMMON_JITTER_H

#include <stdatomic.h>
#include <stdbool.h>

extern _Atomic bool smp_jitter_on;

/* Reads the environment. */
void smp_jitter_init(void);

void smp_jitter_delay(void);

/* A hand-over is about to happen, or has just happened. */
static inline void
smp_jitter(void)
{
    if (atomic_load_explicit(&smp_jitter_on, memory_order_relaxed)) {
        smp_jitter_delay();
    }
}

#endif
