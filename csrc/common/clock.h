/* Monotonic time in nanoseconds, and deadlines in it. */
#ifndef SMP_COMMON_CLOCK_H
#define SMP_COMMON_CLOCK_H

#include <stdint.h>
#include <time.h>

#define SMP_NS_PER_US 1000LL
#define SMP_NS_PER_MS 1000000LL
#define SMP_NS_PER_S 1000000000LL

/* No deadline. */
#define SMP_NEVER INT64_MAX

int64_t smp_clock_ns(void);

/* timeout_ns from now; SMP_NEVER for a negative one.  Inline: a test's own
 * smp_clock_ns() moves deadlines too. */
static inline int64_t
smp_clock_deadline(int64_t timeout_ns)
{
    int64_t now;

    if (timeout_ns < 0) {
        return SMP_NEVER;
    }
    now = smp_clock_ns();
    return timeout_ns > SMP_NEVER - now ? SMP_NEVER : now + timeout_ns;
}

/* So many nanoseconds for the system's calls. */
static inline struct timespec
smp_timespec(int64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / SMP_NS_PER_S),
                             .tv_nsec = (long)(ns % SMP_NS_PER_S)};
}

#endif
