/* The kernels for processors with AVX-512 F, BW, DQ and VL. */
#include "tp_kernels/sets.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <math.h>
#    include <stdint.h>
#    include <string.h>

#    define LANES 16
#    define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#    define KERNEL TARGET static
#    define INLINE TARGET static inline __attribute__((always_inline))

typedef __m512   lanes;
typedef uint64_t wides __attribute__((vector_size(64)));

#    define WIDES 8

INLINE lanes
all_lanes(float value)
{
    return _mm512_set1_ps(value);
}

INLINE __mmask16
below(size_t count)
{
    return (__mmask16)((1u << count) - 1);
}

INLINE lanes
widened(__m256i halves, smp_tp_dtype dtype)
{
    return dtype == SMP_TP_F16 ? _mm512_cvtph_ps(halves)
                               : _mm512_castsi512_ps(_mm512_slli_epi32(
                                     _mm512_cvtepu16_epi32(halves), 16));
}

INLINE __m256i
narrowed(lanes x, smp_tp_dtype dtype)
{
    __m512i bits = _mm512_castps_si512(x);
    __m512i even;
    __m512i near;

    if (dtype == SMP_TP_F16) {
        return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
    }
    even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
    near = _mm512_mask_or_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                                _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
}

INLINE lanes
load(const void *from, size_t i, size_t end, smp_tp_dtype dtype)
{
    const uint16_t *halves = (const uint16_t *)from + i;

    if (dtype == SMP_TP_F32) {
        const float *x = (const float *)from + i;

        return end - i >= LANES ? _mm512_loadu_ps(x)
                                : _mm512_maskz_loadu_ps(below(end - i), x);
    }
    return widened(end - i >= LANES
                       ? _mm256_loadu_si256((const __m256i *)(const void *)halves)
                       : _mm256_maskz_loadu_epi16(below(end - i), halves),
                   dtype);
}

INLINE void
store(void *to, size_t i, size_t end, lanes x, smp_tp_dtype dtype)
{
    uint16_t *halves = (uint16_t *)to + i;

    if (dtype == SMP_TP_F32) {
        if (end - i >= LANES) {
            _mm512_storeu_ps((float *)to + i, x);
        } else {
            _mm512_mask_storeu_ps((float *)to + i, below(end - i), x);
        }
    } else if (end - i >= LANES) {
        _mm256_storeu_si256((__m256i *)(void *)halves, narrowed(x, dtype));
    } else {
        _mm256_mask_storeu_epi16(halves, below(end - i), narrowed(x, dtype));
    }
}

INLINE lanes
product_sum(lanes a, lanes b, lanes c)
{
    return _mm512_fmadd_ps(a, b, c);
}

INLINE lanes
larger(lanes a, lanes b)
{
    return _mm512_max_ps(a, b);
}

INLINE lanes
chosen(lanes x, uint32_t bits)
{
    return _mm512_maskz_mov_ps((__mmask16)bits, x);
}

INLINE lanes
first_lanes(lanes x, size_t count, float rest)
{
    return count >= LANES ? x
                          : _mm512_mask_mov_ps(_mm512_set1_ps(rest), below(count), x);
}

INLINE lanes
zero_where_below(lanes y, lanes x, float limit)
{
    return _mm512_maskz_mov_ps(
        _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), y);
}

INLINE lanes
times_power_of_two(lanes y, lanes n)
{
    __m512i power = _mm512_slli_epi32(_mm512_castps_si512(n), 23);

    return y *
           _mm512_castsi512_ps(_mm512_add_epi32(power, _mm512_set1_epi32(0x3f800000)));
}

INLINE float
lanes_sum(lanes x)
{
    return _mm512_reduce_add_ps(x);
}

INLINE float
lanes_largest(lanes x)
{
    return _mm512_reduce_max_ps(x);
}

/* In the order of halves_kept(). */
INLINE wides
counters_from(uint64_t counter)
{
    return counter + (wides){0, 4, 1, 5, 2, 6, 3, 7};
}

INLINE wides
wide_product(wides a, uint32_t b)
{
    return (wides)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64((long long)b));
}

INLINE uint64_t
at_least(__m512i halves, uint16_t threshold)
{
    return _mm512_cmpge_epu16_mask(halves, _mm512_set1_epi16((short)threshold));
}

INLINE uint64_t
halves_kept(const wides c[4], uint16_t threshold)
{
    __m512i low = _mm512_mask_blend_epi32(0xaaaa, (__m512i)c[0],
                                          _mm512_slli_epi64((__m512i)c[1], 32));
    __m512i high = _mm512_mask_blend_epi32(0xaaaa, (__m512i)c[2],
                                           _mm512_slli_epi64((__m512i)c[3], 32));

    return at_least(_mm512_unpacklo_epi64(low, high), threshold) |
           at_least(_mm512_unpackhi_epi64(low, high), threshold) << 32;
}

#    include "tp_kernels/bodies.h"

const smp_tp_kernels smp_tp_kernels_avx512 = SMP_TP_KERNELS;

#endif
