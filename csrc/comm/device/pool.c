/* The allocation, its events, and pools with readers yet to close. */
#define _GNU_SOURCE
#include "comm/device/pool.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "comm/device/allocations.h"
#include "comm/device/retired.h"
#include "comm/device/trial.h"
#include "comm/memory/device_card.h"
#include "common/clock.h"
#include "common/lock.h"

/* The unit of every offset and of the size. */
#define UNIT 64u

struct smp_device_pool {
    smp_retired        retired; /* first; of a retired pool, like readers */
    const smp_driver  *driver;
    smp_segment       *own; /* owned: one reference */
    smp_arena         *arena;
    int                rank;
    int                device;
    void              *context;
    uint64_t           base;
    void              *tried;                    /* owned: the pattern's event */
    void              *events[SMP_DEVICE_SPANS]; /* owned; NULL: not made yet */
    int                dests[SMP_DEVICE_SPANS];  /* the receiver of a taken slot */
    void             **kept;                     /* owned: other events, till the end */
    size_t             nkept;
    bool               empty;   /* it has no memory any more */
    smp_device_reader *readers; /* owned */
    int                nreaders;
};

/* ------------------------------------------------------------------ retirement */

/* Whether a reader may still touch the memory of the pool of `rank`.  One of another
 * pid namespace (pid 0) is taken to live. */
static bool
has_it(const smp_device_reader *reader, int rank)
{
    uint32_t state;

    if (reader->segment == NULL) {
        return false;
    }
    state = atomic_load(&reader->segment->device->pools[rank]);
    return (state == SMP_READER_OPENING || state == SMP_READER_OPEN) &&
           (kill(reader->pid, 0) == 0 || errno != ESRCH);
}

static void
drop_books(smp_device_pool *pool)
{
    for (int i = 0; i < pool->nreaders; i++) {
        smp_segment_unref(pool->readers[i].segment);
    }
    free(pool->readers);
    free(pool->kept);
    smp_arena_destroy(pool->arena);
    smp_segment_unref(pool->own);
    free(pool);
}

/* Events, memory, context. */
static void
give_memory_back(smp_device_pool *pool)
{
    const smp_driver *driver = pool->driver;
    char              why[SMP_DRIVER_TEXT];

    /* A failure here is the device's, with no caller to tell. */
    if (smp_driver_enter(driver, pool->context, why)) {
        for (uint32_t i = 0; i < SMP_DEVICE_SPANS; i++) {
            if (pool->events[i] != NULL) {
                (void)driver->event_destroy(pool->events[i]);
            }
        }
        for (size_t i = 0; i < pool->nkept; i++) {
            (void)driver->event_destroy(pool->kept[i]);
        }
        (void)driver->event_destroy(pool->tried);
        (void)driver->free(pool->base);
        smp_driver_leave(driver);
    }
    (void)driver->context_release(pool->device);
    pool->empty = true;
}

static void
destroy(smp_retired *retired)
{
    smp_device_pool *pool = (smp_device_pool *)retired;

    if (!pool->empty) {
        give_memory_back(pool);
    }
    drop_books(pool);
}

static bool
is_read(const smp_retired *retired)
{
    const smp_device_pool *pool = (const smp_device_pool *)retired;
    bool                   read = false;

    for (int i = 0; i < pool->nreaders && !read; i++) {
        read = has_it(&pool->readers[i], pool->rank);
    }
    return read;
}

static smp_retired_list retired_pools = {
    .lock = SMP_LOCK_INIT(SMP_LOCK_DEVICES), .is_read = is_read, .destroy = destroy};

/* -------------------------------------------------------------------- in use */

size_t
smp_device_pool_end(size_t bytes, int ranks)
{
    return bytes + SMP_TRIAL_BYTES + (size_t)ranks * SMP_LANDINGS_TRIAL_BYTES;
}

/* Writes the pattern for a reader's trial; the context is current. */
static bool
write_pattern(const smp_device_pool *pool, void *stream, size_t at,
              char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = pool->driver;
    smp_device_card  *card = pool->own->device;

    card->seed = (uint64_t)smp_clock_ns() ^ (uint64_t)pool->rank << 56;
    return smp_trial_write(driver, pool->base + at, SMP_TRIAL_BYTES, card->seed, stream,
                           why) &&
           smp_driver_ok(driver, "cuEventRecord",
                         driver->event_record(pool->tried, stream), why);
}

/* The memory with its pattern, and its handles on the card. */
static bool
make_memory(smp_device_pool *pool, void *stream, size_t bytes,
            char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = pool->driver;
    smp_device_card  *card = pool->own->device;
    bool              made;

    if (!smp_driver_enter(driver, pool->context, why)) {
        return false;
    }
    made = smp_driver_ok(
        driver, "cuMemAlloc",
        driver->alloc(&pool->base,
                      smp_driver_blocks(smp_device_pool_end(bytes, pool->own->nrings))),
        why);
    if (made &&
        (!smp_driver_ok(driver, "cuIpcGetMemHandle",
                        driver->memory_export(&card->memory, pool->base), why) ||
         !smp_driver_share_event(driver, &pool->tried, &card->tried, why) ||
         !write_pattern(pool, stream, bytes, why))) {
        if (pool->tried != NULL) {
            (void)driver->event_destroy(pool->tried);
        }
        (void)driver->free(pool->base);
        made = false;
    }
    smp_driver_leave(driver);
    return made;
}

smp_device_pool *
smp_device_pool_create(const smp_driver *driver, int device, void *stream, size_t bytes,
                       int rank, smp_segment *own, char why[SMP_DRIVER_TEXT])
{
    smp_device_pool       *pool = calloc(1, sizeof(*pool));
    const smp_arena_ground ground = {
        .states = own->device->states,
        .nslots = SMP_DEVICE_SPANS,
        .bytes = (bytes + UNIT - 1) / UNIT * UNIT,
    };

    smp_retired_sweep(&retired_pools);
    if (pool == NULL || smp_arena_create_over(own, &ground, &pool->arena) != SMP_OK) {
        memcpy(why, "out of memory", sizeof("out of memory"));
        goto err_free;
    }
    if (!smp_driver_ok(driver, "cuDevicePrimaryCtxRetain",
                       driver->context_retain(&pool->context, device), why)) {
        goto err_arena;
    }
    smp_segment_ref(own);
    pool->driver = driver;
    pool->own = own;
    pool->rank = rank;
    pool->device = device;
    if (!make_memory(pool, stream, ground.bytes, why)) {
        goto err_context;
    }
    own->device->bytes = ground.bytes;
    own->device->owner = smp_allocations_owner();
    own->device->base = pool->base;
    atomic_store(&own->device->shown, SMP_POOL_SHOWN);
    return pool;

err_context:
    (void)driver->context_release(device);
    smp_segment_unref(own);
err_arena:
    smp_arena_destroy(pool->arena);
err_free:
    free(pool);
    return NULL;
}

bool
smp_device_pool_take(smp_device_pool *pool, size_t bytes, int dest,
                     smp_device_span *out, bool *fault, char why[SMP_DRIVER_TEXT])
{
    void **event;

    *fault = false;
    if (pool->empty || !smp_arena_take(pool->arena, bytes, &out->slot, &out->offset)) {
        return false;
    }
    event = &pool->events[out->slot];
    if (*event == NULL &&
        !smp_driver_share_event(pool->driver, event,
                                &pool->own->device->events[out->slot], why)) {
        *fault = true;
        smp_device_pool_give_back(pool, out->slot);
        return false;
    }
    pool->dests[out->slot] = dest;
    out->at = pool->base + out->offset;
    out->event = *event;
    return true;
}

void
smp_device_pool_give_back(smp_device_pool *pool, uint32_t slot)
{
    atomic_store(&pool->own->device->states[slot], SMP_SLOT_FREE);
}

void
smp_device_pool_reclaim(smp_device_pool *pool, int dest)
{
    for (uint32_t slot = 0; slot < SMP_DEVICE_SPANS; slot++) {
        uint32_t sent = SMP_SLOT_SENT;

        /* A packed and unsent span is still its packer's to give back. */
        if (pool->dests[slot] == dest) {
            atomic_compare_exchange_strong(&pool->own->device->states[slot], &sent,
                                           SMP_SLOT_FREE);
        }
    }
}

void
smp_device_pool_withdraw(smp_device_pool *pool)
{
    if (!pool->empty) {
        atomic_store(&pool->own->device->shown, SMP_POOL_WITHDRAWN);
        give_memory_back(pool);
    }
}

void
smp_device_pool_measure(smp_device_pool *pool, smp_arena_use *use)
{
    smp_arena_measure(pool->arena, use);
}

void
smp_device_pool_keep(smp_device_pool *pool, void *event)
{
    void **kept = realloc(pool->kept, (pool->nkept + 1) * sizeof(*kept));

    if (kept != NULL) { /* else it is left to the end of the process */
        kept[pool->nkept++] = event;
        pool->kept = kept;
    }
}

void
smp_device_pool_retire(smp_device_pool *pool, smp_device_reader *readers, int n,
                       bool leave)
{
    atomic_store(&pool->own->device->shown, SMP_POOL_WITHDRAWN);
    pool->readers = readers;
    pool->nreaders = n;
    if (leave) {
        drop_books(pool);
    } else {
        smp_retired_add(&retired_pools, &pool->retired);
    }
    smp_retired_sweep(&retired_pools);
}
