/* SHA-256 over two pieces, and HMAC from it. */
#define _GNU_SOURCE
#include "comm/transport/connecting/proof.h"

#include <string.h>

#define BLOCK 64

typedef struct {
    uint32_t state[8];
    uint64_t total; /* bytes so far */
    uint8_t  block[BLOCK];
} sha256;

/* The first 32 bits of the fractional parts of the cube roots of the first primes. */
static const uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
    0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
    0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
    0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
    0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
    0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
    0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};

static uint32_t
turned(uint32_t x, int right)
{
    return x >> right | x << (32 - right);
}

static void
mix_block(sha256 *s)
{
    uint32_t w[64];
    uint32_t v[8];

    for (size_t i = 0; i < 16; i++) {
        const uint8_t *at = s->block + 4 * i;

        w[i] = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 |
               (uint32_t)at[3];
    }
    for (size_t i = 16; i < 64; i++) {
        uint32_t a = w[i - 15];
        uint32_t b = w[i - 2];

        w[i] = w[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[i - 7] +
               (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    memcpy(v, s->state, sizeof(v));
    for (size_t i = 0; i < 64; i++) {
        uint32_t e = v[4];
        uint32_t a = v[0];
        uint32_t one = v[7] + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) +
                       ((e & v[5]) ^ (~e & v[6])) + rounds[i] + w[i];
        uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) +
                       ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));

        memmove(v + 1, v, 7 * sizeof(v[0]));
        v[4] += one;
        v[0] = one + two;
    }
    for (size_t i = 0; i < 8; i++) {
        s->state[i] += v[i];
    }
}

static void
add(sha256 *s, const void *bytes, size_t n)
{
    const uint8_t *from = bytes;

    while (n != 0) {
        size_t filled = s->total % BLOCK;
        size_t part = n < BLOCK - filled ? n : BLOCK - filled;

        memcpy(s->block + filled, from, part);
        from += part;
        n -= part;
        s->total += part;
        if (filled + part == BLOCK) {
            mix_block(s);
        }
    }
}

/* The hash of `first`, a whole block, and then `second`. */
static void
hash_two(const uint8_t first[BLOCK], const void *second, size_t n,
         uint8_t out[SMP_PROOF_BYTES])
{
    static const uint8_t padding[BLOCK] = {0x80};
    uint8_t              bits[8];
    sha256 s = {.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                          0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};

    add(&s, first, BLOCK);
    add(&s, second, n);
    for (int i = 0; i < 8; i++) {
        bits[i] = (uint8_t)(s.total * 8 >> (56 - 8 * i));
    }
    add(&s, padding, 1 + (2 * BLOCK - 1 - 8 - s.total % BLOCK) % BLOCK);
    add(&s, bits, 8);
    for (size_t i = 0; i < SMP_PROOF_BYTES; i++) {
        out[i] = (uint8_t)(s.state[i / 4] >> (24 - 8 * (i % 4)));
    }
}

void
smp_proof(const char *secret, const void *text, size_t n, uint8_t out[SMP_PROOF_BYTES])
{
    uint8_t inner[BLOCK] = {0};
    uint8_t outer[BLOCK];
    uint8_t hash[SMP_PROOF_BYTES];

    memcpy(inner, secret, strnlen(secret, BLOCK));
    for (size_t i = 0; i < BLOCK; i++) {
        outer[i] = inner[i] ^ 0x5c;
        inner[i] ^= 0x36;
    }
    hash_two(inner, text, n, hash);
    hash_two(outer, hash, sizeof(hash), out);
}

bool
smp_proof_equal(const uint8_t a[SMP_PROOF_BYTES], const uint8_t b[SMP_PROOF_BYTES])
{
    unsigned differ = 0;

    for (size_t i = 0; i < SMP_PROOF_BYTES; i++) {
        differ |= a[i] ^ b[i];
    }
    return differ == 0;
}
