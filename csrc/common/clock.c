/* The vdso clock: no system call. */
#define _POSIX_C_SOURCE 200809L
#include "common/clock.h"

#include <time.h>

int64_t
smp_clock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SMP_NS_PER_S + now.tv_nsec;
}

int64_t
smp_clock_deadline(int64_t timeout_ns)
{
    int64_t now;

    if (timeout_ns < 0) {
        return SMP_NEVER;
    }
    now = smp_clock_ns();
    return timeout_ns > SMP_NEVER - now ? SMP_NEVER : now + timeout_ns;
}
