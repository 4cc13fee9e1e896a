/* Tensors on their way: the copies of two ranks, with their streams and events. */
#include "comm/device/port.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/device/port_state.h"
#include "common/clock.h"
#include "common/fork.h"
#include "device/streams.h"

/* The most time of destroy's wait for copies. */
#define FINISH_NS (1 * SMP_NS_PER_S)

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
        smp_port_shut(port);
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
        smp_port_shut(port);
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
            smp_port_shut(port);
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
copy_there(smp_device_port *port, smp_port_peer *peer, uint64_t data, size_t bytes,
           void *stream)
{
    smp_device_card *its = peer->segment->device;
    smp_block       *block = NULL;
    uint32_t         number = 0;
    uint64_t         at;
    bool             begun = false;

    if (!smp_driver_enter(port->driver, port->context, port->why)) {
        smp_port_shut(port);
        return NULL;
    }
    at = smp_landing_take(&peer->landings, port->driver, its, port->rank, bytes,
                          &number);
    if (at != 0 && !copy_between(port, at, data, bytes, stream, NULL,
                                 peer->landings.written[number], &begun, port->why)) {
        if (!begun || comes_to_rest(port, port->stream)) {
            atomic_store(&its->landings[number].state, SMP_LANDING_OPEN);
        } /* else the landing is never used again */
        smp_port_shut(port);
    } else if (at != 0 &&
               smp_block_landing(peer->segment, number, bytes, &block) != SMP_OK) {
        block = NULL;
        atomic_store(&its->landings[number].state, SMP_LANDING_LEFT);
    }
    smp_driver_leave(port->driver);
    return block;
}

/* Whether every other rank of this host has tried to open the own pool, in vain. */
static bool
all_refuse(smp_device_port *port)
{
    for (int r = 0; r < port->size; r++) {
        const smp_port_peer *peer = smp_port_find_peer(port, r);

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
    smp_block     *block = NULL;
    smp_port_peer *peer;
    bool           known;

    if (port->bytes == 0 || port->generation != smp_fork_generation()) {
        return NULL;
    }
    peer = smp_port_find_peer(port, dest);
    if (peer == NULL || port->ask.gone(port->ask.comm, dest)) {
        return NULL;
    }
    smp_device_meet(port, dest, device);
    smp_device_sweep(port);
    if (smp_port_is_open(port, device) && !is_captured(port, stream, &known) && known) {
        switch (atomic_load(&peer->segment->device->pools[port->rank])) {
        case SMP_READER_OPEN:
            block = copy_there(port, peer, data, bytes, stream);
            if (block != NULL) {
                atomic_fetch_add(&port->landed, 1);
            } else if (smp_port_state_of(port) == SMP_PORT_OPEN) {
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

/* The event of the slot of an open pool. */
static bool
span_event(const smp_device_port *port, smp_port_peer *peer, uint32_t slot,
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
copy_in(smp_device_port *port, smp_port_peer *peer, smp_block *block, uint64_t to,
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
copy_from_landing(smp_device_port *port, smp_port_peer *peer, smp_block *block,
                  uint64_t to, void *stream, bool *running, char why[SMP_DRIVER_TEXT])
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
    if (to == at) { /* by the own stream: the user's waits for other ranks through it */
        done = smp_driver_ok(driver, "cuStreamWaitEvent",
                             driver->stream_wait(port->stream, came, 0), why) &&
               smp_driver_ok(driver, "cuEventRecord",
                             driver->event_record(r->event, port->stream), why) &&
               smp_driver_ok(driver, "cuStreamWaitEvent",
                             driver->stream_wait(stream, r->event, 0), why);
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
    smp_port_peer *peer = port->peers[source];
    bool           running = false;
    bool           done = false;
    bool           captured;
    bool           known;

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
    if (!done && !captured && smp_port_state_of(port) == SMP_PORT_OPEN) {
        memcpy(port->why, why, SMP_DRIVER_TEXT);
        smp_port_shut(port);
    }
    smp_device_sweep(port);
    return done ? SMP_OK : SMP_ERR_SYSTEM;
}

void
smp_device_sweep(smp_device_port *port)
{
    bool     offers = port->landings != NULL && smp_landings_pending(port->landings);
    reading *r;
    char     why[SMP_DRIVER_TEXT];

    if ((port->first == NULL && !offers) || port->generation != smp_fork_generation() ||
        !smp_driver_enter(port->driver, port->context, why)) {
        return;
    }
    while ((r = port->first) != NULL &&
           port->driver->event_query(r->event) == SMP_DRIVER_OK) {
        port->first = r->next;
        end_reading(port, r);
        put_spare(port, r);
    }
    if (offers) {
        smp_landings_show(port->landings);
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
    const smp_port_peer *peer = port->peers[source];

    return peer != NULL && port->landings != NULL &&
           smp_port_state_of(port) == SMP_PORT_OPEN &&
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

/* NULL for a dead one, too: its events may never come. */
static smp_landing_peer *
landing_peer(void *of, int rank)
{
    const smp_device_port *port = of;
    bool                   dead =
        port->ask.gone(port->ask.comm, rank) && !port->ask.left(port->ask.comm, rank);

    return port->peers[rank] == NULL || dead ? NULL : &port->peers[rank]->landings;
}

void
smp_device_pause_landings(smp_device_port *port)
{
    if (port->landings != NULL) {
        smp_landings_pause(port->landings);
    }
}

void
smp_device_begin_step(smp_device_port *port)
{
    char why[SMP_DRIVER_TEXT];

    smp_device_sweep(port);
    /* Closing waits for the device, which may wait for a dead rank: so not unless it
     * rests, as at a step's begin it mostly does. */
    if (!port->step_ended || port->generation != smp_fork_generation() ||
        !smp_streams_rest(0) || !smp_driver_enter(port->driver, port->context, why)) {
        return;
    }
    for (int r = 0; r < port->size; r++) {
        if (port->peers[r] != NULL) {
            smp_imports_close_unused(&port->peers[r]->landings.imports);
        }
    }
    smp_driver_leave(port->driver);
    port->step_ended = false;
}

void
smp_device_end_step(smp_device_port *port)
{
    char why[SMP_DRIVER_TEXT];

    smp_device_sweep(port);
    if (port->landings != NULL && port->generation == smp_fork_generation() &&
        smp_driver_enter(port->driver, port->context, why)) {
        smp_landings_end_step(port->landings, landing_peer, port, port->stream);
        smp_driver_leave(port->driver);
        port->step_ended = true;
    }
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
    port->peers = calloc((size_t)size, sizeof(smp_port_peer *));
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
        smp_port_peer *peer = port->peers[r];

        if (peer == NULL || peer->base == 0) {
            continue;
        }
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

/* The events of this rank that `peer` has opened end with the pool: it has that open,
 * too. */
static void
keep_events(smp_device_port *port, const smp_landing_peer *peer)
{
    smp_device_pool *pool = atomic_load(&port->pool);

    for (uint32_t i = 0; i < SMP_LANDINGS && pool != NULL; i++) {
        if (peer->written[i] != NULL) {
            smp_device_pool_keep(pool, peer->written[i]);
        }
    }
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
    if (entered && port->landings != NULL) {
        smp_landings_leave(port->landings, landing_peer, port, port->stream);
    }
    quiet = entered && smp_streams_rest(smp_clock_ns() + FINISH_NS);
    free_readings(port, port->first, quiet);
    free_readings(port, port->spare, quiet);
    smp_landings_destroy(port->landings, quiet);
    for (int r = 0; r < port->size; r++) {
        if (port->peers[r] != NULL && port->peers[r]->base != 0) {
            keep_events(port, &port->peers[r]->landings);
            smp_landing_peer_end(&port->peers[r]->landings, port->driver, !quiet);
        }
    }
    if (quiet) {
        if (port->trial != NULL) {
            (void)port->driver->event_destroy(port->written);
            smp_stream_destroy(port->driver, port->trial);
        }
        close_pools(port);
        (void)port->driver->event_destroy(port->fence);
        smp_stream_destroy(port->driver, port->stream);
        (void)port->driver->free(port->arrived);
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
        .why = smp_port_state_of(port) == SMP_PORT_SHUT ? port->why
               : atomic_load(&port->useless) ? "no rank of this host can open it"
                                             : "",
    };
}
