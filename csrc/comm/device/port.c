/* Streams, events and the two copies; the open pools of other ranks. */
#include "comm/device/port.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/device/allocations.h"
#include "comm/device/landings.h"
#include "comm/device/pool.h"
#include "comm/device/trial.h"
#include "comm/memory/block.h"
#include "comm/memory/device_card.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/log.h"
#include "device/streams.h"

/* The most time of destroy's wait for copies. */
#define FINISH_NS (1 * SMP_NS_PER_S)

/* IDLE -> OPEN -> SHUT, or IDLE -> SHUT. */
typedef enum { PORT_IDLE, PORT_OPEN, PORT_SHUT } port_state;

/* Another rank of this host. */
typedef struct {
    smp_segment *segment; /* owned: one reference; NULL: not met */
    pid_t        pid;
    uint64_t     base; /* its pool, as this process sees it; 0: not open */
    void        *events[SMP_DEVICE_SPANS]; /* owned; its spans'; NULL: not opened yet */
    smp_landing_peer landings;
} reader_of;

/* A tensor under way: a copy out of another's pool, or a wait for a landing. */
typedef struct reading {
    struct reading *next;  /* owned; in the order of their begin */
    void           *event; /* owned */
    smp_block      *block; /* owned; NULL: this one is free to use */
} reading;

struct smp_device_port {
    smp_device_peers ask; /* set at create, like all up to peers */
    smp_segment     *own; /* borrowed */
    int              rank;
    int              size;
    size_t           bytes;
    uint32_t         generation; /* smp_fork_generation() of its own process */
    reader_of      **peers;      /* owned: [size]; NULL: not on this host, or not met */

    const smp_driver *driver; /* set when the port opens, like all up to fence */
    int               number; /* of the device */
    int               device; /* as the driver calls it */
    void             *context;
    void             *stream;  /* owned */
    void             *fence;   /* owned: an event, for the work of the user's stream */
    uint64_t          arrived; /* owned: where a pattern arrives */
    void *trial; /* owned: the stream of a failed trial, perhaps still with the device's
                    work, and its event */
    void *written;

    reading *first; /* owned */
    reading *last;
    reading *spare; /* owned */

    smp_landings *landings;   /* owned; NULL: not open yet, or no memory */
    bool          step_ended; /* and nothing has been sent since */

    _Atomic(smp_device_pool *) pool;  /* owned */
    _Atomic int                state; /* port_state; `why` is written before SHUT */
    char                       why[SMP_DRIVER_TEXT];
    _Atomic bool               distrusted; /* by groups */
    _Atomic bool     useless; /* no rank can open the pool: it has no memory */
    _Atomic uint64_t tensors;
    _Atomic uint64_t sent;
    _Atomic uint64_t landed;
    _Atomic uint64_t fallbacks;
};

static port_state
state_of(const smp_device_port *port)
{
    return (port_state)atomic_load(&port->state);
}

/* Nothing is sent by it any more, and no rank sends to it; `why` is written. */
static void
shut(smp_device_port *port)
{
    for (int r = 0; r < port->size; r++) {
        uint32_t open = SMP_READER_OPEN;

        atomic_compare_exchange_strong(&port->own->device->pools[r], &open,
                                       SMP_READER_OPENING);
    }
    atomic_store(&port->state, PORT_SHUT);
}

/* The same after a failed trial of rank `name`, this one or another; others follow. */
static void
give_up(smp_device_port *port, int name)
{
    atomic_store(&port->own->device->distrusts, (uint32_t)name + 1);
    shut(port);
}

/* -------------------------------------------------------------------- opening */

/* The driver, the context, the stream. */
static bool
open_device(smp_device_port *port, int number)
{
    const smp_driver *driver = smp_driver_load(port->why);
    char             *why = port->why;

    if (driver == NULL) {
        return false;
    }
    port->driver = driver;
    if (!smp_driver_ok(driver, "cuDeviceGet", driver->device_get(&port->device, number),
                       why) ||
        !smp_driver_ok(driver, "cuDevicePrimaryCtxRetain",
                       driver->context_retain(&port->context, port->device), why)) {
        return false;
    }
    if (!smp_driver_enter(port->driver, port->context, why)) {
        goto err_release;
    }
    if (!smp_stream_create(driver, port->context, &port->stream, why)) {
        goto err_leave;
    }
    if (!smp_driver_ok(driver, "cuEventCreate",
                       driver->event_create(&port->fence, SMP_DRIVER_EVENT_UNTIMED),
                       why)) {
        goto err_stream;
    }
    if (!smp_driver_ok(driver, "cuMemAlloc",
                       driver->alloc(&port->arrived, SMP_TRIAL_BYTES), why)) {
        goto err_fence;
    }
    smp_driver_leave(port->driver);
    port->number = number;
    return true;

err_fence:
    (void)driver->event_destroy(port->fence);
err_stream:
    smp_stream_destroy(driver, port->stream);
    port->stream = NULL;
err_leave:
    smp_driver_leave(port->driver);
err_release:
    (void)driver->context_release(port->device);
    return false;
}

/* Whether the port is open on device `number`; opens it, the first time. */
static bool
is_open(smp_device_port *port, int number)
{
    smp_device_pool *pool;

    if (state_of(port) == PORT_IDLE && port->bytes != 0) {
        if (!open_device(port, number)) {
            atomic_store(&port->state, PORT_SHUT);
            return false;
        }
        atomic_store(&port->state, PORT_OPEN);
        pool = smp_device_pool_create(port->driver, port->device, port->stream,
                                      port->bytes, port->rank, port->own, port->why);
        if (pool == NULL) {
            shut(port);
            return false;
        }
        atomic_store(&port->pool, pool);
        port->landings = smp_landings_create(port->driver, port->own, port->bytes);
    }
    return state_of(port) == PORT_OPEN && port->number == number;
}

/* `rank` as a reader of this rank's pool and the other way round; NULL: it is on
 * another host, or there is no memory. */
static reader_of *
peer_of(smp_device_port *port, int rank)
{
    smp_neighbour its;
    reader_of    *peer;

    if (port->peers[rank] == NULL && rank != port->rank &&
        port->ask.neighbour(port->ask.comm, rank, &its)) {
        peer = calloc(1, sizeof(*peer));
        if (peer == NULL) {
            return NULL;
        }
        smp_segment_ref(its.segment);
        peer->segment = its.segment;
        peer->pid = its.pid;
        port->peers[rank] = peer;
    }
    return port->peers[rank];
}

/* The event of the slot of an open pool. */
static bool
span_event(const smp_device_port *port, reader_of *peer, uint32_t slot,
           char why[SMP_DRIVER_TEXT])
{
    smp_driver_handle handle;

    if (peer->events[slot] != NULL) {
        return true;
    }
    handle = peer->segment->device->events[slot];
    return smp_driver_ok(port->driver, "cuIpcOpenEventHandle",
                         port->driver->event_open(&peer->events[slot], handle), why);
}

/* Writes a pattern behind a pool as tensors go into landings, and reads it back:
 * reading has been tried. */
static smp_trial_result
try_writing(const smp_device_port *port, const reader_of *peer, void *stream,
            char why[SMP_DRIVER_TEXT])
{
    const smp_driver      *driver = port->driver;
    const smp_device_card *its = peer->segment->device;
    const size_t           bytes = SMP_LANDINGS_TRIAL_BYTES;
    uint64_t               pattern = peer->base + its->bytes;
    uint64_t to = pattern + SMP_TRIAL_BYTES + (uint64_t)port->rank * bytes;
    uint64_t seed = its->seed ^ (uint64_t)smp_clock_ns();

    const uint64_t copies[][2] = {
        {to, port->arrived}, {port->arrived, pattern}, {port->arrived, to}};

    if (!smp_trial_write(driver, port->arrived, bytes, seed, stream, why)) {
        return SMP_TRIAL_FAILED;
    }
    for (int i = 0; i < 3; i++) {
        if (!smp_driver_ok(driver, "cuMemcpyDtoDAsync",
                           driver->copy(copies[i][0], copies[i][1], bytes, stream),
                           why)) {
            return SMP_TRIAL_FAILED;
        }
    }
    return smp_trial_read(driver, port->arrived, bytes, seed, stream, why);
}

/* Copies the pattern out of a pool as tensors will be, on a stream of its own: the
 * port's may have to wait for tensors.  Takes `written`, the pattern's event; the
 * context is current. */
static smp_trial_result
try_pool(smp_device_port *port, reader_of *peer, void *written,
         char why[SMP_DRIVER_TEXT])
{
    const smp_driver      *driver = port->driver;
    const smp_device_card *its = peer->segment->device;
    smp_trial_result       result = SMP_TRIAL_FAILED;
    void                  *stream;

    peer->landings.imports =
        (smp_imports){.driver = driver, .context = port->context, .owner = its->owner};
    if (!smp_trial_came(driver, written, why) ||
        !smp_stream_create(driver, port->context, &stream, why)) {
        (void)driver->event_destroy(written);
        return SMP_TRIAL_FAILED;
    }
    if (smp_driver_ok(driver, "cuStreamWaitEvent",
                      driver->stream_wait(stream, written, 0), why) &&
        smp_driver_ok(driver, "cuMemcpyDtoDAsync",
                      driver->copy(port->arrived, peer->base + its->bytes,
                                   SMP_TRIAL_BYTES, stream),
                      why)) {
        result = smp_trial_read(driver, port->arrived, SMP_TRIAL_BYTES, its->seed,
                                stream, why);
    }
    if (result == SMP_TRIAL_RIGHT) {
        smp_trial_result writing = try_writing(port, peer, stream, why);

        peer->landings.works = writing == SMP_TRIAL_RIGHT;
        result = writing == SMP_TRIAL_FAILED ? writing : result;
    }
    if (result == SMP_TRIAL_FAILED) {
        port->trial = stream;
        port->written = written;
    } else {
        smp_stream_destroy(driver, stream);
        (void)driver->event_destroy(written);
    }
    return result;
}

/* The trial of the pool of `rank` has failed. */
static void
distrust(smp_device_port *port, int rank, const char why[SMP_DRIVER_TEXT])
{
    int its = port->ask.name(port->ask.comm, rank);
    int own = port->ask.name(port->ask.comm, port->rank);

    snprintf(port->why, sizeof(port->why), "trial with rank %d: %.*s", its,
             SMP_DRIVER_TEXT - 40, why);
    give_up(port, own);
    smp_warn("tensors between the GPUs of this host go through host memory: the way "
             "from the device pool of rank %d to rank %d was tried and cannot be "
             "relied on: %s",
             its, own, why);
}

/* Opens the pool of `rank` and tries it.  Returns its state for the own card. */
static uint32_t
open_and_try(smp_device_port *port, int rank, reader_of *peer)
{
    const smp_driver *driver = port->driver;
    smp_device_card  *its = peer->segment->device;
    void             *written;
    smp_trial_result  result;
    char              why[SMP_DRIVER_TEXT];

    smp_imports_make_way(
        its->owner, 0, its->base,
        smp_driver_blocks(smp_device_pool_end(its->bytes, port->size)));
    /* No way between the two devices or processes: not a failure. */
    if (!smp_driver_ok(
            driver, "cuIpcOpenMemHandle",
            driver->memory_open(&peer->base, its->memory, SMP_DRIVER_OPEN_WITH_PEERS),
            why)) {
        peer->base = 0;
        return SMP_READER_REFUSED;
    }
    if (!smp_driver_ok(driver, "cuIpcOpenEventHandle",
                       driver->event_open(&written, its->tried), why)) {
        (void)driver->memory_close(peer->base);
        peer->base = 0;
        return SMP_READER_REFUSED;
    }
    result = try_pool(port, peer, written, why);
    if (result != SMP_TRIAL_RIGHT) {
        distrust(port, rank, why);
        return SMP_READER_OPENING; /* it has the memory, and does not use it */
    }
    return SMP_READER_OPEN;
}

/* Opens the pool of `rank` if it is shown and this was not tried yet. */
static void
open_pool(smp_device_port *port, int rank, reader_of *peer)
{
    _Atomic uint32_t *mine = &port->own->device->pools[rank];
    smp_device_card  *its = peer->segment->device;

    if (atomic_load(mine) != SMP_READER_NONE ||
        atomic_load(&its->shown) != SMP_POOL_SHOWN) {
        return;
    }
    /* It frees the memory when it sees no reader, after it has withdrawn it. */
    atomic_store(mine, SMP_READER_OPENING);
    if (atomic_load(&its->shown) != SMP_POOL_SHOWN) {
        atomic_store(mine, SMP_READER_CLOSED);
        return;
    }
    if (!smp_driver_enter(port->driver, port->context, port->why)) {
        atomic_store(mine, SMP_READER_REFUSED);
        shut(port);
        return;
    }
    atomic_store(mine, open_and_try(port, rank, peer));
    smp_driver_leave(port->driver);
}

void
smp_device_meet(smp_device_port *port, int rank, int device)
{
    reader_of *peer = peer_of(port, rank);
    uint32_t   distrusts;

    if (peer == NULL || !is_open(port, device)) {
        return;
    }
    distrusts = atomic_load(&peer->segment->device->distrusts);
    if (distrusts != 0) {
        int failed = (int)(distrusts - 1);

        snprintf(port->why, sizeof(port->why), "a trial failed on rank %d", failed);
        give_up(port, failed);
    } else {
        open_pool(port, rank, peer);
    }
}

void
smp_device_distrust(smp_device_port *port)
{
    atomic_store(&port->distrusted, true);
}

bool
smp_device_is_distrusted(const smp_device_port *port)
{
    return atomic_load(&port->distrusted);
}

int
smp_device_number(const smp_device_port *port)
{
    return port->stream != NULL ? port->number : -1;
}

/* -------------------------------------------------------------------- copying */

/* A copy between the device's memory and a pool, on the own stream: after the work
 * given to `user` so far and after `before` (NULL: nothing else), and before its next
 * work.  Records `after` behind it.  False with `why`; *begun: the copy may be running
 * all the same.  The context is current. */
static bool
copy_between(const smp_device_port *port, uint64_t to, uint64_t from, size_t bytes,
             void *user, void *before, void *after, bool *begun,
             char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = port->driver;

    *begun = false;
    if (!smp_driver_ok(driver, "cuEventRecord", driver->event_record(port->fence, user),
                       why) ||
        !smp_driver_ok(driver, "cuStreamWaitEvent",
                       driver->stream_wait(port->stream, port->fence, 0), why) ||
        (before != NULL &&
         !smp_driver_ok(driver, "cuStreamWaitEvent",
                        driver->stream_wait(port->stream, before, 0), why))) {
        return false;
    }
    *begun = true;
    return smp_driver_ok(driver, "cuMemcpyDtoDAsync",
                         driver->copy(to, from, bytes, port->stream), why) &&
           smp_driver_ok(driver, "cuEventRecord",
                         driver->event_record(after, port->stream), why) &&
           smp_driver_ok(driver, "cuStreamWaitEvent",
                         driver->stream_wait(user, after, 0), why);
}

/* Waits until a stream has nothing to do; false: it has still. */
static bool
comes_to_rest(const smp_device_port *port, void *stream)
{
    return smp_driver_rest(port->driver, stream, smp_clock_ns() + FINISH_NS) ==
           SMP_DRIVER_OK;
}

/* Room in the pool; the pools of dead ranks' spans are looked through when it is full.
 */
static bool
take_span(smp_device_port *port, int dest, size_t bytes, smp_device_span *span)
{
    smp_device_pool *pool = atomic_load(&port->pool);
    bool             fault;

    if (smp_device_pool_take(pool, bytes, dest, span, &fault, port->why)) {
        return true;
    }
    for (int r = 0; r < port->size && !fault; r++) {
        if (port->peers[r] != NULL && port->ask.gone(port->ask.comm, r) &&
            !port->ask.left(port->ask.comm, r)) {
            smp_device_pool_reclaim(pool, r);
        }
    }
    if (!fault && smp_device_pool_take(pool, bytes, dest, span, &fault, port->why)) {
        return true;
    }
    if (fault) {
        shut(port);
    }
    return false;
}

/* The copy into the pool; the port is open on the right device. */
static smp_block *
copy_out(smp_device_port *port, int dest, uint64_t data, size_t bytes, void *stream)
{
    smp_block      *block = NULL;
    smp_device_span span;
    bool            begun;

    if (!smp_driver_enter(port->driver, port->context, port->why)) {
        shut(port);
        return NULL;
    }
    if (take_span(port, dest, bytes, &span)) {
        if (!copy_between(port, span.at, data, bytes, stream, NULL, span.event, &begun,
                          port->why)) {
            if (!begun ||
                comes_to_rest(port,
                              port->stream)) { /* else the span is never used again */
                smp_device_pool_give_back(atomic_load(&port->pool), span.slot);
            }
            shut(port);
        } else if (smp_block_on_device(port->own, span.slot, span.offset, bytes,
                                       &block) != SMP_OK) {
            block = NULL;
            /* The next copy there comes after this one, on the same stream. */
            smp_device_pool_give_back(atomic_load(&port->pool), span.slot);
        }
    }
    smp_driver_leave(port->driver);
    return block;
}

/* The copy into a landing of the receiver, if there is one; as copy_out. */
static smp_block *
copy_there(smp_device_port *port, reader_of *peer, uint64_t data, size_t bytes,
           void *stream)
{
    smp_device_card *its = peer->segment->device;
    smp_block       *block = NULL;
    uint32_t         number = 0;
    uint64_t         at;
    bool             begun = false;

    if (!smp_driver_enter(port->driver, port->context, port->why)) {
        shut(port);
        return NULL;
    }
    if (!smp_landing_take(&peer->landings, port->driver, its, port->rank, bytes,
                          &number, &at, port->why)) {
        shut(port);
    } else if (at != 0) {
        if (!copy_between(port, at, data, bytes, stream, NULL,
                          peer->landings.written[number], &begun, port->why)) {
            if (!begun) {
                atomic_store(&its->landings[number].state, SMP_LANDING_OPEN);
            } /* else the landing is never used again */
            shut(port);
        } else if (smp_block_landing(peer->segment, number, bytes, &block) != SMP_OK) {
            block = NULL;
            atomic_store(&its->landings[number].state, SMP_LANDING_LEFT);
        }
    }
    smp_driver_leave(port->driver);
    return block;
}

/* A step has begun, and the device may be at rest, as a script's read of a loss leaves
 * it: closes what the last step did not use.  Closing waits for the device, which may
 * wait for a dead rank: so not unless it rests. */
static void
close_unused(smp_device_port *port)
{
    char why[SMP_DRIVER_TEXT];

    port->step_ended = false;
    if (!smp_streams_rest(0) || !smp_driver_enter(port->driver, port->context, why)) {
        return;
    }
    for (int r = 0; r < port->size; r++) {
        if (port->peers[r] != NULL) {
            smp_landing_close_unused(&port->peers[r]->landings);
        }
    }
    smp_driver_leave(port->driver);
}

/* Whether every other rank of this host has tried to open the own pool, in vain. */
static bool
all_refuse(smp_device_port *port)
{
    for (int r = 0; r < port->size; r++) {
        const reader_of *peer = peer_of(port, r);

        if (peer != NULL && atomic_load(&peer->segment->device->pools[port->rank]) !=
                                SMP_READER_REFUSED) {
            return false;
        }
    }
    return true;
}

/* Whether a CUDA graph captures the stream; *known: the driver has said so. */
static bool
is_captured(const smp_device_port *port, void *stream, bool *known)
{
    char why[SMP_DRIVER_TEXT];
    int  status = 0;

    *known = smp_driver_enter(port->driver, port->context, why);
    if (*known) {
        *known = port->driver->stream_capturing(stream, &status) == SMP_DRIVER_OK;
        smp_driver_leave(port->driver);
    }
    return status != 0;
}

smp_block *
smp_device_put(smp_device_port *port, int dest, int device, uint64_t data, size_t bytes,
               void *stream)
{
    smp_block *block = NULL;
    reader_of *peer;
    bool       known;

    if (port->bytes == 0 || port->generation != smp_fork_generation()) {
        return NULL;
    }
    peer = peer_of(port, dest);
    if (peer == NULL || port->ask.gone(port->ask.comm, dest)) {
        return NULL;
    }
    smp_device_meet(port, dest, device);
    smp_device_sweep(port);
    if (port->step_ended) {
        close_unused(port);
    }
    if (is_open(port, device) && !is_captured(port, stream, &known) && known) {
        switch (atomic_load(&peer->segment->device->pools[port->rank])) {
        case SMP_READER_OPEN:
            if (peer->landings.works) {
                block = copy_there(port, peer, data, bytes, stream);
            }
            if (block != NULL) {
                atomic_fetch_add(&port->landed, 1);
            } else if (state_of(port) == PORT_OPEN) {
                block = copy_out(port, dest, data, bytes, stream);
            }
            break;
        case SMP_READER_REFUSED:
            if (all_refuse(port)) {
                smp_device_pool_withdraw(atomic_load(&port->pool));
                atomic_store(&port->useless, true);
            }
            break;
        default:
            break;
        }
    }
    if (block == NULL) {
        atomic_fetch_add(&port->fallbacks, 1);
    } else {
        atomic_fetch_add(&port->tensors, 1);
        atomic_fetch_add(&port->sent, bytes);
    }
    return block;
}

/* -------------------------------------------------------------------- reading */

/* One with an event and without a block; NULL with `why`. */
static reading *
spare_reading(smp_device_port *port, char why[SMP_DRIVER_TEXT])
{
    reading *r = port->spare;

    if (r != NULL) {
        port->spare = r->next;
        return r;
    }
    r = calloc(1, sizeof(*r));
    if (r == NULL) {
        memcpy(why, "out of memory", sizeof("out of memory"));
        return NULL;
    }
    if (!smp_driver_ok(port->driver, "cuEventCreate",
                       port->driver->event_create(&r->event, SMP_DRIVER_EVENT_UNTIMED),
                       why)) {
        free(r);
        return NULL;
    }
    return r;
}

static void
put_spare(smp_device_port *port, reading *r)
{
    r->next = port->spare;
    port->spare = r;
}

static void
add_reading(smp_device_port *port, reading *r, smp_block *block)
{
    r->block = block;
    r->next = NULL;
    if (port->first == NULL) {
        port->first = r;
    } else {
        port->last->next = r;
    }
    port->last = r;
}

/* Its tensor has come. */
static void
end_reading(smp_device_port *port, reading *r)
{
    if (r->block->lands) {
        smp_landings_done(port->landings, r->block->slot);
        smp_block_forget(r->block);
    } else {
        smp_block_release(r->block);
    }
    r->block = NULL;
}

/* The copy out of the pool; the context is current.  *running: the block must be kept.
 */
static bool
copy_in(smp_device_port *port, reader_of *peer, smp_block *block, uint64_t to,
        void *stream, bool *running, char why[SMP_DRIVER_TEXT])
{
    reading *r;
    bool     begun;

    *running = false;
    if (!span_event(port, peer, block->slot, why)) {
        return false;
    }
    r = spare_reading(port, why);
    if (r == NULL) {
        return false;
    }
    if (!copy_between(port, to, peer->base + block->offset, block->bytes, stream,
                      peer->events[block->slot], r->event, &begun, why)) {
        *running = begun && !comes_to_rest(port, port->stream);
        put_spare(port, r);
        return false;
    }
    *running = true;
    add_reading(port, r, block);
    return true;
}

/* The same for a landing of this rank: waits for its writing, and copies it if `to` is
 * not in its memory.  Else the memory is the caller's. */
static bool
copy_from_landing(smp_device_port *port, reader_of *peer, smp_block *block, uint64_t to,
                  void *stream, bool *running, char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = port->driver;
    uint64_t          at;
    void             *of;
    void             *came;
    reading          *r;
    bool              begun = false;
    bool              done;

    *running = false;
    if (smp_landings_see(port->landings, block->slot, &at, &of) == NULL) {
        memcpy(why, "there is no such landing", sizeof("there is no such landing"));
        return false;
    }
    came = smp_landings_came(port->landings, block->slot, &peer->landings, why);
    r = came == NULL ? NULL : spare_reading(port, why);
    if (r == NULL) {
        return false;
    }
    if (to == at) {
        done = smp_driver_ok(driver, "cuStreamWaitEvent",
                             driver->stream_wait(stream, came, 0), why) &&
               smp_driver_ok(driver, "cuEventRecord",
                             driver->event_record(r->event, stream), why);
    } else {
        done = copy_between(port, to, at, block->bytes, stream, came, r->event, &begun,
                            why);
    }
    if (!done) {
        *running = begun && !comes_to_rest(port, port->stream);
        put_spare(port, r);
        return false;
    }
    if (to == at) {
        smp_landings_give(port->landings, block->slot);
    }
    *running = true;
    add_reading(port, r, block);
    return true;
}

smp_status
smp_device_get(smp_device_port *port, int source, smp_block *block, uint64_t to,
               void *stream, char why[SMP_DRIVER_TEXT])
{
    reader_of *peer = port->peers[source];
    bool       running = false;
    bool       done = false;
    bool       captured;
    bool       known;

    captured = peer != NULL && peer->base != 0 && is_captured(port, stream, &known);
    if (captured) {
        memcpy(why, "a CUDA graph is being captured",
               sizeof("a CUDA graph is being captured"));
    } else if (peer == NULL || peer->base == 0 || block->data != NULL ||
               block->segment != (block->lands ? port->own : peer->segment)) {
        memcpy(why, "its pool is not open here", sizeof("its pool is not open here"));
    } else if (smp_driver_enter(port->driver, port->context, why)) {
        done = (block->lands ? copy_from_landing : copy_in)(port, peer, block, to,
                                                            stream, &running, why);
        smp_driver_leave(port->driver);
    }
    if (!running) {
        smp_block_release(block);
    } else if (!done) {
        smp_block_forget(block); /* the device may still read it */
    }
    if (!done && !captured && state_of(port) == PORT_OPEN) {
        memcpy(port->why, why, SMP_DRIVER_TEXT);
        shut(port);
    }
    smp_device_sweep(port);
    return done ? SMP_OK : SMP_ERR_SYSTEM;
}

void
smp_device_sweep(smp_device_port *port)
{
    reading *r;
    char     why[SMP_DRIVER_TEXT];

    if (port->first == NULL || !smp_driver_enter(port->driver, port->context, why)) {
        return;
    }
    while ((r = port->first) != NULL &&
           port->driver->event_query(r->event) == SMP_DRIVER_OK) {
        port->first = r->next;
        end_reading(port, r);
        put_spare(port, r);
    }
    smp_driver_leave(port->driver);
}

/* ---------------------------------------------------------------------- landings */

void *
smp_device_landing(const smp_device_port *port, const smp_block *block, uint64_t *at,
                   void **stream)
{
    return block->lands && block->segment == port->own && port->landings != NULL
               ? smp_landings_see(port->landings, block->slot, at, stream)
               : NULL;
}

bool
smp_device_wants_landing(smp_device_port *port, int source, size_t bytes)
{
    const reader_of *peer = port->peers[source];

    return peer != NULL && port->landings != NULL && state_of(port) == PORT_OPEN &&
           smp_landings_want(port->landings, source, &peer->landings, bytes);
}

bool
smp_device_offer_landing(smp_device_port *port, int source, uint64_t at, size_t bytes,
                         void *stream, void *memory, void (*let_go)(void *memory))
{
    char why[SMP_DRIVER_TEXT];
    bool offered = false;

    if (smp_driver_enter(port->driver, port->context, why)) {
        offered = smp_landings_offer(port->landings, source, at, bytes, stream, memory,
                                     let_go);
        smp_driver_leave(port->driver);
    }
    return offered;
}

static smp_landing_peer *
landing_peer(void *of, int rank)
{
    const smp_device_port *port = of;

    return port->peers[rank] == NULL ? NULL : &port->peers[rank]->landings;
}

void
smp_device_stop_landings(smp_device_port *port)
{
    if (port->landings != NULL) {
        smp_landings_stop(port->landings);
    }
}

void
smp_device_end_step(smp_device_port *port)
{
    char why[SMP_DRIVER_TEXT];

    smp_device_sweep(port);
    if (port->landings == NULL || state_of(port) != PORT_OPEN ||
        !smp_driver_enter(port->driver, port->context, why)) {
        return;
    }
    smp_landings_end_step(port->landings, landing_peer, port);
    smp_driver_leave(port->driver);
    port->step_ended = true;
}

/* -------------------------------------------------------- setup, end, counters */

smp_device_port *
smp_device_port_create(const smp_device_peers *peers, smp_segment *own, int rank,
                       int size, size_t bytes)
{
    smp_device_port *port = calloc(1, sizeof(*port));

    if (port == NULL) {
        return NULL;
    }
    port->peers = calloc((size_t)size, sizeof(reader_of *));
    if (port->peers == NULL) {
        free(port);
        return NULL;
    }
    port->ask = *peers;
    port->own = own;
    port->rank = rank;
    port->size = size;
    port->bytes = bytes;
    port->generation = smp_fork_generation();
    return port;
}

/* Closes the pools of the others; the context is current. */
static void
close_pools(smp_device_port *port)
{
    for (int r = 0; r < port->size; r++) {
        reader_of *peer = port->peers[r];

        if (peer == NULL || peer->base == 0) {
            continue;
        }
        smp_landing_peer_end(&peer->landings, port->driver, false);
        for (uint32_t i = 0; i < SMP_DEVICE_SPANS; i++) {
            if (peer->events[i] != NULL) {
                (void)port->driver->event_destroy(peer->events[i]);
            }
        }
        (void)port->driver->memory_close(peer->base);
        atomic_store(&port->own->device->pools[r], SMP_READER_CLOSED);
    }
}

static void
free_readings(smp_device_port *port, reading *r, bool destroy)
{
    while (r != NULL) {
        reading *next = r->next;

        if (destroy) {
            (void)port->driver->event_destroy(r->event);
        }
        if (r->block != NULL && destroy) {
            end_reading(port, r);
        } else if (r->block != NULL) {
            smp_block_forget(r->block);
        }
        free(r);
        r = next;
    }
}

/* The own pool, with its possible readers.  `leave`: the device's further work is
 * unknown. */
static void
retire_pool(smp_device_port *port, bool leave)
{
    smp_device_pool   *pool = atomic_load(&port->pool);
    smp_device_reader *readers;

    if (pool == NULL) {
        return;
    }
    readers = calloc((size_t)port->size, sizeof(*readers));
    for (int r = 0; r < port->size && readers != NULL; r++) {
        if (port->peers[r] != NULL) {
            readers[r] =
                (smp_device_reader){port->peers[r]->segment, port->peers[r]->pid};
            smp_segment_ref(readers[r].segment);
        }
    }
    smp_device_pool_retire(pool, readers, readers == NULL ? 0 : port->size,
                           leave || readers == NULL);
}

void
smp_device_port_destroy(smp_device_port *port)
{
    char why[SMP_DRIVER_TEXT];
    bool entered;
    bool quiet;

    if (port == NULL) {
        return;
    }
    entered =
        port->stream != NULL && smp_driver_enter(port->driver, port->context, why);
    quiet = entered && smp_streams_rest(smp_clock_ns() + FINISH_NS);
    free_readings(port, port->first, quiet);
    free_readings(port, port->spare, quiet);
    smp_landings_destroy(port->landings, !quiet);
    for (int r = 0; r < port->size && !quiet; r++) {
        if (port->peers[r] != NULL) {
            smp_landing_peer_end(&port->peers[r]->landings, port->driver, true);
        }
    }
    if (quiet) {
        close_pools(port);
        (void)port->driver->event_destroy(port->fence);
        smp_stream_destroy(port->driver, port->stream);
        (void)port->driver->free(port->arrived);
        if (port->trial != NULL) {
            (void)port->driver->event_destroy(port->written);
            smp_stream_destroy(port->driver, port->trial);
        }
    }
    if (entered) {
        smp_driver_leave(port->driver);
    }
    if (quiet) {
        (void)port->driver->context_release(port->device);
    }
    retire_pool(port, !quiet);
    for (int r = 0; r < port->size; r++) {
        if (port->peers[r] != NULL) {
            smp_segment_unref(port->peers[r]->segment);
            free(port->peers[r]);
        }
    }
    free(port->peers);
    free(port);
}

void
smp_device_measure(smp_device_port *port, smp_device_use *use)
{
    smp_device_pool *pool = atomic_load(&port->pool);
    smp_arena_use    memory = {0};

    if (pool != NULL) {
        smp_device_pool_measure(pool, &memory);
    }
    if (atomic_load(&port->useless)) {
        memory.size = 0;
    }
    *use = (smp_device_use){
        .tensors = atomic_load(&port->tensors),
        .bytes = atomic_load(&port->sent),
        .landed = atomic_load(&port->landed),
        .fallbacks = atomic_load(&port->fallbacks),
        .in_use = memory.in_use,
        .high = memory.high,
        .size = memory.size,
        .why = state_of(port) == PORT_SHUT   ? port->why
               : atomic_load(&port->useless) ? "no rank of this host can open it"
                                             : "",
    };
}
