/* The table of this rank's landings, and the events and allocations of others'. */
#include "comm/device/landings.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "device/streams.h"

/* The most open landings of one size for one rank: tensors of a step, or under way. */
#define MOST_ALIKE 8

/* Sizes remembered; offers in vain, one after another, before a pause of so many steps.
 */
#define SIZES 32u
#define MOST_FAILURES 8
#define PAUSE_STEPS 100

/* Looks of a leaving rank for a sender that has taken a landing to look at it. */
#define LOOKS 1000

typedef enum {
    UNUSED,
    OFFERED, /* its memory is in use by earlier work */
    SHOWN,   /* its state on the card counts */
    LEAVING  /* nobody reads it; the last writing may be under way */
} phase;

typedef struct {
    phase    phase;
    void    *memory; /* owned; NULL: none, or given */
    uint64_t at;
    size_t   bytes;
    void    *stream;
    uint64_t step;  /* of the offer */
    void    *event; /* owned; made once: behind the earlier work, or the last writing */
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
    uint64_t          resumes; /* the step of the next offer */
    int               failures;
    int               pending; /* landings that are OFFERED or LEAVING */
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
        if (peer->came[i] != NULL) {
            (void)driver->event_destroy(peer->came[i]);
        }
    }
    smp_imports_close(&peer->imports);
}

/* The state of a taken landing after a look at its allocation: TAKEN, with *at; OPEN:
 * not now; REFUSED: never. */
static uint32_t
open_landing(smp_landing_peer *peer, const smp_driver *driver, smp_landing *landing,
             uint32_t number, uint64_t *at)
{
    const smp_allocation its = {.identity = landing->identity,
                                .base = landing->base,
                                .bytes = landing->allocated,
                                .memory = landing->memory};
    char                 why[SMP_DRIVER_TEXT];

    if (!peer->works || (peer->written[number] == NULL &&
                         !smp_driver_share_event(driver, &peer->written[number],
                                                 &peer->handles[number], why))) {
        return SMP_LANDING_REFUSED;
    }
    landing->written = peer->handles[number];
    *at = smp_imports_find(&peer->imports, its.identity);
    /* Making way waits for the device, which may wait for a dead rank. */
    if (*at == 0 &&
        smp_imports_are_in_the_way(peer->imports.owner, its.identity, its.base,
                                   its.bytes) &&
        !smp_streams_rest(0)) {
        return SMP_LANDING_OPEN;
    }
    if (*at == 0) {
        *at = smp_imports_open(&peer->imports, &its, why);
    }
    if (*at == 0) {
        return SMP_LANDING_REFUSED;
    }
    *at += landing->offset;
    return SMP_LANDING_TAKEN;
}

uint64_t
smp_landing_take(smp_landing_peer *peer, const smp_driver *driver,
                 smp_device_card *card, int rank, size_t bytes, uint32_t *number)
{
    for (uint32_t i = 0; i < SMP_LANDINGS && bytes >= SMP_LANDINGS_LEAST; i++) {
        smp_landing *landing = &card->landings[i];
        uint32_t     state = SMP_LANDING_OPEN;
        uint64_t     at = 0;

        if (atomic_load(&landing->state) != SMP_LANDING_OPEN ||
            landing->source != rank || landing->bytes != bytes ||
            !atomic_compare_exchange_strong(&landing->state, &state,
                                            SMP_LANDING_TAKEN)) {
            continue;
        }
        /* Perhaps taken back and offered anew, for another rank or size. */
        state = landing->source != rank || landing->bytes != bytes
                    ? SMP_LANDING_OPEN
                    : open_landing(peer, driver, landing, i, &at);
        if (state == SMP_LANDING_TAKEN) {
            *number = i;
            return at;
        }
        atomic_store(&landing->state, state);
    }
    return 0;
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

    while (i < SMP_LANDINGS && landings->entries[i].phase != UNUSED) {
        i++;
    }
    return i;
}

void
smp_landings_pause(smp_landings *landings)
{
    landings->failures = 0;
    landings->resumes = landings->step + PAUSE_STEPS;
}

bool
smp_landings_want(smp_landings *landings, int source, const smp_landing_peer *peer,
                  size_t bytes)
{
    int alike = 0;

    if (bytes < SMP_LANDINGS_LEAST || peer->refused ||
        landings->step < landings->resumes || !was_seen(landings, source, bytes) ||
        bytes > landings->limit || landings->total > landings->limit - bytes ||
        unused(landings) == SMP_LANDINGS) {
        return false;
    }
    for (uint32_t i = 0; i < SMP_LANDINGS; i++) {
        const smp_landing *landing = &landings->own->device->landings[i];
        phase              now = landings->entries[i].phase;
        bool               open = now == OFFERED ||
                    (now == SHOWN && atomic_load(&landing->state) == SMP_LANDING_OPEN);

        alike += open && landing->source == source && landing->bytes == bytes;
    }
    return alike < MOST_ALIKE;
}

/* Finds the allocation, and has an event behind the work on it so far. */
static smp_export *
prepare(smp_landings *landings, mine *entry, uint64_t at, size_t bytes, void *stream)
{
    const smp_driver *driver = landings->driver;
    smp_export       *found;
    uint64_t          gone[SMP_GONE]; /* senders close by themselves */
    char              why[SMP_DRIVER_TEXT];

    found = smp_exports_find(&landings->exports, at, bytes, stream, gone, why);
    if (found != NULL && entry->event == NULL &&
        !smp_driver_ok(driver, "cuEventCreate",
                       driver->event_create(&entry->event, SMP_DRIVER_EVENT_UNTIMED),
                       why)) {
        entry->event = NULL;
        return NULL;
    }
    return found != NULL &&
                   smp_driver_ok(driver, "cuEventRecord",
                                 driver->event_record(entry->event, stream), why)
               ? found
               : NULL;
}

bool
smp_landings_offer(smp_landings *landings, int source, uint64_t at, size_t bytes,
                   void *stream, void *memory, void (*let_go)(void *memory))
{
    uint32_t     number = unused(landings);
    mine        *entry = &landings->entries[number];
    smp_landing *landing = &landings->own->device->landings[number];
    smp_export  *found = prepare(landings, entry, at, bytes, stream);

    if (found == NULL) {
        if (++landings->failures >= MOST_FAILURES) {
            smp_landings_pause(landings);
        }
        return false;
    }
    landings->failures = 0;
    landings->let_go = let_go;
    landings->total += bytes;
    landings->pending++;
    *entry = (mine){.phase = OFFERED,
                    .memory = memory,
                    .at = at,
                    .bytes = bytes,
                    .stream = stream,
                    .step = landings->step,
                    .event = entry->event};
    landing->source = source;
    landing->bytes = bytes;
    landing->offset = at - found->allocation.base;
    landing->identity = found->allocation.identity;
    landing->base = found->allocation.base;
    landing->allocated = found->allocation.bytes;
    landing->memory = found->allocation.memory;
    return true;
}

bool
smp_landings_pending(const smp_landings *landings)
{
    return landings->pending > 0;
}

void
smp_landings_show(smp_landings *landings)
{
    for (uint32_t i = 0; i < SMP_LANDINGS && landings->pending > 0; i++) {
        mine *entry = &landings->entries[i];

        if ((entry->phase != OFFERED && entry->phase != LEAVING) ||
            landings->driver->event_query(entry->event) != SMP_DRIVER_OK) {
            continue;
        }
        if (entry->phase == LEAVING) {
            smp_landings_done(landings, i);
            continue;
        }
        landings->pending--;
        entry->phase = SHOWN;
        atomic_store(&landings->own->device->landings[i].state, SMP_LANDING_OPEN);
    }
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
    landings->pending -= entry->phase == OFFERED || entry->phase == LEAVING;
    entry->memory = NULL;
    entry->phase = UNUSED;
    atomic_store(&landings->own->device->landings[number].state, SMP_LANDING_NONE);
    if (memory != NULL) {
        landings->let_go(memory);
    }
}

/* Nobody reads this one: lets its memory go behind the writing, on `stream`. */
static void
leave(smp_landings *landings, uint32_t number, smp_landing_peer *peer, void *stream)
{
    const smp_driver *driver = landings->driver;
    mine             *entry = &landings->entries[number];
    char              why[SMP_DRIVER_TEXT];
    void *came = peer == NULL ? NULL : smp_landings_came(landings, number, peer, why);

    if (came != NULL && driver->stream_wait(stream, came, 0) == SMP_DRIVER_OK &&
        driver->event_record(entry->event, stream) == SMP_DRIVER_OK) {
        entry->phase = LEAVING;
        landings->pending++;
    } /* else it stays as it is, for the next time */
}

/* Takes one back that is not given; `all`: also if its message may be read yet. */
static void
take_back(smp_landings *landings, uint32_t number, smp_landing_peer *peer, void *stream,
          bool all)
{
    smp_landing *landing = &landings->own->device->landings[number];
    uint32_t     state = SMP_LANDING_OPEN;

    if (landings->entries[number].phase == OFFERED ||
        atomic_compare_exchange_strong(&landing->state, &state, SMP_LANDING_NONE)) {
        smp_landings_done(landings, number);
    } else if (state == SMP_LANDING_REFUSED) {
        if (peer != NULL) {
            peer->refused = true;
        }
        smp_landings_done(landings, number);
    } else if (state == SMP_LANDING_LEFT || (all && state == SMP_LANDING_SENT)) {
        leave(landings, number, peer, stream);
    }
}

void
smp_landings_end_step(smp_landings *landings, smp_landing_peer_of *peer_of, void *port,
                      void *stream)
{
    for (uint32_t i = 0; i < SMP_LANDINGS; i++) {
        const mine        *entry = &landings->entries[i];
        const smp_landing *landing = &landings->own->device->landings[i];
        bool               idle =
            entry->phase == OFFERED || atomic_load(&landing->state) == SMP_LANDING_OPEN;

        if (entry->memory != NULL && entry->phase != LEAVING &&
            (!idle || entry->step < landings->step)) {
            take_back(landings, i, peer_of(port, landing->source), stream, false);
        }
    }
    landings->step++;
}

void
smp_landings_leave(smp_landings *landings, smp_landing_peer_of *peer_of, void *port,
                   void *stream)
{
    for (uint32_t i = 0; i < SMP_LANDINGS; i++) {
        const mine        *entry = &landings->entries[i];
        const smp_landing *landing = &landings->own->device->landings[i];

        if (entry->memory == NULL || entry->phase == LEAVING) {
            continue;
        }
        for (int look = 0;
             look < LOOKS && atomic_load(&landing->state) == SMP_LANDING_TAKEN;
             look++) {
            sched_yield();
        }
        take_back(landings, i, peer_of(port, landing->source), stream, true);
    }
}

void
smp_landings_destroy(smp_landings *landings, bool quiet)
{
    if (landings == NULL) {
        return;
    }
    for (uint32_t i = 0; i < SMP_LANDINGS && quiet; i++) {
        if (landings->entries[i].phase == LEAVING) {
            smp_landings_done(landings, i);
        }
        if (landings->entries[i].event != NULL) {
            (void)landings->driver->event_destroy(landings->entries[i].event);
        }
    }
    free(landings);
}
