/* A rank's card of its device pool for the others of its host: a part of its segment.
 *
 * The owner writes it when it makes the pool, once, and says so in `shown`.  Each other
 * rank with a device opens the pool then, and tries it with the pattern behind its end.
 * It writes the outcome on its own card, under the owner's number: in this order both
 * know the other's abilities, and neither has to wait.
 *
 *   owner's shown    NONE -> SHOWN -> WITHDRAWN   (its comm or device has ended)
 *   reader's card    NONE -> OPENING -> OPEN -> CLOSED   (pools[owner])
 *                                  \-> REFUSED
 *
 * A reader at OPENING or OPEN may touch the pool's memory; the owner sends to a reader
 * at OPEN.  A reader goes back to OPENING after a failure of its device, and stays
 * there after a failed trial: it still has the memory.
 *
 * A rank sets `distrusts` after a failed trial, for good.  Others see this before they
 * send to it or open its pool, give up likewise, and set theirs to the same rank: so a
 * broken path is off for all ranks of the host that send each other tensors.
 *
 * A *landing* is memory of the owner for a tensor that one other rank sends: that rank
 * writes the tensor there itself (comm/device/landings.h).
 *
 *   owner    NONE -> OPEN            the memory is free for use, by rank `source` alone
 *            OPEN -> NONE            it is taken back
 *   source   OPEN -> TAKEN           it writes there, or looks whether it can ...
 *            TAKEN -> OPEN, REFUSED    ... not yet, or never
 *            TAKEN -> SENT           its message is under way
 *            TAKEN -> LEFT           there is no message
 *   owner    SENT -> NONE            the tensor has come
 *            SENT -> LEFT            its message is dropped
 *            LEFT, REFUSED -> NONE   it has seen this
 *
 * The card shows the slabs of the owner's arena for tensors on their way through host
 * memory, too (comm/device/pinned.h): each is written before `nslabs` counts it, once.
 *
 * Status  Run by ranks on one shared H100, not yet between two GPUs.
 */
#ifndef SMP_COMM_MEMORY_DEVICE_CARD_H
#define SMP_COMM_MEMORY_DEVICE_CARD_H

#include <stdatomic.h>
#include <stdint.h>

#include "device/driver.h"

/* The most tensors in a pool at a time; each has an event of its own. */
#define SMP_DEVICE_SPANS 512u

/* The most landings of a rank. */
#define SMP_LANDINGS 64u

/* Bytes of each rank's pattern, behind the pool's own: to try the way of landings. */
#define SMP_LANDINGS_TRIAL_BYTES 4096u

/* The most slabs, and blocks in each at a time. */
#define SMP_PINNED_SLABS 16u
#define SMP_PINNED_SLOTS 1024u

enum { SMP_POOL_NONE = 0, SMP_POOL_SHOWN, SMP_POOL_WITHDRAWN };

enum {
    SMP_READER_NONE = 0,
    SMP_READER_OPENING,
    SMP_READER_OPEN,
    SMP_READER_REFUSED,
    SMP_READER_CLOSED
};

enum {
    SMP_LANDING_NONE = 0,
    SMP_LANDING_OPEN,
    SMP_LANDING_TAKEN,
    SMP_LANDING_SENT,
    SMP_LANDING_LEFT,
    SMP_LANDING_REFUSED
};

typedef struct {
    _Atomic uint32_t  state;  /* SMP_LANDING_* */
    _Atomic int32_t   source; /* like all but `written`, set before it is OPEN */
    _Atomic uint64_t  bytes;  /* of the tensor */
    uint64_t          offset; /* in its allocation (comm/device/allocations.h): */
    uint64_t          identity;
    uint64_t          base;
    uint64_t          allocated;
    smp_driver_handle memory;
    smp_driver_handle written; /* an event, shown by source: the tensor is there */
} smp_landing;

/* A part of the arena. */
typedef struct {
    uint64_t offset;
    uint64_t bytes;
} smp_pinned_slab;

typedef struct {
    _Atomic uint32_t shown;     /* SMP_POOL_*; the seven below are written before it */
    _Atomic uint32_t distrusts; /* 1 + the rank whose trial failed, as messages
                                name it; 0: none */
    uint64_t bytes;             /* of the pool; SMP_TRIAL_BYTES of a pattern follow,
                                   and each rank's SMP_LANDINGS_TRIAL_BYTES */
    uint64_t          seed;     /* of the pattern (common/pattern.h) */
    uint64_t          owner;    /* smp_allocations_owner() */
    uint64_t          base;     /* the owner's address */
    smp_driver_handle memory;
    smp_driver_handle tried; /* an event: the pattern is there */
    smp_driver_handle
                     events[SMP_DEVICE_SPANS]; /* written before the slot's first use */
    _Atomic uint32_t states[SMP_DEVICE_SPANS]; /* SMP_SLOT_* */
    smp_landing      landings[SMP_LANDINGS];
    _Atomic uint32_t nslabs;
    smp_pinned_slab  slabs[SMP_PINNED_SLABS];
    _Atomic uint32_t pools[]; /* by rank: SMP_READER_* of this rank */
} smp_device_card;

#endif
