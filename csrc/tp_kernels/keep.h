/* The elements kept by dropout, a vector at a time; see smp_tp_dropout.
 *
 * Included by tp_kernels/bodies.h.
 */
#ifndef SMP_TP_KERNELS_KEEP_H
#define SMP_TP_KERNELS_KEEP_H

/* Reads on from some element of the tensor. */
typedef struct {
    uint64_t seed;
    uint16_t threshold;
    bool     random; /* else `bits` holds for every element */
    uint64_t block;  /* the next one of 64 elements */
    uint64_t bits;   /* of the elements before it, the next one lowest */
    unsigned left;   /* so many */
} keep_stream;

/* Bit i: whether element 64 * block + i is kept. */
INLINE uint64_t
block_kept(const keep_stream *keep, uint64_t block)
{
    uint64_t bits = 0;

    for (unsigned part = 0; part < 64; part += 8 * WIDES) {
        uint32_t key[2] = {(uint32_t)keep->seed, (uint32_t)(keep->seed >> 32)};
        wides    start = counters_from(block * 8 + part / 8);
        /* Words of 32 bits; the higher bits do not count. */
        wides zero = {0};
        wides c[4] = {start, start >> 32, zero, zero};

        for (int round = 0; round < 7; round++) {
            wides even = wide_product(c[0], 0xd2511f53u);
            wides odd = wide_product(c[2], 0xcd9e8d57u);

            c[0] = (odd >> 32) ^ c[1] ^ key[0];
            c[1] = odd;
            c[2] = (even >> 32) ^ c[3] ^ key[1];
            c[3] = even;
            key[0] += 0x9e3779b9u;
            key[1] += 0xbb67ae85u;
        }
        bits |= halves_kept(c, keep->threshold) << part;
    }
    return bits;
}

INLINE keep_stream
keep_of(const smp_tp_dropout *dropout)
{
    keep_stream keep = {.seed = dropout->seed};

    keep.random = dropout->p > 0 && dropout->p < 1;
    keep.bits = dropout->p > 0 ? 0 : UINT64_MAX;
    if (keep.random) {
        uint32_t nearest = (uint32_t)(dropout->p * 0x1p16 + 0.5);

        keep.threshold = (uint16_t)(nearest < UINT16_MAX ? nearest : UINT16_MAX);
    }
    return keep;
}

/* The factor of a kept element. */
INLINE float
keep_scale(const smp_tp_dropout *dropout)
{
    return (float)(1 / (1 - dropout->p)); /* of p == 1 nothing is kept */
}

/* Goes to row `row`, column `column` of the call. */
INLINE void
keep_seek(keep_stream *keep, const smp_tp_dropout *dropout, size_t row, size_t column)
{
    uint64_t index;

    if (!keep->random) {
        return;
    }
    index = dropout->first + row / dropout->run * dropout->jump +
            row % dropout->run * dropout->width + column;
    keep->bits = block_kept(keep, index / 64) >> index % 64;
    keep->left = 64 - (unsigned)(index % 64);
    keep->block = index / 64 + 1;
}

/* Bits of the next LANES elements; those above do not count. */
INLINE uint32_t
keep_next(keep_stream *keep)
{
    uint64_t bits = keep->bits;

    if (!keep->random) {
        return (uint32_t)bits;
    }
    if (keep->left >= LANES) {
        keep->bits >>= LANES;
        keep->left -= LANES;
    } else {
        unsigned missing = LANES - keep->left;
        uint64_t next = block_kept(keep, keep->block++);

        bits |= next << keep->left;
        keep->bits = next >> missing;
        keep->left = 64 - missing;
    }
    return (uint32_t)bits;
}

#endif
