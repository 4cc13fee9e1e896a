/* The exports as a table, least recently used ones last; the imports as a list. */
#include "comm/device/allocations.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* Looks after one known allocation, another one at each call: its identity, if it has
 * been freed, or 0. */
static uint64_t
find_freed(smp_exports *exports)
{
    smp_export *one;
    uint64_t    was;
    uint64_t    now = 0;
    int         result;

    if (exports->n == 0) {
        return 0;
    }
    one = &exports->entries[exports->time % (uint64_t)exports->n];
    was = one->allocation.identity;
    result = exports->driver->pointer_attribute(&now, SMP_DRIVER_BUFFER_ID,
                                                one->allocation.base);
    if ((result != SMP_DRIVER_OK || now == was) && result != SMP_DRIVER_INVALID_VALUE) {
        return 0;
    }
    drop_export(exports, one);
    return was;
}

/* Has room for one more.  False: all may be in use. */
static bool
make_room(smp_exports *exports, void *stream, uint64_t *gone)
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
    *gone = oldest->allocation.identity;
    drop_export(exports, oldest);
    return true;
}

/* Adds the allocation around `at`. */
static smp_export *
add_export(smp_exports *exports, uint64_t identity, uint64_t at, void *stream,
           uint64_t *gone, char why[SMP_DRIVER_TEXT])
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
        .state = smp_driver_ok(driver, "cuIpcGetMemHandle", result, why)
                     ? SMP_EXPORT_NEW
                     : SMP_EXPORT_CLOSED,
    };
    return one;
}

smp_export *
smp_exports_find(smp_exports *exports, uint64_t at, size_t bytes, void *stream,
                 uint64_t *gone, char why[SMP_DRIVER_TEXT])
{
    const smp_driver *driver = exports->driver;
    smp_export       *one = NULL;
    uint64_t          identity;
    uint64_t          offset;

    snprintf(why, SMP_DRIVER_TEXT, "the tensor is not in one shared allocation");
    *gone = find_freed(exports);
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
    smp_import *next;
    uint64_t    identity;
    uint64_t    base; /* its owner's address */
    uint64_t    bytes;
    uint64_t    at; /* the address here */
};

/* A failure here is the device's, with no caller to tell. */
static void
close_at(smp_imports *imports, smp_import **link)
{
    smp_import *one = *link;

    *link = one->next;
    (void)imports->driver->memory_close(one->at);
    free(one);
}

static void
put_first(smp_imports *imports, smp_import *one)
{
    one->next = imports->first;
    imports->first = one;
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

/* Only one allocation has an address at a time. */
static void
close_predecessors(smp_imports *imports, const smp_allocation *allocation)
{
    smp_import **link = &imports->first;

    while (*link != NULL) {
        if (overlap((*link)->base, (*link)->bytes, allocation->base,
                    allocation->bytes)) {
            close_at(imports, link);
        } else {
            link = &(*link)->next;
        }
    }
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
    close_predecessors(imports, allocation);
    *one = (smp_import){.identity = allocation->identity,
                        .base = allocation->base,
                        .bytes = allocation->bytes};
    if (!smp_driver_ok(imports->driver, "cuIpcOpenMemHandle",
                       imports->driver->memory_open(&one->at, allocation->memory,
                                                    SMP_DRIVER_OPEN_WITH_PEERS),
                       why)) {
        free(one);
        return 0;
    }
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
        free(one);
    }
}
