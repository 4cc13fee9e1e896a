/* Layout and mapping of a segment. */
#define _GNU_SOURCE
#include "comm/memory/segment.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* older C libraries */
#    define MADV_POPULATE_WRITE 23
#endif

#define PAGE 4096u

/* Seals: the size is final. */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* One slot per this many bytes of arena: blocks below SMP_RECORD_INLINE do not come
 * from it, and running out of slots is the same as running out of bytes. */
#define BYTES_PER_SLOT 4096u
#define MIN_SLOTS 256u
#define MAX_SLOTS (1u << 20)

/* No rank has more: keeps sums of sizes far from overflow. */
#define MAX_ARENA ((size_t)1 << 46)

static size_t
pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static uint32_t
slots_for(size_t arena_bytes)
{
    size_t slots = arena_bytes / BYTES_PER_SLOT;

    if (slots < MIN_SLOTS) {
        return MIN_SLOTS;
    }
    return slots > MAX_SLOTS ? MAX_SLOTS : (uint32_t)slots;
}

static size_t
device_card_bytes(int ranks)
{
    return pages(sizeof(smp_device_card) + (size_t)ranks * sizeof(uint32_t));
}

/* The struct for this shape, without a mapping. */
static smp_segment *
shape(int ranks, size_t arena_bytes)
{
    smp_segment *segment = calloc(1, sizeof(*segment));

    if (segment == NULL) {
        return NULL;
    }
    atomic_init(&segment->references, 1);
    segment->fd = -1;
    segment->nrings = ranks;
    segment->arena_slots = slots_for(arena_bytes);
    segment->nslots = segment->arena_slots + SMP_PINNED_SLABS * SMP_PINNED_SLOTS;
    segment->arena_bytes = pages(arena_bytes);
    segment->bytes = PAGE + pages(segment->nslots * sizeof(uint32_t)) +
                     pages((size_t)ranks * sizeof(smp_ring)) +
                     pages(SMP_CONTROL_BLOCKS * sizeof(smp_control_block)) +
                     device_card_bytes(ranks) + segment->arena_bytes;
    return segment;
}

static smp_status
map(smp_segment *segment, int fd)
{
    uint8_t *at;
    void *base = mmap(NULL, segment->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED) {
        return errno == ENOMEM ? SMP_ERR_NO_MEMORY : smp_status_refused();
    }
    segment->base = base;
    at = segment->base;
    segment->doorbell = (smp_doorbell *)(void *)at;
    at += PAGE;
    segment->states = (_Atomic uint32_t *)(void *)at;
    at += pages(segment->nslots * sizeof(uint32_t));
    segment->rings = (smp_ring *)(void *)at;
    at += pages((size_t)segment->nrings * sizeof(smp_ring));
    segment->controls = (smp_control_block *)(void *)at;
    at += pages(SMP_CONTROL_BLOCKS * sizeof(smp_control_block));
    segment->device = (smp_device_card *)(void *)at;
    at += device_card_bytes(segment->nrings);
    segment->arena = at;
    return SMP_OK;
}

smp_status
smp_segment_create(int ranks, size_t arena_bytes, smp_segment **out)
{
    smp_segment *segment;
    smp_status   status;

    if (arena_bytes > MAX_ARENA) {
        return SMP_ERR_NO_MEMORY;
    }
    segment = shape(ranks, arena_bytes);
    if (segment == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    segment->fd = memfd_create("smp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (segment->fd < 0) {
        status = smp_status_refused();
        goto err_free;
    }
    if (ftruncate(segment->fd, (off_t)segment->bytes) != 0 ||
        fcntl(segment->fd, F_ADD_SEALS, SEALS) != 0) {
        status = smp_status_refused();
        goto err_close;
    }
    status = map(segment, segment->fd);
    if (status != SMP_OK) {
        goto err_close;
    }
    *out = segment;
    return SMP_OK;

err_close:
    close(segment->fd);
err_free:
    free(segment);
    return status;
}

smp_status
smp_segment_attach(int fd, int ranks, size_t arena_bytes, smp_segment **out)
{
    smp_segment *segment;
    struct stat  found;
    smp_status   status = SMP_ERR_MALFORMED;
    int          seals = fcntl(fd, F_GET_SEALS);

    if (arena_bytes > MAX_ARENA || fstat(fd, &found) != 0 || seals < 0 ||
        (seals & F_SEAL_SHRINK) == 0) {
        return SMP_ERR_MALFORMED;
    }
    segment = shape(ranks, arena_bytes);
    if (segment == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    if (found.st_size != (off_t)segment->bytes) {
        goto err_free;
    }
    status = map(segment, fd);
    if (status != SMP_OK) {
        goto err_free;
    }
    *out = segment;
    return SMP_OK;

err_free:
    free(segment);
    return status;
}

void
smp_segment_make_pages(void *from, size_t bytes)
{
    uint8_t *page = (uint8_t *)from - (uintptr_t)from % PAGE;

    /* Older kernels refuse, and then pages are made at first use: slower, no worse. */
    (void)madvise(page, bytes, MADV_POPULATE_WRITE);
}

void
smp_segment_close_fd(smp_segment *segment)
{
    if (segment->fd >= 0) {
        close(segment->fd);
        segment->fd = -1;
    }
}

void
smp_segment_ref(smp_segment *segment)
{
    atomic_fetch_add_explicit(&segment->references, 1, memory_order_relaxed);
}

void
smp_segment_unref(smp_segment *segment)
{
    if (segment == NULL || atomic_fetch_sub(&segment->references, 1) != 1) {
        return;
    }
    smp_segment_close_fd(segment);
    munmap(segment->base, segment->bytes);
    free(segment);
}
