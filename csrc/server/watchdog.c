/* A thread, mostly asleep. */
#define _GNU_SOURCE
#include "server/watchdog.h"

#include <pthread.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/lock.h"
#include "common/thread.h"

/* It looks this many times within the shorter limit, and at least once in MOST_NS. */
#define LOOKS 8
#define MOST_NS (1 * SMP_NS_PER_S)
#define LEAST_NS (5 * SMP_NS_PER_MS)

struct smp_watchdog {
    smp_board          *board; /* borrowed */
    smp_watchdog_config config;
    int64_t             period_ns;
    pthread_t           thread;
    smp_lock            lock;    /* guards ending */
    pthread_cond_t      changed; /* ending changed; waits on lock */
    bool                ending;
};

static int64_t
period_of(const smp_watchdog_config *config)
{
    int64_t shorter = config->report_ns;

    if (shorter == 0 || (config->end_ns != 0 && config->end_ns < shorter)) {
        shorter = config->end_ns;
    }
    shorter /= LOOKS;
    return shorter > MOST_NS ? MOST_NS : shorter < LEAST_NS ? LEAST_NS : shorter;
}

/* Sleeps a period.  False: the watchdog is to end. */
static bool
sleep_a_period(smp_watchdog *watchdog)
{
    bool ending;

    smp_lock_acquire(&watchdog->lock);
    if (!watchdog->ending) {
        smp_cond_wait(&watchdog->changed, &watchdog->lock,
                      smp_clock_ns() + watchdog->period_ns);
    }
    ending = watchdog->ending;
    smp_lock_release(&watchdog->lock);
    return !ending;
}

static void *
watchdog_main(void *arg)
{
    smp_watchdog              *watchdog = arg;
    const smp_watchdog_config *config = &watchdog->config;
    int64_t                    moved_ns = 0;
    int64_t                    next_ns = 0; /* without a move: when to report */
    smp_standing               now;

    while (sleep_a_period(watchdog)) {
        int64_t still_ns;

        smp_board_read(watchdog->board, &now);
        if (now.moved_ns != moved_ns) {
            moved_ns = now.moved_ns;
            next_ns = config->report_ns;
        }
        if (!now.in_step && !now.outside) {
            continue;
        }
        still_ns = now.now_ns - now.moved_ns;
        if (config->end_ns != 0 && still_ns >= config->end_ns) {
            config->report(config->ctx, &now, true);
        } else if (next_ns != 0 && still_ns >= next_ns) {
            config->report(config->ctx, &now, false);
            next_ns = 2 * still_ns;
        }
    }
    return NULL;
}

smp_status
smp_watchdog_create(smp_board *board, const smp_watchdog_config *config,
                    smp_watchdog **out)
{
    smp_watchdog *watchdog;
    smp_status    status;

    *out = NULL;
    if (config->report_ns == 0 && config->end_ns == 0) {
        return SMP_OK;
    }
    watchdog = calloc(1, sizeof(*watchdog));
    if (watchdog == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    watchdog->board = board;
    watchdog->config = *config;
    watchdog->period_ns = period_of(config);
    smp_lock_init(&watchdog->lock, SMP_LOCK_WATCHDOG);
    smp_cond_init(&watchdog->changed);
    status =
        smp_thread_start(&watchdog->thread, "smp-watchdog", watchdog_main, watchdog);
    if (status != SMP_OK) {
        pthread_cond_destroy(&watchdog->changed);
        smp_lock_fini(&watchdog->lock);
        free(watchdog);
        return status;
    }
    *out = watchdog;
    return SMP_OK;
}

void
smp_watchdog_destroy(smp_watchdog *watchdog)
{
    if (watchdog == NULL) {
        return;
    }
    smp_lock_acquire(&watchdog->lock); /* 1. wake it */
    watchdog->ending = true;
    pthread_cond_signal(&watchdog->changed);
    smp_lock_release(&watchdog->lock);
    pthread_join(watchdog->thread, NULL); /* 2. no other user now */
    pthread_cond_destroy(&watchdog->changed);
    smp_lock_fini(&watchdog->lock);
    free(watchdog);
}
