/* Eight consecutive elements of a row, what a thread of a GPU reads at once.
 *
 * Included by tp_kernels/gpu.cu.  Eight halves are 16 bytes, the widest load; eight
 * elements have one counter of the generator.
 */
#ifndef SMP_TP_KERNELS_GPU_EIGHTS_H
#define SMP_TP_KERNELS_GPU_EIGHTS_H

/* As they lie in memory. */
template <smp_tp_dtype DTYPE> struct eight {
    static constexpr int VECTORS = DTYPE == SMP_TP_F32 ? 2 : 1; /* of 16 bytes */
    uint32_t             words[4 * VECTORS];
};

template <smp_tp_dtype DTYPE>
INLINE constexpr size_t
bytes_of(void)
{
    return DTYPE == SMP_TP_F32 ? 4 : 2;
}

INLINE float
half_to_float(uint32_t bits, smp_tp_dtype dtype)
{
    return dtype == SMP_TP_BF16 ? __uint_as_float(bits << 16)
                                : __half2float(__ushort_as_half((unsigned short)bits));
}

/* The first one in the lower half. */
INLINE uint32_t
halves_of(float first, float second, smp_tp_dtype dtype)
{
    uint32_t word;

    if (dtype == SMP_TP_BF16) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);

        memcpy(&word, &both, sizeof(word));
    } else {
        const __half2 both = __floats2half2_rn(first, second);

        memcpy(&word, &both, sizeof(word));
    }
    return word;
}

template <smp_tp_dtype DTYPE>
INLINE float
load_one(const void *row, size_t i)
{
    return DTYPE == SMP_TP_F32 ? ((const float *)row)[i]
                               : half_to_float(((const uint16_t *)row)[i], DTYPE);
}

template <smp_tp_dtype DTYPE>
INLINE void
store_one(void *row, size_t i, float x)
{
    if (DTYPE == SMP_TP_F32) {
        ((float *)row)[i] = x;
    } else {
        ((uint16_t *)row)[i] = (uint16_t)halves_of(x, x, DTYPE);
    }
}

template <smp_tp_dtype DTYPE>
INLINE void
widen(float x[8], const eight<DTYPE> &from)
{
    for (int j = 0; j < 8; j++) {
        if (DTYPE == SMP_TP_F32) {
            x[j] = __uint_as_float(from.words[j % (4 * eight<DTYPE>::VECTORS)]);
        } else {
            x[j] = half_to_float(from.words[j / 2] >> j % 2 * 16 & 0xffff, DTYPE);
        }
    }
}

template <smp_tp_dtype DTYPE>
INLINE eight<DTYPE>
       narrow(const float x[8])
{
    eight<DTYPE> out;

    for (int j = 0; j < 4 * eight<DTYPE>::VECTORS; j++) {
        out.words[j] = DTYPE == SMP_TP_F32
                           ? __float_as_uint(x[j])
                           : halves_of(x[2 * j % 8], x[2 * j % 8 + 1], DTYPE);
    }
    return out;
}

/* Elements i .. i + 8 of a row of n; 0 beyond, and all of NULL.  WHOLE: they are at a
 * multiple of 16 bytes, and in the row. */
template <smp_tp_dtype DTYPE, bool WHOLE>
INLINE eight<DTYPE>
       load_eight(const void *row, size_t i, size_t n)
{
    eight<DTYPE> out = {};

    if (row == NULL) {
        return out;
    }
    if constexpr (WHOLE) {
        const uint4 *from = (const uint4 *)((const char *)row + i * bytes_of<DTYPE>());

        for (int v = 0; v < eight<DTYPE>::VECTORS; v++) {
            const uint4 vector = from[v];

            out.words[4 * v] = vector.x;
            out.words[4 * v + 1] = vector.y;
            out.words[4 * v + 2] = vector.z;
            out.words[4 * v + 3] = vector.w;
        }
    } else {
#pragma unroll /* or the words are in memory, for their index */
        for (size_t j = 0; j < 8; j++) {
            if (i + j < n && DTYPE == SMP_TP_F32) {
                out.words[j % (4 * eight<DTYPE>::VECTORS)] =
                    ((const uint32_t *)row)[i + j];
            } else if (i + j < n) {
                out.words[j / 2] |= (uint32_t)((const uint16_t *)row)[i + j]
                                    << j % 2 * 16;
            }
        }
    }
    return out;
}

/* The counterpart; nothing is written beyond the row. */
template <smp_tp_dtype DTYPE, bool WHOLE>
INLINE void
store_eight(void *row, size_t i, size_t n, const float x[8])
{
    if constexpr (WHOLE) {
        const eight<DTYPE> from = narrow<DTYPE>(x);
        uint4             *to = (uint4 *)((char *)row + i * bytes_of<DTYPE>());

        for (int v = 0; v < eight<DTYPE>::VECTORS; v++) {
            to[v] = make_uint4(from.words[4 * v], from.words[4 * v + 1],
                               from.words[4 * v + 2], from.words[4 * v + 3]);
        }
    } else {
#pragma unroll
        for (size_t j = 0; j < 8; j++) {
            if (i + j < n) {
                store_one<DTYPE>(row, i + j, x[j]);
            }
        }
    }
}

/* Halves of the generator for eight elements, the first one lowest. */
typedef struct {
    uint32_t words[4];
} eight_halves;

/* Those from this global index on; 0 if none is dropped at random. */
INLINE eight_halves
halves_from(const keep_rule &keep, uint64_t index)
{
    const unsigned off = (unsigned)(index % 8);
    eight_halves   out;
    wides          c[4];

    if (!keep.random) {
        for (int i = 0; i < 4; i++) {
            out.words[i] = 0;
        }
        return out;
    }
    keep_words(&keep, index / 8, c);
    for (int i = 0; i < 4; i++) {
        out.words[i] = (uint32_t)c[i];
    }
    if (off != 0) { /* the rest is of the next counter */
        uint32_t all[8];

        keep_words(&keep, index / 8 + 1, c);
        for (int i = 0; i < 4; i++) {
            all[i] = out.words[i];
            all[i + 4] = (uint32_t)c[i];
        }
        for (int i = 0; i < 4; i++) {
            uint64_t both = 0;

            for (int k = 0; k < 4; k++) {
                if (off / 2 == (unsigned)k) {
                    both = all[i + k] | (uint64_t)all[i + k + 1] << 32;
                }
            }
            out.words[i] = (uint32_t)(both >> off % 2 * 16);
        }
    }
    return out;
}

/* x after dropout. */
INLINE void
drop_eight(float x[8], const keep_rule &keep, const eight_halves &halves)
{
    for (int j = 0; j < 8; j++) {
        /* Without a shift: this half is the higher one. */
        const uint32_t high = halves.words[j / 2] << (1 - j % 2) * 16;

        x[j] = dropped(x[j], keep.scale, high >= (uint32_t)keep.threshold << 16);
    }
}

/* The global index of an element of the call; anything if none is dropped at random. */
INLINE uint64_t
index_of(const keep_rule &keep, const smp_tp_dropout &dropout, size_t row,
         size_t column)
{
    return keep.random ? keep_index(&dropout, row, column) : 0;
}

#endif
