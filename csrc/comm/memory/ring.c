/* Both ends of the ring; see the header for the picture. */
#include "comm/memory/ring.h"

#include <assert.h>
#include <string.h>

#include "common/jitter.h"

#define LINE 64u

/* The mark before an entry's bytes. */
typedef struct {
    uint32_t bytes; /* of the entry */
    uint32_t kind;  /* MARK_* */
} mark;

enum { MARK_ENTRY = 0x45u, MARK_PAD = 0x50u };

/* Bytes of an entry in the ring. */
static uint64_t
span_of(size_t bytes)
{
    return (sizeof(mark) + bytes + LINE - 1) / LINE * LINE;
}

static uint64_t
room(const smp_ring_producer *producer)
{
    return SMP_RING_BYTES - (producer->tail - producer->head);
}

static smp_status
see_head(smp_ring_producer *producer)
{
    uint64_t head = atomic_load(&producer->ring->head);

    if (producer->tail - head > SMP_RING_BYTES || head % LINE != 0) {
        return SMP_ERR_MALFORMED;
    }
    producer->head = head;
    return SMP_OK;
}

static void
put_mark(smp_ring *ring, uint64_t at, mark value)
{
    memcpy(&ring->data[at], &value, sizeof(value));
}

smp_status
smp_ring_reserve(smp_ring_producer *producer, size_t bytes, void **out)
{
    uint64_t   at = producer->tail % SMP_RING_BYTES;
    uint64_t   to_end = SMP_RING_BYTES - at;
    uint64_t   span = span_of(bytes);
    uint64_t   pad = span > to_end ? to_end : 0;
    smp_status status;

    assert(bytes <= SMP_RING_ENTRY_BYTES);
    if (room(producer) < pad + span) {
        status = see_head(producer);
        if (status != SMP_OK) {
            return status;
        }
        if (room(producer) < pad + span) {
            *out = NULL;
            return SMP_OK;
        }
    }
    if (pad != 0) {
        put_mark(producer->ring, at, (mark){0, MARK_PAD});
    }
    at = (at + pad) % SMP_RING_BYTES;
    put_mark(producer->ring, at, (mark){(uint32_t)bytes, MARK_ENTRY});
    producer->next = producer->tail + pad + span;
    *out = &producer->ring->data[at + sizeof(mark)];
    return SMP_OK;
}

void
smp_ring_commit(smp_ring_producer *producer)
{
    smp_jitter();
    producer->tail = producer->next;
    atomic_store(&producer->ring->tail, producer->tail);
}

void
smp_ring_ask_for_room(smp_ring_producer *producer)
{
    atomic_store(&producer->ring->hungry, 1);
    smp_jitter();
}

smp_status
smp_ring_peek(smp_ring_consumer *consumer, const void **out, size_t *bytes)
{
    smp_ring *ring = consumer->ring;
    uint64_t  tail = atomic_load(&ring->tail);

    smp_jitter();
    if (tail - consumer->head > SMP_RING_BYTES || tail % LINE != 0) {
        return SMP_ERR_MALFORMED;
    }
    consumer->tail = tail;
    while (tail != consumer->head) {
        uint64_t at = consumer->head % SMP_RING_BYTES;
        uint64_t to_end = SMP_RING_BYTES - at;
        uint64_t there = tail - consumer->head;
        mark     found;

        memcpy(&found, &ring->data[at], sizeof(found));
        if (found.kind == MARK_PAD) {
            if (to_end > there || at == 0) {
                return SMP_ERR_MALFORMED; /* a pad of a whole ring would never end */
            }
            consumer->head += to_end;
            continue;
        }
        if (found.kind != MARK_ENTRY || found.bytes > SMP_RING_ENTRY_BYTES ||
            span_of(found.bytes) > there || span_of(found.bytes) > to_end) {
            return SMP_ERR_MALFORMED;
        }
        consumer->next = consumer->head + span_of(found.bytes);
        *out = &ring->data[at + sizeof(mark)];
        *bytes = found.bytes;
        return SMP_OK;
    }
    *out = NULL;
    return SMP_OK;
}

bool
smp_ring_advance(smp_ring_consumer *consumer)
{
    smp_ring *ring = consumer->ring;

    smp_jitter();
    consumer->head = consumer->next;
    atomic_store(&ring->head, consumer->head);
    return consumer->tail - consumer->head <= SMP_RING_BYTES / 2 &&
           atomic_load(&ring->hungry) != 0 && atomic_exchange(&ring->hungry, 0) != 0;
}
