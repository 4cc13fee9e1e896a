/* The elements kept by dropout in their order, a vector at a time.
 *
 * Included by tp_kernels/bodies.h.
 */
#ifndef SMP_TP_KERNELS_KEEP_STREAM_H
#define SMP_TP_KERNELS_KEEP_STREAM_H

/* Reads on from some element of the tensor. */
typedef struct {
    keep_rule rule;
    uint64_t  block; /* the next one of 64 elements */
    uint64_t  bits;  /* of the elements before it, the next one lowest */
    unsigned  left;  /* so many */
} keep_stream;

/* Bit i: whether element 64 * block + i is kept. */
INLINE uint64_t
block_kept(const keep_stream *keep, uint64_t block)
{
    uint64_t bits = 0;

    for (unsigned part = 0; part < 64; part += 8 * WIDES) {
        wides c[4];

        keep_words(&keep->rule, block * 8 + part / 8, c);
        bits |= halves_kept(c, keep->rule.threshold) << part;
    }
    return bits;
}

INLINE keep_stream
keep_of(const smp_tp_dropout *dropout)
{
    keep_stream keep = {.rule = keep_rule_of(dropout)};

    keep.bits = keep.rule.every ? UINT64_MAX : 0;
    return keep;
}

/* Goes to row `row`, column `column` of the call. */
INLINE void
keep_seek(keep_stream *keep, const smp_tp_dropout *dropout, size_t row, size_t column)
{
    uint64_t index;

    if (!keep->rule.random) {
        return;
    }
    index = keep_index(dropout, row, column);
    keep->bits = block_kept(keep, index / 64) >> index % 64;
    keep->left = 64 - (unsigned)(index % 64);
    keep->block = index / 64 + 1;
}

/* Bits of the next LANES elements; those above do not count. */
INLINE uint32_t
keep_next(keep_stream *keep)
{
    uint64_t bits = keep->bits;

    if (!keep->rule.random) {
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
