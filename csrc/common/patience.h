/* How long somebody waits, and who may end that. */
#ifndef SMP_COMMON_PATIENCE_H
#define SMP_COMMON_PATIENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/clock.h"
#include "common/status.h"

/* Whoever waits with it looks at least this often. */
#define SMP_PATIENCE_NS (20 * SMP_NS_PER_MS)

typedef struct {
    int64_t deadline_ns;         /* of smp_clock_ns() */
    bool (*gives_up)(void *arg); /* asked by the thread that waits; or NULL */
    void *arg;                   /* borrowed */
} smp_patience;

/* SMP_OK: it can go on.  SMP_ERR_TIMED_OUT, SMP_ERR_INTERRUPTED. */
static inline smp_status
smp_patience_left(const smp_patience *patience, int64_t now_ns)
{
    if (now_ns >= patience->deadline_ns) {
        return SMP_ERR_TIMED_OUT;
    }
    return patience->gives_up != NULL && patience->gives_up(patience->arg)
               ? SMP_ERR_INTERRUPTED
               : SMP_OK;
}

/* For poll(): how long to sleep until until_ns, or until it is time to look. */
static inline int
smp_patience_ms(const smp_patience *patience, int64_t until_ns)
{
    int64_t longest = patience->gives_up != NULL ? SMP_PATIENCE_NS : SMP_NS_PER_S;
    int64_t now = smp_clock_ns();
    int64_t until = until_ns < patience->deadline_ns ? until_ns : patience->deadline_ns;
    int64_t left = until < now ? 0 : until - now;

    return (int)((left < longest ? left : longest) / SMP_NS_PER_MS) + 1;
}

/* Half of the time, so that a network that swallows everything leaves the other half to
 * the transports that come after. */
static inline smp_patience
smp_patience_half(const smp_patience *patience)
{
    smp_patience half = *patience;
    int64_t      now = smp_clock_ns();

    if (half.deadline_ns != SMP_NEVER) {
        half.deadline_ns = now + (half.deadline_ns - now) / 2;
    }
    return half;
}

#endif
