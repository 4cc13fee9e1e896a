/* Several ranks for a test: forked processes, or threads of this one.
 *
 * A test of the list is one function that every rank runs.  It gets a connected comm
 * and returns 0, or prints what is wrong and returns 1.  A rank that says nothing for
 * WORLD_SECONDS is killed by its alarm, so no test waits for ever.
 */
#ifndef SMP_TESTS_WORLD_H
#define SMP_TESTS_WORLD_H

#ifndef _GNU_SOURCE
#    error "define _GNU_SOURCE before the first include"
#endif

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "comm/memory/control_block.h"
#include "comm/memory/segment.h"
#include "comm/messaging/comm.h"
#include "comm/messaging/neighbour.h"
#include "comm/transport/card.h"
#include "common/clock.h"

#define WORLD_RANKS 8

/* smp_comm_config.spin_us.  Ranks that outnumber the cores sleep at once in tests that
 * wait thousands of times: to yield is to wait for whatever else the machine runs. */
#ifndef WORLD_SPIN_US
#    define WORLD_SPIN_US (-1)
#endif

#define WORLD_SECONDS 300

/* How long a test waits for what must come. */
#define WORLD_DEADLINE_NS (60 * SMP_NS_PER_S)

typedef struct world world;

/* One rank's part of a test. */
#define TEST_RANK(name) static int name(world *w)

typedef struct {
    const char *name;
    int (*rank)(world *w);
    size_t      pool_bytes;        /* 0: WORLD_POOL */
    size_t      device_pool_bytes; /* 0: none */
    const char *hosts; /* a letter for each rank: those with the same see each other's
                          shared memory; NULL: all do */
} world_test;

#define WORLD_POOL ((size_t)8 << 20)

/* Shared by the ranks of one test. */
typedef struct {
    pthread_barrier_t barrier;
    _Alignas(8) uint8_t cards[WORLD_RANKS][SMP_CARD_BYTES];
    size_t          card_bytes[WORLD_RANKS];
    pid_t           pids[WORLD_RANKS];
    _Atomic int64_t scratch[64]; /* for the test */
} world_shared;

struct world {
    const world_test *test;
    const char       *transports;
    int               rank;
    int               size;
    size_t            pool_bytes;
    smp_comm         *comm;
    world_shared     *shared;
    void (*barrier)(world *w);
    /* Fills shared->cards; collective. */
    void (*exchange)(world *w, const void *card, size_t bytes);
};

static inline void
world_local_barrier(world *w)
{
    pthread_barrier_wait(&w->shared->barrier);
}

static inline void
world_local_exchange(world *w, const void *card, size_t bytes)
{
    memcpy(w->shared->cards[w->rank], card, bytes);
    w->shared->card_bytes[w->rank] = bytes;
    world_local_barrier(w);
}

/* Where no shared memory is between two ranks, neither finds it on the other's card. */
static inline const void *
world_card(const world *w, int rank, uint8_t *copy)
{
    smp_card *card = (smp_card *)(void *)copy;

    memcpy(copy, w->shared->cards[rank], SMP_CARD_BYTES);
    for (uint32_t i = 0; i < card->nsections && w->test->hosts != NULL; i++) {
        if (w->test->hosts[rank] != w->test->hosts[w->rank] &&
            strcmp(card->sections[i].name, "shm") == 0) {
            card->sections[i].name[0] = '-';
        }
    }
    return copy;
}

/* A comm of this rank, and the cards of all. */
typedef struct {
    smp_comm *comm;
    _Alignas(8) uint8_t copies[WORLD_RANKS][SMP_CARD_BYTES];
    const void *cards[WORLD_RANKS];
    size_t      card_bytes[WORLD_RANKS];
} world_end;

/* Makes a comm that can be connected; collective. */
static inline smp_status
world_prepare(world *w, const char *job, world_end *end)
{
    smp_comm_config config = {.rank = w->rank,
                              .size = w->size,
                              .pool_bytes = w->pool_bytes,
                              .device_pool_bytes = w->test->device_pool_bytes,
                              .spin_us = WORLD_SPIN_US,
                              .transports = w->transports};
    const void     *card;
    size_t          bytes;
    smp_status      status;

    snprintf(config.job, sizeof(config.job), "%s", job);
    status = smp_comm_create(&config, &end->comm);
    if (status != SMP_OK) {
        return status;
    }
    card = smp_comm_card(end->comm, &bytes);
    w->exchange(w, card, bytes);
    for (int r = 0; r < w->size; r++) {
        end->cards[r] = world_card(w, r, end->copies[r]);
        end->card_bytes[r] = w->shared->card_bytes[r];
    }
    return SMP_OK;
}

/* The socket file of a rank's shared memory; false: it has none on its card. */
static inline bool
world_socket_file(const world_end *end, int rank, char path[64])
{
    const char *at = (const char *)end->copies[rank];

    for (size_t i = 0; i + 64 < SMP_CARD_BYTES; i++) {
        if (memcmp(at + i, "/dev/shm/", 9) == 0) {
            snprintf(path, 64, "%s", at + i);
            return true;
        }
    }
    return false;
}

/* A connected comm in w->comm; *failed: the rank that is the reason. */
static inline smp_status
world_connect(world *w, int *failed)
{
    world_end  end;
    smp_status status = world_prepare(w, "world", &end);

    if (status != SMP_OK) {
        return status;
    }
    w->comm = end.comm;
    return smp_comm_connect(w->comm, end.cards, end.card_bytes, PATIENCE_MS(30000),
                            failed);
}

static inline int
world_run_rank(world *w)
{
    int        other = -1;
    smp_status status = world_connect(w, &other);
    int        failed = 1;

    if (status == SMP_OK) {
        failed = w->test->rank(w);
    } else {
        fprintf(stderr, "rank %d: connect to %d: %s\n", w->rank, other,
                smp_status_name(status));
    }
    if (failed != 0) {
        fprintf(stderr, "rank %d of %s failed\n", w->rank, w->test->name);
    }
    smp_comm_destroy(w->comm);
    return failed;
}

static inline world_shared *
world_share(int size)
{
    world_shared         *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attributes;

    if (shared == MAP_FAILED) {
        abort();
    }
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, (unsigned)size);
    pthread_barrierattr_destroy(&attributes);
    return shared;
}

/* Each rank a process.  A rank that a test kills with SIGKILL has not failed. */
static inline int
world_run_processes(const world_test *test, const char *transports, int size)
{
    world_shared *shared = world_share(size);
    int           failed = 0;

    fflush(NULL);
    for (int r = 0; r < size; r++) {
        pid_t pid = fork();

        if (pid == 0) {
            world w = {.test = test,
                       .transports = transports,
                       .rank = r,
                       .size = size,
                       .pool_bytes = test->pool_bytes ? test->pool_bytes : WORLD_POOL,
                       .shared = shared,
                       .barrier = world_local_barrier,
                       .exchange = world_local_exchange};

            alarm(WORLD_SECONDS);
            shared->pids[r] = getpid();
            exit(world_run_rank(&w)); /* exit: the leak check runs */
        }
        shared->pids[r] = pid;
    }
    for (int r = 0; r < size; r++) {
        int how;

        waitpid(shared->pids[r], &how, 0);
        if (WIFSIGNALED(how) ? WTERMSIG(how) != SIGKILL : WEXITSTATUS(how) != 0) {
            fprintf(stderr, "rank %d ended with %s %d\n", r,
                    WIFSIGNALED(how) ? "signal" : "status",
                    WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how));
            failed = 1;
        }
    }
    munmap(shared, sizeof(*shared));
    return failed;
}

/* Whether this build can learn from running a test's ranks as threads, or as processes.
 * The thread sanitizer sees one process, so that what can run as threads does, with as
 * many ranks as its list says; the address sanitizer sees no more in threads than in
 * processes. */
static inline bool
world_learns(bool as_threads, bool can_be_threads)
{
#if defined(__SANITIZE_THREAD__)
    return as_threads == can_be_threads;
#elif defined(__SANITIZE_ADDRESS__)
    (void)can_be_threads;
    return !as_threads;
#else
    return can_be_threads || !as_threads;
#endif
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#    define WORLD_SANITIZED 1
#else
#    define WORLD_SANITIZED 0
#endif

/* How often this build repeats what is the same each time but for its order.  A
 * sanitizer takes many times as long, and sees at the first what it sees. */
static inline int
world_times(int times)
{
    return WORLD_SANITIZED ? (times + 3) / 4 : times;
}

static inline void *
world_thread_main(void *arg)
{
    world *w = arg;

    if (world_run_rank(w) != 0) {
        fflush(NULL);
        _exit(1);
    }
    return NULL;
}

/* Each rank a thread: for the thread sanitizer, which sees one process.  It ends with
 * the first rank that fails: others may wait for that one, at a barrier without a
 * limit. */
static inline int
world_run_threads(const world_test *test, const char *transports, int size)
{
    world_shared *shared = world_share(size);
    pthread_t     threads[WORLD_RANKS];
    world         worlds[WORLD_RANKS];

    for (int r = 0; r < size; r++) {
        worlds[r] =
            (world){.test = test,
                    .transports = transports,
                    .rank = r,
                    .size = size,
                    .pool_bytes = test->pool_bytes ? test->pool_bytes : WORLD_POOL,
                    .shared = shared,
                    .barrier = world_local_barrier,
                    .exchange = world_local_exchange};
        if (pthread_create(&threads[r], NULL, world_thread_main, &worlds[r]) != 0) {
            abort();
        }
    }
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
    }
    munmap(shared, sizeof(*shared));
    return 0;
}

/* The SMP_CONTROL_BLOCKS of a rank that shares its memory; borrowed. */
static inline const smp_control_block *
world_control_blocks(const world *w, int rank)
{
    smp_neighbour neighbour;

    if (!smp_comm_neighbour(w->comm, rank, &neighbour)) {
        abort();
    }
    return neighbour.segment->controls;
}

/* Whether a rank sleeps in some group. */
static inline bool
world_sleeps(const world *w, int rank)
{
    const smp_control_block *controls = world_control_blocks(w, rank);

    for (int i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        if (atomic_load(&controls[i].waits) != 0) {
            return true;
        }
    }
    return false;
}

#endif
