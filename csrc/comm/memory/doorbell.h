/* A doorbell: one futex word in shared memory, for one sleeping thread.
 *
 * The sleeper marks the word, looks once more for the awaited thing, and sleeps.  A
 * thread rings after its write; a ring is one load while the sleeper is awake, and one
 * system call when it sleeps.
 *
 * The awaited thing must be written and read with seq_cst atomics: the order "I wrote,
 * then saw it awake" against "it lay down, then saw nothing" makes a lost wake-up
 * impossible.
 *
 * A ringer killed between clearing the word and the system call leaves the sleeper
 * asleep; a thread with news of the death uses smp_doorbell_ring_hard().
 */
#ifndef SMP_COMM_MEMORY_DOORBELL_H
#define SMP_COMM_MEMORY_DOORBELL_H

#include <stdatomic.h>
#include <stdint.h>

#include "common/jitter.h"

typedef struct {
    _Atomic uint32_t asleep; /* 1: a thread sleeps here or is about to */
} smp_doorbell;

/* Wakes the sleeper, whatever the word says.  Async-signal-safe. */
void smp_doorbell_ring_hard(smp_doorbell *doorbell);

/* Wakes the sleeper, if there is one.  Async-signal-safe. */
static inline void
smp_doorbell_ring(smp_doorbell *doorbell)
{
    smp_jitter();
    if (atomic_load(&doorbell->asleep) != 0 &&
        atomic_exchange(&doorbell->asleep, 0) != 0) {
        smp_doorbell_ring_hard(doorbell);
    }
}

/* Announces sleep.  Look once more afterwards, then sleep or get up. */
static inline void
smp_doorbell_lie_down(smp_doorbell *doorbell)
{
    atomic_store(&doorbell->asleep, 1);
    smp_jitter();
}

static inline void
smp_doorbell_get_up(smp_doorbell *doorbell)
{
    atomic_store_explicit(&doorbell->asleep, 0, memory_order_relaxed);
}

/* Sleeps until rung or until deadline_ns (smp_clock_ns); may return early. */
void smp_doorbell_sleep(smp_doorbell *doorbell, int64_t deadline_ns);

#endif
