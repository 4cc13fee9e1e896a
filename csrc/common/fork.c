/* The fork handlers, and the callbacks deferred until forked children end.
 *
 * A fork's children hold the write end of a pipe made just before it.  The pipe hangs
 * up when the last of them (and of their children) has exited or run exec.
 */
#define _GNU_SOURCE
#include "common/fork.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/lock.h"

/* Descriptors of ours, or pipes of forks with living children. */
#define FORK_GROW 32

typedef struct waiting {
    struct waiting *next; /* owned */
    uint32_t        epoch;
    void (*give_back)(void *);
    void *arg; /* owned by give_back */
} waiting;

typedef struct {
    uint32_t epoch;   /* the fork's number */
    int      hang_up; /* read end of its pipe */
} living_fork;

static _Atomic uint32_t generation;
static _Atomic uint32_t epoch;
static pthread_once_t   installed = PTHREAD_ONCE_INIT;
static int              install_error;

static smp_lock lock = SMP_LOCK_INIT(SMP_LOCK_FORK); /* guards all below */

static int         *fds; /* owned: fds[0 .. nfds), room for fds_room */
static size_t       nfds;
static size_t       fds_room;
static living_fork *forks; /* owned: forks[0 .. nforks), room for forks_room */
static size_t       nforks;
static size_t       forks_room;
static uint32_t     unwatched; /* the last fork without a pipe to its children */
static waiting     *waiters;   /* owned */
static int          fork_pipe[2] = {-1, -1}; /* between prepare and parent or child */

/* Makes room for one more element.  Caller holds the lock. */
static bool
grow(void **array, size_t element, size_t count, size_t *room)
{
    void *larger;

    if (count < *room) {
        return true;
    }
    larger = realloc(*array, (*room + FORK_GROW) * element);
    if (larger == NULL) {
        return false;
    }
    *array = larger;
    *room += FORK_GROW;
    return true;
}

/* Forgets the forks without living children.  Caller holds the lock. */
static void
reap_forks(void)
{
    size_t kept = 0;

    for (size_t i = 0; i < nforks; i++) {
        struct pollfd ended = {.fd = forks[i].hang_up, .events = POLLIN};

        if (poll(&ended, 1, 0) > 0) {
            close(forks[i].hang_up);
        } else {
            forks[kept++] = forks[i];
        }
    }
    nforks = kept;
}

/* Whether a child of a fork after `since` lives, or may.  Caller holds the lock. */
static bool
child_sees(uint32_t since)
{
    if (unwatched > since) {
        return true;
    }
    for (size_t i = 0; i < nforks; i++) {
        if (forks[i].epoch > since) {
            return true;
        }
    }
    return false;
}

/* Takes the entries out of the list that no child sees any more.  Caller holds the
 * lock. */
static waiting *
take_ready(void)
{
    waiting  *ready = NULL;
    waiting **link = &waiters;

    while (*link != NULL) {
        waiting *item = *link;

        if (child_sees(item->epoch)) {
            link = &item->next;
        } else {
            *link = item->next;
            item->next = ready;
            ready = item;
        }
    }
    return ready;
}

static void
run_all(waiting *ready)
{
    while (ready != NULL) {
        waiting *next = ready->next;

        ready->give_back(ready->arg);
        free(ready);
        ready = next;
    }
}

/* Held over the fork: another thread's list would be half written in the child. */
static void
before_fork(void)
{
    smp_lock_acquire(&lock);
    fork_pipe[0] = -1;
    fork_pipe[1] = -1;
    reap_forks();
    /* Without descriptors of ours there is no shared memory to protect. */
    if (nfds != 0 && grow((void **)&forks, sizeof(living_fork), nforks, &forks_room) &&
        pipe2(fork_pipe, O_CLOEXEC) != 0) {
        fork_pipe[0] = -1;
    }
}

static void
after_fork_in_parent(void)
{
    uint32_t number = atomic_fetch_add(&epoch, 1) + 1;

    if (fork_pipe[0] >= 0) {
        close(fork_pipe[1]);
        forks[nforks++] = (living_fork){.epoch = number, .hang_up = fork_pipe[0]};
    } else if (nfds != 0) { /* no descriptor was left for a pipe, or no memory */
        unwatched = number;
    }
    smp_lock_release(&lock);
}

/* The child keeps fork_pipe[1] open for as long as it lives. */
static void
after_fork_in_child(void)
{
    atomic_fetch_add(&generation, 1);
    for (size_t i = 0; i < nfds; i++) {
        close(fds[i]);
    }
    for (size_t i = 0; i < nforks; i++) {
        close(forks[i].hang_up);
    }
    if (fork_pipe[0] >= 0) {
        close(fork_pipe[0]);
    }
    nfds = 0;
    nforks = 0;
    waiters = NULL; /* the parent's to give back; this copy is lost with the child */
    smp_lock_release(&lock);
}

static void
install(void)
{
    install_error =
        pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

smp_status
smp_fork_init(void)
{
    pthread_once(&installed, install);
    return install_error == 0 ? SMP_OK : SMP_ERR_NO_MEMORY;
}

uint32_t
smp_fork_generation(void)
{
    return atomic_load_explicit(&generation, memory_order_relaxed);
}

uint32_t
smp_fork_epoch(void)
{
    return atomic_load_explicit(&epoch, memory_order_relaxed);
}

smp_status
smp_fork_close_in_child(int fd)
{
    smp_status status = SMP_OK;

    smp_lock_acquire(&lock);
    if (grow((void **)&fds, sizeof(int), nfds, &fds_room)) {
        fds[nfds++] = fd;
    } else {
        status = SMP_ERR_NO_MEMORY;
    }
    smp_lock_release(&lock);
    return status;
}

void
smp_fork_forget_fd(int fd)
{
    smp_lock_acquire(&lock);
    for (size_t i = 0; i < nfds; i++) {
        if (fds[i] == fd) {
            fds[i] = fds[--nfds];
            break;
        }
    }
    smp_lock_release(&lock);
}

bool
smp_fork_defer(uint32_t since, void (*give_back)(void *), void *arg)
{
    waiting *item;
    waiting *ready;
    bool     deferred;

    smp_lock_acquire(&lock);
    reap_forks();
    deferred = child_sees(since);
    if (deferred) {
        item = malloc(sizeof(*item));
        if (item != NULL) {
            *item = (waiting){waiters, since, give_back, arg};
            waiters = item;
        } /* else it is never given back: a leak is better than a changed tensor */
    }
    ready = take_ready();
    smp_lock_release(&lock);
    run_all(ready);
    return deferred;
}

bool
smp_fork_sweep(void)
{
    waiting *ready;
    bool     left;

    smp_lock_acquire(&lock);
    if (waiters != NULL) {
        reap_forks();
    }
    ready = take_ready();
    left = waiters != NULL;
    smp_lock_release(&lock);
    run_all(ready);
    return left;
}
