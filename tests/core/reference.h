/* What an operation of a group should give, computed by one rank alone.
 *
 * The inputs of all members follow from a seed, so each member can compute all of them,
 * and its own result by the definition: recursion over the tree, one element at a time.
 */
#ifndef SMP_TESTS_REFERENCE_H
#define SMP_TESTS_REFERENCE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/group.h"
#include "comm/collective/kernels/reduce.h"

#define REFERENCE_MEMBERS 8

typedef struct {
    smp_call call;
    int      n;
    int      self;
    uint64_t seed;
    size_t   in_counts[REFERENCE_MEMBERS]; /* call.counts, when uneven */
    size_t   out_counts[REFERENCE_MEMBERS];
    size_t   in_elements;
    size_t   out_elements; /* that the operation writes on this member */
    uint8_t *in;           /* owned */
    uint8_t *out;          /* owned; NULL: in place */
} reference_call;

static inline uint64_t
reference_random(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Element i of member m's input, as bits.  Floats have many magnitudes, so that every
 * order of adding gives other bits. */
static inline uint64_t
reference_input(uint64_t seed, smp_dtype dtype, int m, size_t i)
{
    uint64_t x = reference_random(seed * 1000003 + (uint64_t)m * 7919 + i * 31);
    double   value = (double)(int64_t)(x >> 11) / 0x1p52 - 0.9;
    float    single;
    uint64_t bits = 0;

    value = ldexp(value, (int)(x % 13) - 6);
    single = (float)value;
    switch (dtype) {
    case SMP_F64:
        memcpy(&bits, &value, sizeof(value));
        return bits;
    case SMP_F32:
        memcpy(&bits, &single, sizeof(single));
        return bits;
    case SMP_F16: /* any of -2^6 .. 2^6, also subnormals */
        return (x >> 20 & 0x83ffu) | (x >> 32) % 22 << 10;
    case SMP_BF16:
        memcpy(&bits, &single, sizeof(single));
        return bits >> 16;
    case SMP_BOOL:
        return x >> 40 & 1;
    case SMP_F8_E4M3FN: /* any below 2^-1 */
        return (x >> 20 & 0x87u) | (x >> 32) % 6 << 3;
    case SMP_F8_E5M2: /* the same, also subnormals */
        return (x >> 20 & 0x83u) | (x >> 32) % 14 << 2;
    case SMP_U8:
    case SMP_I8:
    case SMP_I32:
    case SMP_I64:
    case SMP_DTYPES:
        break;
    }
    return x;
}

/* Half to float and back, by the definition of the formats. */
static inline double
reference_half(uint64_t bits, int exponent_bits, int fraction_bits)
{
    int64_t bias = (1 << (exponent_bits - 1)) - 1;
    int64_t exponent = (int64_t)(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
    double  fraction = (double)(bits & ((1u << fraction_bits) - 1));
    double  sign = bits >> (exponent_bits + fraction_bits) & 1 ? -1 : 1;

    if (exponent == (1 << exponent_bits) - 1) {
        return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    }
    if (exponent == 0) {
        return sign * ldexp(fraction, (int)(1 - bias - fraction_bits));
    }
    return sign * ldexp(ldexp(fraction, -fraction_bits) + 1, (int)(exponent - bias));
}

/* The same for floats of 8 bits, of which one has no infinities. */
static inline double
reference_eighth(smp_dtype dtype, uint64_t bits)
{
    if (dtype == SMP_F8_E5M2) {
        return reference_half(bits, 5, 2);
    }
    if ((bits & 0x7f) == 0x7f) {
        return (double)NAN;
    }
    if ((bits & 0x78) == 0x78) { /* as if it went on */
        return (bits & 0x80 ? -256.0 : 256.0) * (1 + (double)(bits & 7) / 8);
    }
    return reference_half(bits, 4, 3);
}

/* The nearest half of a finite float; ties to the even one. */
static inline uint64_t
reference_to_half(double value, int exponent_bits, int fraction_bits)
{
    uint64_t sign = signbit(value) ? 1u << (exponent_bits + fraction_bits) : 0;
    int      bias = (1 << (exponent_bits - 1)) - 1;
    int      exponent;
    double   scaled;
    uint64_t whole;

    if (value == 0) {
        return sign;
    }
    frexp(fabs(value), &exponent);
    exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
    scaled = nearbyint(ldexp(fabs(value), fraction_bits - exponent));
    whole = (uint64_t)scaled; /* with the hidden bit, if it is there */
    whole += (uint64_t)(exponent + bias - 1) << fraction_bits;
    if (whole >= (uint64_t)((1 << exponent_bits) - 1) << fraction_bits) {
        whole = (uint64_t)((1 << exponent_bits) - 1) << fraction_bits;
    }
    return sign | whole;
}

static inline uint64_t
reference_to_eighth(smp_dtype dtype, double value)
{
    uint64_t sign = signbit(value) ? 0x80 : 0;

    if (dtype == SMP_F8_E5M2) {
        return reference_to_half(value, 5, 2);
    }
    if (fabs(value) >= 256) { /* the last of the powers of two: by 32 up to 448 */
        double steps = nearbyint((fabs(value) - 256) / 32);

        return sign | (steps > 6 ? 0x7f : 0x78 + (uint64_t)steps);
    }
    return reference_to_half(value, 4, 3);
}

/* A term: an integer, or a float in f64 (which holds every f32). */
typedef struct {
    double  value;
    int64_t integer;
} reference_term;

static inline bool
reference_is_float(smp_dtype dtype)
{
    return dtype == SMP_F16 || dtype == SMP_BF16 || dtype == SMP_F32 ||
           dtype == SMP_F64 || dtype == SMP_F8_E4M3FN || dtype == SMP_F8_E5M2;
}

/* Wraps an integer, rounds a float to what terms have. */
static inline reference_term
reference_fit(smp_dtype dtype, reference_term t)
{
    switch (dtype) {
    case SMP_U8:
    case SMP_BOOL:
        t.integer = (uint8_t)t.integer;
        break;
    case SMP_I8:
        t.integer = (int8_t)(uint8_t)t.integer;
        break;
    case SMP_I32:
        t.integer = (int32_t)(uint32_t)t.integer;
        break;
    case SMP_F16:
    case SMP_BF16:
    case SMP_F8_E4M3FN:
    case SMP_F8_E5M2:
    case SMP_F32:
        t.value = (double)(float)t.value;
        break;
    case SMP_I64:
    case SMP_F64:
    case SMP_DTYPES:
        break;
    }
    return t;
}

static inline reference_term
reference_leaf(smp_dtype dtype, uint64_t bits)
{
    reference_term t = {0, (int64_t)bits};
    float          single;

    if (dtype == SMP_F64) {
        memcpy(&t.value, &bits, sizeof(t.value));
    } else if (dtype == SMP_F32) {
        memcpy(&single, &bits, sizeof(single));
        t.value = (double)single;
    } else if (dtype == SMP_F16) {
        t.value = reference_half(bits, 5, 10);
    } else if (dtype == SMP_BF16) {
        t.value = reference_half(bits & 0xffff, 8, 7);
    } else if (dtype == SMP_F8_E4M3FN || dtype == SMP_F8_E5M2) {
        t.value = reference_eighth(dtype, bits & 0xff);
    }
    return reference_is_float(dtype) ? t : reference_fit(dtype, t);
}

static inline reference_term
reference_op(smp_reduction reduction, smp_dtype dtype, reference_term a,
             reference_term b)
{
    uint64_t       x = (uint64_t)a.integer;
    uint64_t       y = (uint64_t)b.integer;
    bool           is_float = reference_is_float(dtype);
    bool           less = is_float ? a.value < b.value : a.integer < b.integer;
    reference_term t = {0, 0};

    if (dtype == SMP_BOOL && reduction == SMP_SUM) {
        reduction = SMP_BOR;
    }
    switch (reduction) {
    case SMP_SUM:
    case SMP_AVG:
    case SMP_PREMUL_SUM:
        t = (reference_term){a.value + b.value, (int64_t)(x + y)};
        break;
    case SMP_PRODUCT:
        t = (reference_term){a.value * b.value, (int64_t)(x * y)};
        break;
    case SMP_MIN:
        return isnan(a.value) || less ? a : b;
    case SMP_MAX:
        return isnan(a.value) || (is_float ? a.value > b.value : a.integer > b.integer)
                   ? a
                   : b;
    case SMP_BAND:
        t.integer = (int64_t)(x & y);
        break;
    case SMP_BOR:
        t.integer = (int64_t)(x | y);
        break;
    case SMP_BXOR:
        t.integer = (int64_t)(x ^ y);
        break;
    case SMP_REDUCTIONS:
        break;
    }
    return reference_fit(dtype, t);
}

static inline double
reference_factor(int m)
{
    return 0.3 + 1.1 * m;
}

/* Element i of the reduced inputs of members first .. first + n. */
static inline reference_term
reference_tree(const reference_call *r, int first, int n, size_t i)
{
    smp_dtype dtype = r->call.dtype;
    int       half = 1;

    if (n == 1) {
        reference_term t =
            reference_leaf(dtype, reference_input(r->seed, dtype, first, i));

        if (r->call.reduction == SMP_PREMUL_SUM) {
            double factor = reference_factor(first);

            t.value *= dtype == SMP_F64 ? factor : (double)(float)factor;
            t = reference_fit(dtype, t);
        }
        return t;
    }
    while (2 * half < n) {
        half *= 2;
    }
    return reference_op(r->call.reduction, dtype, reference_tree(r, first, half, i),
                        reference_tree(r, first + half, n - half, i));
}

/* As the tensor has it. */
static inline uint64_t
reference_bits(smp_dtype dtype, reference_term t)
{
    float    single = (float)t.value;
    uint64_t bits = 0;

    switch (dtype) {
    case SMP_F64:
        memcpy(&bits, &t.value, sizeof(t.value));
        return bits;
    case SMP_F32:
        memcpy(&bits, &single, sizeof(single));
        return bits;
    case SMP_F16:
        return reference_to_half(t.value, 5, 10);
    case SMP_BF16:
        return reference_to_half(t.value, 8, 7);
    case SMP_F8_E4M3FN:
    case SMP_F8_E5M2:
        return reference_to_eighth(dtype, t.value);
    case SMP_U8:
    case SMP_I8:
    case SMP_I32:
    case SMP_I64:
    case SMP_BOOL:
    case SMP_DTYPES:
        break;
    }
    return (uint64_t)t.integer;
}

static inline uint64_t
reference_reduced(const reference_call *r, size_t i)
{
    reference_term t = reference_tree(r, 0, r->n, i);

    if (r->call.reduction == SMP_AVG) {
        t.value /= r->n;
        t.integer /= r->n;
        t = reference_fit(r->call.dtype, t);
    }
    return reference_bits(r->call.dtype, t);
}

static inline size_t
reference_sum(const size_t *counts, int n)
{
    size_t sum = 0;

    for (int m = 0; m < n; m++) {
        sum += counts[m];
    }
    return sum;
}

/* How many elements member `from` sends to `to` in an uneven operation. */
static inline size_t
reference_split(size_t count, uint64_t seed, int from, int to)
{
    uint64_t x = reference_random(seed + (uint64_t)from * 64 + (uint64_t)to);

    return x % 4 == 0 ? 0 : (count * (x % 8) + x % 3) / 4;
}

/* Element i of what this member should get: whose input, and which element of it. */
static inline void
reference_source(const reference_call *r, size_t i, int *member, size_t *element)
{
    const smp_call *call = &r->call;
    size_t          skip = 0;

    *member = call->root;
    *element = i;
    switch (call->operation) {
    case SMP_SCATTER:
        *element = (size_t)r->self * call->count + i;
        break;
    case SMP_GATHER:
    case SMP_ALL_GATHER:
    case SMP_ALL_TO_ALL:
        for (*member = 0; i >= skip + r->out_counts[*member]; (*member)++) {
            skip += r->out_counts[*member];
        }
        *element = i - skip;
        if (call->operation == SMP_ALL_TO_ALL) {
            for (int to = 0; to < r->self; to++) {
                *element += call->counts != NULL
                                ? reference_split(call->count, r->seed, *member, to)
                                : call->count;
            }
        }
        break;
    case SMP_REDUCE_SCATTER:
        *element += reference_sum(r->in_counts, r->self);
        break;
    case SMP_BARRIER:
    case SMP_ALL_REDUCE:
    case SMP_REDUCE:
    case SMP_BROADCAST:
    case SMP_OPERATIONS:
        break;
    }
}

static inline bool
reference_reduces(smp_operation operation)
{
    return operation == SMP_ALL_REDUCE || operation == SMP_REDUCE ||
           operation == SMP_REDUCE_SCATTER;
}

/* A call with filled inputs; false: that operation has no uneven form.  Which
 * reduction, which root, in place or not follow from the seed. */
static inline bool
reference_make(reference_call *r, const smp_group *group, smp_operation operation,
               smp_dtype dtype, size_t count, bool uneven, uint64_t seed)
{
    int      n = smp_group_size(group);
    int      self = smp_group_member(group);
    uint64_t x = reference_random(seed);
    size_t   bytes = smp_dtype_bytes(dtype);
    size_t   in_elements = count;
    bool     in_place = (x >> 8 & 1) != 0;
    bool     at_root;

    if (uneven && operation != SMP_REDUCE_SCATTER && operation != SMP_ALL_GATHER &&
        operation != SMP_ALL_TO_ALL) {
        return false;
    }
    *r = (reference_call){.n = n, .self = self, .seed = seed};
    r->call = (smp_call){.operation = operation,
                         .dtype = dtype,
                         .reduction = (smp_reduction)(x % SMP_REDUCTIONS),
                         .root = (int)((x >> 16) % (unsigned)n),
                         .count = count,
                         .factor = reference_factor(self)};
    while (!smp_reduction_defined(r->call.reduction, dtype)) {
        r->call.reduction = (r->call.reduction + 1) % SMP_REDUCTIONS;
    }
    at_root = self == r->call.root;
    for (int m = 0; m < n; m++) {
        r->in_counts[m] = uneven ? reference_split(count, seed, self, m) : count;
        r->out_counts[m] = uneven ? reference_split(count, seed, m, self) : count;
        if (uneven && operation != SMP_ALL_TO_ALL) { /* the same on all members */
            r->in_counts[m] = reference_split(count, seed, m, m);
            r->out_counts[m] = r->in_counts[m];
        }
    }
    if (uneven) {
        r->call.counts = r->in_counts;
        r->call.out_counts = operation == SMP_ALL_TO_ALL ? r->out_counts : NULL;
    }
    r->out_elements = count;
    switch (operation) {
    case SMP_BARRIER:
        in_elements = r->out_elements = 0;
        break;
    case SMP_REDUCE:
        r->out_elements = at_root ? count : 0;
        break;
    case SMP_REDUCE_SCATTER:
        in_elements = reference_sum(r->in_counts, n);
        r->out_elements = r->in_counts[self];
        break;
    case SMP_ALL_GATHER:
        in_elements = r->out_counts[self];
        r->out_elements = reference_sum(r->out_counts, n);
        break;
    case SMP_BROADCAST:
        in_elements = at_root ? count : 0;
        break;
    case SMP_GATHER:
        r->out_elements = at_root ? (size_t)n * count : 0;
        break;
    case SMP_SCATTER:
        in_elements = at_root ? (size_t)n * count : 0;
        break;
    case SMP_ALL_TO_ALL:
        in_elements = reference_sum(r->in_counts, n);
        r->out_elements = reference_sum(r->out_counts, n);
        break;
    case SMP_ALL_REDUCE:
    case SMP_OPERATIONS:
        break;
    }
    in_place = in_place && (operation == SMP_ALL_REDUCE || operation == SMP_REDUCE);
    r->in_elements = in_elements;
    r->in = malloc(in_elements * bytes + 1);
    r->out = in_place ? NULL : malloc(r->out_elements * bytes + 1);
    if (r->in == NULL || (r->out == NULL && !in_place)) {
        abort();
    }
    for (size_t i = 0; i < in_elements; i++) {
        uint64_t bits = reference_input(seed, dtype, self, i);

        memcpy(r->in + i * bytes, &bits, bytes);
    }
    r->call.in = r->in;
    r->call.out = in_place ? r->in : r->out;
    if (r->out != NULL) { /* to see what is written behind the end */
        r->out[r->out_elements * bytes] = 0x5a;
    }
    return true;
}

/* Whether the call's output is right; says where it is not. */
static inline bool
reference_right(const reference_call *r)
{
    const uint8_t *out = r->call.out;
    size_t         bytes = smp_dtype_bytes(r->call.dtype);

    for (size_t i = 0; i < r->out_elements; i++) {
        int      member;
        size_t   element;
        uint64_t want;

        reference_source(r, i, &member, &element);
        want = reference_reduces(r->call.operation)
                   ? reference_reduced(r, element)
                   : reference_input(r->seed, r->call.dtype, member, element);
        if (memcmp(out + i * bytes, &want, bytes) != 0) {
            uint64_t got = 0;

            memcpy(&got, out + i * bytes, bytes);
            fprintf(stderr, "element %zu of %zu: want %llx, got %llx\n", i,
                    r->out_elements, (unsigned long long)want, (unsigned long long)got);
            return false;
        }
    }
    if (r->out != NULL && out[r->out_elements * bytes] != 0x5a) {
        fprintf(stderr, "written behind the end\n");
        return false;
    }
    return true;
}

static inline void
reference_free(reference_call *r)
{
    free(r->in);
    free(r->out);
}

#endif
