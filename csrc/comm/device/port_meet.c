/* The port opens: the device, the other ranks' pools, and their trials. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/device/allocations.h"
#include "comm/device/port_state.h"
#include "comm/device/trial.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/log.h"
#include "device/streams.h"

void
smp_port_shut(smp_device_port *port)
{
    for (int r = 0; r < port->size; r++) {
        uint32_t open = SMP_READER_OPEN;

        atomic_compare_exchange_strong(&port->own->device->pools[r], &open,
                                       SMP_READER_OPENING);
    }
    atomic_store(&port->state, SMP_PORT_SHUT);
}

/* The same after a failed trial of rank `name`, this one or another; others follow. */
static void
give_up(smp_device_port *port, int name)
{
    atomic_store(&port->own->device->distrusts, (uint32_t)name + 1);
    smp_port_shut(port);
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

bool
smp_port_is_open(smp_device_port *port, int number)
{
    smp_device_pool *pool;

    if (smp_port_state_of(port) == SMP_PORT_IDLE && port->bytes != 0) {
        if (!open_device(port, number)) {
            atomic_store(&port->state, SMP_PORT_SHUT);
            return false;
        }
        atomic_store(&port->state, SMP_PORT_OPEN);
        pool = smp_device_pool_create(port->driver, port->device, port->stream,
                                      port->bytes, port->rank, port->own, port->why);
        if (pool == NULL) {
            smp_port_shut(port);
            return false;
        }
        atomic_store(&port->pool, pool);
        port->landings = smp_landings_create(port->driver, port->own, port->bytes);
    }
    return smp_port_state_of(port) == SMP_PORT_OPEN && port->number == number;
}

smp_port_peer *
smp_port_find_peer(smp_device_port *port, int rank)
{
    smp_neighbour  its;
    smp_port_peer *peer;

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

/* Writes a pattern behind a pool as tensors go into landings, and reads it back:
 * reading has been tried. */
static smp_trial_result
try_writing(const smp_device_port *port, const smp_port_peer *peer, void *stream,
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

/* Whether the pool of a rank is on this rank's device. */
static bool
shares_device(const smp_device_port *port, const smp_port_peer *peer)
{
    int number = -1;

    return port->driver->pointer_attribute(&number, SMP_DRIVER_DEVICE_ORDINAL,
                                           peer->base) == SMP_DRIVER_OK &&
           number == port->number;
}

/* Copies the pattern out of a pool as tensors will be, on a stream of its own: the
 * port's may have to wait for tensors.  Takes `written`, the pattern's event; the
 * context is current. */
static smp_trial_result
try_pool(smp_device_port *port, smp_port_peer *peer, void *written,
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
    if (result == SMP_TRIAL_RIGHT && shares_device(port, peer)) {
        result = try_writing(port, peer, stream, why);
        peer->landings.works = result == SMP_TRIAL_RIGHT;
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
open_and_try(smp_device_port *port, int rank, smp_port_peer *peer)
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
open_pool(smp_device_port *port, int rank, smp_port_peer *peer)
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
        smp_port_shut(port);
        return;
    }
    atomic_store(mine, open_and_try(port, rank, peer));
    smp_driver_leave(port->driver);
}

void
smp_device_meet(smp_device_port *port, int rank, int device)
{
    smp_port_peer *peer = smp_port_find_peer(port, rank);
    uint32_t       distrusts;

    if (peer == NULL || !smp_port_is_open(port, device)) {
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
