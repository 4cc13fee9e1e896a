/* The end of a wait, and a function to end the wait earlier. */
#ifndef SMP_COMMON_DEADLINE_H
#define SMP_COMMON_DEADLINE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/clock.h"
#include "common/status.h"

/* A thread waiting with it looks at least this often. */
#define SMP_DEADLINE_LOOK_NS (20 * SMP_NS_PER_MS)

typedef struct {
    int64_t at_ns;               /* of smp_clock_ns() */
    bool (*gives_up)(void *arg); /* asked by the waiting thread; or NULL */
    void *arg;                   /* borrowed */
} smp_deadline;

/* SMP_OK: it can go on.  SMP_ERR_TIMED_OUT, SMP_ERR_INTERRUPTED. */
static inline smp_status
smp_deadline_left(const smp_deadline *deadline, int64_t now_ns)
{
    if (now_ns >= deadline->at_ns) {
        return SMP_ERR_TIMED_OUT;
    }
    return deadline->gives_up != NULL && deadline->gives_up(deadline->arg)
               ? SMP_ERR_INTERRUPTED
               : SMP_OK;
}

/* For poll(): how long to sleep until until_ns, or until it is time to look. */
static inline int
smp_deadline_ms(const smp_deadline *deadline, int64_t until_ns)
{
    int64_t longest = deadline->gives_up != NULL ? SMP_DEADLINE_LOOK_NS : SMP_NS_PER_S;
    int64_t now = smp_clock_ns();
    int64_t until = until_ns < deadline->at_ns ? until_ns : deadline->at_ns;
    int64_t left = until < now ? 0 : until - now;

    return (int)((left < longest ? left : longest) / SMP_NS_PER_MS) + 1;
}

/* Half of the time, so that a network without an answer leaves the other half to the
 * next transports. */
static inline smp_deadline
smp_deadline_half(const smp_deadline *deadline)
{
    smp_deadline half = *deadline;
    int64_t      now = smp_clock_ns();

    if (half.at_ns != SMP_NEVER) {
        half.at_ns = now + (half.at_ns - now) / 2;
    }
    return half;
}

#endif
