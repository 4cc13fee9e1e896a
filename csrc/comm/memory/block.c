/* Handles on blocks, and the one store for a block's return. */
#include "comm/memory/block.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "comm/memory/segment.h"
#include "common/fork.h"

smp_status
smp_block_private(size_t bytes, smp_block **out)
{
    smp_block *block;
    uintptr_t  at;

    if (bytes > SIZE_MAX / 2) {
        return SMP_ERR_NO_MEMORY;
    }
    block = malloc(sizeof(*block) + SMP_BLOCK_ALIGN - 1 + bytes);
    if (block == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    at = (uintptr_t)(block + 1);
    *block = (smp_block){
        .data = (uint8_t *)(block + 1) +
                (SMP_BLOCK_ALIGN - at % SMP_BLOCK_ALIGN) % SMP_BLOCK_ALIGN,
        .bytes = bytes,
    };
    *out = block;
    return SMP_OK;
}

/* A handle on a slot of the segment; `data` is NULL for one of its device card. */
static smp_status
make_handle(smp_segment *segment, uint32_t slot, void *data, uint64_t offset,
            size_t bytes, smp_block **out)
{
    smp_block *block = malloc(sizeof(*block));

    if (block == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    smp_segment_ref(segment);
    *block = (smp_block){
        .data = data,
        .bytes = bytes,
        .segment = segment,
        .slot = slot,
        .offset = offset,
        .generation = smp_fork_generation(),
        .epoch = smp_fork_epoch(),
    };
    *out = block;
    return SMP_OK;
}

smp_status
smp_block_shared(smp_segment *segment, uint32_t slot, uint64_t offset, size_t bytes,
                 smp_block **out)
{
    return make_handle(segment, slot, segment->arena + offset, 0, bytes, out);
}

smp_status
smp_block_on_device(smp_segment *segment, uint32_t slot, uint64_t offset, size_t bytes,
                    smp_block **out)
{
    return make_handle(segment, slot, NULL, offset, bytes, out);
}

smp_status
smp_block_landing(smp_segment *segment, uint32_t landing, size_t bytes, smp_block **out)
{
    smp_status status = make_handle(segment, landing, NULL, 0, bytes, out);

    if (status == SMP_OK) {
        (*out)->lands = true;
    }
    return status;
}

void
smp_block_list_put(smp_block_list *list, smp_block *block)
{
    block->next = NULL;
    if (list->head == NULL) {
        list->head = block;
    } else {
        list->tail->next = block;
    }
    list->tail = block;
}

smp_block *
smp_block_list_get(smp_block_list *list)
{
    smp_block *block = list->head;

    if (block != NULL) {
        list->head = block->next;
        block->next = NULL;
    }
    return block;
}

void
smp_block_list_clear(smp_block_list *list)
{
    smp_block *block;

    while ((block = smp_block_list_get(list)) != NULL) {
        smp_block_release(block);
    }
}

void
smp_block_forget(smp_block *block)
{
    smp_segment_unref(block->segment);
    free(block);
}

void
smp_block_hand_over(smp_block *block)
{
    smp_device_card *card = block->segment->device;

    if (block->lands) {
        atomic_store_explicit(&card->landings[block->slot].state, SMP_LANDING_SENT,
                              memory_order_release);
    } else {
        atomic_store_explicit(&card->states[block->slot], SMP_SLOT_SENT,
                              memory_order_release);
    }
    smp_block_forget(block);
}

/* The store: after it the sender may use the bytes again. */
static void
give_back(void *arg)
{
    smp_block       *block = arg;
    smp_device_card *card = block->segment->device;

    if (block->lands) {
        atomic_store_explicit(&card->landings[block->slot].state, SMP_LANDING_LEFT,
                              memory_order_release);
    } else {
        _Atomic uint32_t *states =
            block->data == NULL ? card->states : block->segment->states;

        atomic_store_explicit(&states[block->slot], SMP_SLOT_FREE,
                              memory_order_release);
    }
    smp_block_forget(block);
}

void
smp_block_release(smp_block *block)
{
    if (block == NULL) {
        return;
    }
    if (block->segment == NULL) {
        free(block);
    } else if (block->generation != smp_fork_generation()) {
        smp_block_forget(block);      /* a child's copy; the parent holds the block */
    } else if (block->data == NULL || /* a child sees nothing of a device */
               block->epoch == smp_fork_epoch() ||
               !smp_fork_defer(block->epoch, give_back, block)) {
        give_back(block);
    }
}

void *
smp_block_data(const smp_block *block)
{
    return block->data;
}

size_t
smp_block_bytes(const smp_block *block)
{
    return block->bytes;
}
