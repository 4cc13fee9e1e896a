/* What PyTorch is for the device pool and for exchanges: memory, and a stream with work
 * on it, on the stand-in of the driver. */
#ifndef SMP_TESTS_DEVICE_USER_H
#define SMP_TESTS_DEVICE_USER_H

#include <dlfcn.h>
#include <sched.h>

#include "comm/device/port.h"
#include "comm/device/trial.h"
#include "comm/messaging/neighbour.h"
#include "device/streams.h"
#include "stand_in_library.h"
#include "traffic.h"

#define USER_BYTES ((size_t)200000)

typedef struct {
    smp_device_port      *port;
    const smp_driver     *driver;
    const stand_in_table *stand_in;
    void                 *context;
    void                 *stream; /* owned */
    uint64_t              x;      /* owned: of USER_BYTES bytes in whole blocks, as y */
    uint64_t              y;
    _Atomic int           wrong; /* tensors that were not what they should be */
    _Atomic int           right;
} user;

/* A thread that hurries finds a second gone whenever it looks at the clock in a trial.
 */
static _Thread_local bool    hurries;
static _Thread_local bool    in_trial;
static _Thread_local int64_t skipped_ns;

int64_t          __real_smp_clock_ns(void);
int64_t          __wrap_smp_clock_ns(void);
smp_trial_result __real_smp_trial_read(const smp_driver *driver, uint64_t at,
                                       size_t bytes, uint64_t seed, void *stream,
                                       char why[SMP_DRIVER_TEXT]);
smp_trial_result __wrap_smp_trial_read(const smp_driver *driver, uint64_t at,
                                       size_t bytes, uint64_t seed, void *stream,
                                       char why[SMP_DRIVER_TEXT]);
bool             __real_smp_trial_came(const smp_driver *driver, void *event,
                                       char why[SMP_DRIVER_TEXT]);
bool             __wrap_smp_trial_came(const smp_driver *driver, void *event,
                                       char why[SMP_DRIVER_TEXT]);

int64_t
__wrap_smp_clock_ns(void)
{
    skipped_ns += hurries && in_trial ? SMP_NS_PER_S : 0;
    return __real_smp_clock_ns() + skipped_ns;
}

smp_trial_result
__wrap_smp_trial_read(const smp_driver *driver, uint64_t at, size_t bytes,
                      uint64_t seed, void *stream, char why[SMP_DRIVER_TEXT])
{
    smp_trial_result result;

    in_trial = true;
    result = __real_smp_trial_read(driver, at, bytes, seed, stream, why);
    in_trial = false;
    return result;
}

bool
__wrap_smp_trial_came(const smp_driver *driver, void *event, char why[SMP_DRIVER_TEXT])
{
    bool came;

    in_trial = true;
    came = __real_smp_trial_came(driver, event, why);
    in_trial = false;
    return came;
}

/* Of sanitizers: what this thread allocates from now on may be left behind. */
extern void __lsan_disable(void) __attribute__((weak));

/* A stream of the core's with work that does not end, as behind a dead rank's event:
 * nothing of this process's devices does, until end_stuck(). */
static inline void *
begin_stuck(const user *u)
{
    char  why[SMP_DRIVER_TEXT];
    void *stream;

    CHECK(smp_stream_create(u->driver, u->context, &stream, why));
    u->stand_in->hold(true);
    CHECK(u->driver->copy(u->y, u->x, 1, stream) == 0);
    return stream;
}

static inline void
end_stuck(const user *u, void *stream)
{
    u->stand_in->hold(false);
    smp_stream_destroy(u->driver, stream);
}

/* The device of this rank's thread. */
static _Thread_local int ordinal;

/* Memory, a stream and the context for this rank's thread, on its device. */
static inline void
begin(world *w, user *u)
{
    char  why[SMP_DRIVER_TEXT];
    void *loaded;
    int   device;

    memset(u, 0, sizeof(*u));
    u->port = smp_comm_device(w->comm);
    u->driver = smp_driver_load(why);
    CHECK(u->driver != NULL);
    loaded = dlopen(library, RTLD_NOW);
    CHECK(loaded != NULL);
    u->stand_in = dlsym(loaded, "stand_in");
    CHECK(u->stand_in != NULL);
    CHECK(u->driver->device_get(&device, ordinal) == 0);
    CHECK(u->driver->context_retain(&u->context, device) == 0);
    CHECK(u->driver->context_push(u->context) == 0);
    CHECK(u->driver->stream_create(&u->stream, SMP_DRIVER_STREAM_ALONE) == 0);
    CHECK(u->driver->alloc(&u->x, smp_driver_blocks(USER_BYTES)) == 0 &&
          u->driver->alloc(&u->y, smp_driver_blocks(USER_BYTES)) == 0);
}

static inline void
settle(user *u)
{
    int64_t until = smp_clock_ns() + WORLD_DEADLINE_NS;

    while (u->driver->stream_query(u->stream) != SMP_DRIVER_OK) {
        CHECK(smp_clock_ns() < until);
        sched_yield();
    }
}

static inline void
end(user *u)
{
    void *before;
    int   device;

    settle(u);
    CHECK(u->wrong == 0);
    CHECK(u->driver->stream_destroy(u->stream) == 0);
    CHECK(u->driver->free(u->x) == 0 && u->driver->free(u->y) == 0);
    CHECK(u->driver->context_pop(&before) == 0);
    CHECK(u->driver->device_get(&device, ordinal) == 0);
    CHECK(u->driver->context_release(device) == 0);
}

/* A test whose ranks use a device, from its begin to its end. */
#define DEVICE_TEST(...) DEVICE_TEST_(__VA_ARGS__, .next = NULL)
#define DEVICE_TEST_(test, ...)                                                        \
    static void test##_used(world *w, user *u);                                        \
    TEST_RANK_(test, __VA_ARGS__)                                                      \
    {                                                                                  \
        user u;                                                                        \
                                                                                       \
        begin(w, &u);                                                                  \
        test##_used(w, &u);                                                            \
        end(&u);                                                                       \
    }                                                                                  \
    static void test##_used(world *w, user *u)

/* ------------------------------------------------------------------- kernels */

typedef struct {
    user    *u;
    uint64_t at;
    size_t   bytes;
    uint64_t seed;
} job;

static inline void
fill_kernel(void *arg)
{
    job *j = arg;

    fill((void *)(uintptr_t)j->at, j->bytes, j->seed);
    free(j);
}

static inline void
check_kernel(void *arg)
{
    job *j = arg;

    atomic_fetch_add(filled((const void *)(uintptr_t)j->at, j->bytes, j->seed)
                         ? &j->u->right
                         : &j->u->wrong,
                     1);
    free(j);
}

static inline void
launch(user *u, stand_in_kernel fn, uint64_t at, size_t bytes, uint64_t seed)
{
    job *j = malloc(sizeof(*j));

    if (j == NULL) {
        abort();
    }
    *j = (job){u, at, bytes, seed};
    u->stand_in->launch(u->stream, fn, j);
}

static inline int
alive(void)
{
    void                 *loaded = dlopen(library, RTLD_NOW);
    const stand_in_table *table = dlsym(loaded, "stand_in");
    int                   n = table->alive();

    dlclose(loaded);
    return n;
}

static inline void
none_alive(void *unused)
{
    (void)unused;
    CHECK(alive() == 0);
}

/* ------------------------------------------------------------------ what is shown */

/* Of the allocation that was last exported, in this process. */
static size_t   shown_bytes;
static uint64_t last_at;
static size_t   last_bytes;
static int (*real_alloc)(uint64_t *at, size_t bytes);
static int (*real_export)(smp_driver_handle *handle, uint64_t at);

static int
watched_alloc(uint64_t *at, size_t bytes)
{
    int result = real_alloc(at, bytes);

    last_at = *at;
    last_bytes = bytes;
    return result;
}

static int
watched_export(smp_driver_handle *handle, uint64_t at)
{
    shown_bytes = at == last_at ? last_bytes : 0;
    return real_export(handle, at);
}

/* In a process of its own. */
static inline void
watch_exports(user *u)
{
    smp_driver *table = (smp_driver *)(uintptr_t)u->driver;

    real_alloc = table->alloc;
    real_export = table->memory_export;
    table->alloc = watched_alloc;
    table->memory_export = watched_export;
}

/* ------------------------------------------------------------------ failures */

/* The call of the driver that fails, in which rank, and (shared by the ranks) whether
 * it came to that. */
static int           unlucky_call;
static int           unlucky_rank;
static _Atomic bool *unlucky;

/* Each call in turn, first in the one rank, then in the other; more than `most` calls
 * are repetitions, and fewer than `least` are too few to be all.  A sanitizer tries a
 * sample, others in the one rank than in the other; the thread sanitizer, which sees no
 * more in ranks that are processes, a smaller one. */
static inline void
fail_each_call(const world_test *test, const world_plan *plan, int least, int most)
{
    int step = !WORLD_SANITIZED ? 1 : WORLD_SANITIZER_OF_THREADS ? 8 : 4;

    unlucky = mmap(NULL, sizeof(*unlucky), PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(unlucky != MAP_FAILED);
    for (unlucky_rank = 0; unlucky_rank < 2; unlucky_rank++) {
        unlucky_call = unlucky_rank * step / 2;
        do {
            unlucky_call += step;
            CHECK(!world_fails(test, plan, 2, NULL, false));
        } while (atomic_load(unlucky) && unlucky_call < most);
        CHECK(unlucky_call > least);
    }
    munmap(unlucky, sizeof(*unlucky));
}

#endif
