/* A stand-in for the GPU's driver, for machines without one: the functions that
 * csrc/device/driver.h names, over host memory that processes share.
 *
 * What makes it worth testing with is what it has in common with a driver:
 *
 *   - what a stream is told happens late, in a thread of the stand-in, after a random
 *     number of yields (or not before a test says so): who reads without waiting for an
 *     event reads old bytes;
 *   - streams are in order by themselves and in none among each other;
 *   - a wait for an event means its last record at the time of the call, also for an
 *     event of another process;
 *   - memory and events go to other processes by handles of 64 bytes;
 *   - the address of freed memory comes back, with another identity and perhaps fewer
 *     bytes; its handle is refused while another process has the earlier memory open;
 *   - memory freed, closed or no longer registered waits for all streams' work, also
 *     for what waits for a dead process;
 *   - while a stream is captured, allocations and queries of threads that have not said
 *     that they may spoil the capture and fail;
 *   - a copy from or to a range of the host that is registered in part fails;
 *   - every function can fail, but for those that only tell or undo;
 *   - a test can have it change bytes, or keep events from happening.
 *
 * Kernels are those of stand_in_gpu.cpp, whatever module they are looked for in.  An
 * address on the device is an address of the process.  There are two devices, with
 * one context each.  Memory and events are descriptors of a memfd, which another
 * process opens through /proc, so that nothing is left behind by one that is killed.
 */
#define _GNU_SOURCE
#include "stand_in.h"
#include "stand_in_gpu.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define DEVICES 2
#define HANDLE_MAGIC 0x534d504856u

/* A stream rests before one in so many of the things that it does. */
#define RESTS 8
/* At most for so long; and while it waits.  It does not yield: on a busy machine a
 * thread that yields is gone for milliseconds, one that wakes up runs at once. */
#define REST_NS 20000

/* CUresult. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ALREADY_MAPPED = 208,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
};

/* CUstreamCaptureMode. */
enum { CAPTURE_GLOBAL = 0, CAPTURE_RELAXED = 2 };

typedef struct {
    uint64_t magic;
    int32_t  pid;
    int32_t  fd;
    uint64_t bytes;
    uint64_t base; /* of memory: its address there, and its id */
    uint64_t id;
    int32_t  device; /* of memory */
    uint8_t  rest[20];
} handle64;

/* Shared between the processes that have the event. */
typedef struct {
    _Atomic uint64_t recorded;
    _Atomic uint64_t done;
} moment;

typedef struct {
    moment    *at;
    int        fd;    /* of the one that made it, when it can be exported; else -1 */
    bool       mine;  /* not opened by a handle */
    atomic_int users; /* its owner, until it destroys it, and work */
} event;

/* An allocation of this process, or one of another that is mapped. */
typedef struct memory {
    struct memory *next;
    void          *base;
    size_t         bytes;
    uint64_t       id; /* of no other one of this process, then or later */
    bool           withheld;
    handle64       source; /* of another's; of its own, the device */
    int            fd;     /* -1: another's */
    int            users;  /* its owner, until it frees it, and copies */
} memory;

typedef enum { WORK_COPY, WORK_LAUNCH, WORK_RECORD, WORK_WAIT } work_kind;

typedef struct work {
    struct work    *next;
    work_kind       kind;
    void           *to;
    const void     *from;
    size_t          bytes;
    memory         *uses[2]; /* of a copy: where from and to, if they are ours */
    void           *staged;  /* owned: of a copy from the host, from */
    bool            inside;  /* of a copy: between devices */
    stand_in_kernel fn;
    void           *arg;
    event          *event;
    uint64_t        count;
} work;

typedef struct stream {
    struct stream  *next; /* under streams_lock */
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t  changed;
    work           *first;
    work           *last;
    bool            busy; /* with one that is out of the list */
    bool            ending;
    pthread_t       thread;
} stream;

/* A range of the host's memory that is registered. */
typedef struct range {
    struct range *next;
    uintptr_t     at;
    size_t        bytes;
} range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all up to held */
static range          *ranges;
static memory         *memories;
static uint64_t        ids;
static void           *freed_base; /* of the last one that was unmapped */
static size_t          freed_bytes;
static stream         *null_stream;
static stream         *streams; /* all */
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static const char     *failing;
static int             countdown; /* 0: nothing fails */
static int             failing_result;
static bool            has_failed;
static void (*drain_user)(void);

static atomic_bool        held;
static atomic_int         faulty; /* stand_in_fault */
static atomic_int         living;
static atomic_bool        started;
static atomic_bool        capturing;
static atomic_bool        capture_spoilt;
static void *_Atomic      captured;
static _Thread_local int  capture_mode = CAPTURE_GLOBAL;
static _Thread_local int  context_depth;
static _Thread_local long contexts[8];

/* ------------------------------------------------------------------- failures */

static int
refused(const char *name)
{
    int result = SUCCESS;

    pthread_mutex_lock(&lock);
    if (countdown > 0 && (failing == NULL || strcmp(failing, name) == 0) &&
        --countdown == 0) {
        has_failed = true;
        result = failing_result;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* The same, for what may not be called beside a capture. */
static int
refused_beside_capture(const char *name)
{
    if (atomic_load(&capturing) && capture_mode != CAPTURE_RELAXED) {
        atomic_store(&capture_spoilt, true);
        return CAPTURE_UNSUPPORTED;
    }
    return refused(name);
}

/* The same, for functions that need a context. */
static int
refused_here(const char *name)
{
    return context_depth == 0 ? INVALID_CONTEXT : refused(name);
}

/* -------------------------------------------------------------------- streams */

/* Of the last one it is freed: work outlives the call that destroys its event. */
static void
let_go(event *e)
{
    if (atomic_fetch_sub(&e->users, 1) != 1) {
        return;
    }
    if (e->fd >= 0 || !e->mine) {
        munmap(e->at, sizeof(moment));
    } else {
        free(e->at);
    }
    if (e->fd >= 0) {
        close(e->fd);
    }
    free(e);
}

/* Of the last one it is unmapped: the driver's cuMemFree waits for the copies. */
static void
let_go_of_memory(memory *m)
{
    bool is_last;

    if (m == NULL) {
        return;
    }
    pthread_mutex_lock(&lock);
    is_last = --m->users == 0;
    pthread_mutex_unlock(&lock);
    if (!is_last) {
        return;
    }
    munmap(m->base, m->bytes);
    if (m->fd >= 0) {
        pthread_mutex_lock(&lock);
        freed_base = m->base;
        freed_bytes = m->bytes;
        pthread_mutex_unlock(&lock);
        close(m->fd);
    }
    free(m);
}

static void
rest(long ns)
{
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

static void
do_work(const work *w, uint64_t *seed)
{
    uint64_t number;

    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    number = *seed >> 33;
    if (number % RESTS == 0) {
        rest((long)(number / RESTS % REST_NS));
    }
    while (atomic_load(&held)) {
        rest(REST_NS);
    }
    switch (w->kind) {
    case WORK_COPY:
        memmove(w->to, w->from, w->bytes);
        if (w->inside && w->bytes != 0 &&
            atomic_load(&faulty) == STAND_IN_SPOILS_BYTES) {
            ((uint8_t *)w->to)[w->bytes / 2] ^= 1;
        }
        free(w->staged);
        let_go_of_memory(w->uses[0]);
        let_go_of_memory(w->uses[1]);
        break;
    case WORK_LAUNCH:
        w->fn(w->arg);
        break;
    case WORK_RECORD:
        while (atomic_load(&faulty) == STAND_IN_LATE_EVENTS) {
            rest(REST_NS);
        }
        atomic_store(&w->event->at->done, w->count);
        let_go(w->event);
        break;
    case WORK_WAIT:
        while (atomic_load(&w->event->at->done) < w->count) {
            rest(REST_NS);
        }
        let_go(w->event);
        break;
    }
}

static void *
stream_main(void *arg)
{
    stream  *s = arg;
    uint64_t seed = (uint64_t)(uintptr_t)s ^ (uint64_t)getpid();

    pthread_mutex_lock(&s->lock);
    for (;;) {
        work *w = s->first;

        if (w == NULL && s->ending) {
            break;
        }
        if (w == NULL) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        s->first = w->next;
        s->busy = true;
        pthread_mutex_unlock(&s->lock);
        do_work(w, &seed);
        free(w);
        pthread_mutex_lock(&s->lock);
        s->busy = false;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static stream *
make_stream(void)
{
    stream *s = calloc(1, sizeof(*s));

    if (s == NULL) {
        return NULL;
    }
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->thread, NULL, stream_main, s) != 0) {
        abort();
    }
    pthread_mutex_lock(&streams_lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&streams_lock);
    return s;
}

/* Ends when it has done all. */
static void
end_stream(stream *s)
{
    stream **link = &streams;

    pthread_mutex_lock(&streams_lock);
    while (*link != s) {
        link = &(*link)->next;
    }
    *link = s->next;
    pthread_mutex_unlock(&streams_lock);
    pthread_mutex_lock(&s->lock);
    s->ending = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
    free(s);
}

static stream *
stream_of(void *given)
{
    stream *s = given;

    if (s == NULL) {
        pthread_mutex_lock(&lock);
        if (null_stream == NULL) {
            null_stream = make_stream();
        }
        s = null_stream;
        pthread_mutex_unlock(&lock);
    }
    return s;
}

static void
put_work(stream *s, work w)
{
    work *made = malloc(sizeof(*made));

    if (made == NULL) {
        abort();
    }
    *made = w;
    made->next = NULL;
    pthread_mutex_lock(&s->lock);
    if (s->first == NULL) {
        s->first = made;
    } else {
        s->last->next = made;
    }
    s->last = made;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static bool
is_idle(stream *s)
{
    bool idle;

    pthread_mutex_lock(&s->lock);
    idle = s->first == NULL && !s->busy;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

static void
wait_for_streams(void)
{
    bool idle;

    do {
        idle = true;
        pthread_mutex_lock(&streams_lock);
        for (stream *s = streams; s != NULL && idle; s = s->next) {
            idle = is_idle(s);
        }
        pthread_mutex_unlock(&streams_lock);
        if (!idle) {
            rest(REST_NS);
        }
    } while (!idle);
}

__attribute__((destructor)) static void
end_null_stream(void)
{
    if (null_stream != NULL && is_idle(null_stream)) { /* else it waits for the dead */
        end_stream(null_stream);
    }
}

/* --------------------------------------------------------------- shared memory */

/* At `where`, if that is free. */
static void *
map_new(void *where, size_t bytes, int *fd)
{
    void *base;

    *fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (*fd < 0) {
        return NULL;
    }
    if (ftruncate(*fd, (off_t)bytes) != 0) {
        close(*fd);
        return NULL;
    }
    base = mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (base == MAP_FAILED) {
        close(*fd);
        return NULL;
    }
    return base;
}

static handle64
handle_of(int fd, size_t bytes)
{
    return (handle64){.magic = HANDLE_MAGIC, .pid = getpid(), .fd = fd, .bytes = bytes};
}

static void *
map_handle(const handle64 *handle)
{
    char  path[64];
    void *base;
    int   fd;

    if (handle->magic != HANDLE_MAGIC) {
        return NULL;
    }
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle->pid, handle->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return NULL;
    }
    base = mmap(NULL, handle->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return base == MAP_FAILED ? NULL : base;
}

static void
keep_memory(void *base, size_t bytes, int fd, handle64 source)
{
    memory *m = malloc(sizeof(*m));

    if (m == NULL) {
        abort();
    }
    pthread_mutex_lock(&lock);
    *m = (memory){memories, base, bytes, ++ids, false, source, fd, 1};
    memories = m;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&living, 1);
}

static int
drop_memory(uint64_t at, bool mine)
{
    memory **link;
    memory  *m;

    wait_for_streams();
    pthread_mutex_lock(&lock);
    for (link = &memories; *link != NULL && ((uint64_t)(uintptr_t)(*link)->base != at ||
                                             ((*link)->fd >= 0) != mine);
         link = &(*link)->next) {
    }
    m = *link;
    if (m != NULL) {
        *link = m->next;
    }
    pthread_mutex_unlock(&lock);
    if (m == NULL) {
        return INVALID_VALUE;
    }
    let_go_of_memory(m);
    atomic_fetch_sub(&living, 1);
    return SUCCESS;
}

/* What holds that address; NULL: it is not ours.  Under the lock. */
static memory *
memory_at(uint64_t at)
{
    memory *m;

    for (m = memories; m != NULL && at - (uint64_t)(uintptr_t)m->base >= m->bytes;
         m = m->next) {
    }
    return m;
}

/* Whether other memory of the same process and address is still open here. */
static bool
has_predecessor(const handle64 *handle)
{
    const memory *m;

    pthread_mutex_lock(&lock);
    for (m = memories; m != NULL && (m->fd >= 0 || m->source.pid != handle->pid ||
                                     m->source.id == handle->id ||
                                     handle->base - m->source.base >= m->source.bytes);
         m = m->next) {
    }
    pthread_mutex_unlock(&lock);
    return m != NULL;
}

/* What holds that address, for a copy. */
static memory *
use_memory(uint64_t at)
{
    memory *m;

    pthread_mutex_lock(&lock);
    m = memory_at(at);
    if (m != NULL) {
        m->users++;
    }
    pthread_mutex_unlock(&lock);
    return m;
}

/* --------------------------------------------------------- the driver's functions */

/* No header declares them: they are looked up by name. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

#define OR_REFUSED(how)                                                                \
    do {                                                                               \
        int refused_ = how(__func__);                                                  \
        if (refused_ != SUCCESS) {                                                     \
            return refused_;                                                           \
        }                                                                              \
    } while (0)

int
cuInit(unsigned flags)
{

    (void)flags;
    OR_REFUSED(refused);
    atomic_store(&started, true);
    return SUCCESS;
}

int
cuDeviceGet(int *device, int ordinal)
{
    if (!atomic_load(&started) || ordinal < 0 || ordinal >= DEVICES) {
        return INVALID_DEVICE;
    }
    *device = 40 + ordinal; /* not the number: who mixes them up finds no device */
    return refused("cuDeviceGet");
}

int
cuDevicePrimaryCtxRetain(void **context, int device)
{

    if (device < 40 || device >= 40 + DEVICES) {
        return INVALID_DEVICE;
    }
    OR_REFUSED(refused);
    *context = (void *)(uintptr_t)(device - 39);
    atomic_fetch_add(&living, 1);
    return SUCCESS;
}

int
cuDevicePrimaryCtxRelease_v2(int device)
{
    if (device < 40 || device >= 40 + DEVICES) {
        return INVALID_DEVICE;
    }
    atomic_fetch_sub(&living, 1);
    return SUCCESS;
}

int
cuCtxPushCurrent_v2(void *context)
{

    OR_REFUSED(refused);
    contexts[context_depth++ % 8] = (long)(intptr_t)context;
    return SUCCESS;
}

int
cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;

    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

int
cuCtxPopCurrent_v2(void **context)
{
    if (context_depth == 0) {
        return INVALID_CONTEXT;
    }
    *context = (void *)(intptr_t)contexts[--context_depth % 8];
    return SUCCESS;
}

int
cuMemAlloc_v2(uint64_t *at, size_t bytes)
{
    int result =
        context_depth == 0 ? INVALID_CONTEXT : refused_beside_capture("cuMemAlloc_v2");
    void *where = NULL;
    void *base;
    int   fd;

    if (result != SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&lock);
    if (bytes <= freed_bytes) {
        where = freed_base;
    }
    pthread_mutex_unlock(&lock);
    base = bytes == 0 ? NULL : map_new(where, bytes, &fd);
    if (base == NULL) {
        return OUT_OF_MEMORY;
    }
    keep_memory(base, bytes, fd,
                (handle64){.device = (int32_t)contexts[(context_depth - 1) % 8] - 1});
    *at = (uint64_t)(uintptr_t)base;
    return SUCCESS;
}

int
cuMemFree_v2(uint64_t at)
{
    return context_depth == 0 ? INVALID_CONTEXT : drop_memory(at, true);
}

int
cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t at)
{
    int           result = refused_here("cuMemGetAddressRange_v2");
    const memory *m;

    if (result != SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&lock);
    m = memory_at(at);
    if (m != NULL) {
        *base = (uint64_t)(uintptr_t)m->base;
        *bytes = m->bytes;
    }
    pthread_mutex_unlock(&lock);
    return m != NULL ? SUCCESS : NOT_FOUND;
}

int
cuPointerGetAttribute(void *value, int attribute, uint64_t at)
{
    const int     buffer_id = 7;
    const int     device_ordinal = 9;
    int           result = refused_here("cuPointerGetAttribute");
    const memory *m;

    if (result != SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&lock);
    m = attribute == buffer_id || attribute == device_ordinal ? memory_at(at) : NULL;
    if (m != NULL && attribute == buffer_id) {
        memcpy(value, &m->id, sizeof(m->id));
    } else if (m != NULL) {
        memcpy(value, &m->source.device, sizeof(m->source.device));
    }
    pthread_mutex_unlock(&lock);
    return m != NULL ? SUCCESS : INVALID_VALUE;
}

int
cuIpcGetMemHandle(handle64 *handle, uint64_t at)
{
    int result = refused_here("cuIpcGetMemHandle");

    if (result != SUCCESS) {
        return result;
    }
    result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (const memory *m = memories; m != NULL; m = m->next) {
        if ((uint64_t)(uintptr_t)m->base == at && m->fd >= 0 && !m->withheld) {
            *handle = handle_of(m->fd, m->bytes);
            handle->base = at;
            handle->id = m->id;
            handle->device = m->source.device;
            result = SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int
cuIpcOpenMemHandle_v2(uint64_t *at, handle64 handle, unsigned flags)
{
    void *base;

    (void)flags;
    OR_REFUSED(refused_here);
    if (has_predecessor(&handle)) {
        return ALREADY_MAPPED;
    }
    base = map_handle(&handle);
    if (base == NULL) {
        return INVALID_HANDLE;
    }
    keep_memory(base, handle.bytes, -1, handle);
    *at = (uint64_t)(uintptr_t)base;
    return SUCCESS;
}

int
cuIpcCloseMemHandle(uint64_t at)
{
    return drop_memory(at, false);
}

int
cuStreamCreate(void **made, unsigned flags)
{

    (void)flags;
    OR_REFUSED(refused_here);
    *made = make_stream();
    if (*made == NULL) {
        return OUT_OF_MEMORY;
    }
    atomic_fetch_add(&living, 1);
    return SUCCESS;
}

int
cuStreamDestroy_v2(void *s)
{
    end_stream(s);
    atomic_fetch_sub(&living, 1);
    return SUCCESS;
}

int
cuStreamQuery(void *s)
{
    int result = refused_beside_capture("cuStreamQuery");

    return result != SUCCESS ? result : is_idle(stream_of(s)) ? SUCCESS : NOT_READY;
}

int
cuStreamIsCapturing(void *s, int *status)
{
    *status = s != NULL && atomic_load(&captured) == s;
    return SUCCESS;
}

int
cuStreamSynchronize(void *given)
{
    stream *s = stream_of(given);

    pthread_mutex_lock(&s->lock);
    while (s->first != NULL || s->busy) {
        pthread_cond_wait(&s->changed, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return SUCCESS;
}

int
cuStreamWaitEvent(void *s, void *given, unsigned flags)
{
    event *e = given;

    (void)flags;
    OR_REFUSED(refused_here);
    atomic_fetch_add(&e->users, 1);
    put_work(
        stream_of(s),
        (work){.kind = WORK_WAIT, .event = e, .count = atomic_load(&e->at->recorded)});
    return SUCCESS;
}

int
cuEventCreate(void **made, unsigned flags)
{
    const unsigned untimed = 2, shared = 4;
    event         *e;

    OR_REFUSED(refused_here);
    if ((flags & shared) != 0 && (flags & untimed) == 0) {
        return INVALID_VALUE;
    }
    e = calloc(1, sizeof(*e));
    if (e == NULL) {
        return OUT_OF_MEMORY;
    }
    e->mine = true;
    e->users = 1;
    e->fd = -1;
    e->at = (flags & shared) != 0 ? map_new(NULL, sizeof(moment), &e->fd)
                                  : calloc(1, sizeof(moment));
    if (e->at == NULL) {
        free(e);
        return OUT_OF_MEMORY;
    }
    atomic_fetch_add(&living, 1);
    *made = e;
    return SUCCESS;
}

int
cuEventDestroy_v2(void *given)
{
    let_go(given);
    atomic_fetch_sub(&living, 1);
    return SUCCESS;
}

int
cuEventRecord(void *given, void *s)
{
    event *e = given;

    OR_REFUSED(refused_here);
    if (!e->mine) {
        return INVALID_HANDLE;
    }
    if (s == NULL && drain_user != NULL) {
        drain_user();
    }
    atomic_fetch_add(&e->users, 1);
    put_work(stream_of(s), (work){.kind = WORK_RECORD,
                                  .event = e,
                                  .count = atomic_fetch_add(&e->at->recorded, 1) + 1});
    return SUCCESS;
}

int
cuEventQuery(void *given)
{
    const event *e = given;

    OR_REFUSED(refused_beside_capture);
    return atomic_load(&e->at->done) < atomic_load(&e->at->recorded) ? NOT_READY
                                                                     : SUCCESS;
}

int
cuIpcGetEventHandle(handle64 *handle, void *given)
{
    int          result = refused_here("cuIpcGetEventHandle");
    const event *e = given;

    if (result == SUCCESS && e->fd < 0) {
        result = INVALID_HANDLE;
    }
    if (result == SUCCESS) {
        *handle = handle_of(e->fd, sizeof(moment));
    }
    return result;
}

int
cuIpcOpenEventHandle(void **made, handle64 handle)
{
    event *e;

    OR_REFUSED(refused_here);
    e = calloc(1, sizeof(*e));
    if (e == NULL) {
        return OUT_OF_MEMORY;
    }
    e->users = 1;
    e->fd = -1;
    e->at = map_handle(&handle);
    if (e->at == NULL) {
        free(e);
        return INVALID_HANDLE;
    }
    atomic_fetch_add(&living, 1);
    *made = e;
    return SUCCESS;
}

int
cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *s)
{

    OR_REFUSED(refused_here);
    put_work(stream_of(s), (work){.kind = WORK_COPY,
                                  .to = (void *)(uintptr_t)to,
                                  .from = (const void *)(uintptr_t)from,
                                  .bytes = bytes,
                                  .inside = true,
                                  .uses = {use_memory(from), use_memory(to)}});
    return SUCCESS;
}

static stand_in_registered
registered(const void *at, size_t bytes)
{
    const uintptr_t     from = (uintptr_t)at;
    stand_in_registered found = STAND_IN_PAGEABLE;

    pthread_mutex_lock(&lock);
    for (const range *r = ranges; r != NULL; r = r->next) {
        if (from < r->at + r->bytes && r->at < from + bytes) {
            found = r->at <= from && from + bytes <= r->at + r->bytes
                        ? STAND_IN_PINNED
                        : STAND_IN_IN_PART;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

int
cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags)
{
    const size_t page = 4096;
    range       *r;

    (void)flags;
    OR_REFUSED(refused_here);
    if ((uintptr_t)at % page != 0 || bytes % page != 0 || bytes == 0) {
        return INVALID_VALUE;
    }
    if (registered(at, bytes) != STAND_IN_PAGEABLE) {
        return ALREADY_REGISTERED;
    }
    r = malloc(sizeof(*r));
    if (r == NULL) {
        return OUT_OF_MEMORY;
    }
    *r = (range){.at = (uintptr_t)at, .bytes = bytes};
    pthread_mutex_lock(&lock);
    r->next = ranges;
    ranges = r;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&living, 1);
    return SUCCESS;
}

int
cuMemHostUnregister(void *at)
{
    range *r;

    if (context_depth == 0) {
        return INVALID_CONTEXT;
    }
    wait_for_streams();
    pthread_mutex_lock(&lock);
    for (range **link = &ranges; (r = *link) != NULL; link = &r->next) {
        if (r->at == (uintptr_t)at) {
            *link = r->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    if (r == NULL) {
        return NOT_REGISTERED;
    }
    free(r);
    atomic_fetch_sub(&living, 1);
    return SUCCESS;
}

/* The host's memory may be used again at once, as with the driver's pageable memory. */
int
cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *s)
{
    void *staged;

    OR_REFUSED(refused_here);
    if (registered(from, bytes) == STAND_IN_IN_PART) {
        return INVALID_VALUE;
    }
    staged = malloc(bytes + 1);
    if (staged == NULL) {
        return OUT_OF_MEMORY;
    }
    memcpy(staged, from, bytes);
    put_work(stream_of(s), (work){.kind = WORK_COPY,
                                  .to = (void *)(uintptr_t)to,
                                  .from = staged,
                                  .staged = staged,
                                  .bytes = bytes,
                                  .uses = {NULL, use_memory(to)}});
    return SUCCESS;
}

/* Comes back when the bytes are there, as with the driver's pageable memory. */
int
cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *given)
{
    stream *s = stream_of(given);

    OR_REFUSED(refused_here);
    if (registered(to, bytes) == STAND_IN_IN_PART) {
        return INVALID_VALUE;
    }
    put_work(s, (work){.kind = WORK_COPY,
                       .to = to,
                       .from = (const void *)(uintptr_t)from,
                       .bytes = bytes,
                       .uses = {use_memory(from), NULL}});
    return cuStreamSynchronize(s);
}

/* A module is whatever image it is of: its functions are the stand-in's. */
int
cuModuleLoadData(void **module, const void *image)
{
    int result = context_depth == 0 ? INVALID_CONTEXT : refused("cuModuleLoadData");

    if (result == SUCCESS) {
        *module = (void *)(uintptr_t)image;
    }
    return result;
}

int
cuModuleGetFunction(void **function, void *module, const char *name)
{
    int result = refused("cuModuleGetFunction");

    (void)module;
    if (result == SUCCESS) {
        *function = (void *)(uintptr_t)stand_in_find(name);
        result = *function == NULL ? NOT_FOUND : SUCCESS;
    }
    return result;
}

/* A kernel with its parameters, copied as the driver copies them. */
typedef struct {
    const stand_in_function *function;
    unsigned                 blocks;
    unsigned                 threads;
    void                    *parameters[STAND_IN_PARAMETERS];
} launched;

static void
run_launched(void *arg)
{
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    launched              *l = arg;

    pthread_mutex_lock(&one_at_a_time);
    stand_in_run(l->function, (const void *const *)l->parameters, l->blocks,
                 l->threads);
    pthread_mutex_unlock(&one_at_a_time);
    for (int i = 0; i < STAND_IN_PARAMETERS; i++) {
        free(l->parameters[i]);
    }
    free(l);
}

int
cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
               void *s, void **parameters, void **extra)
{
    int       result = context_depth == 0 ? INVALID_CONTEXT : refused("cuLaunchKernel");
    launched *l;

    if (result != SUCCESS) {
        return result;
    }
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 ||
        block_y != 1 || block_z != 1 || shared != 0 || extra != NULL) {
        return INVALID_VALUE;
    }
    if (s == NULL && drain_user != NULL) {
        drain_user();
    }
    l = malloc(sizeof(*l));
    if (l == NULL) {
        return OUT_OF_MEMORY;
    }
    l->function = function;
    l->blocks = grid_x;
    l->threads = block_x;
    for (int i = 0; i < STAND_IN_PARAMETERS; i++) {
        l->parameters[i] = malloc(l->function->bytes[i]);
        if (l->parameters[i] == NULL) {
            abort();
        }
        memcpy(l->parameters[i], parameters[i], l->function->bytes[i]);
    }
    put_work(stream_of(s), (work){.kind = WORK_LAUNCH, .fn = run_launched, .arg = l});
    return SUCCESS;
}

int
cuGetErrorName(int result, const char **name)
{
    static const struct {
        int         result;
        const char *name;
    } names[] = {{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
                 {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
                 {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
                 {ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED"},
                 {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
                 {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
                 {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
                 {NOT_READY, "CUDA_ERROR_NOT_READY"}};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (names[i].result == result) {
            *name = names[i].name;
            return SUCCESS;
        }
    }
    return INVALID_VALUE;
}

/* ------------------------------------------------------------ what tests tell it */

static void
fail(const char *name, int nth, int result)
{
    pthread_mutex_lock(&lock);
    failing = name;
    countdown = nth;
    failing_result = result;
    has_failed = false;
    pthread_mutex_unlock(&lock);
}

static bool
failed(void)
{
    bool result;

    pthread_mutex_lock(&lock);
    result = has_failed;
    pthread_mutex_unlock(&lock);
    return result;
}

static void
hold(bool now)
{
    atomic_store(&held, now);
}

static void
launch(void *s, stand_in_kernel fn, void *arg)
{
    put_work(stream_of(s), (work){.kind = WORK_LAUNCH, .fn = fn, .arg = arg});
}

static void
set_drain(void (*drain)(void))
{
    drain_user = drain;
}

static void
begin_capture(void *of)
{
    atomic_store(&captured, of);
    atomic_store(&capture_spoilt, false);
    atomic_store(&capturing, true);
}

static bool
end_capture(void)
{
    atomic_store(&capturing, false);
    atomic_store(&captured, NULL);
    return !atomic_load(&capture_spoilt);
}

static void
misbehave(stand_in_fault fault)
{
    atomic_store(&faulty, (int)fault);
}

static int
alive(void)
{
    return atomic_load(&living);
}

static void
withhold(uint64_t at)
{
    pthread_mutex_lock(&lock);
    memory_at(at)->withheld = true;
    pthread_mutex_unlock(&lock);
}

const stand_in_table stand_in = {fail,      failed,   hold,          launch,
                                 set_drain, alive,    begin_capture, end_capture,
                                 misbehave, withhold, registered};
