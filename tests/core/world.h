/* Several ranks for a test: forked processes, or threads of this one.
 *
 * TEST_RANK(name, ...) { ... } is one function that every rank runs, with a connected
 * comm; it adds itself to the list that run_worlds() runs.  Behind the name stands how
 * it is run, as of a world_test.  A rank that says nothing for WORLD_SECONDS is killed
 * by its alarm, so no test waits for ever.
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
#define WORLD_LAYOUTS 6 /* at the most */

/* smp_comm_config.spin_us.  Ranks that outnumber the cores sleep at once in tests that
 * wait thousands of times: to yield is to wait for whatever else the machine runs. */
#ifndef WORLD_SPIN_US
#    define WORLD_SPIN_US (-1)
#endif

#define WORLD_SECONDS 300

/* How long a test waits for what must come. */
#define WORLD_DEADLINE_NS (60 * SMP_NS_PER_S)

typedef struct world world;

/* Hosts are a letter for each rank: those with the same see each other's shared memory.
 * Ranks are numbered by digits: "24" is a run of two and one of four. */
typedef struct world_test {
    const char *name;
    void (*rank)(world *w);
    /* How many ranks, as processes and as threads; neither: as the plan says. */
    const char *processes;
    const char *threads;
    const char *hosts;          /* of the ranks; NULL: one host */
    int         times;          /* of what differs each time; 0: once */
    size_t      pool_bytes;     /* 0: WORLD_POOL */
    bool        no_device_pool; /* whatever the plan says */
    size_t      device_pool_bytes;

    /* For programs of several hosts, hosts_test.c and others: the hosts of a run each,
     * and those that are enough at a time (NULL: none). */
    const char *layouts[WORLD_LAYOUTS];
    const char *sample;
    bool        forks; /* or ends ranks: they must be processes of ours */

    struct world_test *next;
} world_test;

static world_test *world_list;

static inline void
world_enlist(world_test *test)
{
    static world_test **last = &world_list;

    *last = test;
    last = &test->next;
}

#define TEST_RANK(...) TEST_RANK_(__VA_ARGS__, .next = NULL)
#define TEST_RANK_(test, ...)                                                          \
    static void       test(world *w);                                                  \
    static world_test world_##test = {.name = #test, .rank = test, __VA_ARGS__};       \
    __attribute__((constructor)) static void list_##test(void)                         \
    {                                                                                  \
        world_enlist(&world_##test);                                                   \
    }                                                                                  \
    static void test(world *w)

/* A test in which each rank has something of a type, from begin() to finish(). */
#define TEST_OF(type, test)                                                            \
    static void test##_of(type *self);                                                 \
    TEST_RANK(test)                                                                    \
    {                                                                                  \
        type self;                                                                     \
                                                                                       \
        begin(&self, w);                                                               \
        test##_of(&self);                                                              \
        finish(&self);                                                                 \
    }                                                                                  \
    static void test##_of(type *self)

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

static inline void
world_run_connected(void *arg)
{
    world *w = arg;

    w->test->rank(w);
}

static inline bool
world_run_rank(world *w)
{
    int        other = -1;
    smp_status status = world_connect(w, &other);
    bool       failed = status != SMP_OK || check_fails(world_run_connected, w);

    if (status != SMP_OK) {
        fprintf(stderr, "rank %d: connect to %d: %s\n", w->rank, other,
                smp_status_name(status));
    }
    if (failed) {
        fprintf(stderr, "rank %d of %s failed\n", w->rank, w->test->name);
    }
    smp_comm_destroy(w->comm);
    return failed;
}

/* A child of a test's has found nothing wrong. */
static inline void
expect_well(pid_t child)
{
    int how;

    CHECK(waitpid(child, &how, 0) == child && WIFEXITED(how) && WEXITSTATUS(how) == 0);
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

static inline world
world_of(const world_test *test, const char *transports, int rank, int size,
         world_shared *shared)
{
    return (world){.test = test,
                   .transports = transports,
                   .rank = rank,
                   .size = size,
                   .pool_bytes = test->pool_bytes ? test->pool_bytes : WORLD_POOL,
                   .shared = shared,
                   .barrier = world_local_barrier,
                   .exchange = world_local_exchange};
}

/* Each rank a process.  A rank that a test kills with SIGKILL has not failed. */
static inline bool
world_run_processes(const world_test *test, const char *transports, int size)
{
    world_shared *shared = world_share(size);
    bool          failed = false;

    fflush(NULL);
    for (int r = 0; r < size; r++) {
        pid_t pid = fork();

        if (pid == 0) {
            world w = world_of(test, transports, r, size, shared);

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
            failed = true;
        }
    }
    munmap(shared, sizeof(*shared));
    return failed;
}

#if defined(__SANITIZE_THREAD__)
#    define WORLD_SANITIZER_OF_THREADS 1
#else
#    define WORLD_SANITIZER_OF_THREADS 0
#endif

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#    define WORLD_SANITIZED 1
#else
#    define WORLD_SANITIZED 0
#endif

/* Whether this build learns nothing from ranks of a kind, when a test can be run with
 * the other kind.  The thread sanitizer sees one process; the address sanitizer sees no
 * more in threads than in processes. */
static inline bool
world_skips(bool as_threads)
{
    return WORLD_SANITIZED && as_threads != WORLD_SANITIZER_OF_THREADS;
}

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

    if (world_run_rank(w)) {
        printf("FAILED %s, %d ranks, threads\n", w->test->name, w->size);
        fflush(NULL);
        _exit(1);
    }
    return NULL;
}

/* Each rank a thread: for the thread sanitizer, which sees one process.  It ends with
 * the first rank that fails: others may wait for that one, at a barrier without a
 * limit. */
static inline void
world_run_threads(const world_test *test, const char *transports, int size)
{
    world_shared *shared = world_share(size);
    pthread_t     threads[WORLD_RANKS];
    world         worlds[WORLD_RANKS];

    alarm(WORLD_SECONDS);
    for (int r = 0; r < size; r++) {
        worlds[r] = world_of(test, transports, r, size, shared);
        if (pthread_create(&threads[r], NULL, world_thread_main, &worlds[r]) != 0) {
            abort();
        }
    }
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
    }
    alarm(0);
    munmap(shared, sizeof(*shared));
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

/* --------------------------------------------------------------------- the list */

/* How a program runs its tests. */
typedef enum {
    WORLD_SIZES,         /* each by its numbers of ranks */
    WORLD_SIZES_ALONE,   /* but for those that have layouts */
    WORLD_LAYOUTS_ALONE, /* those, on their layouts */
    WORLD_SAMPLE,        /* on the one that is enough */
} world_by;

typedef struct {
    const char *transports;
    world_by    by;
    const char *processes; /* as of a world_test */
    const char *threads;
    int         step; /* each how many-th layout; 0: all */
    bool        once; /* whatever the test says */
    size_t      device_pool_bytes;
    void (*after)(void *); /* what holds when threads have ended; NULL: nothing */
} world_plan;

/* The largest layout as threads: enough for the thread sanitizer. */
#define WORLD_LAYOUT_THREADS 4

static inline bool
world_fails(const world_test *test, const world_plan *plan, int size, const char *hosts,
            bool as_threads)
{
    world_test one = *test;

    one.hosts = hosts;
    one.device_pool_bytes = test->no_device_pool ? 0 : plan->device_pool_bytes;
    if (!as_threads) {
        return world_run_processes(&one, plan->transports, size);
    }
    world_run_threads(&one, plan->transports, size);
    return plan->after != NULL && check_fails(plan->after, NULL);
}

static inline void
world_run(const world_test *test, const world_plan *plan, int size, const char *hosts,
          bool as_threads)
{
    check_ran++;
    if (world_fails(test, plan, size, hosts, as_threads)) {
        check_failed++;
        printf("FAILED %s, %d ranks, hosts %s, %s, %s\n", test->name, size,
               hosts != NULL ? hosts : "a", plan->transports,
               as_threads ? "threads" : "processes");
    }
}

static inline void
world_run_sizes(const world_test *test, const world_plan *plan, bool as_threads)
{
    bool        own = test->processes != NULL || test->threads != NULL;
    const char *processes = own ? test->processes : plan->processes;
    const char *threads = own ? test->threads : plan->threads;
    const char *sizes = as_threads ? threads : processes;
    int         times = plan->once ? 1 : world_times(test->times);

    if (sizes == NULL ||
        (processes != NULL && threads != NULL && world_skips(as_threads))) {
        return;
    }
    for (; *sizes != '\0'; sizes++) {
        for (int i = 0; i == 0 || i < times; i++) {
            world_run(test, plan, *sizes - '0', test->hosts, as_threads);
        }
    }
}

static inline void
world_run_layouts(const world_test *test, const world_plan *plan, bool as_threads)
{
    int step = plan->step == 0 ? 1 : plan->step;
    int times = plan->once ? 1 : world_times(test->times);

    if (as_threads ? test->threads == NULL || world_skips(true)
                   : test->threads != NULL && world_skips(false)) {
        return;
    }
    for (int l = 0; l < WORLD_LAYOUTS && test->layouts[l] != NULL; l += step) {
        int size = (int)strlen(test->layouts[l]);

        for (int i = 0; i == 0 || i < times; i++) {
            if (!as_threads || size <= WORLD_LAYOUT_THREADS) {
                world_run(test, plan, size, test->layouts[l], as_threads);
            }
        }
    }
}

static inline void
run_worlds_as(int argc, char **argv, const world_plan *plan, bool as_threads)
{
    check_only = argc > 1 ? argv[1] : "";
    for (world_test *test = world_list; test != NULL; test = test->next) {
        if (!check_chosen(test->name)) {
            continue;
        }
        if (plan->by == WORLD_SAMPLE) {
            if (test->sample != NULL && !as_threads) {
                world_run(test, plan, (int)strlen(test->sample), test->sample, false);
            }
        } else if (plan->by == WORLD_LAYOUTS_ALONE) {
            world_run_layouts(test, plan, as_threads);
        } else if (plan->by == WORLD_SIZES || test->layouts[0] == NULL) {
            world_run_sizes(test, plan, as_threads);
        }
    }
}

/* Processes first, and tests that fork: a process that has had threads forks badly
 * under the sanitizers. */
static inline int
run_worlds(int argc, char **argv, const world_plan *plan)
{
    run_worlds_as(argc, argv, plan, false);
    run_tests(argc, argv);
    run_worlds_as(argc, argv, plan, true);
    return tests_are_over();
}

/* The program that does just that. */
#define RUN_WORLDS(...)                                                                \
    int main(int argc, char **argv)                                                    \
    {                                                                                  \
        return run_worlds(argc, argv, &(world_plan){__VA_ARGS__});                     \
    }

#endif
