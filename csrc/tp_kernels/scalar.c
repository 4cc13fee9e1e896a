/* The kernels in plain C: vectors of one lane. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common/half.h"
#include "tp_kernels/sets.h"

#define LANES 1
#define KERNEL static
#define INLINE static inline __attribute__((always_inline))

typedef float    lanes;
typedef uint64_t wides; /* lanes of 64 bits */

#define WIDES 1

INLINE lanes
all_lanes(float value)
{
    return value;
}

INLINE lanes
load(const void *from, size_t i, size_t end, smp_tp_dtype dtype)
{
    (void)end;
    switch (dtype) {
    case SMP_TP_F16:
        return smp_f16_to_f32(((const uint16_t *)from)[i]);
    case SMP_TP_BF16:
        return smp_bf16_to_f32(((const uint16_t *)from)[i]);
    case SMP_TP_F32:
    case SMP_TP_DTYPES:
        break;
    }
    return ((const float *)from)[i];
}

INLINE void
store(void *to, size_t i, size_t end, lanes x, smp_tp_dtype dtype)
{
    (void)end;
    switch (dtype) {
    case SMP_TP_F16:
        ((uint16_t *)to)[i] = smp_f32_to_f16(x);
        return;
    case SMP_TP_BF16:
        ((uint16_t *)to)[i] = smp_f32_to_bf16(x);
        return;
    case SMP_TP_F32:
    case SMP_TP_DTYPES:
        break;
    }
    ((float *)to)[i] = x;
}

INLINE lanes
product_sum(lanes a, lanes b, lanes c)
{
    return a * b + c;
}

INLINE lanes
larger(lanes a, lanes b)
{
    return a > b ? a : b;
}

INLINE lanes
chosen(lanes x, uint32_t bits)
{
    return (bits & 1) != 0 ? x : 0;
}

INLINE lanes
first_lanes(lanes x, size_t count, float rest)
{
    (void)count;
    (void)rest;
    return x;
}

INLINE lanes
zero_where_below(lanes y, lanes x, float limit)
{
    return x < limit ? 0 : y;
}

INLINE lanes
times_power_of_two(lanes y, lanes n)
{
    return y * smp_f32_of_bits((smp_f32_bits(n) << 23) + 0x3f800000u);
}

INLINE float
lanes_sum(lanes x)
{
    return x;
}

INLINE float
lanes_largest(lanes x)
{
    return x;
}

INLINE wides
counters_from(uint64_t counter)
{
    return counter;
}

INLINE wides
wide_product(wides a, uint32_t b)
{
    return (a & UINT32_MAX) * b;
}

INLINE uint64_t
halves_kept(const wides c[4], uint16_t threshold)
{
    uint64_t bits = 0;

    for (unsigned i = 0; i < 8; i++) {
        bits |= (uint64_t)((uint16_t)(c[i / 2] >> i % 2 * 16) >= threshold) << i;
    }
    return bits;
}

#include "tp_kernels/bodies.h"

const smp_tp_kernels smp_tp_kernels_scalar = SMP_TP_KERNELS;
