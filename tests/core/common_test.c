/* Spec: csrc/common: fork.h, clock.h, deadline.h, half.h, pattern.h, mix.h, thread.h.
 */
#define _GNU_SOURCE
#include "common/fork.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "common/clock.h"
#include "common/deadline.h"
#include "common/half.h"
#include "common/mix.h"
#include "common/pattern.h"
#include "common/thread.h"

/* ------------------------------------------------------------------------- forks */

/* A child that lives until it is let go. */
typedef struct {
    pid_t pid;
    int   ends; /* until this is closed */
} living;

/* The child runs `look` first, and ends with 1 if that says so. */
static living
fork_child(int (*look)(void))
{
    int    ends[2] = {-1, -1};
    living child;
    char   byte;

    child.pid = pipe(ends) == 0 ? fork() : -1;
    if (child.pid == 0) {
        int said = look == NULL ? 0 : look();

        close(ends[1]);
        (void)!read(ends[0], &byte, 1);
        _exit(said);
    }
    close(ends[0]);
    child.ends = ends[1];
    return child;
}

/* What the child said, which has ended then. */
static int
let_go(living child)
{
    int status = -1;

    close(child.ends);
    return waitpid(child.pid, &status, 0) == child.pid && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : -1;
}

static int
open_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int  n = -1; /* the folder's own */

    while (folder != NULL && readdir(folder) != NULL) {
        n++;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return n;
}

static void
count_one(void *arg)
{
    ++*(int *)arg;
}

static uint32_t generation;
static uint32_t epoch;

static int
is_another_generation(void)
{
    return smp_fork_generation() == generation;
}

TEST(a_child_is_of_another_generation_and_the_parent_counts_forks)
{
    CHECK_OK(smp_fork_init());
    CHECK_OK(smp_fork_init());
    generation = smp_fork_generation();
    epoch = smp_fork_epoch();
    CHECK(let_go(fork_child(is_another_generation)) == 0);
    CHECK(smp_fork_generation() == generation && smp_fork_epoch() == epoch + 1);
}

static int kept[4]; /* descriptors; the child is to have the last one alone */

static int
has_only_what_was_forgotten(void)
{
    for (int i = 0; i < 3; i++) {
        if (fcntl(kept[i], F_GETFD) != -1 || errno != EBADF) {
            return 1;
        }
    }
    return fcntl(kept[3], F_GETFD) == -1;
}

TEST(a_child_closes_the_descriptors_that_are_not_forgotten)
{
    static const int forgotten[] = {3, 0, 2, 1};

    CHECK_OK(smp_fork_init());
    for (int i = 0; i < 4; i++) {
        kept[i] = dup(STDERR_FILENO);
        CHECK(kept[i] >= 0);
    }
    /* The one that is forgotten stands between others. */
    CHECK_OK(smp_fork_close_in_child(kept[0]));
    CHECK_OK(smp_fork_close_in_child(kept[3]));
    CHECK_OK(smp_fork_close_in_child(kept[1]));
    CHECK_OK(smp_fork_close_in_child(kept[2]));
    smp_fork_forget_fd(kept[3]);
    CHECK(let_go(fork_child(has_only_what_was_forgotten)) == 0);
    for (int i = 0; i < 4; i++) {
        CHECK(fcntl(kept[i], F_GETFD) != -1);
        if (i > 0) {
            smp_fork_forget_fd(kept[forgotten[i]]);
        }
    }
    for (int i = 0; i < 4; i++) {
        close(kept[i]);
    }
}

static int given; /* how often something was given back */
static int descriptors;

/* The copies of the parent's list and pipes are not the child's. */
static int
gives_nothing_back(void)
{
    bool waits = smp_fork_sweep();

    /* What is new: the pipe that it is let go by, and the end of the fork's own that it
     * holds.  What is gone: a descriptor of the core's, and the pipe of another fork.
     */
    return waits || given != 0 || open_descriptors() != descriptors + 3 - 2;
}

TEST(what_a_child_sees_is_given_back_when_it_has_ended)
{
    int      fd = dup(STDERR_FILENO);
    int      both = 0;
    uint32_t old;
    uint32_t young;
    living   first;
    living   second;

    CHECK_OK(smp_fork_init());
    CHECK(!smp_fork_sweep());
    CHECK_OK(smp_fork_close_in_child(fd));
    old = smp_fork_epoch();
    CHECK(!smp_fork_defer(old, count_one, &given) && given == 0); /* nobody sees it */
    first = fork_child(NULL);
    young = smp_fork_epoch();
    descriptors = open_descriptors();
    CHECK(smp_fork_defer(old, count_one, &given));
    CHECK(!smp_fork_defer(young, count_one, &given)); /* made after the fork */
    second = fork_child(gives_nothing_back);
    CHECK(smp_fork_defer(young, count_one, &both));
    CHECK(smp_fork_sweep() && given == 0 && both == 0);
    CHECK(let_go(second) == 0);
    CHECK(smp_fork_sweep() && given == 0 && both == 1);
    CHECK(let_go(first) == 0);
    /* Who has something to give back looks after the others, too. */
    CHECK(!smp_fork_defer(smp_fork_epoch(), count_one, &both));
    CHECK(given == 1 && both == 1);
    CHECK(!smp_fork_sweep() && given == 1 && both == 1);
    CHECK(open_descriptors() == descriptors - 2); /* the first's pipes are gone */
    smp_fork_forget_fd(fd);
    close(fd);
}

TEST(without_descriptors_of_the_cores_no_child_is_watched)
{
    uint32_t old;
    living   child;

    CHECK_OK(smp_fork_init());
    old = smp_fork_epoch();
    given = 0;
    child = fork_child(NULL);
    CHECK(!smp_fork_defer(old, count_one, &given));
    CHECK(let_go(child) == 0 && given == 0);
}

/* Nobody can tell when such a child ends.  Comes last: it is so for ever. */
TEST(without_a_pipe_what_a_child_saw_is_kept)
{
    int           fd = dup(STDERR_FILENO);
    uint32_t      old;
    struct rlimit most;
    struct rlimit none;
    pid_t         pid;
    int           status;

    CHECK_OK(smp_fork_init());
    CHECK_OK(smp_fork_close_in_child(fd));
    old = smp_fork_epoch();
    given = 0;
    CHECK(getrlimit(RLIMIT_NOFILE, &most) == 0);
    none = most;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    pid = fork();
    if (pid == 0) {
        _exit(0);
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &most) == 0);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(!smp_fork_defer(smp_fork_epoch(), count_one, &given));
    CHECK(smp_fork_defer(old, count_one, &given));
    CHECK(smp_fork_sweep() && given == 0);
    smp_fork_forget_fd(fd);
    close(fd);
}

/* ------------------------------------------------------------------------- clocks */

TEST(a_deadline_that_is_negative_or_beyond_time_never_comes)
{
    int64_t         before = smp_clock_ns();
    int64_t         soon = smp_clock_deadline(5 * SMP_NS_PER_S);
    struct timespec parts = smp_timespec(3 * SMP_NS_PER_S + 7);

    CHECK(soon >= before + 5 * SMP_NS_PER_S);
    CHECK(soon <= smp_clock_ns() + 5 * SMP_NS_PER_S);
    CHECK(smp_clock_deadline(0) <= smp_clock_ns());
    CHECK(smp_clock_deadline(-1) == SMP_NEVER);
    CHECK(smp_clock_deadline(SMP_NEVER) == SMP_NEVER);
    CHECK(smp_clock_deadline(SMP_NEVER - 1) == SMP_NEVER);
    CHECK(parts.tv_sec == 3 && parts.tv_nsec == 7);
}

static bool
says_so(void *arg)
{
    ++((int *)arg)[1];
    return ((int *)arg)[0] != 0;
}

TEST(a_wait_ends_at_its_time_or_when_its_thread_gives_up)
{
    int          asked[2] = {0, 0};
    smp_deadline at = {1000, NULL, NULL};
    smp_deadline gives_up = {1000, says_so, asked};

    CHECK_OK(smp_deadline_left(&at, 999));
    CHECK_STATUS(smp_deadline_left(&at, 1000), SMP_ERR_TIMED_OUT);
    CHECK_OK(smp_deadline_left(&gives_up, 999));
    asked[0] = 1;
    CHECK_STATUS(smp_deadline_left(&gives_up, 999), SMP_ERR_INTERRUPTED);
    CHECK_STATUS(smp_deadline_left(&gives_up, 1000), SMP_ERR_TIMED_OUT);
    CHECK(asked[1] == 2);
}

TEST(who_sleeps_looks_when_it_is_time_to)
{
    smp_deadline never = {SMP_NEVER, NULL, NULL};
    smp_deadline gives_up = {SMP_NEVER, says_so, NULL};
    smp_deadline over = {smp_clock_ns() - 1, NULL, NULL};

    CHECK(smp_deadline_ms(&never, SMP_NEVER) == 1001);
    CHECK(smp_deadline_ms(&gives_up, SMP_NEVER) == 21);
    CHECK(smp_deadline_ms(&never, over.at_ns) == 1);
    CHECK(smp_deadline_ms(&over, SMP_NEVER) == 1);
}

TEST(half_of_a_deadline_is_half_of_what_is_left)
{
    int          asked[2];
    int64_t      before = smp_clock_ns();
    smp_deadline at = {before + 1000 * SMP_NS_PER_S, says_so, asked};
    smp_deadline never = {SMP_NEVER, NULL, NULL};
    smp_deadline half = smp_deadline_half(&at);
    int64_t      after = smp_clock_ns();

    CHECK(half.at_ns >= before + (at.at_ns - before) / 2 - 1);
    CHECK(half.at_ns <= after + (at.at_ns - after) / 2 + 1);
    CHECK(half.gives_up == says_so && half.arg == asked);
    CHECK(smp_deadline_half(&never).at_ns == SMP_NEVER);
}

/* ------------------------------------------------------------------------ numbers */

static bool
is_nan_half(uint32_t half)
{
    return (half & 0x7c00u) == 0x7c00u && (half & 0x3ffu) != 0;
}

/* What IEEE 754 says of it. */
static float
value_of_half(uint32_t half)
{
    int   exponent = (int)(half >> 10 & 31);
    float size = exponent == 31  ? INFINITY
                 : exponent == 0 ? ldexpf((float)(half & 0x3ff), -24)
                                 : ldexpf((float)(half & 0x3ff) + 1024, exponent - 25);

    return (half & 0x8000u) != 0 ? -size : size;
}

TEST(every_half_has_its_value_and_comes_back)
{
    for (uint32_t h = 0; h <= 0xffffu; h++) {
        float    value = smp_f16_to_f32((uint16_t)h);
        uint32_t back = smp_f32_to_f16(value);

        if (is_nan_half(h)) { /* quiet, with its sign and its bits */
            CHECK(smp_f32_bits(value) ==
                  ((h & 0x8000u) << 16 | 0x7fc00000u | (h & 0x3ffu) << 13));
            CHECK(back == (h | 0x200u));
        } else {
            CHECK(smp_f32_bits(value) == smp_f32_bits(value_of_half(h)));
            CHECK(back == h);
        }
    }
}

TEST(what_lies_between_halves_goes_to_the_nearest_and_to_the_even_one)
{
    for (uint32_t h = 0; h < 0x7c00u; h++) {
        /* Above the largest there would be one more if the exponent went on. */
        float above = h == 0x7bffu ? 65536.0f : value_of_half(h + 1);
        float middle = (value_of_half(h) + above) / 2; /* is a float */

        for (uint32_t sign = 0; sign <= 0x8000u; sign += 0x8000u) {
            float s = sign == 0 ? 1.0f : -1.0f;

            CHECK(smp_f32_to_f16(s * middle) == (sign | (h + (h & 1u))));
            CHECK(smp_f32_to_f16(s * nextafterf(middle, 0)) == (sign | h));
            CHECK(smp_f32_to_f16(s * nextafterf(middle, INFINITY)) == (sign | (h + 1)));
        }
    }
    CHECK(smp_f32_to_f16(INFINITY) == 0x7c00u && smp_f32_to_f16(1e30f) == 0x7c00u);
    CHECK(smp_f32_to_f16(smp_f32_of_bits(0xff800001u)) == 0xfe00u); /* NaN stays one */
}

TEST(bfloat16_is_the_upper_half_rounded_to_nearest_even)
{
    for (uint32_t h = 0; h <= 0xffffu; h++) {
        uint32_t bits = h << 16;
        uint32_t up = h + 1;

        CHECK(smp_f32_bits(smp_bf16_to_f32((uint16_t)h)) == bits);
        if ((h & 0x7f80u) == 0x7f80u) { /* infinity, and NaN: which stays one */
            CHECK(smp_f32_to_bf16(smp_f32_of_bits(bits)) ==
                  ((h & 0x7fu) == 0 ? h : (h | 0x40u)));
            CHECK(smp_f32_to_bf16(smp_f32_of_bits(bits | 1)) == (h | 0x40u));
            continue;
        }
        CHECK(smp_f32_to_bf16(smp_f32_of_bits(bits)) == h);
        CHECK(smp_f32_to_bf16(smp_f32_of_bits(bits | 0x7fffu)) == h);
        CHECK(smp_f32_to_bf16(smp_f32_of_bits(bits | 0x8000u)) == (h & 1u ? up : h));
        CHECK(smp_f32_to_bf16(smp_f32_of_bits(bits | 0x8001u)) == up);
    }
}

static int
compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

TEST(numbers_that_follow_from_two_others_are_positive_and_differ)
{
    enum { SIDE = 64 };

    static uint64_t made[SIDE * SIDE];

    for (uint64_t i = 0; i < SIDE * SIDE; i++) {
        made[i] = smp_mix(i / SIDE, i % SIDE);
        CHECK(made[i] <= INT64_MAX);
    }
    qsort(made, SIDE * SIDE, sizeof(made[0]), compare);
    for (int i = 1; i < SIDE * SIDE; i++) {
        CHECK(made[i] != made[i - 1]);
    }
}

TEST(a_pattern_is_known_and_every_other_byte_is_noticed)
{
    enum { MOST = 41 };

    uint8_t bytes[MOST + 1];
    uint8_t moved[MOST + 1];

    for (size_t n = 0; n <= MOST; n++) {
        bytes[n] = 99;
        smp_pattern_write(bytes, n, 7);
        CHECK(bytes[n] == 99); /* no byte more */
        CHECK(smp_pattern_is(bytes, n, 7));
        CHECK(n == 0 || !smp_pattern_is(bytes, n, 8));
        for (size_t i = 0; i < n; i++) {
            bytes[i] ^= 1;
            CHECK(!smp_pattern_is(bytes, n, 7));
            bytes[i] ^= 1;
        }
    }
    memcpy(moved, bytes + 8, 16);
    CHECK(!smp_pattern_is(moved, 16, 7));
}

/* ------------------------------------------------------------------------ threads */

typedef struct {
    pthread_barrier_t looked; /* it is there until its name has been read */
    sigset_t          blocked;
} seen_by_thread;

static void *
look_around(void *arg)
{
    seen_by_thread *seen = arg;

    pthread_sigmask(SIG_SETMASK, NULL, &seen->blocked);
    pthread_barrier_wait(&seen->looked);
    return NULL;
}

TEST(signals_are_not_for_threads_of_the_core)
{
    seen_by_thread seen;
    sigset_t       mine;
    pthread_t      thread;
    char           name[16];
    int            named;

    CHECK(pthread_barrier_init(&seen.looked, NULL, 2) == 0);
    CHECK_OK(smp_thread_start(&thread, "smp-of-a-test", look_around, &seen));
    named = pthread_getname_np(thread, name, sizeof(name));
    pthread_barrier_wait(&seen.looked);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(pthread_barrier_destroy(&seen.looked) == 0);
    CHECK(named == 0 && strcmp(name, "smp-of-a-test") == 0);
    CHECK(sigismember(&seen.blocked, SIGINT) && sigismember(&seen.blocked, SIGTERM));
    pthread_sigmask(SIG_SETMASK, NULL, &mine);
    CHECK(!sigismember(&mine, SIGINT) && !sigismember(&mine, SIGTERM));
}

RUN_TESTS
