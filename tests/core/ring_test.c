/* Spec: csrc/comm/memory/ring.h. */
#define _GNU_SOURCE
#include "comm/memory/ring.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "check.h"

/* All zero is empty. */
static smp_ring *
make_ring(void)
{
    smp_ring *ring = aligned_alloc(64, sizeof(*ring));

    memset(ring, 0, sizeof(*ring));
    return ring;
}

static size_t
size_of(uint64_t i)
{
    return i * 2654435761u % (i % 7 == 0 ? SMP_RING_ENTRY_BYTES + 1 : 300);
}

enum { PASSED = 20000 };

static void *
produce(void *arg)
{
    smp_ring_producer producer = {.ring = arg};

    for (uint64_t i = 0; i < PASSED; i++) {
        void *to;

        while (smp_ring_reserve(&producer, size_of(i), &to) == SMP_OK && to == NULL) {
            sched_yield();
        }
        if (to == NULL) {
            return "malformed";
        }
        memset(to, (int)(i % 251), size_of(i));
        smp_ring_commit(&producer);
    }
    return NULL;
}

TEST(entries_come_out_whole_and_in_order)
{
    smp_ring         *ring = make_ring();
    smp_ring_consumer consumer = {.ring = ring};
    pthread_t         thread;
    void             *wrong;

    CHECK(pthread_create(&thread, NULL, produce, ring) == 0);
    for (uint64_t i = 0; i < PASSED;) {
        const void *from;
        size_t      bytes;

        CHECK_OK(smp_ring_peek(&consumer, &from, &bytes));
        if (from == NULL) {
            sched_yield();
            continue;
        }
        CHECK(bytes == size_of(i) && (uintptr_t)from % 8 == 0);
        for (size_t j = 0; j < bytes; j++) {
            CHECK(((const uint8_t *)from)[j] == i % 251);
        }
        smp_ring_advance(&consumer);
        i++;
    }
    pthread_join(thread, &wrong);
    CHECK(wrong == NULL);
    free(ring);
}

TEST(a_hungry_producer_is_reported_when_there_is_room_for_any_entry)
{
    smp_ring         *ring = make_ring();
    smp_ring_producer producer = {.ring = ring};
    smp_ring_consumer consumer = {.ring = ring};
    const void       *from;
    size_t            bytes;
    void             *to;
    bool              told = false;

    for (;;) {
        CHECK_OK(smp_ring_reserve(&producer, 5000, &to));
        if (to == NULL) {
            break;
        }
        smp_ring_commit(&producer);
    }
    smp_ring_ask_for_room(&producer);
    while (!told) {
        CHECK_OK(smp_ring_peek(&consumer, &from, &bytes));
        CHECK(from != NULL);
        told = smp_ring_advance(&consumer);
    }
    CHECK_OK(smp_ring_reserve(&producer, SMP_RING_ENTRY_BYTES, &to));
    CHECK(to != NULL);
    free(ring);
}

TEST(a_counter_that_runs_ahead_is_malformed)
{
    smp_ring         *ring = make_ring();
    smp_ring_producer producer = {.ring = ring};
    smp_ring_consumer consumer = {.ring = ring};
    const void       *from;
    size_t            bytes;
    void             *to;

    atomic_store(&ring->tail, SMP_RING_BYTES + 64);
    CHECK_STATUS(smp_ring_peek(&consumer, &from, &bytes), SMP_ERR_MALFORMED);
    atomic_store(&ring->tail, 63);
    CHECK_STATUS(smp_ring_peek(&consumer, &from, &bytes), SMP_ERR_MALFORMED);

    atomic_store(&ring->head, (uint64_t)1 << 40); /* more than was ever written */
    for (int i = 0; i < 100; i++) {
        smp_status status = smp_ring_reserve(&producer, 1000, &to);

        if (status == SMP_ERR_MALFORMED) {
            free(ring);
            return;
        }
        CHECK_OK(status);
        CHECK(to != NULL);
        smp_ring_commit(&producer);
    }
    CHECK(!"the producer never looked at head");
}

TEST(an_entry_longer_than_what_is_published_is_malformed)
{
    smp_ring         *ring = make_ring();
    smp_ring_producer producer = {.ring = ring};
    smp_ring_consumer consumer = {.ring = ring};
    const void       *from;
    size_t            bytes;
    void             *to;

    CHECK_OK(smp_ring_reserve(&producer, 1000, &to));
    smp_ring_commit(&producer);
    atomic_store(&ring->tail, 64);
    CHECK_STATUS(smp_ring_peek(&consumer, &from, &bytes), SMP_ERR_MALFORMED);
    free(ring);
}

/* Whatever the other side writes: a status, or an entry inside the ring. */
TEST(random_bytes_in_the_ring_never_lead_outside)
{
    smp_ring *ring = make_ring();
    unsigned  seed = 7;
    int       found = 0;

    for (int i = 0; i < 20000; i++) {
        smp_ring_consumer consumer = {.ring = ring};
        const void       *from;
        size_t            bytes;

        consumer.head = (uint64_t)(rand_r(&seed) % 1024) * 64;
        atomic_store(&ring->tail,
                     consumer.head + (uint64_t)(rand_r(&seed) % 1100) * 64);
        for (int j = 0; j < 8; j++) {
            uint32_t word = (uint32_t)(rand_r(&seed) % 3   ? rand_r(&seed) % 20000
                                       : rand_r(&seed) % 2 ? 0x45
                                                           : 0x50);

            memcpy(&ring->data[(consumer.head + (uint64_t)j * 4) % SMP_RING_BYTES],
                   &word, 4);
        }
        for (int j = 0; j < 50; j++) {
            if (smp_ring_peek(&consumer, &from, &bytes) != SMP_OK || from == NULL) {
                break;
            }
            CHECK((const uint8_t *)from >= ring->data);
            CHECK((const uint8_t *)from + bytes <= ring->data + SMP_RING_BYTES);
            found++;
            smp_ring_advance(&consumer);
        }
    }
    CHECK(found > 0);
    free(ring);
}

RUN_TESTS
