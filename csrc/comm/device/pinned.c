/* Slabs, and what is registered with the driver. */
#include "comm/device/pinned.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "comm/memory/device_card.h"
#include "common/clock.h"
#include "common/fork.h"
#include "device/streams.h"

/* The driver pins whole pages. */
#define PAGE 4096u

/* The most time of destroy's wait for the device. */
#define FINISH_NS (1 * SMP_NS_PER_S)

/* Parts of the arena, at most: for all slabs, for the first one. */
#define ALL_SLABS 2
#define FIRST_SLAB 8

/* IDLE -> OPEN -> SHUT, or IDLE -> SHUT. */
typedef enum { PINNED_IDLE, PINNED_OPEN, PINNED_SHUT } pinned_state;

/* Registered memory. */
typedef struct registered {
    struct registered *next;
    smp_segment       *segment; /* owned: one reference */
    uint8_t           *at;      /* in it */
} registered;

struct smp_pinned {
    smp_segment      *own;   /* borrowed */
    smp_arena        *arena; /* borrowed */
    uint32_t          generation;
    const smp_driver *driver; /* set when it opens, like all up to context */
    int               device; /* as the driver calls it */
    void             *context;
    _Atomic int       state; /* pinned_state; `why` is written before SHUT */
    _Atomic bool      busy;  /* a thread has all below */
    char              why[SMP_DRIVER_TEXT];
    size_t            bytes;                   /* of all slabs */
    smp_arena        *slabs[SMP_PINNED_SLABS]; /* owned; as many as the card shows */
    _Atomic(registered *) first;               /* owned; others read it */
};

static bool
is_open(const smp_pinned *pinned)
{
    return atomic_load(&pinned->state) == PINNED_OPEN &&
           pinned->generation == smp_fork_generation();
}

static void
shut(smp_pinned *pinned)
{
    atomic_store(&pinned->state, PINNED_SHUT);
}

/* Whether this thread has the books now; another one's are not waited for. */
static bool
begin(smp_pinned *pinned)
{
    return is_open(pinned) && !atomic_exchange(&pinned->busy, true);
}

static void
end(smp_pinned *pinned)
{
    atomic_store(&pinned->busy, false);
}

/* Shuts where it fails. */
static bool
pin(smp_pinned *pinned, smp_segment *segment, uint8_t *at, size_t bytes)
{
    const smp_driver *driver = pinned->driver;
    registered       *r = malloc(sizeof(*r));
    bool              done = false;

    if (r == NULL) {
        memcpy(pinned->why, "out of memory", sizeof("out of memory"));
    } else if (smp_driver_enter(driver, pinned->context, pinned->why)) {
        done = smp_driver_ok(driver, "cuMemHostRegister",
                             driver->host_register(at, bytes, SMP_DRIVER_HOST_PORTABLE),
                             pinned->why);
        smp_driver_leave(driver);
    }
    if (!done) {
        free(r);
        shut(pinned);
        return false;
    }
    smp_segment_ref(segment);
    *r = (registered){atomic_load(&pinned->first), segment, at};
    atomic_store(&pinned->first, r);
    return true;
}

smp_pinned *
smp_pinned_create(smp_segment *own, smp_arena *arena)
{
    smp_pinned *pinned = calloc(1, sizeof(*pinned));

    if (pinned != NULL) {
        pinned->own = own;
        pinned->arena = arena;
        pinned->generation = smp_fork_generation();
    }
    return pinned;
}

void
smp_pinned_destroy(smp_pinned *pinned)
{
    char why[SMP_DRIVER_TEXT];
    bool entered;

    if (pinned == NULL) {
        return;
    }
    entered = pinned->context != NULL && smp_streams_rest(smp_clock_ns() + FINISH_NS) &&
              smp_driver_enter(pinned->driver, pinned->context, why);
    for (registered *next, *r = atomic_load(&pinned->first); r != NULL; r = next) {
        next = r->next;
        if (entered) { /* else it stays registered, and mapped */
            (void)pinned->driver->host_unregister(r->at);
            smp_segment_unref(r->segment);
        }
        free(r);
    }
    if (entered) {
        smp_driver_leave(pinned->driver);
    }
    if (pinned->context != NULL) {
        (void)pinned->driver->context_release(pinned->device);
    }
    for (size_t i = 0; i < SMP_PINNED_SLABS; i++) {
        smp_arena_destroy(pinned->slabs[i]);
    }
    free(pinned);
}

void
smp_pinned_use_device(smp_pinned *pinned, int device)
{
    const smp_driver *driver;

    if (atomic_load(&pinned->state) != PINNED_IDLE ||
        pinned->generation != smp_fork_generation()) {
        return;
    }
    driver = smp_driver_load(pinned->why);
    if (driver == NULL ||
        !smp_driver_ok(driver, "cuDeviceGet",
                       driver->device_get(&pinned->device, device), pinned->why) ||
        !smp_driver_ok(driver, "cuDevicePrimaryCtxRetain",
                       driver->context_retain(&pinned->context, pinned->device),
                       pinned->why)) {
        pinned->context = NULL;
        shut(pinned);
        return;
    }
    pinned->driver = driver;
    atomic_store(&pinned->state, PINNED_OPEN);
}

/* -------------------------------------------------------------------- the owner */

static uint32_t
shown_slabs(const smp_segment *segment)
{
    uint32_t n = atomic_load(&segment->device->nslabs);

    return n < SMP_PINNED_SLABS ? n : SMP_PINNED_SLABS;
}

static bool
take_in(const smp_pinned *pinned, uint32_t slab, size_t bytes, uint32_t *slot,
        uint64_t *offset)
{
    if (!smp_arena_take(pinned->slabs[slab], bytes, slot, offset)) {
        return false;
    }
    *slot += pinned->own->arena_slots + slab * SMP_PINNED_SLOTS;
    *offset += pinned->own->device->slabs[slab].offset;
    return true;
}

static bool
take_in_any(const smp_pinned *pinned, size_t bytes, uint32_t *slot, uint64_t *offset)
{
    for (uint32_t i = 0; i < shown_slabs(pinned->own); i++) {
        if (take_in(pinned, i, bytes, slot, offset)) {
            return true;
        }
    }
    return false;
}

static size_t
pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* Takes memory for a new slab with room for a block out of the arena: its bytes, or 0.
 * An arena without room for a slab as large as wanted has it for the block, perhaps. */
static size_t
take_slab(const smp_pinned *pinned, size_t bytes, uint32_t *slot, uint64_t *offset)
{
    size_t arena = pinned->own->arena_bytes;
    size_t before = pinned->bytes;
    size_t most = arena / ALL_SLABS / PAGE * PAGE - before;
    size_t first =
        arena / FIRST_SLAB < SMP_PINNED_SLAB ? arena / FIRST_SLAB : SMP_PINNED_SLAB;
    size_t size = before == 0 ? first / PAGE * PAGE : before;

    if (pages(bytes) > most) {
        return 0;
    }
    size = size < most ? size : most;
    size = size < bytes ? pages(bytes) : size;
    if (!smp_arena_take(pinned->arena, size + PAGE, slot, offset)) {
        size = pages(bytes);
        if (!smp_arena_take(pinned->arena, size + PAGE, slot, offset)) {
            return 0;
        }
    }
    *offset = pages(*offset);
    return size;
}

/* Shows one more slab, with room for a block; this thread has the books.  False: no. */
static bool
add_slab(smp_pinned *pinned, size_t bytes)
{
    smp_segment     *own = pinned->own;
    uint32_t         n = shown_slabs(own);
    size_t           size;
    uint32_t         slot;
    uint64_t         offset;
    smp_arena_ground ground;

    if (n == SMP_PINNED_SLABS) {
        return false;
    }
    size = take_slab(pinned, bytes, &slot, &offset);
    if (size == 0) {
        return false;
    }
    ground = (smp_arena_ground){
        .states = own->states + own->arena_slots + (size_t)n * SMP_PINNED_SLOTS,
        .nslots = SMP_PINNED_SLOTS,
        .bytes = size,
    };
    if (smp_arena_create_over(own, &ground, &pinned->slabs[n]) != SMP_OK) {
        pinned->slabs[n] = NULL;
        goto err_slot;
    }
    if (!pin(pinned, own, own->arena + offset, size)) {
        goto err_slab;
    }
    own->device->slabs[n] = (smp_pinned_slab){offset, size};
    pinned->bytes += size;
    atomic_store(&own->device->nslabs, n + 1);
    return true;

err_slab:
    smp_arena_destroy(pinned->slabs[n]);
    pinned->slabs[n] = NULL;
err_slot:
    atomic_store(&own->states[slot], SMP_SLOT_FREE);
    return false;
}

bool
smp_pinned_take(smp_pinned *pinned, size_t bytes, uint32_t *slot, uint64_t *offset)
{
    bool taken;

    if (bytes < SMP_PINNED_LEAST || pinned->generation != smp_fork_generation()) {
        return false;
    }
    taken = take_in_any(pinned, bytes, slot, offset);
    if (!taken && begin(pinned)) {
        taken = add_slab(pinned, bytes) && take_in_any(pinned, bytes, slot, offset);
        end(pinned);
    }
    return taken;
}

smp_arena *
smp_pinned_slab_at(const smp_pinned *pinned, uint64_t *offset)
{
    for (uint32_t i = 0; i < shown_slabs(pinned->own); i++) {
        const smp_pinned_slab slab = pinned->own->device->slabs[i];

        if (*offset >= slab.offset && *offset - slab.offset < slab.bytes) {
            *offset -= slab.offset;
            return pinned->slabs[i];
        }
    }
    return NULL;
}

/* ------------------------------------------------------------------- the reader */

static bool
is_pinned(const smp_pinned *pinned, const uint8_t *at)
{
    for (const registered *r = atomic_load(&pinned->first); r != NULL; r = r->next) {
        if (r->at == at) {
            return true;
        }
    }
    return false;
}

void
smp_pinned_open(smp_pinned *pinned, const smp_block *block)
{
    smp_segment *segment = block->segment;
    uint64_t     at;

    if (segment == NULL || block->data == NULL || !is_open(pinned)) {
        return;
    }
    at = (uint64_t)((const uint8_t *)block->data - segment->arena);
    for (uint32_t i = 0; i < shown_slabs(segment); i++) {
        const smp_pinned_slab slab = segment->device->slabs[i];

        if (at < slab.offset || at - slab.offset >= slab.bytes ||
            slab.bytes > segment->arena_bytes - slab.offset) {
            continue;
        }
        if (!is_pinned(pinned, segment->arena + slab.offset) && begin(pinned)) {
            (void)pin(pinned, segment, segment->arena + slab.offset, slab.bytes);
            end(pinned);
        }
        return;
    }
}

void
smp_pinned_measure(const smp_pinned *pinned, smp_pinned_use *use)
{
    smp_arena_use slab;

    *use = (smp_pinned_use){.why = ""};
    if (atomic_load(&pinned->state) == PINNED_SHUT) {
        use->why = pinned->why;
    }
    for (uint32_t i = 0; i < shown_slabs(pinned->own); i++) {
        smp_arena_measure(pinned->slabs[i], &slab);
        use->bytes += slab.size;
        use->taken += slab.size + PAGE;
        use->in_use += slab.in_use;
        use->high += slab.high;
    }
}
