/* How long somebody waits, and who may end that. */
#ifndef SMP_COMM_PATIENCE_H
#define SMP_COMM_PATIENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/clock.h"
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

#endif
