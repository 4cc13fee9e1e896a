/* The bytes handed out from the own segment's arena; or from a device's memory, with
 * the states in the own segment.
 *
 * A good-fit allocator in the manner of two-level segregated fit: constant time, free
 * neighbours are joined, small holes are used first, so the pages in use stay few and
 * warm.  Its books are private to the owner: another process's death or mistake cannot
 * damage them.
 *
 * A block is given back by storing SMP_SLOT_FREE into its state in shared memory, from
 * any process.  The owner notices at later calls of take, and leaves the block as long
 * as another process may write into it (smp_arena_keep).
 *
 * Threads  any.
 */
#ifndef SMP_COMM_MEMORY_ARENA_H
#define SMP_COMM_MEMORY_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/segment.h"
#include "comm/memory/user.h"
#include "common/status.h"

typedef struct smp_arena smp_arena;

typedef struct {
    uint64_t in_use; /* bytes handed out and not given back */
    uint64_t high;   /* the most of in_use */
    uint64_t made;   /* bytes with pages: the arena's use of the machine's memory */
    uint64_t size;
} smp_arena_use;

/* An arena's memory, and the states of its blocks. */
typedef struct {
    _Atomic uint32_t *states; /* in the segment */
    uint32_t          nslots;
    uint64_t          bytes; /* a multiple of 64 */
    uint8_t *memory;         /* NULL: not in this process's memory, it needs no pages */
} smp_arena_ground;

/* Over the segment's own memory.  Holds a reference to it.  SMP_ERR_NO_MEMORY. */
smp_status smp_arena_create(smp_segment *segment, smp_arena **out);

/* Over something else.  Holds a reference to the segment.  SMP_ERR_NO_MEMORY. */
smp_status smp_arena_create_over(smp_segment *segment, const smp_arena_ground *ground,
                                 smp_arena **out);

/* Taken blocks stay valid.  Takes NULL. */
void smp_arena_destroy(smp_arena *arena);

/* `bytes` at *offset of the memory, aligned to 64; false: no room. */
bool smp_arena_take(smp_arena *arena, size_t bytes, uint32_t *slot, uint64_t *offset);

/* Blocks in [offset, offset + bytes), once given back, stay taken while one of users[0
 * .. n) operates on them (smp_user_operates(last)).  Takes the users.  Without memory
 * for the range nothing is kept. */
void smp_arena_keep(smp_arena *arena, uint64_t offset, uint64_t bytes, smp_user *users,
                    int n, uint64_t last);

/* Looks at all blocks first: in_use is exact. */
void smp_arena_measure(smp_arena *arena, smp_arena_use *use);

/* So many bytes will be in use: their pages are wanted. */
void smp_arena_expect(smp_arena *arena, uint64_t bytes);

/* Whether pages ahead of the highest use so far, or expected, should be made now. */
bool smp_arena_wants_pages(const smp_arena *arena);

/* Makes some of them; a thread with time on its hands calls it while it is wanted. */
void smp_arena_make_pages(smp_arena *arena);

#endif
