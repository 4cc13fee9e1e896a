/* Memory for one tensor: in a segment, in this process's own memory, in the device pool
 * of a segment's owner, or in a landing of the receiver (comm/memory/device_card.h).
 *
 * The struct's members, and all functions from smp_block_private() on, are for the
 * files of csrc/comm alone.
 */
#ifndef SMP_COMM_MEMORY_BLOCK_H
#define SMP_COMM_MEMORY_BLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

/* Alignment of every block's data, in bytes. */
#define SMP_BLOCK_ALIGN 64

typedef struct smp_block smp_block;

typedef struct smp_segment smp_segment;

void  *smp_block_data(const smp_block *block); /* NULL: it is on a device */
size_t smp_block_bytes(const smp_block *block);

/* Gives a block back: to its sender's arena, or to the heap.  Any thread, also
 * after smp_comm_destroy().  Takes NULL. */
void smp_block_release(smp_block *block);

struct smp_block {
    void        *data; /* in the segment, or behind this struct; NULL: on a device */
    size_t       bytes;
    smp_segment *segment; /* owned: one reference; NULL: private memory */
    bool         lands;   /* it is a landing of the segment's owner */
    uint32_t     slot; /* of the segment, or of its device card; the landing's number */
    uint64_t     offset;     /* in the device pool; 0 for others */
    uint32_t     generation; /* smp_fork_generation() when made */
    uint32_t     epoch;      /* smp_fork_epoch() when made */
    smp_block   *next;       /* in its owning list, else NULL */
};

/* First in, first out; all zero is empty. */
typedef struct {
    smp_block *head; /* owned */
    smp_block *tail;
} smp_block_list;

/* One in private memory.  SMP_ERR_NO_MEMORY. */
smp_status smp_block_private(size_t bytes, smp_block **out);

/* A handle on the taken slot of a segment; holds a reference to the segment.  On
 * failure (SMP_ERR_NO_MEMORY) the slot is still taken. */
smp_status smp_block_shared(smp_segment *segment, uint32_t slot, uint64_t offset,
                            size_t bytes, smp_block **out);

/* The same for a span of the device pool on the segment's device card. */
smp_status smp_block_on_device(smp_segment *segment, uint32_t slot, uint64_t offset,
                               size_t bytes, smp_block **out);

/* The same for a taken landing of the segment's owner. */
smp_status smp_block_landing(smp_segment *segment, uint32_t landing, size_t bytes,
                             smp_block **out);

void       smp_block_list_put(smp_block_list *list, smp_block *block);
smp_block *smp_block_list_get(smp_block_list *list); /* NULL: empty */

/* Releases all of them. */
void smp_block_list_clear(smp_block_list *list);

/* Frees the handle of a shared block and leaves its slot taken: another rank in the job
 * holds it now. */
void smp_block_forget(smp_block *block);

/* The same for one on a device, before the receiver can see it: from now on it comes
 * back from the receiver, or after the receiver's death (comm/device/pool.h).  A
 * landing is its owner's again. */
void smp_block_hand_over(smp_block *block);

#endif
