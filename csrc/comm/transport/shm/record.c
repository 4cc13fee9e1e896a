/* Writing and reading records. */
#include "comm/transport/shm/record.h"

#include <assert.h>
#include <string.h>

#include "comm/memory/message.h"

typedef struct {
    uint32_t kind; /* smp_record_kind */
    uint32_t nblocks;
    uint64_t nbytes;
} head;

typedef struct {
    uint32_t place; /* smp_place */
    uint32_t slot;  /* in the arena or on the device card, else 0 */
    uint64_t offset;
    uint64_t bytes;
} ref;

static size_t
padded(size_t bytes)
{
    return (bytes + 7) / 8 * 8;
}

smp_place
smp_record_place(const smp_block *block, const smp_segment *own)
{
    if (block->lands) {
        return SMP_IN_LANDING;
    }
    if (block->segment == own) {
        return block->data == NULL ? SMP_ON_DEVICE : SMP_IN_ARENA;
    }
    return block->bytes <= SMP_RECORD_INLINE ? SMP_IN_RECORD : SMP_IN_STREAM;
}

size_t
smp_record_bytes(size_t nbytes, smp_block *const *blocks, size_t nblocks,
                 const smp_segment *own)
{
    size_t bytes = sizeof(head) + nblocks * sizeof(ref) + padded(nbytes);

    for (size_t i = 0; i < nblocks; i++) {
        if (smp_record_place(blocks[i], own) == SMP_IN_RECORD) {
            bytes += padded(blocks[i]->bytes);
        }
    }
    return bytes;
}

void
smp_record_write(void *to, smp_record_kind kind, const void *bytes, size_t nbytes,
                 smp_block *const *blocks, size_t nblocks, const smp_segment *own)
{
    head    *h = to;
    ref     *refs = (ref *)(h + 1);
    uint8_t *at = (uint8_t *)(refs + nblocks);

    *h = (head){(uint32_t)kind, (uint32_t)nblocks, nbytes};
    if (nbytes != 0) {
        memcpy(at, bytes, nbytes);
    }
    at += padded(nbytes);
    for (size_t i = 0; i < nblocks; i++) {
        const smp_block *block = blocks[i];

        refs[i] = (ref){.place = smp_record_place(block, own), .bytes = block->bytes};
        if (refs[i].place == SMP_IN_ARENA) {
            refs[i].slot = block->slot;
            refs[i].offset = (uint64_t)((uint8_t *)block->data - own->arena);
        } else if (refs[i].place == SMP_ON_DEVICE || refs[i].place == SMP_IN_LANDING) {
            refs[i].slot = block->slot;
            refs[i].offset = block->offset;
        } else if (refs[i].place == SMP_IN_RECORD) {
            memcpy(at, block->data, block->bytes);
            at += padded(block->bytes);
        }
    }
}

/* Makes block i from its ref.  *inlined: the remaining bytes of inline blocks. */
static smp_status
read_block(const ref *r, const uint8_t **inlined, size_t *left, int source,
           smp_segment *theirs, smp_segment *own, smp_block **out, size_t *missing)
{
    const smp_landing *landing;
    uint64_t           pool;
    smp_status         status;

    switch (r->place) {
    case SMP_IN_RECORD:
        if (r->bytes > SMP_RECORD_INLINE || padded(r->bytes) > *left) {
            return SMP_ERR_MALFORMED;
        }
        status = smp_block_private(r->bytes, out);
        if (status == SMP_OK) {
            memcpy((*out)->data, *inlined, r->bytes);
            *inlined += padded(r->bytes);
            *left -= padded(r->bytes);
        }
        return status;
    case SMP_IN_ARENA:
        if (r->slot >= theirs->nslots || r->offset % SMP_BLOCK_ALIGN != 0 ||
            r->offset > theirs->arena_bytes ||
            r->bytes > theirs->arena_bytes - r->offset) {
            return SMP_ERR_MALFORMED;
        }
        return smp_block_shared(theirs, r->slot, r->offset, r->bytes, out);
    case SMP_ON_DEVICE:
        pool = theirs->device->bytes;
        if (r->slot >= SMP_DEVICE_SPANS || r->offset > pool ||
            r->bytes > pool - r->offset) {
            return SMP_ERR_MALFORMED;
        }
        return smp_block_on_device(theirs, r->slot, r->offset, r->bytes, out);
    case SMP_IN_LANDING:
        landing = &own->device->landings[r->slot % SMP_LANDINGS];
        if (r->slot >= SMP_LANDINGS ||
            atomic_load(&landing->state) != SMP_LANDING_SENT ||
            landing->source != source || landing->bytes != r->bytes) {
            return SMP_ERR_MALFORMED;
        }
        return smp_block_landing(own, r->slot, r->bytes, out);
    case SMP_IN_STREAM:
        (*missing)++;
        return SMP_OK;
    default:
        return SMP_ERR_MALFORMED;
    }
}

smp_status
smp_record_read(const void *from, size_t n, int source, smp_segment *theirs,
                smp_segment *own, smp_message **out, smp_record_kind *kind,
                size_t *missing)
{
    head           h;
    smp_message   *message;
    const ref     *refs;
    const uint8_t *inlined;
    size_t         left;
    smp_status     status;

    if (n < sizeof(h)) {
        return SMP_ERR_MALFORMED;
    }
    memcpy(&h, from, sizeof(h));
    left = n - sizeof(h);
    if ((h.kind != SMP_RECORD_WHOLE && h.kind != SMP_RECORD_SPILLED) ||
        (h.kind == SMP_RECORD_SPILLED && (h.nblocks != 1 || h.nbytes != 0)) ||
        h.nblocks > left / sizeof(ref)) {
        return SMP_ERR_MALFORMED;
    }
    left -= h.nblocks * sizeof(ref);
    if (h.nbytes > left || padded(h.nbytes) > left) {
        return SMP_ERR_MALFORMED;
    }
    left -= padded(h.nbytes);

    status = smp_message_create(source, n - sizeof(h), h.nblocks, &message);
    if (status != SMP_OK) {
        return status;
    }
    memcpy(message->bytes, (const uint8_t *)from + sizeof(h), n - sizeof(h));
    refs = (const ref *)(const void *)message->bytes;
    message->bytes += h.nblocks * sizeof(ref);
    message->nbytes = h.nbytes;
    inlined = message->bytes + padded(h.nbytes);
    *missing = 0;
    for (size_t i = 0; i < h.nblocks && status == SMP_OK; i++) {
        status = read_block(&refs[i], &inlined, &left, source, theirs, own,
                            &message->blocks[i], missing);
    }
    /* A record in a block is read by this process itself. */
    if (status == SMP_OK && (left != 0 || (h.kind == SMP_RECORD_SPILLED &&
                                           (refs[0].place == SMP_ON_DEVICE ||
                                            refs[0].place == SMP_IN_LANDING)))) {
        status = SMP_ERR_MALFORMED;
    }
    if (status != SMP_OK) {
        smp_message_free(message);
        return status;
    }
    *out = message;
    *kind = (smp_record_kind)h.kind;
    return SMP_OK;
}
