/* A list whose entries stay, for streams to come. */
#include "device/streams.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/clock.h"

/* FREE -> TAKEN -> USED -> TAKEN -> FREE */
enum { FREE, TAKEN, USED };

typedef struct entry {
    struct entry     *next;
    const smp_driver *driver; /* written while it is TAKEN, like all up to stream */
    void             *context;
    void             *stream;
    _Atomic int       state;
    _Atomic int       queries; /* threads that may ask for the stream */
} entry;

static _Atomic(entry *) entries;
static _Atomic bool     in_vain; /* the last wait was */

static entry *
take_entry(void)
{
    entry *e;

    for (e = atomic_load(&entries); e != NULL; e = e->next) {
        int free_one = FREE;

        if (atomic_compare_exchange_strong(&e->state, &free_one, TAKEN)) {
            return e;
        }
    }
    e = calloc(1, sizeof(*e));
    if (e != NULL) {
        atomic_store(&e->state, TAKEN);
        e->next = atomic_load(&entries);
        while (!atomic_compare_exchange_weak(&entries, &e->next, e)) {
        }
    }
    return e;
}

bool
smp_stream_create(const smp_driver *driver, void *context, void **stream,
                  char why[SMP_DRIVER_TEXT])
{
    entry *e = take_entry();

    *stream = NULL;
    if (e == NULL) {
        snprintf(why, SMP_DRIVER_TEXT, "out of memory");
        return false;
    }
    if (!smp_driver_ok(driver, "cuStreamCreate",
                       driver->stream_create(stream, SMP_DRIVER_STREAM_ALONE), why)) {
        *stream = NULL;
        atomic_store(&e->state, FREE);
        return false;
    }
    e->driver = driver;
    e->context = context;
    e->stream = *stream;
    atomic_store(&e->state, USED);
    return true;
}

void
smp_stream_destroy(const smp_driver *driver, void *stream)
{
    entry *e = atomic_load(&entries);

    if (stream == NULL) {
        return;
    }
    while (atomic_load(&e->state) != USED || e->stream != stream) {
        e = e->next;
    }
    atomic_store(&e->state, TAKEN);
    while (atomic_load(&e->queries) != 0) {
        sched_yield();
    }
    (void)driver->stream_destroy(stream);
    atomic_store(&e->state, FREE);
}

/* After a failed query no work follows, either. */
static bool
rests(entry *e)
{
    char why[SMP_DRIVER_TEXT];
    bool done = true;

    atomic_fetch_add(&e->queries, 1);
    if (atomic_load(&e->state) == USED &&
        smp_driver_enter(e->driver, e->context, why)) {
        done = e->driver->stream_query(e->stream) != SMP_DRIVER_NOT_READY;
        smp_driver_leave(e->driver);
    }
    atomic_fetch_sub(&e->queries, 1);
    return done;
}

bool
smp_streams_rest(int64_t until_ns)
{
    bool waits = smp_clock_ns() < until_ns && !atomic_load(&in_vain);

    for (entry *e = atomic_load(&entries); e != NULL; e = e->next) {
        while (!rests(e)) {
            if (!waits || smp_clock_ns() >= until_ns) {
                if (waits) {
                    atomic_store(&in_vain, true);
                }
                return false;
            }
            sched_yield();
        }
    }
    atomic_store(&in_vain, false);
    return true;
}
