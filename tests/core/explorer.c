/* The search, and what stands for the system's side of threads. */
#include "explorer.h"

#include <assert.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include "common/clock.h"
#include "common/lock.h"
#include "points.h"

#undef malloc
#undef free

#if defined(__SANITIZE_ADDRESS__)
#    include <sanitizer/asan_interface.h>
#else
#    define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#    define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

enum {
    STACK_BYTES = 256 << 10,
    HEAP_BYTES = 4 << 20,
    STEPS = 4096,  /* of one run, at most */
    OBJECTS = 512, /* that one scenario touches */
    DESCRIPTORS = 16,
};

/* How far a thread's clock goes on from one look to the next: spinning ends soon. */
#define TICK_NS (1 * SMP_NS_PER_MS)

typedef enum { ACCESS, LOCK, KILL, WOKEN } step_kind;

typedef struct {
    step_kind            kind;
    const volatile void *object;
    bool                 writes;
    int                  victim; /* KILL */
    const char          *where;
} step;

typedef enum { READY, ASLEEP, OVER } thread_state;

typedef struct {
    ucontext_t           context;
    thread_state         state;
    step                 next;     /* READY: what it does when it is its turn */
    const volatile void *sleeps;   /* ASLEEP: on what */
    pthread_mutex_t     *mutex;    /* ... and takes this when it wakes, or NULL */
    int64_t              until_ns; /* ... and wakes by itself then */
    bool                 timed_out;
    uint64_t             asleep_since; /* number of the step */
    int64_t              clock_ns;
    char                *stack;
} thread;

/* One decision of the present path. */
typedef struct {
    unsigned enabled; /* masks of threads */
    unsigned sleep;   /* what was tried in another order already */
    unsigned tried;
    int      chosen;
    step     steps[EXPLORE_THREADS]; /* what each would do */
} node;

typedef struct {
    const volatile void *object;
    unsigned             users; /* masks of threads */
    unsigned             writers;
    bool                 shared;
} object_use;

static struct {
    const exploration *what;
    int                nthreads;
    thread             threads[EXPLORE_THREADS];
    ucontext_t         home;
    int                running; /* -1: the explorer */
    node               path[STEPS];
    size_t             length; /* decisions that this run repeats */
    size_t             depth;  /* decisions and steps of this run so far */
    bool               redundant;
    bool               shown; /* print steps as they happen */
    char               wrong[256];
    object_use         objects[OBJECTS];
    size_t             nobjects;
    bool               another_is_shared;
    pthread_mutex_t   *held[32];
    int                nheld;
    uint64_t           counters[DESCRIPTORS];
    char              *heap;
    size_t             heap_used;
    void *(*started)(void *); /* by set_up() */
    void *started_with;
    int   servant; /* the thread that runs it */
} ex;

/* ----------------------------------------------------------------- what threads do */

void
explore_wrong(const char *why)
{
    if (ex.wrong[0] == '\0') {
        snprintf(ex.wrong, sizeof(ex.wrong), "%s%s%s",
                 ex.running >= 0 ? ex.what->threads[ex.running].name : "",
                 ex.running >= 0 ? ": " : "", why);
    }
}

static void
give_way(void)
{
    thread *self = &ex.threads[ex.running];

    swapcontext(&self->context, &ex.home);
}

/* Whether two threads use it and one of them writes. */
static bool
is_shared(const volatile void *object, bool writes)
{
    unsigned    self = 1u << ex.running;
    object_use *use = NULL;

    for (size_t i = 0; i < ex.nobjects && use == NULL; i++) {
        use = ex.objects[i].object == object ? &ex.objects[i] : NULL;
    }
    if (use == NULL) {
        assert(ex.nobjects < OBJECTS);
        use = &ex.objects[ex.nobjects++];
        *use = (object_use){.object = object};
    }
    use->users |= self;
    use->writers |= writes ? self : 0;
    if (!use->shared && use->writers != 0 && (use->users & (use->users - 1)) != 0) {
        use->shared = true;
        ex.another_is_shared = true;
    }
    return use->shared;
}

static void
stop_before(step next)
{
    ex.threads[ex.running].next = next;
    give_way();
}

void
explore_point(const volatile void *object, bool writes, const char *where)
{
    if (ex.running >= 0 && is_shared(object, writes)) {
        stop_before(
            (step){.kind = ACCESS, .object = object, .writes = writes, .where = where});
    }
}

void
explore_kill(int victim)
{
    stop_before((step){.kind = KILL, .victim = victim, .where = __func__});
    ex.threads[victim].state = OVER;
}

/* True: woken; false: by the limit. */
static bool
sleep_on(const volatile void *object, pthread_mutex_t *mutex, int64_t until_ns)
{
    thread *self = &ex.threads[ex.running];

    self->state = ASLEEP;
    self->sleeps = object;
    self->mutex = mutex;
    self->until_ns = until_ns;
    self->timed_out = false;
    self->asleep_since = ex.depth;
    give_way();
    return !self->timed_out;
}

static void
wake(thread *sleeper)
{
    sleeper->state = READY;
    sleeper->next = sleeper->mutex == NULL ? (step){.kind = WOKEN, .where = "woken"}
                                           : (step){.kind = LOCK,
                                                    .object = sleeper->mutex,
                                                    .writes = true,
                                                    .where = "woken"};
}

/* The one that has slept the longest, or all. */
static void
wake_on(const volatile void *object, bool all)
{
    thread *first;

    do {
        first = NULL;
        for (int t = 0; t < ex.nthreads; t++) {
            thread *other = &ex.threads[t];

            if (other->state == ASLEEP && other->sleeps == object &&
                (first == NULL || other->asleep_since < first->asleep_since)) {
                first = other;
            }
        }
        if (first != NULL) {
            wake(first);
        }
    } while (all && first != NULL);
}

/* ------------------------------------------------------- in place of the system's */

int64_t
smp_clock_ns(void)
{
    return ex.running < 0 ? 0 : (ex.threads[ex.running].clock_ns += TICK_NS);
}

static int64_t
ns_of(const struct timespec *time)
{
    return time == NULL ? SMP_NEVER : time->tv_sec * SMP_NS_PER_S + time->tv_nsec;
}

long
explore_syscall(long number, ...)
{
    const _Atomic uint32_t *word;
    int                     operation;
    uint32_t                value;
    const struct timespec  *until;
    va_list                 arguments;

    assert(number == SYS_futex);
    va_start(arguments, number);
    word = va_arg(arguments, _Atomic uint32_t *);
    operation = va_arg(arguments, int);
    value = (uint32_t)va_arg(arguments, int);
    until = va_arg(arguments, const struct timespec *);
    va_end(arguments);
    explore_point(word, true, operation == FUTEX_WAKE ? "futex wake" : "futex wait");
    if (operation == FUTEX_WAKE) {
        wake_on(word, value == INT_MAX);
    } else if (*word == value) {
        sleep_on(word, NULL, ns_of(until));
    }
    return 0;
}

static bool
is_held(const pthread_mutex_t *mutex)
{
    for (int i = 0; i < ex.nheld; i++) {
        if (ex.held[i] == mutex) {
            return true;
        }
    }
    return false;
}

static void
let_go(const pthread_mutex_t *mutex)
{
    for (int i = 0; i < ex.nheld; i++) {
        if (ex.held[i] == mutex) {
            ex.held[i] = ex.held[--ex.nheld];
            return;
        }
    }
    assert(!"a lock that is not held");
}

void
smp_lock_init(smp_lock *lock, smp_lock_rank rank)
{
    lock->rank = rank;
}

void
smp_lock_fini(smp_lock *lock)
{
    assert(!is_held(&lock->mutex));
}

void
smp_lock_acquire(smp_lock *lock)
{
    pthread_mutex_t *mutex = &lock->mutex;

    if (ex.running >= 0 && is_shared(mutex, true)) {
        stop_before(
            (step){.kind = LOCK, .object = mutex, .writes = true, .where = "lock"});
    }
    assert(!is_held(mutex));
    ex.held[ex.nheld++] = mutex;
}

/* No point: who waits for the lock goes on at the earliest after the next one. */
void
smp_lock_release(smp_lock *lock)
{
    let_go(&lock->mutex);
}

void
explore_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                  const struct timespec *until)
{
    let_go(mutex);
    sleep_on(cond, mutex, ns_of(until));
    assert(!is_held(mutex));
    ex.held[ex.nheld++] = mutex;
}

/* All calls are made with the lock held, which orders them with the waits. */
void
explore_cond_wake(pthread_cond_t *cond, bool all)
{
    assert(ex.running < 0 || ex.nheld != 0);
    wake_on(cond, all);
}

/* The loop's descriptor is the eventfd's plus one. */
static uint64_t *
counter_of(int fd)
{
    assert(fd / 2 < DESCRIPTORS);
    return &ex.counters[fd / 2];
}

ssize_t
explore_write(int fd, const void *from, size_t bytes)
{
    uint64_t n;

    memcpy(&n, from, sizeof(n));
    explore_point(counter_of(fd), true, "kick");
    *counter_of(fd) += n;
    wake_on(counter_of(fd), true);
    return (ssize_t)bytes;
}

ssize_t
explore_read(int fd, void *to, size_t bytes)
{
    explore_point(counter_of(fd), true, "read of kicks");
    memcpy(to, counter_of(fd), sizeof(uint64_t));
    *counter_of(fd) = 0;
    return (ssize_t)bytes;
}

int
explore_ppoll(const struct pollfd *fds, const struct timespec *limit)
{
    explore_point(counter_of(fds->fd), true, "poll");
    if (*counter_of(fds->fd) == 0) {
        int64_t now = ex.threads[ex.running].clock_ns;

        return sleep_on(counter_of(fds->fd), NULL,
                        limit == NULL ? SMP_NEVER : now + ns_of(limit));
    }
    return 1;
}

int
explore_epoll_wait(int fd, struct epoll_event *events)
{
    explore_point(counter_of(fd), false, "epoll");
    events[0] = (struct epoll_event){.events = EPOLLIN, .data.ptr = NULL};
    return *counter_of(fd) != 0;
}

int
explore_start(void *(*run)(void *), void *arg)
{
    assert(ex.running < 0 && ex.started == NULL);
    ex.started = run;
    ex.started_with = arg;
    return 0;
}

int
explore_join(void)
{
    explore_point(&ex.servant, true, "join");
    if (ex.threads[ex.servant].state != OVER) {
        sleep_on(&ex.servant, NULL, SMP_NEVER);
    }
    return 0;
}

/* The size stands before the memory. */
void *
explore_malloc(size_t bytes)
{
    size_t room = 64 + (bytes + 63) / 64 * 64;
    char  *at = ex.heap + ex.heap_used;

    assert(ex.heap_used + room <= HEAP_BYTES);
    ex.heap_used += room;
    ASAN_UNPOISON_MEMORY_REGION(at, 64 + bytes);
    memcpy(at, &bytes, sizeof(bytes));
    memset(at + 64, 0xa5, bytes);
    return at + 64;
}

void *
explore_calloc(size_t n, size_t bytes)
{
    void *memory = explore_malloc(n * bytes);

    memset(memory, 0, n * bytes);
    return memory;
}

char *
explore_strdup(const char *text)
{
    char *copy = explore_malloc(strlen(text) + 1);

    memcpy(copy, text, strlen(text) + 1);
    return copy;
}

void
explore_free(void *memory)
{
    size_t bytes;

    if (memory != NULL) {
        memcpy(&bytes, (char *)memory - 64, sizeof(bytes));
        memset(memory, 0xdd, bytes);
        ASAN_POISON_MEMORY_REGION((char *)memory - 64, 64 + bytes);
    }
}

/* -------------------------------------------------------------------------- the runs
 */

static void
thread_main(void)
{
    thread *self = &ex.threads[ex.running];

    if (ex.what->threads[ex.running].run != NULL) {
        ex.what->threads[ex.running].run();
    } else {
        ex.started(ex.started_with);
        explore_point(&ex.servant, true, "end");
        wake_on(&ex.servant, true);
    }
    self->state = OVER;
    give_way();
}

/* Goes on with a thread until its next point. */
static void
resume(int t)
{
    ex.running = t;
    swapcontext(&ex.home, &ex.threads[t].context);
    ex.running = -1;
}

static void
begin_run(void)
{
    memset(ex.counters, 0, sizeof(ex.counters));
    ex.heap_used = 0;
    ASAN_POISON_MEMORY_REGION(ex.heap, HEAP_BYTES);
    ex.nheld = 0;
    ex.depth = 0;
    ex.redundant = false;
    ex.running = -1;
    ex.started = NULL;
    ex.what->set_up();
    for (int t = 0; t < ex.nthreads; t++) {
        thread *new = &ex.threads[t];
        char *stack = new->stack;

        ASAN_UNPOISON_MEMORY_REGION(stack, STACK_BYTES); /* a thread may not return */
        *new = (thread){.stack = stack, .state = READY};
        new->next = (step){.kind = WOKEN, .where = "start"};
        getcontext(&new->context);
        new->context.uc_stack.ss_sp = stack;
        new->context.uc_stack.ss_size = STACK_BYTES;
        new->context.uc_link = NULL;
        makecontext(&new->context, thread_main, 0);
    }
}

static bool
is_enabled(int t)
{
    const thread *self = &ex.threads[t];

    return self->state == READY &&
           !(self->next.kind == LOCK && is_held((const void *)self->next.object));
}

/* Whether the order of the two does not matter. */
static bool
independent(const step *a, int a_thread, const step *b, int b_thread)
{
    if (a->kind == KILL || b->kind == KILL) {
        return (a->kind != KILL || a->victim != b_thread) &&
               (b->kind != KILL || b->victim != a_thread);
    }
    if (a->object == NULL || b->object == NULL || a->object != b->object) {
        return true;
    }
    return !a->writes && !b->writes;
}

static int
lowest(unsigned mask)
{
    return __builtin_ctz(mask);
}

/* The decision of this depth: an old one, or a new one. */
static int
decide(unsigned enabled)
{
    node *now = &ex.path[ex.depth];

    if (ex.redundant) {
        return lowest(enabled);
    }
    assert(ex.depth < STEPS - 1);
    if (ex.depth >= ex.length) {
        unsigned sleep = 0;

        if (ex.depth > 0) {
            const node *last = &ex.path[ex.depth - 1];

            for (int t = 0; t < ex.nthreads; t++) {
                if (((last->sleep | last->tried) >> t & 1) != 0 && t != last->chosen &&
                    independent(&last->steps[t], t, &last->steps[last->chosen],
                                last->chosen)) {
                    sleep |= 1u << t;
                }
            }
        }
        *now = (node){.enabled = enabled, .sleep = sleep};
        for (int t = 0; t < ex.nthreads; t++) {
            now->steps[t] = ex.threads[t].next;
        }
        if ((enabled & ~sleep) == 0) {
            ex.redundant = true; /* to its end, so that the next can begin */
            return lowest(enabled);
        }
        now->chosen = lowest(enabled & ~sleep);
        ex.length = ex.depth + 1;
    }
    assert((now->enabled & 1u << now->chosen) != 0 && now->enabled == enabled);
    return now->chosen;
}

/* Nobody can go on.  True: somebody's sleep has come to its limit. */
static bool
let_time_pass(void)
{
    int first = -1;

    for (int t = 0; t < ex.nthreads && ex.what->timers; t++) {
        const thread *other = &ex.threads[t];

        if (other->state == ASLEEP && other->until_ns != SMP_NEVER &&
            !ex.what->threads[t].serves &&
            (first < 0 || other->until_ns < ex.threads[first].until_ns)) {
            first = t;
        }
    }
    if (first >= 0) {
        ex.threads[first].clock_ns = ex.threads[first].until_ns;
        ex.threads[first].timed_out = true;
        wake(&ex.threads[first]);
    }
    return first >= 0;
}

static void
run_once(void)
{
    begin_run();
    for (;;) {
        unsigned enabled = 0;
        bool     over = true;
        int      t;

        for (t = 0; t < ex.nthreads; t++) {
            enabled |= is_enabled(t) ? 1u << t : 0;
            over = over && (ex.threads[t].state == OVER || ex.what->threads[t].serves);
        }
        if (enabled == 0) {
            if (!over && let_time_pass()) {
                continue;
            }
            for (t = 0; t < ex.nthreads && !over; t++) {
                if (ex.threads[t].state != OVER && !ex.what->threads[t].serves) {
                    ex.running = t;
                    explore_wrong("sleeps for ever");
                    ex.running = -1;
                }
            }
            break;
        }
        t = decide(enabled);
        if (ex.shown) {
            fprintf(stderr, "%4zu %-10s %s\n", ex.depth, ex.what->threads[t].name,
                    ex.threads[t].next.where);
        }
        ex.depth++;
        resume(t);
    }
    if (ex.what->check != NULL) {
        ex.what->check();
    }
}

/* Makes the path the next one; false: there is none. */
static bool
next_path(void)
{
    while (ex.length > 0) {
        node    *last = &ex.path[ex.length - 1];
        unsigned left;

        last->tried |= 1u << last->chosen;
        left = last->enabled & ~last->sleep & ~last->tried;
        if (left != 0) {
            last->chosen = lowest(left);
            return true;
        }
        ex.length--;
    }
    return false;
}

void
explore(const exploration *what, bool show, explore_findings *out)
{
    memset(&ex, 0, sizeof(ex));
    *out = (explore_findings){.runs = 0};
    ex.what = what;
    ex.heap = malloc(HEAP_BYTES);
    while (ex.nthreads < EXPLORE_THREADS && what->threads[ex.nthreads].name != NULL) {
        if (what->threads[ex.nthreads].run == NULL) {
            ex.servant = ex.nthreads;
        }
        ex.threads[ex.nthreads++].stack = malloc(STACK_BYTES);
    }
    do {
        run_once();
        if (ex.another_is_shared) { /* from the beginning, with its points */
            ex.another_is_shared = false;
            ex.wrong[0] = '\0';
            ex.length = 0;
            out->runs = out->redundant = 0;
            continue;
        }
        out->runs += !ex.redundant;
        out->redundant += ex.redundant;
        out->longest = ex.depth > out->longest ? ex.depth : out->longest;
    } while (ex.wrong[0] == '\0' && (ex.length == 0 || next_path()));
    if (ex.wrong[0] != '\0' && show) {
        fprintf(stderr, "%s, after these steps:\n", ex.wrong);
        ex.shown = true;
        run_once();
    }
    memcpy(out->wrong, ex.wrong, sizeof(out->wrong));
    for (int t = 0; t < ex.nthreads; t++) {
        ASAN_UNPOISON_MEMORY_REGION(ex.threads[t].stack, STACK_BYTES);
        free(ex.threads[t].stack);
    }
    ASAN_UNPOISON_MEMORY_REGION(ex.heap, HEAP_BYTES);
    free(ex.heap);
}
