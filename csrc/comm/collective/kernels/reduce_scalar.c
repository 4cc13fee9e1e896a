/* The kernels in plain C: the definition of every reduction. */
#include <stdint.h>

#include "comm/collective/kernels/reduce_kernels.h"
#include "common/half.h"

/* NOLINTBEGIN(bugprone-macro-parentheses): a type cannot have them. */

/* The loop of a kernel: `expression` of a = left[i] and b = right[i]. */
#define BINARY(name, type, expression)                                                 \
    static void name(void *out, const void *left, const void *right, size_t count)     \
    {                                                                                  \
        type       *o = out;                                                           \
        const type *l = left;                                                          \
        const type *r = right;                                                         \
                                                                                       \
        for (size_t i = 0; i < count; i++) {                                           \
            type a = l[i];                                                             \
            type b = r[i];                                                             \
                                                                                       \
            o[i] = (type)(expression);                                                 \
        }                                                                              \
    }

/* `expression` of a = in[i] and v, the value as a `type`. */
#define SCALING(name, type, expression)                                                \
    static void name(void *out, const void *in, double value, size_t count)            \
    {                                                                                  \
        type       *o = out;                                                           \
        const type *x = in;                                                            \
        type        v = (type)value;                                                   \
                                                                                       \
        (void)v;                                                                       \
        for (size_t i = 0; i < count; i++) {                                           \
            type a = x[i];                                                             \
                                                                                       \
            o[i] = (type)(expression);                                                 \
        }                                                                              \
    }

/* Integers wrap around, so they are added and multiplied as unsigned ones, of at least
 * 32 bits: two of 8 bits cannot overflow those. */
BINARY(add_i8, uint8_t, (unsigned)a + b)
BINARY(add_i32, uint32_t, a + b)
BINARY(add_i64, uint64_t, a + b)
BINARY(add_f32, float, a + b)
BINARY(add_f64, double, a + b)

BINARY(multiply_i8, uint8_t, (unsigned)a *b)
BINARY(multiply_i32, uint32_t, a *b)
BINARY(multiply_i64, uint64_t, a *b)
BINARY(multiply_f32, float, a *b)
BINARY(multiply_f64, double, a *b)

BINARY(min_u8, uint8_t, a < b ? a : b)
BINARY(min_i8, int8_t, a < b ? a : b)
BINARY(min_i32, int32_t, a < b ? a : b)
BINARY(min_i64, int64_t, a < b ? a : b)
BINARY(min_f32, float, a < b || a != a ? a : b)
BINARY(min_f64, double, a < b || a != a ? a : b)

BINARY(max_u8, uint8_t, a > b ? a : b)
BINARY(max_i8, int8_t, a > b ? a : b)
BINARY(max_i32, int32_t, a > b ? a : b)
BINARY(max_i64, int64_t, a > b ? a : b)
BINARY(max_f32, float, a > b || a != a ? a : b)
BINARY(max_f64, double, a > b || a != a ? a : b)

BINARY(and_8, uint8_t, a &b)
BINARY(and_32, uint32_t, a &b)
BINARY(and_64, uint64_t, a &b)
BINARY(or_8, uint8_t, a | b)
BINARY(or_32, uint32_t, a | b)
BINARY(or_64, uint64_t, a | b)
BINARY(xor_8, uint8_t, a ^ b)
BINARY(xor_32, uint32_t, a ^ b)
BINARY(xor_64, uint64_t, a ^ b)

SCALING(scale_f32, float, a *v)
SCALING(scale_f64, double, a *v)

/* The value of a division is a number of ranks: whole, and at least 1. */
SCALING(divide_u8, uint8_t, (unsigned)a / (unsigned)value)
SCALING(divide_i8, int8_t, (int)a / (int)value)
SCALING(divide_i32, int32_t, a / v)
SCALING(divide_i64, int64_t, a / v)
SCALING(divide_f32, float, a / v)
SCALING(divide_f64, double, a / v)

static float
e5m2_to_f32(uint8_t eighth) /* the upper half of an f16 */
{
    return smp_f16_to_f32((uint16_t)(eighth << 8));
}

static uint8_t
f32_to_e5m2(float value)
{
    uint32_t bits = smp_f32_bits(value);
    uint32_t sign = bits >> 24 & 0x80u;
    uint32_t x = bits & 0x7fffffffu;

    if (x > 0x7f800000u) {
        return (uint8_t)(sign | 0x7fu);
    }
    if (x >= 0x47700000u) { /* 61440 and more round to infinity */
        return (uint8_t)(sign | 0x7cu);
    }
    if (x < 0x38800000u) { /* below 2^-14: the sum with 128 is rounded to 2^-16 */
        return (uint8_t)(sign |
                         (smp_f32_bits(smp_f32_of_bits(x) + 128.0f) - 0x43000000u));
    }
    return (uint8_t)(sign | (x + 0xfffffu + (x >> 21 & 1u) - 0x38000000u) >> 21);
}

static float
e4m3fn_to_f32(uint8_t eighth)
{
    uint32_t sign = (uint32_t)(eighth & 0x80u) << 24;
    uint32_t exponent = (uint32_t)eighth >> 3 & 15;
    uint32_t fraction = eighth & 7u;

    if ((eighth & 0x7fu) == 0x7fu) {
        return smp_f32_of_bits(sign | 0x7fc00000u);
    }
    if (exponent != 0) {
        return smp_f32_of_bits(sign | (exponent + 120) << 23 | fraction << 20);
    }
    return smp_f32_of_bits(sign | smp_f32_bits((float)fraction * 0x1p-9f));
}

static uint8_t
f32_to_e4m3fn(float value)
{
    uint32_t bits = smp_f32_bits(value);
    uint32_t sign = bits >> 24 & 0x80u;
    uint32_t x = bits & 0x7fffffffu;

    if (x > 0x43e80000u) { /* NaN, and values above 464; 464 rounds to 448 */
        return (uint8_t)(sign | 0x7fu);
    }
    if (x < 0x3c800000u) { /* below 2^-6: the sum with 2^14 is rounded to 2^-9 */
        return (uint8_t)(sign |
                         (smp_f32_bits(smp_f32_of_bits(x) + 0x1p14f) - 0x46800000u));
    }
    return (uint8_t)(sign | (x + 0x7ffffu + (x >> 20 & 1u) - 0x3c000000u) >> 20);
}

#define CONVERT(name, to, from, function)                                              \
    static void name(void *out, const void *in, size_t count)                          \
    {                                                                                  \
        to         *o = out;                                                           \
        const from *x = in;                                                            \
                                                                                       \
        for (size_t i = 0; i < count; i++) {                                           \
            o[i] = function(x[i]);                                                     \
        }                                                                              \
    }

CONVERT(widen_f16, float, uint16_t, smp_f16_to_f32)
CONVERT(widen_bf16, float, uint16_t, smp_bf16_to_f32)
CONVERT(narrow_f16, uint16_t, float, smp_f32_to_f16)
CONVERT(narrow_bf16, uint16_t, float, smp_f32_to_bf16)
CONVERT(widen_e4m3fn, float, uint8_t, e4m3fn_to_f32)
CONVERT(widen_e5m2, float, uint8_t, e5m2_to_f32)
CONVERT(narrow_e4m3fn, uint8_t, float, f32_to_e4m3fn)
CONVERT(narrow_e5m2, uint8_t, float, f32_to_e5m2)

/* NOLINTEND(bugprone-macro-parentheses) */

const smp_kernels smp_kernels_scalar = {
    .binary =
        {
            [SMP_U8] = {add_i8, multiply_i8, min_u8, max_u8, and_8, or_8, xor_8},
            [SMP_I8] = {add_i8, multiply_i8, min_i8, max_i8, and_8, or_8, xor_8},
            [SMP_I32] = {add_i32, multiply_i32, min_i32, max_i32, and_32, or_32,
                         xor_32},
            [SMP_I64] = {add_i64, multiply_i64, min_i64, max_i64, and_64, or_64,
                         xor_64},
            [SMP_F32] = {add_f32, multiply_f32, min_f32, max_f32},
            [SMP_F64] = {add_f64, multiply_f64, min_f64, max_f64},
            [SMP_BOOL] = {or_8, and_8, and_8, or_8, and_8, or_8, xor_8},
        },
    .multiply = {[SMP_F32] = scale_f32, [SMP_F64] = scale_f64},
    .divide = {[SMP_U8] = divide_u8,
               [SMP_I8] = divide_i8,
               [SMP_I32] = divide_i32,
               [SMP_I64] = divide_i64,
               [SMP_F32] = divide_f32,
               [SMP_F64] = divide_f64},
    .widen = {[SMP_F16] = widen_f16,
              [SMP_BF16] = widen_bf16,
              [SMP_F8_E4M3FN] = widen_e4m3fn,
              [SMP_F8_E5M2] = widen_e5m2},
    .narrow = {[SMP_F16] = narrow_f16,
               [SMP_BF16] = narrow_bf16,
               [SMP_F8_E4M3FN] = narrow_e4m3fn,
               [SMP_F8_E5M2] = narrow_e5m2},
};
