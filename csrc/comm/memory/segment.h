/* One rank's shared memory: its doorbell, the rings to it, its control blocks, its
 * arena.
 *
 *   doorbell | states of the arena's blocks | ring from rank 0 | ring from rank 1 |
 *   ... | control blocks of groups | card of the device pool | arena
 *
 * Made by its owner, mapped by every peer on the host; never by name, so nothing is
 * left when the job is killed.  Sealed: no process can truncate it under a reader.
 *
 * Ownership  Counted references; the last one unmaps.  A block holds one, so received
 *            memory outlives the comm.
 * Threads    any.
 */
#ifndef SMP_COMM_MEMORY_SEGMENT_H
#define SMP_COMM_MEMORY_SEGMENT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "comm/memory/control_block.h"
#include "comm/memory/device_card.h"
#include "comm/memory/doorbell.h"
#include "comm/memory/ring.h"
#include "common/status.h"

/* State of a slot of the arena, in shared memory.  Giving a block back is one store of
 * SMP_SLOT_FREE, by its holder; all other stores are the owner's. */
enum {
    SMP_SLOT_FREE = 0,
    SMP_SLOT_TAKEN = 1,
    SMP_SLOT_SENT = 2 /* of a device card: it is not its owner's any more */
};

typedef struct smp_segment {
    _Atomic uint32_t   references;
    int                fd; /* owned; -1 once no rank needs to be given it */
    uint8_t           *base;
    size_t             bytes;    /* of the mapping */
    smp_doorbell      *doorbell; /* this and all below: into the mapping */
    _Atomic uint32_t  *states;
    uint32_t           nslots;
    uint32_t           arena_slots; /* the first ones; the others are its slabs' */
    smp_ring          *rings;       /* rings[r]: from rank r to the owner */
    int                nrings;
    smp_control_block *controls; /* SMP_CONTROL_BLOCKS */
    smp_device_card   *device;
    uint8_t           *arena;
    size_t             arena_bytes;
} smp_segment;

/* The segment of another rank, or of this one. */
typedef struct {
    smp_segment *segment; /* borrowed; take a reference to keep it */
    pid_t        pid;     /* as this process sees it; 0: it does not (another pid
                             namespace) */
} smp_neighbour;

/* A new one with `ranks` rings and an arena of arena_bytes (rounded up to pages); one
 * reference.  SMP_ERR_NO_MEMORY, SMP_ERR_SYSTEM. */
smp_status smp_segment_create(int ranks, size_t arena_bytes, smp_segment **out);

/* Maps a peer's segment; the caller keeps fd.  SMP_ERR_MALFORMED: not one from
 * smp_segment_create(ranks, arena_bytes); SMP_ERR_SYSTEM; SMP_ERR_NO_MEMORY. */
smp_status smp_segment_attach(int fd, int ranks, size_t arena_bytes, smp_segment **out);

/* Makes the pages of a part of a segment created here, ahead of its use. */
void smp_segment_make_pages(void *from, size_t bytes);

/* Closes the descriptor; the mapping stays. */
void smp_segment_close_fd(smp_segment *segment);

void smp_segment_ref(smp_segment *segment);

/* Takes NULL. */
void smp_segment_unref(smp_segment *segment);

#endif
