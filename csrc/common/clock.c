/* The vdso clock: no system call. */
#define _POSIX_C_SOURCE 200809L
#include "common/clock.h"

int64_t
smp_clock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SMP_NS_PER_S + now.tv_nsec;
}
