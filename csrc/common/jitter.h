/* Random delays where threads and ranks hand something over, for tests.
 *
 * A result that depends on timing shows up sooner when the timing is random.  Off
 * unless the environment has SMP_JITTER, a number from which the delays follow; a call
 * then does nothing, spins for microseconds, or sleeps for up to a fifth of a
 * millisecond.  It does not yield: beside a busy process that costs milliseconds.
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
