/* Halves, streams, events; and exchanges with readers yet to close. */
#include "comm/device/exchange.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "comm/device/retired.h"
#include "comm/device/trial.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/lock.h"
#include "device/streams.h"

/* Halves begin, and are cut, at multiples of it. */
#define UNIT ((size_t)64)

/* The most time of close's wait for copies. */
#define FINISH_NS (1 * SMP_NS_PER_S)

/* A member's open objects; this member's own, made here. */
typedef struct {
    uint64_t base; /* both halves; 0: not open */
    void    *filled[2];
    void    *read[2];
    void    *ready;
    void    *taken;
    uint64_t seed;  /* of its pattern */
    uint64_t input; /* of the operation without halves under way; 0: of no bytes */
} member;

/* Pieces of a pattern: one for each round, and one without halves. */
#define PIECES ((size_t)SMP_TRIAL_ROUNDS + 1)

/* A gather of patterns. */
typedef struct {
    uint64_t          at;      /* owned: the own pattern, then those of all; 0: none */
    size_t            piece;   /* bytes of a pattern in a round, and without halves */
    smp_device_mark  *mark;    /* until it is over */
    uint64_t         *outs;    /* owned: [size] */
    size_t           *lengths; /* owned: [size] */
    smp_device_gather gather;
} trial;

struct smp_exchange {
    smp_retired       retired; /* first; of a retired one, like all from readers */
    const smp_driver *driver;  /* set at create, like all up to members */
    uint32_t          generation;
    int               number; /* of the device */
    int               device; /* as the driver calls it */
    void             *context;
    int               size;
    int               self;
    void             *fill; /* owned: streams */
    void             *drain;
    member           *members; /* owned: [size] */
    trial             trial;
    smp_exports       exports;
    smp_imports      *imports; /* owned: [size]; of each member */

    smp_export      *shown;  /* in the exports: the last one shown; NULL: none */
    size_t           half;   /* bytes */
    uint64_t         round;  /* to be filled or drained next */
    _Atomic bool     failed; /* the device's work is unknown */
    smp_device_mark *marks;  /* owned: all of them */
    smp_device_mark *spare;

    smp_user *readers; /* owned */
    int       nreaders;
    bool      left; /* to the end of the process */
};

static bool
is_child(const smp_exchange *x)
{
    return x->generation != smp_fork_generation();
}

/* -------------------------------------------------------------------- retirement */

static void
forget_readers(smp_exchange *x)
{
    smp_user_forget(x->readers, x->nreaders);
    x->readers = NULL;
    x->nreaders = 0;
}

static void
drop_books(smp_exchange *x)
{
    forget_readers(x);
    while (x->marks != NULL) {
        smp_device_mark *mark = x->marks;

        x->marks = mark->every;
        free(mark);
    }
    for (int m = 0; m < x->size; m++) {
        smp_imports_forget(&x->imports[m]);
    }
    free(x->imports);
    free(x->trial.outs);
    free(x->trial.lengths);
    free(x->members);
    free(x);
}

static void
destroy_event(const smp_driver *driver, void *event)
{
    if (event != NULL) {
        (void)driver->event_destroy(event);
    }
}

static void
destroy_events(const smp_driver *driver, const member *m)
{
    for (int h = 0; h < 2; h++) {
        destroy_event(driver, m->filled[h]);
        destroy_event(driver, m->read[h]);
    }
    destroy_event(driver, m->ready);
    destroy_event(driver, m->taken);
}

/* A failure here is the device's, with no caller to tell. */
static void
destroy(smp_exchange *x)
{
    const smp_driver *driver = x->driver;
    char              why[SMP_DRIVER_TEXT];

    if (smp_driver_enter(x->driver, x->context, why)) {
        for (const smp_device_mark *mark = x->marks; mark != NULL; mark = mark->every) {
            destroy_event(driver, mark->begin);
            destroy_event(driver, mark->end);
        }
        destroy_events(driver, &x->members[x->self]);
        if (x->members[x->self].base != 0) {
            (void)driver->free(x->members[x->self].base);
        }
        if (x->trial.at != 0) {
            (void)driver->free(x->trial.at);
        }
        smp_stream_destroy(driver, x->fill);
        smp_stream_destroy(driver, x->drain);
        smp_driver_leave(x->driver);
    }
    (void)driver->context_release(x->device);
    drop_books(x);
}

static void
destroy_retired(smp_retired *retired)
{
    destroy((smp_exchange *)retired);
}

static bool
is_read(const smp_retired *retired)
{
    const smp_exchange *x = (const smp_exchange *)retired;
    bool                read = x->left || is_child(x);

    for (int i = 0; i < x->nreaders && !read; i++) {
        read = smp_user_holds(&x->readers[i]);
    }
    return read;
}

static smp_retired_list retired_exchanges = {.lock = SMP_LOCK_INIT(SMP_LOCK_DEVICES),
                                             .is_read = is_read,
                                             .destroy = destroy_retired};

void
smp_exchange_retire(smp_exchange *x, smp_user *readers, int n, bool leave_it)
{
    x->readers = readers;
    x->nreaders = n;
    x->left = leave_it;
    if (is_child(x)) {
        drop_books(x);
        return;
    }
    if (leave_it) {
        forget_readers(x);
    }
    smp_retired_add(&retired_exchanges, &x->retired);
    smp_retired_sweep(&retired_exchanges);
}

/* ------------------------------------------------------------------------ setup */

/* The context is current. */
static bool
make_halves(smp_exchange *x, smp_exchange_card *card, char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = x->driver;
    member           *own = &x->members[x->self];
    size_t            bytes = smp_driver_blocks(2 * x->half);

    if (!smp_driver_ok(driver, "cuMemAlloc", driver->alloc(&own->base, bytes), why)) {
        own->base = 0;
        return false;
    }
    card->bytes = x->half;
    card->owner = smp_allocations_owner();
    card->base = own->base;
    card->seed = (uint64_t)smp_clock_ns() ^ (uint64_t)x->self << 48;
    return smp_driver_ok(driver, "cuIpcGetMemHandle",
                         driver->memory_export(&card->memory, own->base), why) &&
           smp_driver_share_event(driver, &own->filled[0], &card->filled[0], why) &&
           smp_driver_share_event(driver, &own->filled[1], &card->filled[1], why) &&
           smp_driver_share_event(driver, &own->read[0], &card->read[0], why) &&
           smp_driver_share_event(driver, &own->read[1], &card->read[1], why) &&
           smp_driver_share_event(driver, &own->ready, &card->ready, why) &&
           smp_driver_share_event(driver, &own->taken, &card->taken, why) &&
           smp_stream_create(driver, x->context, &x->fill, why) &&
           smp_stream_create(driver, x->context, &x->drain, why);
}

smp_exchange *
smp_exchange_create(int number, size_t bytes, int size, int self,
                    smp_exchange_card *card, char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = smp_driver_load(why);
    smp_exchange     *x;
    bool              made = false;

    smp_retired_sweep(&retired_exchanges);
    if (driver == NULL) {
        return NULL;
    }
    x = calloc(1, sizeof(*x));
    if (x != NULL) {
        x->members = calloc((size_t)size, sizeof(member));
        x->imports = calloc((size_t)size, sizeof(smp_imports));
    }
    if (x == NULL || x->members == NULL || x->imports == NULL) {
        memcpy(why, "out of memory", sizeof("out of memory"));
        goto err_free;
    }
    x->driver = driver;
    x->exports.driver = driver;
    for (int m = 0; m < size; m++) {
        x->imports[m].driver = driver;
    }
    x->generation = smp_fork_generation();
    x->number = number;
    x->size = size;
    x->self = self;
    x->half = bytes / 2 / UNIT * UNIT;
    if (!smp_driver_ok(driver, "cuDeviceGet", driver->device_get(&x->device, number),
                       why) ||
        !smp_driver_ok(driver, "cuDevicePrimaryCtxRetain",
                       driver->context_retain(&x->context, x->device), why)) {
        goto err_free;
    }
    if (smp_driver_enter(x->driver, x->context, why)) {
        made = make_halves(x, card, why);
        smp_driver_leave(x->driver);
    }
    if (!made) {
        smp_exchange_retire(x, NULL, 0, false);
        return NULL;
    }
    return x;

err_free:
    if (x != NULL) {
        free(x->imports);
        free(x->members);
    }
    free(x);
    return NULL;
}

static bool
open_event(const smp_driver *driver, void **event, smp_driver_handle handle,
           char why[SMP_DRIVER_TEXT])
{
    if (!smp_driver_ok(driver, "cuIpcOpenEventHandle",
                       driver->event_open(event, handle), why)) {
        *event = NULL;
        return false;
    }
    return true;
}

/* The context is current. */
static bool
open_member(smp_exchange *x, member *m, const smp_exchange_card *card,
            char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = x->driver;

    smp_imports_make_way(card->owner, 0, card->base,
                         smp_driver_blocks(2 * (size_t)card->bytes));
    if (!smp_driver_ok(
            driver, "cuIpcOpenMemHandle",
            driver->memory_open(&m->base, card->memory, SMP_DRIVER_OPEN_WITH_PEERS),
            why)) {
        m->base = 0;
        return false;
    }
    return open_event(driver, &m->filled[0], card->filled[0], why) &&
           open_event(driver, &m->filled[1], card->filled[1], why) &&
           open_event(driver, &m->read[0], card->read[0], why) &&
           open_event(driver, &m->read[1], card->read[1], why) &&
           open_event(driver, &m->ready, card->ready, why) &&
           open_event(driver, &m->taken, card->taken, why);
}

bool
smp_exchange_open(smp_exchange *x, const smp_exchange_card *cards,
                  char why[SMP_DRIVER_TEXT])
{
    bool opened = smp_driver_enter(x->driver, x->context, why);

    if (!opened) {
        return false;
    }
    for (int m = 0; m < x->size; m++) {
        x->half = cards[m].bytes < x->half ? (size_t)cards[m].bytes : x->half;
        x->members[m].seed = cards[m].seed;
        x->imports[m].context = x->context;
        x->imports[m].owner = cards[m].owner;
        if (m != x->self && opened) {
            opened = open_member(x, &x->members[m], &cards[m], why);
        }
    }
    smp_driver_leave(x->driver);
    return opened;
}

bool
smp_exchange_rest(const smp_exchange *x)
{
    int64_t until = smp_clock_ns() + FINISH_NS;
    char    why[SMP_DRIVER_TEXT];
    bool    rests;

    if (is_child(x) || !smp_driver_enter(x->driver, x->context, why)) {
        return false;
    }
    rests = smp_driver_rest(x->driver, x->fill, until) == SMP_DRIVER_OK &&
            smp_driver_rest(x->driver, x->drain, until) == SMP_DRIVER_OK;
    smp_driver_leave(x->driver);
    return rests;
}

bool
smp_exchange_close(smp_exchange *x)
{
    char why[SMP_DRIVER_TEXT];

    if (is_child(x) || !smp_streams_rest(smp_clock_ns() + FINISH_NS) ||
        !smp_driver_enter(x->driver, x->context, why)) {
        return false;
    }
    for (int m = 0; m < x->size; m++) {
        member *other = &x->members[m];

        if (m == x->self) {
            continue;
        }
        destroy_events(x->driver, other);
        smp_imports_close(&x->imports[m]);
        if (other->base != 0) {
            (void)x->driver->memory_close(other->base);
        }
        *other = (member){0};
    }
    smp_driver_leave(x->driver);
    return true;
}

int
smp_exchange_device(const smp_exchange *x)
{
    return x->number;
}

size_t
smp_exchange_half(const smp_exchange *x)
{
    return x->half;
}

/* ------------------------------------------------------------------- an operation */

static bool
wait_for(const smp_exchange *x, void *stream, void *event, char why[SMP_DRIVER_TEXT])
{
    return smp_driver_ok(x->driver, "cuStreamWaitEvent",
                         x->driver->stream_wait(stream, event, 0), why);
}

static bool
record(const smp_exchange *x, void *event, void *stream, char why[SMP_DRIVER_TEXT])
{
    return smp_driver_ok(x->driver, "cuEventRecord",
                         x->driver->event_record(event, stream), why);
}

static bool
copy(const smp_exchange *x, uint64_t to, uint64_t from, size_t bytes, void *stream,
     char why[SMP_DRIVER_TEXT])
{
    return bytes == 0 || to == from ||
           smp_driver_ok(x->driver, "cuMemcpyDtoDAsync",
                         x->driver->copy(to, from, bytes, stream), why);
}

/* The address of a member's half of the present round. */
static uint64_t
half_of(const smp_exchange *x, int m)
{
    return x->members[m].base + x->round % 2 * x->half;
}

/* The context is current, as below. */
static bool
fill(const smp_exchange *x, const smp_device_gather *gather, size_t skip, size_t bytes,
     char why[SMP_DRIVER_TEXT])
{
    const size_t h = x->round % 2;

    if (!wait_for(x, x->fill, gather->mark->begin, why)) {
        return false;
    }
    for (int m = 0; m < x->size && x->round >= 2; m++) {
        if (m != x->self && !wait_for(x, x->fill, x->members[m].read[h], why)) {
            return false;
        }
    }
    return copy(x, half_of(x, x->self), gather->in + skip, bytes, x->fill, why) &&
           record(x, x->members[x->self].filled[h], x->fill, why);
}

static bool
drain(const smp_exchange *x, const smp_device_gather *gather, size_t skip,
      const size_t *bytes, char why[SMP_DRIVER_TEXT])
{
    const size_t h = x->round % 2;

    /* The outputs may have been in use before, like the tensor. */
    if (!wait_for(x, x->drain, gather->mark->begin, why) ||
        !copy(x, gather->outs[x->self] + skip, gather->in + skip, bytes[x->self],
              x->drain, why)) {
        return false;
    }
    for (int i = 1; i < x->size; i++) { /* each begins with another one */
        int m = (x->self + i) % x->size;

        if (bytes[m] != 0 && (!wait_for(x, x->drain, x->members[m].filled[h], why) ||
                              !copy(x, gather->outs[m] + skip, half_of(x, m), bytes[m],
                                    x->drain, why))) {
            return false;
        }
    }
    return record(x, x->members[x->self].read[h], x->drain, why);
}

/* Both streams have done their work: the last fill is filled[0] or [1], and the drain's
 * own stream is in order. */
static bool
finish(const smp_exchange *x, const smp_device_gather *gather,
       char why[SMP_DRIVER_TEXT])
{
    const member *own = &x->members[x->self];

    return wait_for(x, x->drain, own->filled[0], why) &&
           wait_for(x, x->drain, own->filled[1], why) &&
           record(x, gather->mark->end, x->drain, why);
}

/* The end of a call of the driver: the context is not current any more. */
static bool
leave(const smp_exchange *x, bool done)
{
    smp_driver_leave(x->driver);
    return done;
}

static bool
note(smp_exchange *x, bool done)
{
    if (!done) {
        atomic_store(&x->failed, true);
    }
    return done;
}

bool
smp_exchange_fill(smp_exchange *x, const smp_device_gather *gather, size_t skip,
                  size_t bytes, char why[SMP_DRIVER_TEXT])
{
    return note(x, smp_driver_enter(x->driver, x->context, why) &&
                       leave(x, fill(x, gather, skip, bytes, why)));
}

bool
smp_exchange_drain(smp_exchange *x, const smp_device_gather *gather, size_t skip,
                   const size_t *bytes, char why[SMP_DRIVER_TEXT])
{
    bool done = smp_driver_enter(x->driver, x->context, why) &&
                leave(x, drain(x, gather, skip, bytes, why));

    x->round++;
    return note(x, done);
}

bool
smp_exchange_finish(smp_exchange *x, const smp_device_gather *gather,
                    char why[SMP_DRIVER_TEXT])
{
    return note(x, smp_driver_enter(x->driver, x->context, why) &&
                       leave(x, finish(x, gather, why)));
}

/* ---------------------------------------------------- an operation without halves */

/* The context is current, as below. */
static void
locate(smp_exchange *x, uint64_t in, size_t bytes, smp_exchange_input *own,
       char why[SMP_DRIVER_TEXT])
{
    *own = (smp_exchange_input){.state = SMP_EXPORT_OPEN};
    x->shown = NULL;
    if (bytes == 0) {
        return;
    }
    x->shown = smp_exports_find(&x->exports, in, bytes, x->drain, own->gone, why);
    if (x->shown == NULL) {
        own->state = SMP_EXPORT_CLOSED;
        return;
    }
    own->state = x->shown->state;
    own->allocation = x->shown->allocation;
    own->offset = in - own->allocation.base;
}

static bool
read_inputs(const smp_exchange *x, const smp_device_gather *gather, const size_t *bytes,
            char why[SMP_DRIVER_TEXT])
{
    if (!copy(x, gather->outs[x->self], gather->in, bytes[x->self], x->drain, why)) {
        return false;
    }
    for (int i = 1; i < x->size; i++) { /* each begins with another one */
        int           m = (x->self + i) % x->size;
        const member *other = &x->members[m];

        if (other->input != 0 &&
            (!wait_for(x, x->drain, other->ready, why) ||
             !copy(x, gather->outs[m], other->input, bytes[m], x->drain, why))) {
            return false;
        }
    }
    return record(x, x->members[x->self].taken, x->drain, why);
}

static bool
take_back(const smp_exchange *x, const smp_device_gather *gather,
          char why[SMP_DRIVER_TEXT])
{
    for (int m = 0; m < x->size; m++) {
        if (m != x->self && !wait_for(x, x->drain, x->members[m].taken, why)) {
            return false;
        }
    }
    return record(x, gather->mark->end, x->drain, why);
}

bool
smp_exchange_show(smp_exchange *x, const smp_device_gather *gather, size_t bytes,
                  smp_exchange_input *own, char why[SMP_DRIVER_TEXT])
{
    bool done = smp_driver_enter(x->driver, x->context, why);

    if (done) {
        locate(x, gather->in, bytes, own, why);
        /* The outputs may have been in use before, like the tensor. */
        done = leave(x, wait_for(x, x->drain, gather->mark->begin, why) &&
                            record(x, x->members[x->self].ready, x->drain, why));
    }
    return note(x, done);
}

void
smp_exchange_drop_gone(smp_exchange *x, int m, const smp_exchange_input *input)
{
    char why[SMP_DRIVER_TEXT];

    if (m != x->self && input->gone[0] != 0 &&
        smp_driver_enter(x->driver, x->context, why)) {
        for (int i = 0; i < SMP_GONE && input->gone[i] != 0; i++) {
            smp_imports_drop(&x->imports[m], input->gone[i]);
        }
        smp_driver_leave(x->driver);
    }
}

bool
smp_exchange_open_input(smp_exchange *x, int m, const smp_exchange_input *input,
                        char why[SMP_DRIVER_TEXT])
{
    const smp_allocation *allocation = &input->allocation;
    uint64_t              at;

    x->members[m].input = 0;
    if (m == x->self || allocation->identity == 0) {
        return true;
    }
    at = smp_imports_find(&x->imports[m], allocation->identity);
    if (at == 0 && smp_driver_enter(x->driver, x->context, why)) {
        at = smp_imports_open(&x->imports[m], allocation, why);
        smp_driver_leave(x->driver);
    }
    x->members[m].input = at == 0 ? 0 : at + input->offset;
    return at != 0;
}

void
smp_exchange_settle(smp_exchange *x, smp_export_state state)
{
    if (x->shown != NULL) {
        x->shown->state = state;
    }
}

bool
smp_exchange_read(smp_exchange *x, const smp_device_gather *gather, const size_t *bytes,
                  char why[SMP_DRIVER_TEXT])
{
    return note(x, smp_driver_enter(x->driver, x->context, why) &&
                       leave(x, read_inputs(x, gather, bytes, why)));
}

bool
smp_exchange_take_back(smp_exchange *x, const smp_device_gather *gather,
                       char why[SMP_DRIVER_TEXT])
{
    return note(x, smp_driver_enter(x->driver, x->context, why) &&
                       leave(x, take_back(x, gather, why)));
}

/* ------------------------------------------------------------------------- marks */

static bool
make_event(const smp_exchange *x, void **event, char why[SMP_DRIVER_TEXT])
{
    return smp_driver_ok(x->driver, "cuEventCreate",
                         x->driver->event_create(event, SMP_DRIVER_EVENT_UNTIMED), why);
}

/* The context is current. */
static smp_device_mark *
make_mark(smp_exchange *x, char why[SMP_DRIVER_TEXT])
{
    smp_device_mark *mark = calloc(1, sizeof(*mark));

    if (mark == NULL) {
        memcpy(why, "out of memory", sizeof("out of memory"));
        return NULL;
    }
    if (!make_event(x, &mark->begin, why)) {
        goto err_free;
    }
    if (!make_event(x, &mark->end, why)) {
        goto err_begin;
    }
    mark->every = x->marks;
    x->marks = mark;
    return mark;

err_begin:
    (void)x->driver->event_destroy(mark->begin);
err_free:
    free(mark);
    return NULL;
}

smp_device_mark *
smp_exchange_mark(smp_exchange *x, char why[SMP_DRIVER_TEXT])
{
    smp_device_mark *mark = x->spare;

    if (mark != NULL) {
        x->spare = mark->next;
        return mark;
    }
    if (smp_driver_enter(x->driver, x->context, why)) {
        mark = make_mark(x, why);
        smp_driver_leave(x->driver);
    }
    return mark;
}

void
smp_exchange_put_mark(smp_exchange *x, smp_device_mark *mark)
{
    mark->next = x->spare;
    x->spare = mark;
}

bool
smp_exchange_begin(const smp_exchange *x, const smp_device_mark *mark, void *stream,
                   char why[SMP_DRIVER_TEXT])
{
    return smp_driver_enter(x->driver, x->context, why) &&
           leave(x, record(x, mark->begin, stream, why));
}

bool
smp_exchange_join(const smp_exchange *x, const smp_device_mark *mark, void *stream,
                  char why[SMP_DRIVER_TEXT])
{
    return smp_driver_enter(x->driver, x->context, why) &&
           leave(x, wait_for(x, stream, mark->end, why));
}

bool
smp_exchange_is_over(const smp_exchange *x, const smp_device_mark *mark)
{
    char why[SMP_DRIVER_TEXT];

    return !is_child(x) && !atomic_load(&x->failed) &&
           smp_driver_enter(x->driver, x->context, why) &&
           leave(x, x->driver->event_query(mark->end) == SMP_DRIVER_OK);
}

/* ------------------------------------------------------------------------- the trial
 */

/* The memory, with the own pattern in it; the context is current. */
static bool
begin_trial(smp_exchange *x, char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = x->driver;
    trial            *t = &x->trial;
    size_t            bytes;

    t->piece = x->half < SMP_TRIAL_BYTES ? x->half : SMP_TRIAL_BYTES;
    bytes = PIECES * t->piece;
    t->outs = calloc((size_t)x->size, sizeof(uint64_t));
    t->lengths = calloc((size_t)x->size, sizeof(size_t));
    if (t->outs == NULL || t->lengths == NULL) {
        memcpy(why, "out of memory", sizeof("out of memory"));
        return false;
    }
    if (!smp_driver_ok(
            driver, "cuMemAlloc",
            driver->alloc(&t->at, smp_driver_blocks((size_t)(x->size + 1) * bytes)),
            why)) {
        t->at = 0;
        return false;
    }
    for (int m = 0; m < x->size; m++) {
        t->outs[m] = t->at + (size_t)(m + 1) * bytes;
        t->lengths[m] = t->piece;
    }
    t->mark = smp_exchange_mark(x, why);
    if (t->mark == NULL) {
        return false;
    }
    t->gather = (smp_device_gather){.mark = t->mark, .in = t->at, .outs = t->outs};
    return smp_trial_write(driver, t->at, bytes, x->members[x->self].seed, x->fill,
                           why) &&
           record(x, t->mark->begin, x->fill, why);
}

bool
smp_exchange_try_fill(smp_exchange *x, int round, char why[SMP_DRIVER_TEXT])
{
    bool done = smp_driver_enter(x->driver, x->context, why);

    if (!done) {
        return note(x, false);
    }
    if (round == 0) {
        done = note(x, begin_trial(x, why));
    }
    done =
        done && smp_exchange_fill(x, &x->trial.gather, (size_t)round * x->trial.piece,
                                  x->trial.piece, why);
    smp_driver_leave(x->driver);
    return done;
}

/* The others have recorded their first fills. */
static bool
fills_came(smp_exchange *x, char why[SMP_DRIVER_TEXT])
{
    bool came = smp_driver_enter(x->driver, x->context, why);

    if (!came) {
        return note(x, false);
    }
    for (int m = 0; m < x->size && came; m++) {
        came = m == x->self || smp_trial_came(x->driver, x->members[m].filled[0], why);
    }
    smp_driver_leave(x->driver);
    return came;
}

bool
smp_exchange_try_drain(smp_exchange *x, int round, char why[SMP_DRIVER_TEXT])
{
    return (round != 0 || fills_came(x, why)) &&
           smp_exchange_drain(x, &x->trial.gather, (size_t)round * x->trial.piece,
                              x->trial.lengths, why);
}

/* The last pieces alone; the same addresses serve all rounds before. */
bool
smp_exchange_try_show(smp_exchange *x, smp_exchange_input *own,
                      char why[SMP_DRIVER_TEXT])
{
    trial *t = &x->trial;
    size_t before = SMP_TRIAL_ROUNDS * t->piece;

    t->gather.in += before;
    for (int m = 0; m < x->size; m++) {
        t->outs[m] += before;
    }
    return smp_exchange_show(x, &t->gather, t->piece, own, why) &&
           note(x, own->state != SMP_EXPORT_CLOSED);
}

bool
smp_exchange_try_read(smp_exchange *x, char why[SMP_DRIVER_TEXT])
{
    return smp_exchange_read(x, &x->trial.gather, x->trial.lengths, why);
}

bool
smp_exchange_tried(smp_exchange *x, char why[SMP_DRIVER_TEXT])
{
    size_t           bytes = PIECES * x->trial.piece;
    size_t           before = SMP_TRIAL_ROUNDS * x->trial.piece;
    smp_trial_result result = SMP_TRIAL_RIGHT;

    smp_exchange_settle(x, SMP_EXPORT_OPEN);
    if (!smp_exchange_take_back(x, &x->trial.gather, why) ||
        !smp_driver_enter(x->driver, x->context, why)) {
        return note(x, false);
    }
    for (int m = 0; m < x->size && result == SMP_TRIAL_RIGHT; m++) {
        result = smp_trial_read(x->driver, x->trial.outs[m] - before, bytes,
                                x->members[m].seed, x->drain, why);
    }
    smp_driver_leave(x->driver);
    smp_exchange_put_mark(x, x->trial.mark);
    (void)note(x, result != SMP_TRIAL_FAILED);
    return result == SMP_TRIAL_RIGHT;
}
