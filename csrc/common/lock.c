/* Locks with a rank; the check costs one thread-local word in debug builds. */
#include "common/lock.h"

#include <assert.h>

#ifndef NDEBUG
static _Thread_local unsigned held; /* bit r set: this thread holds rank r */
#endif

void
smp_lock_init(smp_lock *lock, smp_lock_rank rank)
{
    pthread_mutex_init(&lock->mutex, NULL); /* without attributes it cannot fail */
    lock->rank = rank;
}

void
smp_lock_fini(smp_lock *lock)
{
    pthread_mutex_destroy(&lock->mutex);
}

void
smp_lock_acquire(smp_lock *lock)
{
    assert(held >> lock->rank == 0); /* nothing at this rank or below it */
    pthread_mutex_lock(&lock->mutex);
#ifndef NDEBUG
    held |= 1u << lock->rank;
#endif
}

void
smp_lock_release(smp_lock *lock)
{
#ifndef NDEBUG
    assert((held >> lock->rank & 1u) != 0);
    held &= ~(1u << lock->rank);
#endif
    pthread_mutex_unlock(&lock->mutex);
}
