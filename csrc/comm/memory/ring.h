/* A queue of byte strings in shared memory, from one producer to one consumer.
 *
 * Entries lie whole (never wrapped), each starting on a cache line behind an 8-byte
 * mark.  tail and head count bytes since the beginning and never wrap.
 *
 *      head                      tail
 *   ....[mark|entry....][mark|entry.]..........[mark: pad to the end]
 *
 * Neither end trusts the other: it checks values from shared memory, and keeps those
 * needed twice in its own struct.
 *
 * Threads  The producer's functions: one thread at a time.  The consumer's: one
 *          thread at a time.
 * Errors   SMP_ERR_MALFORMED: the other end wrote values unknown to this code.
 */
#ifndef SMP_COMM_MEMORY_RING_H
#define SMP_COMM_MEMORY_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

#define SMP_RING_BYTES 65536u

/* The longest entry: with its mark a quarter of the ring: half a ring has room for any
 * entry and the pad before.  A longer message goes into a block. */
#define SMP_RING_ENTRY_BYTES (SMP_RING_BYTES / 4 - 64)

/* In shared memory; all zero is empty.  Each counter has a cache line of its own. */
typedef struct {
    _Alignas(64) _Atomic uint64_t tail;   /* the producer's */
    _Alignas(64) _Atomic uint64_t head;   /* the consumer's */
    _Alignas(64) _Atomic uint32_t hungry; /* 1: the producer waits for room */
    _Alignas(64) uint8_t data[SMP_RING_BYTES];
} smp_ring;

typedef struct {
    smp_ring *ring; /* borrowed */
    uint64_t  tail; /* the published end */
    uint64_t  next; /* tail after the reserved entry */
    uint64_t  head; /* the consumer's, as last seen */
} smp_ring_producer;

typedef struct {
    smp_ring *ring; /* borrowed */
    uint64_t  head;
    uint64_t  next; /* head after the peeked entry */
    uint64_t  tail; /* the producer's, as last seen */
} smp_ring_consumer;

/* Room for one entry of `bytes`, 8-byte aligned, until commit; NULL in *out when the
 * ring is full.  A second reserve replaces the first. */
smp_status smp_ring_reserve(smp_ring_producer *producer, size_t bytes, void **out);

/* Publishes the reserved entry (seq_cst: a doorbell may be rung after it). */
void smp_ring_commit(smp_ring_producer *producer);

/* Asks for a call when there is room; reserve once more before waiting for it. */
void smp_ring_ask_for_room(smp_ring_producer *producer);

/* The oldest entry, until advance; NULL in *out when the ring is empty.  The producer
 * can still change those bytes: copy before checking them. */
smp_status smp_ring_peek(smp_ring_consumer *consumer, const void **out, size_t *bytes);

/* Drops the peeked entry.  True: the producer has asked to be told of room, and there
 * is enough for any entry (half the ring: a call per entry would be dear). */
bool smp_ring_advance(smp_ring_consumer *consumer);

#endif
