/* Host memory pinned (page-locked) for a device: slabs of a rank's arena.
 *
 * A device copies to and from pageable memory through a buffer of the driver's, at a
 * fraction of the bus's rate.  The thread waits meanwhile.  So tensors on their way
 * through host memory lie in slabs.  The owner takes a slab out of its arena, registers
 * it with the driver, and shows it on its device card.  A reader on the same host
 * registers the slab in its own mapping, before its device's first copy out of it.
 *
 * A block lies in one slab, and nothing else does: the driver refuses a copy of a range
 * that is registered in part.
 *
 * The first slab has SMP_PINNED_SLAB bytes, each later one as many as all before it, or
 * a block's where the arena has no more.  Together they take half of the arena at most.
 *
 * Status     Not yet run on a GPU; the tests have a stand-in for the driver
 *            (tests/core/stand_in.c).
 * Threads    use_device: one at a time (the server's baton guarantees it).  Others:
 *            any; while one has the driver pin a slab, others find no new one.
 * Errors     None.  Where the driver refuses, no more is pinned from then on; `why` of
 *            measure has the driver's words.  In a forked child nothing is pinned.
 */
#ifndef SMP_COMM_DEVICE_PINNED_H
#define SMP_COMM_DEVICE_PINNED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/arena.h"
#include "comm/memory/block.h"
#include "comm/memory/segment.h"

typedef struct smp_pinned smp_pinned;

/* Bytes of the first slab, but at most an eighth of the arena. */
#define SMP_PINNED_SLAB ((size_t)64 << 20)

/* Smaller blocks would take all slots, and gain little.  Not measured. */
#define SMP_PINNED_LEAST ((size_t)16 << 10)

typedef struct {
    uint64_t    bytes;  /* of the own slabs */
    uint64_t    taken;  /* by them, from the arena */
    uint64_t    in_use; /* by blocks in them */
    uint64_t    high;   /* the sum of the most in each */
    const char *why;    /* why no more is pinned, "" if it may be; until destroy */
} smp_pinned_use;

/* Nothing is pinned yet, and no driver loaded.  Both are borrowed until destroy.  NULL:
 * no memory. */
smp_pinned *smp_pinned_create(smp_segment *own, smp_arena *arena);

/* Pinned memory becomes pageable.  No device copies from or to it any more.  Takes
 * NULL.
 */
void smp_pinned_destroy(smp_pinned *pinned);

/* Device number `device` is this rank's.  Cheap when it is known already. */
void smp_pinned_use_device(smp_pinned *pinned, int device);

/* A slot of the own segment with `bytes`, pinned, at *offset of its arena; given back
 * as the arena's own (SMP_SLOT_FREE).  False: none, and so below SMP_PINNED_LEAST. */
bool smp_pinned_take(smp_pinned *pinned, size_t bytes, uint32_t *slot,
                     uint64_t *offset);

/* Pins the slab of a received block in this process, if it lies in one and the device
 * is known. */
void smp_pinned_open(smp_pinned *pinned, const smp_block *block);

/* The books of the own slab with offset *offset of the arena; *offset becomes the
 * slab's.  NULL: no slab has it. */
smp_arena *smp_pinned_slab_at(const smp_pinned *pinned, uint64_t *offset);

void smp_pinned_measure(const smp_pinned *pinned, smp_pinned_use *use);

#endif
