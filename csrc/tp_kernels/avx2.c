/* The kernels for processors with AVX2, FMA and F16C. */
#include "tp_kernels/sets.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <math.h>
#    include <stdint.h>
#    include <string.h>

#    define LANES 8
#    define TARGET __attribute__((target("avx2,fma,f16c")))
#    define KERNEL TARGET static
#    define INLINE TARGET static inline __attribute__((always_inline))

typedef __m256   lanes;
typedef uint64_t wides __attribute__((vector_size(32)));

#    define WIDES 4

INLINE lanes
all_lanes(float value)
{
    return _mm256_set1_ps(value);
}

INLINE __m256i
below(size_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE lanes
widened(__m128i halves, smp_tp_dtype dtype)
{
    return dtype == SMP_TP_F16 ? _mm256_cvtph_ps(halves)
                               : _mm256_castsi256_ps(_mm256_slli_epi32(
                                     _mm256_cvtepu16_epi32(halves), 16));
}

INLINE __m128i
narrowed(lanes x, smp_tp_dtype dtype)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i even;
    __m256i near;
    __m256i nan;

    if (dtype == SMP_TP_F16) {
        return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    }
    even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even);
    nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    near = _mm256_blendv_epi8(near, nan,
                              _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    near = _mm256_srli_epi32(near, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(near),
                            _mm256_extracti128_si256(near, 1));
}

INLINE lanes
load(const void *from, size_t i, size_t end, smp_tp_dtype dtype)
{
    const uint16_t *halves = (const uint16_t *)from + i;
    uint16_t        part[LANES] = {0};

    if (dtype == SMP_TP_F32) {
        const float *x = (const float *)from + i;

        return end - i >= LANES ? _mm256_loadu_ps(x)
                                : _mm256_maskload_ps(x, below(end - i));
    }
    if (end - i < LANES) {
        for (size_t k = 0; k < end - i; k++) {
            part[k] = halves[k];
        }
        halves = part;
    }
    return widened(_mm_loadu_si128((const __m128i *)(const void *)halves), dtype);
}

INLINE void
store(void *to, size_t i, size_t end, lanes x, smp_tp_dtype dtype)
{
    uint16_t *halves = (uint16_t *)to + i;
    uint16_t  part[LANES];

    if (dtype == SMP_TP_F32) {
        if (end - i >= LANES) {
            _mm256_storeu_ps((float *)to + i, x);
        } else {
            _mm256_maskstore_ps((float *)to + i, below(end - i), x);
        }
    } else if (end - i >= LANES) {
        _mm_storeu_si128((__m128i *)(void *)halves, narrowed(x, dtype));
    } else {
        _mm_storeu_si128((__m128i *)(void *)part, narrowed(x, dtype));
        for (size_t k = 0; k < end - i; k++) {
            halves[k] = part[k];
        }
    }
}

INLINE lanes
product_sum(lanes a, lanes b, lanes c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INLINE lanes
larger(lanes a, lanes b)
{
    return _mm256_max_ps(a, b);
}

INLINE lanes
chosen(lanes x, uint32_t bits)
{
    __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i own = _mm256_and_si256(_mm256_set1_epi32((int)bits), one);

    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(own, one)));
}

INLINE lanes
first_lanes(lanes x, size_t count, float rest)
{
    return count >= LANES ? x
                          : _mm256_blendv_ps(_mm256_set1_ps(rest), x,
                                             _mm256_castsi256_ps(below(count)));
}

INLINE lanes
zero_where_below(lanes y, lanes x, float limit)
{
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ), y);
}

INLINE lanes
times_power_of_two(lanes y, lanes n)
{
    __m256i power = _mm256_slli_epi32(_mm256_castps_si256(n), 23);

    return y *
           _mm256_castsi256_ps(_mm256_add_epi32(power, _mm256_set1_epi32(0x3f800000)));
}

INLINE float
lanes_sum(lanes x)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE float
lanes_largest(lanes x)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

/* In the order of halves_kept(). */
INLINE wides
counters_from(uint64_t counter)
{
    return (wides){counter, counter + 2, counter + 1, counter + 3};
}

INLINE wides
wide_product(wides a, uint32_t b)
{
    return (wides)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x((long long)b));
}

/* All ones in each half at or above the threshold. */
INLINE __m256i
at_least(__m256i halves, uint16_t threshold)
{
    __m256i least = _mm256_set1_epi16((short)threshold);

    return _mm256_cmpeq_epi16(_mm256_max_epu16(halves, least), halves);
}

INLINE uint64_t
halves_kept(const wides c[4], uint16_t threshold)
{
    __m256i low =
        _mm256_blend_epi32((__m256i)c[0], _mm256_slli_epi64((__m256i)c[1], 32), 0xaa);
    __m256i high =
        _mm256_blend_epi32((__m256i)c[2], _mm256_slli_epi64((__m256i)c[3], 32), 0xaa);

    __m256i first = at_least(_mm256_unpacklo_epi64(low, high), threshold);
    __m256i second = at_least(_mm256_unpackhi_epi64(low, high), threshold);
    /* Eight of each in turn. */
    __m256i bytes = _mm256_packs_epi16(first, second);

    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xd8));
}

#    include "tp_kernels/bodies.h"

const smp_tp_kernels smp_tp_kernels_avx2 = SMP_TP_KERNELS;

#endif
