/* The two futex calls.  Not the private kind: ringers are in other processes. */
#define _GNU_SOURCE
#include "comm/memory/doorbell.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/clock.h"

void
smp_doorbell_ring_hard(smp_doorbell *doorbell)
{
    atomic_store(&doorbell->asleep, 0);
    smp_jitter();
    syscall(SYS_futex, &doorbell->asleep, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void
smp_doorbell_sleep(smp_doorbell *doorbell, int64_t deadline_ns)
{
    struct timespec until = smp_timespec(deadline_ns);

    smp_jitter();
    /* The bitset form takes an absolute time, so an early return costs no drift. */
    syscall(SYS_futex, &doorbell->asleep, FUTEX_WAIT_BITSET, 1,
            deadline_ns == SMP_NEVER ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
}
