/* Messages whose every byte is known to both sides. */
#ifndef SMP_TESTS_TRAFFIC_H
#define SMP_TESTS_TRAFFIC_H

#include "world.h"

/* Eight bytes that depend on a seed and their place, so that a wrong, moved or late one
 * is seen. */
static inline uint64_t
word_at(uint64_t seed, size_t i)
{
    uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;

    return x ^ x >> 29;
}

static inline void
fill(void *to, size_t bytes, uint64_t seed)
{
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word = word_at(seed, at / 8);

        memcpy((uint8_t *)to + at, &word, bytes - at < 8 ? bytes - at : 8);
    }
}

static inline bool
filled(const void *from, size_t bytes, uint64_t seed)
{
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word = word_at(seed, at / 8);

        if (memcmp((const uint8_t *)from + at, &word,
                   bytes - at < 8 ? bytes - at : 8) != 0) {
            fprintf(stderr, "bytes from %zu of %zu (seed %llu) are wrong\n", at, bytes,
                    (unsigned long long)seed);
            return false;
        }
    }
    return true;
}

static inline uint64_t
next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Sends a message of `nbytes` and blocks of the given sizes, all filled from seed. */
static inline smp_status
send_filled(world *w, int dest, uint64_t seed, size_t nbytes, const size_t *sizes,
            size_t nblocks)
{
    smp_block **blocks = calloc(nblocks + 1, sizeof(*blocks));
    uint8_t    *bytes = malloc(nbytes + 1);
    smp_status  status = SMP_OK;

    fill(bytes, nbytes, seed);
    for (size_t i = 0; i < nblocks && status == SMP_OK; i++) {
        status = smp_comm_block(w->comm, dest, sizes[i], &blocks[i]);
        if (status == SMP_OK) {
            fill(smp_block_data(blocks[i]), sizes[i], seed + i + 1);
        }
    }
    if (status == SMP_OK) {
        status = smp_comm_send(w->comm, dest, bytes, nbytes, blocks, nblocks);
    } else {
        for (size_t i = 0; i < nblocks; i++) {
            smp_block_release(blocks[i]);
        }
    }
    free(bytes);
    free(blocks);
    return status;
}

/* Whether a message is what send_filled() sent. */
static inline bool
message_filled(const smp_message *message, uint64_t seed, size_t nbytes,
               const size_t *sizes, size_t nblocks)
{
    if (message->nbytes != nbytes || message->nblocks != nblocks ||
        (uintptr_t)message->bytes % 8 != 0 || !filled(message->bytes, nbytes, seed)) {
        fprintf(stderr, "message of %zu bytes, %zu blocks; want %zu, %zu\n",
                message->nbytes, message->nblocks, nbytes, nblocks);
        return false;
    }
    for (size_t i = 0; i < nblocks; i++) {
        const smp_block *block = message->blocks[i];

        if (smp_block_bytes(block) != sizes[i] ||
            (uintptr_t)smp_block_data(block) % SMP_BLOCK_ALIGN != 0 ||
            !filled(smp_block_data(block), sizes[i], seed + i + 1)) {
            fprintf(stderr, "block %zu: %zu bytes, want %zu\n", i,
                    smp_block_bytes(block), sizes[i]);
            return false;
        }
    }
    return true;
}

/* The next message is one of send_filled(). */
static inline void
expect_filled(world *w, uint64_t seed, size_t nbytes, const size_t *sizes,
              size_t nblocks)
{
    smp_message *message;

    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
    CHECK(message_filled(message, seed, nbytes, sizes, nblocks));
    smp_message_free(message);
}

/* No message comes any more. */
static inline void
expect_end(world *w, smp_status why)
{
    smp_message *message;

    CHECK_STATUS(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message), why);
}

/* All ranks but this one, in a ring: the first is the next rank. */
static inline int
other(const world *w, int i)
{
    return (w->rank + 1 + i) % w->size;
}

/* A thread that kills this process within 3 ms, and notes when. */
static inline void *
die_soon(void *arg)
{
    world   *w = arg;
    uint64_t seed = (uint64_t)smp_clock_ns() | 1;
    int64_t  when = smp_clock_ns() + (int64_t)(next_random(&seed) % 3000000);

    while (smp_clock_ns() < when) {
    }
    atomic_store(&w->shared->scratch[0], smp_clock_ns());
    kill(getpid(), SIGKILL);
    return NULL;
}

#endif
