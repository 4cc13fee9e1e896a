/* Locks with a rank: the order in which a thread may take them is one list.
 *
 * Debug builds assert that a thread takes locks only downwards in the list, so the
 * first test with a possible lock-order deadlock stops.
 *
 * Never hold one while calling Python, MPI, CUDA or a function out of a table.
 */
#ifndef SMP_COMMON_LOCK_H
#define SMP_COMMON_LOCK_H

#include <pthread.h>

/* A thread holding one of these may take only those further down. */
typedef enum {
    SMP_LOCK_QUEUES,   /* comm: the queues of the groups                */
    SMP_LOCK_MAILBOX,  /* comm: tensors from rank to rank               */
    SMP_LOCK_PEER,     /* comm: data on its way to one peer */
    SMP_LOCK_ARENA,    /* comm: the own arena's books                   */
    SMP_LOCK_DEVICES,  /* comm: ended device pools */
    SMP_LOCK_POST,     /* comm: messages for groups                     */
    SMP_LOCK_INBOX,    /* comm: arrived messages and blocks */
    SMP_LOCK_OUTBOX,   /* comm: blocks queued for a socket */
    SMP_LOCK_REGISTRY, /* comm: the list of transports                  */
    SMP_LOCK_FORK,     /* comm: entries that a forked child must not touch */
    SMP_LOCK_WATCHDOG, /* server: the watchdog is to end                */
    SMP_LOCK_BOARD,    /* server: the rank's work and waits */
    SMP_LOCK_STILL,    /* python: threads stand still for their stacks */
    SMP_NLOCKS
} smp_lock_rank;

typedef struct {
    pthread_mutex_t mutex;
    smp_lock_rank   rank;
} smp_lock;

/* For locks with static storage. */
#define SMP_LOCK_INIT(rank)                                                            \
    {                                                                                  \
        PTHREAD_MUTEX_INITIALIZER, rank                                                \
    }

void smp_lock_init(smp_lock *lock, smp_lock_rank rank);
void smp_lock_fini(smp_lock *lock);
void smp_lock_acquire(smp_lock *lock);
void smp_lock_release(smp_lock *lock);

#endif
