/* Threads of the core, and waiting for each other under a lock.
 *
 * _GNU_SOURCE is defined before the inclusion.
 */
#ifndef SMP_COMMON_THREAD_H
#define SMP_COMMON_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "common/clock.h"
#include "common/lock.h"
#include "common/status.h"

/* Starts a thread with that name (at most 15 bytes), to be joined by the caller.  The
 * thread blocks all signals.  SMP_ERR_NO_THREAD. */
static inline smp_status
smp_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *arg)
{
    sigset_t all;
    sigset_t before;
    int      error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        return SMP_ERR_NO_THREAD;
    }
    pthread_setname_np(*thread, name);
    return SMP_OK;
}

/* A condition for smp_cond_wait(); pthread_cond_destroy() ends it. */
static inline void
smp_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t monotonic;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* Waits for the condition of the held lock, until_ns (smp_clock_ns) at the latest. */
static inline void
smp_cond_wait(pthread_cond_t *cond, smp_lock *lock, int64_t until_ns)
{
    struct timespec until = smp_timespec(until_ns);

    if (until_ns == SMP_NEVER) {
        pthread_cond_wait(cond, &lock->mutex);
    } else {
        pthread_cond_timedwait(cond, &lock->mutex, &until);
    }
}

#endif
