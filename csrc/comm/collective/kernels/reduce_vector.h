/* The kernels with vectors of SMP_VECTOR_BYTES, for the processors of SMP_TARGET.
 *
 * Included once by each file of a set of kernels (comm/collective/kernels/reduce_avx2.c
 * and comm/collective/kernels/reduce_avx512.c).  The file defines these two, and
 * SMP_WIDEN_F16 and SMP_NARROW_F16, the processor's own conversions of a vector: their
 * rounding is the instruction's, for any mode of the thread.  Each loop handles whole
 * vectors; the plain C kernel does the rest.
 */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_REDUCE_VECTOR_H
#define SMP_COMM_COLLECTIVE_KERNELS_REDUCE_VECTOR_H

#include <stdint.h>

#include "comm/collective/kernels/reduce_kernels.h"

/* Vectors at any address, in memory of any type. */
#define VECTOR(type) type __attribute__((vector_size(SMP_VECTOR_BYTES)))
#define LOOSE __attribute__((aligned(1), may_alias))

typedef VECTOR(uint8_t) v_u8;
typedef VECTOR(int8_t) v_i8;
typedef VECTOR(int32_t) v_i32;
typedef VECTOR(uint32_t) v_u32;
typedef VECTOR(int64_t) v_i64;
typedef VECTOR(uint64_t) v_u64;
typedef VECTOR(float) v_f32;
typedef VECTOR(double) v_f64;
typedef uint16_t v_half __attribute__((vector_size(SMP_VECTOR_BYTES / 2)));

typedef v_u8 LOOSE   at_u8;
typedef v_i8 LOOSE   at_i8;
typedef v_i32 LOOSE  at_i32;
typedef v_u32 LOOSE  at_u32;
typedef v_i64 LOOSE  at_i64;
typedef v_u64 LOOSE  at_u64;
typedef v_f32 LOOSE  at_f32;
typedef v_f64 LOOSE  at_f64;
typedef v_half LOOSE at_half;

/* A kernel on vectors a and b of `type`; elements of `size` bytes; `rest` is the plain
 * kernel. */
#define BINARY(name, type, size, rest, expression)                                     \
    SMP_TARGET static void name(void *out, const void *left, const void *right,        \
                                size_t count)                                          \
    {                                                                                  \
        size_t         whole = count * (size) / SMP_VECTOR_BYTES * SMP_VECTOR_BYTES;   \
        uint8_t       *o = out;                                                        \
        const uint8_t *l = left;                                                       \
        const uint8_t *r = right;                                                      \
                                                                                       \
        for (size_t i = 0; i < whole; i += SMP_VECTOR_BYTES) {                         \
            v_##type a = *(const at_##type *)(const void *)(l + i);                    \
            v_##type b = *(const at_##type *)(const void *)(r + i);                    \
                                                                                       \
            *(at_##type *)(void *)(o + i) = (v_##type)(expression);                    \
        }                                                                              \
        smp_kernels_scalar.binary rest(o + whole, l + whole, r + whole,                \
                                       count - whole / (size));                        \
    }

/* a where the mask `yes` is all ones, else b; as integers of the lanes' width. */
#define CHOOSE(integers, yes, a, b) (((integers)(a) & (yes)) | ((integers)(b) & ~(yes)))

#define MIN_OF(integers) CHOOSE(integers, (integers)(a < b), a, b)
#define MAX_OF(integers) CHOOSE(integers, (integers)(a > b), a, b)
#define MIN_OR_NAN(integers) CHOOSE(integers, (integers)((a < b) | (a != a)), a, b)
#define MAX_OR_NAN(integers) CHOOSE(integers, (integers)((a > b) | (a != a)), a, b)

BINARY(add_i8, u8, 1, [SMP_U8][SMP_SUM], a + b)
BINARY(add_i32, u32, 4, [SMP_I32][SMP_SUM], a + b)
BINARY(add_i64, u64, 8, [SMP_I64][SMP_SUM], a + b)
BINARY(add_f32, f32, 4, [SMP_F32][SMP_SUM], a + b)
BINARY(add_f64, f64, 8, [SMP_F64][SMP_SUM], a + b)

BINARY(multiply_i8, u8, 1, [SMP_U8][SMP_PRODUCT], a *b)
BINARY(multiply_i32, u32, 4, [SMP_I32][SMP_PRODUCT], a *b)
BINARY(multiply_i64, u64, 8, [SMP_I64][SMP_PRODUCT], a *b)
BINARY(multiply_f32, f32, 4, [SMP_F32][SMP_PRODUCT], a *b)
BINARY(multiply_f64, f64, 8, [SMP_F64][SMP_PRODUCT], a *b)

BINARY(min_u8, u8, 1, [SMP_U8][SMP_MIN], MIN_OF(v_u8))
BINARY(min_i8, i8, 1, [SMP_I8][SMP_MIN], MIN_OF(v_i8))
BINARY(min_i32, i32, 4, [SMP_I32][SMP_MIN], MIN_OF(v_i32))
BINARY(min_i64, i64, 8, [SMP_I64][SMP_MIN], MIN_OF(v_i64))
BINARY(min_f32, f32, 4, [SMP_F32][SMP_MIN], MIN_OR_NAN(v_i32))
BINARY(min_f64, f64, 8, [SMP_F64][SMP_MIN], MIN_OR_NAN(v_i64))

BINARY(max_u8, u8, 1, [SMP_U8][SMP_MAX], MAX_OF(v_u8))
BINARY(max_i8, i8, 1, [SMP_I8][SMP_MAX], MAX_OF(v_i8))
BINARY(max_i32, i32, 4, [SMP_I32][SMP_MAX], MAX_OF(v_i32))
BINARY(max_i64, i64, 8, [SMP_I64][SMP_MAX], MAX_OF(v_i64))
BINARY(max_f32, f32, 4, [SMP_F32][SMP_MAX], MAX_OR_NAN(v_i32))
BINARY(max_f64, f64, 8, [SMP_F64][SMP_MAX], MAX_OR_NAN(v_i64))

BINARY(and_8, u8, 1, [SMP_U8][SMP_BAND], a &b)
BINARY(and_32, u32, 4, [SMP_I32][SMP_BAND], a &b)
BINARY(and_64, u64, 8, [SMP_I64][SMP_BAND], a &b)
BINARY(or_8, u8, 1, [SMP_U8][SMP_BOR], a | b)
BINARY(or_32, u32, 4, [SMP_I32][SMP_BOR], a | b)
BINARY(or_64, u64, 8, [SMP_I64][SMP_BOR], a | b)
BINARY(xor_8, u8, 1, [SMP_U8][SMP_BXOR], a ^ b)
BINARY(xor_32, u32, 4, [SMP_I32][SMP_BXOR], a ^ b)
BINARY(xor_64, u64, 8, [SMP_I64][SMP_BXOR], a ^ b)

/* NOLINTBEGIN(bugprone-macro-parentheses): a type cannot have them. */

/* The same with one value for all elements. */
#define SCALING(name, type, element, rest, expression)                                 \
    SMP_TARGET static void name(void *out, const void *in, double value, size_t count) \
    {                                                                                  \
        size_t         lanes = SMP_VECTOR_BYTES / sizeof(element);                     \
        size_t         whole = count / lanes * lanes;                                  \
        element        v = (element)value;                                             \
        element       *o = out;                                                        \
        const element *x = in;                                                         \
                                                                                       \
        for (size_t i = 0; i < whole; i += lanes) {                                    \
            v_##type a = *(const at_##type *)(const void *)(x + i);                    \
                                                                                       \
            *(at_##type *)(void *)(o + i) = expression;                                \
        }                                                                              \
        smp_kernels_scalar.rest(o + whole, x + whole, value, count - whole);           \
    }

/* NOLINTEND(bugprone-macro-parentheses) */

SCALING(scale_f32, f32, float, multiply[SMP_F32], a *v)
SCALING(scale_f64, f64, double, multiply[SMP_F64], a *v)
SCALING(divide_f32, f32, float, divide[SMP_F32], a / v)
SCALING(divide_f64, f64, double, divide[SMP_F64], a / v)

#define HALF_LANES (SMP_VECTOR_BYTES / sizeof(float))

/* A kernel making a vector `single` of floats of one `half`, ... */
#define WIDEN(name, dtype, expression)                                                 \
    SMP_TARGET static void name(void *out, const void *in, size_t count)               \
    {                                                                                  \
        size_t          whole = count / HALF_LANES * HALF_LANES;                       \
        float          *o = out;                                                       \
        const uint16_t *x = in;                                                        \
                                                                                       \
        for (size_t i = 0; i < whole; i += HALF_LANES) {                               \
            v_half half = *(const at_half *)(const void *)(x + i);                     \
                                                                                       \
            *(at_f32 *)(void *)(o + i) = (v_f32)(expression);                          \
        }                                                                              \
        smp_kernels_scalar.widen[dtype](o + whole, x + whole, count - whole);          \
    }

/* ... and the other way round. */
#define NARROW(name, dtype, expression)                                                \
    SMP_TARGET static void name(void *out, const void *in, size_t count)               \
    {                                                                                  \
        size_t       whole = count / HALF_LANES * HALF_LANES;                          \
        uint16_t    *o = out;                                                          \
        const float *x = in;                                                           \
                                                                                       \
        for (size_t i = 0; i < whole; i += HALF_LANES) {                               \
            v_u32 bits = *(const at_u32 *)(const void *)(x + i);                       \
                                                                                       \
            *(at_half *)(void *)(o + i) = (v_half)(expression);                        \
        }                                                                              \
        smp_kernels_scalar.narrow[dtype](o + whole, x + whole, count - whole);         \
    }

#define IS_NAN(bits) (v_u32)((v_i32)((bits)&0x7fffffffu) > 0x7f800000)
#define NEAREST(bits) (((bits) + 0x7fffu + ((bits) >> 16 & 1u)) >> 16)

WIDEN(widen_f16, SMP_F16, SMP_WIDEN_F16(half))
WIDEN(widen_bf16, SMP_BF16, __builtin_convertvector(half, v_u32) << 16)
NARROW(narrow_f16, SMP_F16, SMP_NARROW_F16(bits))
NARROW(narrow_bf16, SMP_BF16,
       __builtin_convertvector(CHOOSE(v_u32, IS_NAN(bits), bits >> 16 | 0x40u,
                                      NEAREST(bits)),
                               v_half))

/* The division of integers and floats of 8 bits have no vector form, and are rare. */
#define SMP_VECTOR_KERNELS                                                             \
    {                                                                                  \
        .binary =                                                                      \
            {                                                                          \
                [SMP_U8] = {add_i8, multiply_i8, min_u8, max_u8, and_8, or_8, xor_8},  \
                [SMP_I8] = {add_i8, multiply_i8, min_i8, max_i8, and_8, or_8, xor_8},  \
                [SMP_I32] = {add_i32, multiply_i32, min_i32, max_i32, and_32, or_32,   \
                             xor_32},                                                  \
                [SMP_I64] = {add_i64, multiply_i64, min_i64, max_i64, and_64, or_64,   \
                             xor_64},                                                  \
                [SMP_F32] = {add_f32, multiply_f32, min_f32, max_f32},                 \
                [SMP_F64] = {add_f64, multiply_f64, min_f64, max_f64},                 \
                [SMP_BOOL] = {or_8, and_8, and_8, or_8, and_8, or_8, xor_8},           \
            },                                                                         \
        .multiply = {[SMP_F32] = scale_f32, [SMP_F64] = scale_f64},                    \
        .divide = {[SMP_F32] = divide_f32, [SMP_F64] = divide_f64},                    \
        .widen = {[SMP_F16] = widen_f16, [SMP_BF16] = widen_bf16},                     \
        .narrow = {[SMP_F16] = narrow_f16, [SMP_BF16] = narrow_bf16},                  \
    }

#endif
