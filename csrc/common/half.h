/* Floats of 16 bits, to float32 and back: rounded to nearest even.
 *
 * Threads  any.
 */
#ifndef SMP_COMMON_HALF_H
#define SMP_COMMON_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t
smp_f32_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float
smp_f32_of_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Signalling NaNs become quiet, as in the conversions of processors. */
static inline float
smp_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (uint32_t)half >> 10 & 31;
    uint32_t fraction = half & 0x3ffu;

    if (exponent == 31) {
        return smp_f32_of_bits(sign | 0x7f800000u | fraction << 13 |
                               (fraction != 0 ? 0x400000u : 0));
    }
    if (exponent != 0) {
        return smp_f32_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    }
    return smp_f32_of_bits(sign | smp_f32_bits((float)fraction * 0x1p-24f));
}

static inline uint16_t
smp_f32_to_f16(float value)
{
    uint32_t bits = smp_f32_bits(value);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t x = bits & 0x7fffffffu;

    if (x > 0x7f800000u) { /* NaN */
        return (uint16_t)(sign | 0x7e00u | (x >> 13 & 0x3ffu));
    }
    if (x >= 0x477ff000u) { /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (x < 0x38800000u) { /* below 2^-14: the sum with 0.5 is rounded to 2^-24 */
        return (uint16_t)(sign |
                          (smp_f32_bits(smp_f32_of_bits(x) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | (x + 0xfffu + (x >> 13 & 1u) - 0x38000000u) >> 13);
}

static inline float
smp_bf16_to_f32(uint16_t half)
{
    return smp_f32_of_bits((uint32_t)half << 16);
}

static inline uint16_t
smp_f32_to_bf16(float value)
{
    uint32_t bits = smp_f32_bits(value);

    if ((bits & 0x7fffffffu) > 0x7f800000u) { /* NaN stays one */
        return (uint16_t)(bits >> 16 | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#endif
