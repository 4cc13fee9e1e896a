/* The exports as a table, least recently used ones last; the imports as a list. */
#include "comm/device/allocations.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/lock.h"

/* Whether two ranges of addresses share one. */
static bool
overlap(uint64_t a, uint64_t a_bytes, uint64_t b, uint64_t b_bytes)
{
    return a < b + b_bytes && b < a + a_bytes;
}

/* ----------------------------------------------------------------------- exports */

static void
drop_export(smp_exports *exports, smp_export *one)
{
    *one = exports->entries[--exports->n];
}

static void
tell_gone(uint64_t gone[SMP_GONE], uint64_t identity)
{
    int i = 0;

    while (gone[i] != 0) {
        i++;
    }
    gone[i] = identity;
}

/* Whether an allocation has been freed; an error of the driver is no answer. */
static bool
is_freed(const smp_exports *exports, const smp_allocation *allocation)
{
    uint64_t now = 0;
    int      result = exports->driver->pointer_attribute(&now, SMP_DRIVER_BUFFER_ID,
                                                         allocation->base);

    return result == SMP_DRIVER_INVALID_VALUE ||
           (result == SMP_DRIVER_OK && now != allocation->identity);
}

/* Looks after some of the known allocations, others at each call, and drops the freed
 * ones. */
static void
drop_freed(smp_exports *exports, uint64_t gone[SMP_GONE])
{
    for (int k = 1; k < SMP_GONE && k <= exports->n; k++) {
        smp_export *one = &exports->entries[exports->next++ % (uint32_t)exports->n];

        if (is_freed(exports, &one->allocation)) {
            tell_gone(gone, one->allocation.identity);
            drop_export(exports, one);
        }
    }
}

/* Has room for one more.  False: all may be in use. */
static bool
make_room(smp_exports *exports, void *stream, uint64_t gone[SMP_GONE])
{
    smp_export *oldest = &exports->entries[0];

    if (exports->n < SMP_EXPORTS) {
        return true;
    }
    if (exports->driver->stream_query(stream) != SMP_DRIVER_OK) {
        return false;
    }
    for (int i = 1; i < exports->n; i++) {
        if (exports->entries[i].used < oldest->used) {
            oldest = &exports->entries[i];
        }
    }
    tell_gone(gone, oldest->allocation.identity);
    drop_export(exports, oldest);
    return true;
}

/* Adds the allocation around `at`. */
static smp_export *
add_export(smp_exports *exports, uint64_t identity, uint64_t at, void *stream,
           uint64_t gone[SMP_GONE], char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = exports->driver;
    smp_allocation    found = {.identity = identity};
    smp_export       *one;
    size_t            bytes;
    int               result;

    if (!smp_driver_ok(driver, "cuMemGetAddressRange",
                       driver->memory_range(&found.base, &bytes, at), why)) {
        return NULL;
    }
    found.bytes = bytes;
    for (int i = exports->n; i-- > 0;) {
        const smp_allocation *other = &exports->entries[i].allocation;

        if (overlap(other->base, other->bytes, found.base, found.bytes)) {
            drop_export(exports, &exports->entries[i]);
        }
    }
    if (!make_room(exports, stream, gone)) {
        snprintf(why, SMP_DRIVER_TEXT, "%d allocations are in use", SMP_EXPORTS);
        return NULL;
    }
    /* A part of a block would take others along. */
    result = found.bytes % SMP_DRIVER_BLOCK == 0
                 ? driver->memory_export(&found.memory, found.base)
                 : SMP_DRIVER_INVALID_VALUE;
    one = &exports->entries[exports->n++];
    *one = (smp_export){
        .allocation = found,
        .state = smp_driver_ok(driver, "cuIpcGetMemHandle", result, why) &&
                         identity != 0 /* an input of no bytes has that */
                     ? SMP_EXPORT_NEW
                     : SMP_EXPORT_CLOSED,
    };
    return one;
}

smp_export *
smp_exports_find(smp_exports *exports, uint64_t at, size_t bytes, void *stream,
                 uint64_t gone[SMP_GONE], char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = exports->driver;
    smp_export       *one = NULL;
    uint64_t          identity;
    uint64_t          offset;

    snprintf(why, SMP_DRIVER_TEXT, "the tensor is not in one shared allocation");
    memset(gone, 0, SMP_GONE * sizeof(*gone));
    drop_freed(exports, gone);
    if (!smp_driver_ok(driver, "cuPointerGetAttribute",
                       driver->pointer_attribute(&identity, SMP_DRIVER_BUFFER_ID, at),
                       why)) {
        return NULL;
    }
    for (int i = 0; i < exports->n && one == NULL; i++) {
        if (exports->entries[i].allocation.identity == identity) {
            one = &exports->entries[i];
        }
    }
    if (one == NULL) {
        one = add_export(exports, identity, at, stream, gone, why);
    }
    if (one == NULL) {
        return NULL;
    }
    one->used = ++exports->time;
    offset = at - one->allocation.base;
    return one->state != SMP_EXPORT_CLOSED && offset <= one->allocation.bytes &&
                   bytes <= one->allocation.bytes - offset
               ? one
               : NULL;
}

/* ----------------------------------------------------------------------- imports */

struct smp_import {
    smp_import       *next;
    smp_import       *every; /* of all imports; guarded by the lock, like is_open */
    const smp_driver *driver;
    void             *context;
    uint64_t          owner;
    uint64_t          identity;
    uint64_t          base; /* its owner's address */
    uint64_t          bytes;
    uint64_t          at; /* the address here */
    bool              is_open;
    bool              used; /* since the last close_unused() */
};

static smp_lock    lock = SMP_LOCK_INIT(SMP_LOCK_DEVICES); /* guards every_import */
static smp_import *every_import;                           /* linked by every */

static void
add_to_all(smp_import *one)
{
    smp_lock_acquire(&lock);
    one->is_open = true;
    one->every = every_import;
    every_import = one;
    smp_lock_release(&lock);
}

/* Whether it was open still: the caller closes it. */
static bool
take_from_all(smp_import *one)
{
    smp_import **link = &every_import;
    bool         was_open;

    smp_lock_acquire(&lock);
    while (*link != one) {
        link = &(*link)->every;
    }
    *link = one->every;
    was_open = one->is_open;
    smp_lock_release(&lock);
    return was_open;
}

/* A failure here is the device's, with no caller to tell. */
static void
close_at(smp_imports *imports, smp_import **link)
{
    smp_import *one = *link;

    *link = one->next;
    if (take_from_all(one)) {
        (void)imports->driver->memory_close(one->at);
    }
    free(one);
}

uint64_t
smp_allocations_owner(void)
{
    static _Atomic uint64_t number;
    uint64_t                known = atomic_load(&number);
    uint64_t                drawn = 0;

    if (known != 0) {
        return known;
    }
    if (getrandom(&drawn, sizeof(drawn), GRND_NONBLOCK) != (ssize_t)sizeof(drawn)) {
        drawn = (uint64_t)smp_clock_ns() ^ (uint64_t)getpid() << 40;
    }
    drawn |= 1;
    return atomic_compare_exchange_strong(&number, &known, drawn) ? drawn : known;
}

/* One to be closed, of any imports; NULL: none.  The lock is held. */
static smp_import *
in_the_way(uint64_t owner, uint64_t identity, uint64_t base, uint64_t bytes)
{
    smp_import *one = every_import;

    while (one != NULL &&
           !(one->is_open && one->owner == owner && one->identity != identity &&
             overlap(one->base, one->bytes, base, bytes))) {
        one = one->every;
    }
    return one;
}

bool
smp_imports_are_in_the_way(uint64_t owner, uint64_t identity, uint64_t base,
                           uint64_t bytes)
{
    bool found;

    smp_lock_acquire(&lock);
    found = in_the_way(owner, identity, base, bytes) != NULL;
    smp_lock_release(&lock);
    return found;
}

void
smp_imports_make_way(uint64_t owner, uint64_t identity, uint64_t base, uint64_t bytes)
{
    const smp_driver *driver;
    smp_import       *one;
    void             *context = NULL;
    uint64_t          at = 0;
    char              why[SMP_DRIVER_TEXT];

    do {
        driver = NULL;
        smp_lock_acquire(&lock);
        one = in_the_way(owner, identity, base, bytes);
        if (one != NULL) {
            one->is_open = false;
            driver = one->driver;
            context = one->context;
            at = one->at;
        }
        smp_lock_release(&lock);
        if (driver != NULL && smp_driver_enter(driver, context, why)) {
            (void)driver->memory_close(at);
            smp_driver_leave(driver);
        }
    } while (driver != NULL);
}

static void
put_first(smp_imports *imports, smp_import *one)
{
    one->next = imports->first;
    imports->first = one;
    one->used = true;
}

/* The link to it, or to the end. */
static smp_import **
link_of(smp_imports *imports, uint64_t identity)
{
    smp_import **link = &imports->first;

    while (*link != NULL && (*link)->identity != identity) {
        link = &(*link)->next;
    }
    return link;
}

uint64_t
smp_imports_find(smp_imports *imports, uint64_t identity)
{
    smp_import **link = link_of(imports, identity);
    smp_import  *one = *link;

    if (one == NULL) {
        return 0;
    }
    *link = one->next;
    put_first(imports, one);
    return one->at;
}

uint64_t
smp_imports_open(smp_imports *imports, const smp_allocation *allocation,
                 char why[SMP_DRIVER_TEXT])
{
    smp_import *one = malloc(sizeof(*one));

    if (one == NULL) {
        snprintf(why, SMP_DRIVER_TEXT, "out of memory");
        return 0;
    }
    smp_imports_make_way(imports->owner, allocation->identity, allocation->base,
                         allocation->bytes);
    *one = (smp_import){.driver = imports->driver,
                        .context = imports->context,
                        .owner = imports->owner,
                        .identity = allocation->identity,
                        .base = allocation->base,
                        .bytes = allocation->bytes};
    if (!smp_driver_ok(imports->driver, "cuIpcOpenMemHandle",
                       imports->driver->memory_open(&one->at, allocation->memory,
                                                    SMP_DRIVER_OPEN_WITH_PEERS),
                       why)) {
        free(one);
        return 0;
    }
    add_to_all(one);
    put_first(imports, one);
    return one->at;
}

void
smp_imports_drop(smp_imports *imports, uint64_t identity)
{
    smp_import **link = link_of(imports, identity);

    if (*link != NULL) {
        close_at(imports, link);
    }
}

void
smp_imports_close_unused(smp_imports *imports)
{
    smp_import **link = &imports->first;

    while (*link != NULL) {
        if ((*link)->used) {
            (*link)->used = false;
            link = &(*link)->next;
        } else {
            close_at(imports, link);
        }
    }
}

void
smp_imports_close(smp_imports *imports)
{
    while (imports->first != NULL) {
        close_at(imports, &imports->first);
    }
}

void
smp_imports_forget(smp_imports *imports)
{
    while (imports->first != NULL) {
        smp_import *one = imports->first;

        imports->first = one->next;
        (void)take_from_all(one);
        free(one);
    }
}
