/* The table of this rank's landings, and the events and allocations of others'. */
#include "comm/device/landings.h"

#include <stdatomic.h>
#include <stdlib.h>

/* The most open landings of one size for one rank: tensors of a step, or under way. */
#define MOST_ALIKE 8

/* Sizes remembered, and offers in vain before the last one. */
#define SIZES 32u
#define MOST_FAILURES 8

typedef struct {
    void    *memory; /* owned; NULL: none, or given */
    bool     used;   /* from offer to done */
    uint64_t at;
    size_t   bytes;
    void    *stream;
    uint64_t step;  /* of the offer */
    void    *ready; /* owned: an event, made once */
} mine;

typedef struct {
    int    source;
    size_t bytes;
} size_seen;

struct smp_landings {
    const smp_driver *driver;
    smp_segment      *own; /* borrowed */
    size_t            limit;
    size_t            total; /* bytes in landings of now */
    uint64_t          step;
    int               failures;
    uint32_t          nseen;
    size_seen         seen[SIZES];
    void (*let_go)(void *memory);
    smp_exports exports;
    mine        entries[SMP_LANDINGS];
};

/* -------------------------------------------------------------------- the sender's */

void
smp_landing_peer_end(smp_landing_peer *peer, const smp_driver *driver, bool forget)
{
    if (forget) {
        smp_imports_forget(&peer->imports);
        return;
    }
    for (uint32_t i = 0; i < SMP_LANDINGS; i++) {
        void *const events[] = {peer->ready[i], peer->came[i], peer->written[i]};

        for (int k = 0; k < 3; k++) {
            if (events[k] != NULL) {
                (void)driver->event_destroy(events[k]);
            }
        }
    }
    smp_imports_close(&peer->imports);
}

/* Opens what is needed to write a taken landing, once for each: *at, or 0 if the
 * allocation cannot be opened. */
static bool
open_landing(smp_landing_peer *peer, const smp_driver *driver, smp_landing *landing,
             uint32_t number, uint64_t *at, char why[SMP_DRIVER_TEXT])
{
    const smp_allocation its = {.identity = landing->identity,
                                .base = landing->base,
                                .bytes = landing->allocated,
                                .memory = landing->memory};

    if (peer->written[number] == NULL &&
        !smp_driver_share_event(driver, &peer->written[number], &peer->handles[number],
                                why)) {
        return false;
    }
    landing->written = peer->handles[number];
    *at = smp_imports_find(&peer->imports, its.identity);
    if (*at == 0) {
        *at = smp_imports_open(&peer->imports, &its, why);
    }
    return true;
}

/* Whether the owner's work on the memory of a taken landing is over. */
static bool
is_ready(smp_landing_peer *peer, const smp_driver *driver, const smp_landing *landing,
         uint32_t number, bool *ready, char why[SMP_DRIVER_TEXT])
{
    int result;

    if (peer->ready[number] == NULL &&
        !smp_driver_ok(driver, "cuIpcOpenEventHandle",
                       driver->event_open(&peer->ready[number], landing->ready), why)) {
        peer->ready[number] = NULL;
        return false;
    }
    result = driver->event_query(peer->ready[number]);
    *ready = result == SMP_DRIVER_OK;
    return *ready || result == SMP_DRIVER_NOT_READY ||
           smp_driver_ok(driver, "cuEventQuery", result, why);
}

bool
smp_landing_take(smp_landing_peer *peer, const smp_driver *driver,
                 smp_device_card *card, int rank, size_t bytes, uint32_t *number,
                 uint64_t *at, char why[SMP_DRIVER_TEXT])
{
    *at = 0;
    for (uint32_t i = 0; i < SMP_LANDINGS && bytes >= SMP_LANDINGS_LEAST; i++) {
        smp_landing *landing = &card->landings[i];
        uint32_t     open = SMP_LANDING_OPEN;
        bool         ready = false;
        bool         fine;

        if (atomic_load(&landing->state) != SMP_LANDING_OPEN ||
            landing->source != rank || landing->bytes != bytes ||
            !atomic_compare_exchange_strong(&landing->state, &open,
                                            SMP_LANDING_TAKEN)) {
            continue;
        }
        /* Perhaps taken back and offered anew meanwhile. */
        fine = landing->source != rank || landing->bytes != bytes ||
               is_ready(peer, driver, landing, i, &ready, why);
        if (fine && !ready) {
            atomic_store(&landing->state, SMP_LANDING_OPEN);
            continue;
        }
        if (fine && open_landing(peer, driver, landing, i, at, why)) {
            *number = i;
            if (*at != 0) {
                *at += landing->offset;
            } else {
                atomic_store(&landing->state, SMP_LANDING_REFUSED);
            }
            return true;
        }
        atomic_store(&landing->state, SMP_LANDING_OPEN);
        return false;
    }
    return true;
}

void
smp_landing_close_unused(smp_landing_peer *peer)
{
    smp_imports_close_unused(&peer->imports);
}

/* ------------------------------------------------------------------ the receiver's */

smp_landings *
smp_landings_create(const smp_driver *driver, smp_segment *own, size_t limit)
{
    smp_landings *landings = calloc(1, sizeof(*landings));

    if (landings != NULL) {
        landings->driver = driver;
        landings->own = own;
        landings->limit = limit;
        landings->exports.driver = driver;
    }
    return landings;
}

/* Whether `source` has sent as much before; notes it. */
static bool
was_seen(smp_landings *landings, int source, size_t bytes)
{
    for (uint32_t i = 0; i < SIZES; i++) {
        if (landings->seen[i].source == source && landings->seen[i].bytes == bytes) {
            return true;
        }
    }
    landings->seen[landings->nseen++ % SIZES] = (size_seen){source, bytes};
    return false;
}

/* The number of an unused landing; SMP_LANDINGS: none. */
static uint32_t
unused(const smp_landings *landings)
{
    uint32_t i = 0;

    while (i < SMP_LANDINGS && landings->entries[i].used) {
        i++;
    }
    return i;
}

void
smp_landings_stop(smp_landings *landings)
{
    landings->failures = MOST_FAILURES;
}

bool
smp_landings_want(smp_landings *landings, int source, const smp_landing_peer *peer,
                  size_t bytes)
{
    int alike = 0;

    if (bytes < SMP_LANDINGS_LEAST || peer->refused ||
        landings->failures >= MOST_FAILURES || !was_seen(landings, source, bytes) ||
        bytes > landings->limit || landings->total > landings->limit - bytes ||
        unused(landings) == SMP_LANDINGS) {
        return false;
    }
    for (uint32_t i = 0; i < SMP_LANDINGS; i++) {
        const smp_landing *landing = &landings->own->device->landings[i];

        alike += landings->entries[i].used &&
                 atomic_load(&landing->state) == SMP_LANDING_OPEN &&
                 landing->source == source && landing->bytes == bytes;
    }
    return alike < MOST_ALIKE;
}

bool
smp_landings_offer(smp_landings *landings, int source, uint64_t at, size_t bytes,
                   void *stream, void *memory, void (*let_go)(void *memory))
{
    const smp_driver *driver = landings->driver;
    uint32_t          number = unused(landings);
    mine             *entry = &landings->entries[number];
    smp_landing      *landing = &landings->own->device->landings[number];
    smp_export       *found;
    uint64_t          gone[SMP_GONE];
    char              why[SMP_DRIVER_TEXT];

    found = smp_exports_find(&landings->exports, at, bytes, stream, gone, why);
    /* The senders close what they do not use: nobody is told of `gone`. */
    if (found == NULL ||
        (entry->ready == NULL &&
         !smp_driver_share_event(driver, &entry->ready, &landing->ready, why)) ||
        !smp_driver_ok(driver, "cuEventRecord",
                       driver->event_record(entry->ready, stream), why)) {
        landings->failures++;
        return false;
    }
    entry->memory = memory;
    entry->used = true;
    entry->at = at;
    entry->bytes = bytes;
    entry->stream = stream;
    entry->step = landings->step;
    landings->let_go = let_go;
    landings->total += bytes;
    landing->source = source;
    landing->bytes = bytes;
    landing->offset = at - found->allocation.base;
    landing->identity = found->allocation.identity;
    landing->base = found->allocation.base;
    landing->allocated = found->allocation.bytes;
    landing->memory = found->allocation.memory;
    atomic_store(&landing->state, SMP_LANDING_OPEN);
    return true;
}

void *
smp_landings_see(const smp_landings *landings, uint32_t number, uint64_t *at,
                 void **stream)
{
    const mine *entry = &landings->entries[number];

    *at = entry->at;
    *stream = entry->stream;
    return entry->memory;
}

void *
smp_landings_came(const smp_landings *landings, uint32_t number, smp_landing_peer *peer,
                  char why[SMP_DRIVER_TEXT])
{
    const smp_landing *landing = &landings->own->device->landings[number];
    void             **event = &peer->came[number];

    if (*event == NULL &&
        !smp_driver_ok(landings->driver, "cuIpcOpenEventHandle",
                       landings->driver->event_open(event, landing->written), why)) {
        *event = NULL;
    }
    return *event;
}

void
smp_landings_give(smp_landings *landings, uint32_t number)
{
    landings->entries[number].memory = NULL;
}

void
smp_landings_done(smp_landings *landings, uint32_t number)
{
    mine *entry = &landings->entries[number];
    void *memory = entry->memory;

    landings->total -= entry->bytes;
    entry->memory = NULL;
    entry->used = false;
    atomic_store(&landings->own->device->landings[number].state, SMP_LANDING_NONE);
    if (memory != NULL) {
        landings->let_go(memory);
    }
}

/* Whether no device writes into a landing any more; what nobody has taken is taken
 * back.
 */
static bool
is_over(smp_landings *landings, uint32_t number, smp_landing_peer *peer)
{
    uint32_t open = SMP_LANDING_OPEN;
    char     why[SMP_DRIVER_TEXT];
    void    *came;

    switch (atomic_load(&landings->own->device->landings[number].state)) {
    case SMP_LANDING_OPEN:
        return atomic_compare_exchange_strong(
            &landings->own->device->landings[number].state, &open, SMP_LANDING_NONE);
    case SMP_LANDING_LEFT:
        came = peer == NULL ? NULL : smp_landings_came(landings, number, peer, why);
        return came != NULL && landings->driver->event_query(came) == SMP_DRIVER_OK;
    case SMP_LANDING_REFUSED:
        if (peer != NULL) {
            peer->refused = true;
        }
        return true;
    default:
        return false;
    }
}

void
smp_landings_end_step(smp_landings *landings,
                      smp_landing_peer *(*peer_of)(void *of, int rank), void *of)
{
    for (uint32_t i = 0; i < SMP_LANDINGS; i++) {
        const mine        *entry = &landings->entries[i];
        const smp_landing *landing = &landings->own->device->landings[i];

        if (entry->used && entry->memory != NULL &&
            (entry->step < landings->step ||
             atomic_load(&landing->state) != SMP_LANDING_OPEN) &&
            is_over(landings, i, peer_of(of, landing->source))) {
            smp_landings_done(landings, i);
        }
    }
    landings->step++;
}

void
smp_landings_destroy(smp_landings *landings, bool forget)
{
    if (landings == NULL) {
        return;
    }
    for (uint32_t i = 0; i < SMP_LANDINGS; i++) {
        uint32_t open = SMP_LANDING_OPEN;

        if (landings->entries[i].used &&
            atomic_compare_exchange_strong(&landings->own->device->landings[i].state,
                                           &open, SMP_LANDING_NONE)) {
            smp_landings_done(landings, i);
        }
        if (landings->entries[i].ready != NULL && !forget) {
            (void)landings->driver->event_destroy(landings->entries[i].ready);
        }
    }
    free(landings);
}
