/* Monotonic time in nanoseconds, and deadlines in it. */
#ifndef SMP_COMMON_CLOCK_H
#define SMP_COMMON_CLOCK_H

#include <stdint.h>

#define SMP_NS_PER_US 1000LL
#define SMP_NS_PER_MS 1000000LL
#define SMP_NS_PER_S 1000000000LL

/* A deadline that never comes. */
#define SMP_NEVER INT64_MAX

int64_t smp_clock_ns(void);

/* timeout_ns from now; SMP_NEVER for a negative one. */
int64_t smp_clock_deadline(int64_t timeout_ns);

#endif
