/* Scratch: arrays cut one after the other from the caller's memory.
 *
 * With base NULL nothing is handed out and `used` grows all the same, so one function
 * both measures and lays out.
 *
 * Ownership  The memory stays the caller's.
 * Threads    The caller's.
 */
#ifndef SMP_PARTITION_SCRATCH_H
#define SMP_PARTITION_SCRATCH_H

#include <stddef.h>
#include <stdint.h>

#define SMP_SCRATCH_ALIGN 8

typedef struct {
    uint8_t *base; /* borrowed; NULL: only measure */
    size_t   used;
} smp_scratch;

/* Room for `count` things of `bytes` each, not initialised. */
static inline void *
smp_scratch_take(smp_scratch *scratch, size_t count, size_t bytes)
{
    size_t at = scratch->used;
    size_t room = (count * bytes + SMP_SCRATCH_ALIGN - 1) / SMP_SCRATCH_ALIGN;

    scratch->used += room * SMP_SCRATCH_ALIGN;
    return scratch->base == NULL ? NULL : scratch->base + at;
}

#endif
