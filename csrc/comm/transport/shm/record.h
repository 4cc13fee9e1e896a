/* The layout of a message in a ring.
 *
 *   head | one ref per block | the message's bytes | bytes of inline blocks
 *
 * each part padded to 8 bytes.  A message too long for the ring is written as such a
 * record into a block of its own.  The ring then holds a spilled record, with that
 * block as its one ref.
 *
 * Both sides are processes of one machine: host byte order.
 */
#ifndef SMP_COMM_TRANSPORT_SHM_RECORD_H
#define SMP_COMM_TRANSPORT_SHM_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/block.h"
#include "comm/memory/message.h"
#include "comm/memory/segment.h"
#include "common/status.h"

/* Up to this size a block's bytes are copied through the ring: cheaper than the cache
 * misses of a block's state, and the receiver's copy holds no pool memory. */
#define SMP_RECORD_INLINE 1024u

typedef enum {
    SMP_RECORD_WHOLE = 0x57u,
    SMP_RECORD_SPILLED = 0x53u,
} smp_record_kind;

/* The place of a block's bytes. */
typedef enum {
    SMP_IN_RECORD = 1,  /* at the record's end */
    SMP_IN_ARENA = 2,   /* in the sender's arena */
    SMP_IN_STREAM = 3,  /* they come separately, in order */
    SMP_ON_DEVICE = 4,  /* in the sender's device pool */
    SMP_IN_LANDING = 5, /* in a landing of the receiver */
} smp_place;

/* The place of a block for its travel; `own` is the sender's segment. */
smp_place smp_record_place(const smp_block *block, const smp_segment *own);

/* The bytes of smp_record_write(). */
size_t smp_record_bytes(size_t nbytes, smp_block *const *blocks, size_t nblocks,
                        const smp_segment *own);

/* `to` is 8-byte aligned. */
void smp_record_write(void *to, smp_record_kind kind, const void *bytes, size_t nbytes,
                      smp_block *const *blocks, size_t nblocks, const smp_segment *own);

/* Makes a message of the record at `from`.  Its writer (`source`, owner of the segment
 * `theirs`) may still be changing it: every byte is read once.  `own` is the reader's.
 * Separate blocks are NULL, *missing of them.  A spilled record's message has one
 * block, the record. SMP_ERR_MALFORMED, SMP_ERR_NO_MEMORY. */
smp_status smp_record_read(const void *from, size_t n, int source, smp_segment *theirs,
                           smp_segment *own, smp_message **out, smp_record_kind *kind,
                           size_t *missing);

#endif
