/* The reductions: plain C against the definition, and every other set of kernels
 * against plain C.  Spec: csrc/comm/collective/kernels/reduce.h. */
#include "comm/collective/kernels/reduce.h"

#include "check.h"
#include "reference.h"

enum { TENSORS = 9, ELEMENTS = 5000 };

/* Room for offsets, and one guard behind. */
static _Alignas(64) uint8_t inputs[TENSORS][(ELEMENTS + 16) * 8];
static _Alignas(64) uint8_t outputs[2][(ELEMENTS + 16) * 8];
static _Alignas(64) uint8_t scratch[SMP_REDUCE_SCRATCH];

static const size_t counts[] = {0,   1,   2,   3,    7,    8,    15,   16,   17,
                                31,  32,  33,  63,   64,   65,   127,  128,  129,
                                255, 257, 511, 1000, 2047, 2048, 2049, 4096, 4999};
enum { COUNTS = COUNT_OF(counts) };

/* Bits of values at which conversions, comparisons and sums are special. */
static uint64_t
special(smp_dtype dtype, uint64_t x)
{
    static const uint64_t f16[] = {0x7e00, 0xfe01, 0x7c00, 0xfc00, 0,
                                   0x8000, 1,      0x83ff, 0x7bff, 0xfbff};
    static const uint32_t f32[] = {0x7fc00000, 0xffc00001, 0x7f800000, 0xff800000,
                                   0,          0x80000000, 1,          0x807fffff,
                                   0x7f7fffff, 0xff7fffff};
    static const uint64_t e4m3[] = {0x7f, 0xff, 0, 0x80, 1, 0x87, 0x7e, 0xfe};
    static const uint64_t e5m2[] = {0x7e, 0xfd, 0x7c, 0xfc, 0,
                                    0x80, 1,    0x83, 0x7b, 0xfb};
    float                 value;
    double                wide;
    uint64_t              bits;

    switch (dtype) {
    case SMP_F16:
        return f16[x % 10];
    case SMP_BF16:
        return f32[x % 10] >> 16;
    case SMP_F32:
        return f32[x % 10];
    case SMP_F64:
        bits = f32[x % 10];
        memcpy(&value, &bits, sizeof(value));
        wide = (double)value;
        memcpy(&bits, &wide, sizeof(bits));
        return bits;
    case SMP_BOOL:
        return x & 1;
    case SMP_F8_E4M3FN:
        return e4m3[x % 8];
    case SMP_F8_E5M2:
        return e5m2[x % 10];
    case SMP_U8:
    case SMP_I8:
    case SMP_I32:
    case SMP_I64:
    case SMP_DTYPES:
        break;
    }
    return x % 3 == 0 ? UINT64_MAX : (uint64_t)1 << (x % 64);
}

static void
fill(smp_dtype dtype, uint64_t seed, bool specials)
{
    size_t bytes = smp_dtype_bytes(dtype);

    for (int m = 0; m < TENSORS; m++) {
        for (size_t i = 0; i < ELEMENTS + 8; i++) {
            uint64_t x = reference_random(seed + i * TENSORS + (uint64_t)m);
            uint64_t bits = specials && x % 4 == 0 ? special(dtype, x >> 8)
                                                   : reference_input(seed, dtype, m, i);

            memcpy(inputs[m] + i * bytes, &bits, bytes);
        }
    }
}

static bool
is_nan(smp_dtype dtype, uint64_t bits)
{
    switch (dtype) {
    case SMP_F16:
        return (bits & 0x7fff) > 0x7c00;
    case SMP_BF16:
        return (bits & 0x7fff) > 0x7f80;
    case SMP_F32:
        return (bits & 0x7fffffff) > 0x7f800000;
    case SMP_F64:
        return (bits & INT64_MAX) > 0x7ff0000000000000;
    case SMP_F8_E4M3FN:
        return (bits & 0x7f) == 0x7f;
    case SMP_F8_E5M2:
        return (bits & 0x7f) > 0x7c;
    case SMP_U8:
    case SMP_I8:
    case SMP_I32:
    case SMP_I64:
    case SMP_BOOL:
    case SMP_DTYPES:
        break;
    }
    return false;
}

/* The same bits, but any NaN for a NaN. */
static bool
same(smp_dtype dtype, const uint8_t *a, const uint8_t *b, size_t count)
{
    size_t bytes = smp_dtype_bytes(dtype);

    for (size_t i = 0; i < count; i++) {
        uint64_t x = 0;
        uint64_t y = 0;

        memcpy(&x, a + i * bytes, bytes);
        memcpy(&y, b + i * bytes, bytes);
        if (x != y && !(is_nan(dtype, x) && is_nan(dtype, y))) {
            fprintf(stderr, "element %zu of %zu: %llx and %llx\n", i, count,
                    (unsigned long long)x, (unsigned long long)y);
            return false;
        }
    }
    return true;
}

/* Reduces inputs from element `offset` on; out in place of tensor 0 or in outputs. */
static uint8_t *
reduce(smp_isa isa, smp_reduction reduction, smp_dtype dtype, int n, size_t offset,
       size_t count, int output)
{
    const void *in[TENSORS];
    double      factors[TENSORS];
    size_t      skip = offset * smp_dtype_bytes(dtype);
    uint8_t    *out = outputs[output] + skip;

    for (int m = 0; m < n; m++) {
        in[m] = inputs[m] + skip;
        factors[m] = reference_factor(m);
    }
    memset(outputs[output], 0x5a, sizeof(outputs[output]));
    smp_reduce(smp_kernels_of(isa), reduction, dtype, out, in, factors, n, count,
               scratch);
    return out;
}

TEST(plain_c_gives_what_the_definition_says)
{
    for (smp_dtype d = 0; d < SMP_DTYPES; d++) {
        for (smp_reduction o = 0; o < SMP_REDUCTIONS; o++) {
            for (int n = 1; n <= TENSORS && smp_reduction_defined(o, d); n++) {
                enum { COUNT = 2100 };
                reference_call r = {
                    .call = {.dtype = d, .reduction = o}, .n = n, .seed = (uint64_t)n};
                static _Alignas(8) uint8_t want[COUNT * 8];
                const uint8_t             *got;

                fill(d, (uint64_t)n, false);
                for (size_t i = 0; i < COUNT; i++) {
                    uint64_t bits = reference_reduced(&r, i);

                    memcpy(want + i * smp_dtype_bytes(d), &bits, smp_dtype_bytes(d));
                }
                got = reduce(SMP_ISA_SCALAR, o, d, n, 0, COUNT, 0);
                if (!same(d, got, want, COUNT)) {
                    fprintf(stderr, "%s of %d %s\n", smp_reduction_name(o), n,
                            smp_dtype_name(d));
                    check_fail();
                }
            }
        }
    }
}

/* With NaNs, infinities, zeros of both signs, subnormals, wherever tensors begin. */
TEST(every_set_of_kernels_gives_the_bits_of_plain_c)
{
    for (smp_isa isa = SMP_ISA_SCALAR + 1; isa < SMP_ISAS; isa++) {
        if (smp_kernels_of(isa) == NULL) {
            printf("this processor lacks set %d\n", (int)isa);
            continue;
        }
        for (smp_dtype d = 0; d < SMP_DTYPES; d++) {
            fill(d, 7, true);
            for (smp_reduction o = 0; o < SMP_REDUCTIONS; o++) {
                for (int i = 0; i < COUNTS && smp_reduction_defined(o, d); i++) {
                    int            n = 1 + i % TENSORS;
                    size_t         offset = (size_t)i % 4;
                    const uint8_t *want =
                        reduce(SMP_ISA_SCALAR, o, d, n, offset, counts[i], 0);
                    const uint8_t *got = reduce(isa, o, d, n, offset, counts[i], 1);

                    if (!same(d, got, want, counts[i]) ||
                        got[counts[i] * smp_dtype_bytes(d)] != 0x5a) {
                        fprintf(stderr, "set %d: %s of %d x %zu %s\n", (int)isa,
                                smp_reduction_name(o), n, counts[i], smp_dtype_name(d));
                        check_fail();
                    }
                }
            }
        }
    }
}

TEST(nan_propagates_through_min_and_max_from_any_rank)
{
    static const smp_dtype dtypes[] = {SMP_F16, SMP_BF16,      SMP_F32,
                                       SMP_F64, SMP_F8_E4M3FN, SMP_F8_E5M2};
    enum { N = COUNT_OF(dtypes) };

    for (smp_isa isa = 0; isa < SMP_ISAS; isa++) {
        for (int d = 0; d < N && smp_kernels_of(isa) != NULL; d++) {
            for (int bad = 0; bad < 5; bad++) {
                size_t   bytes = smp_dtype_bytes(dtypes[d]);
                uint64_t nan = special(dtypes[d], 0);

                CHECK(is_nan(dtypes[d], nan));
                fill(dtypes[d], 3, false);
                for (size_t i = 0; i < 100; i++) {
                    memcpy(inputs[bad] + i * bytes, &nan, bytes);
                }
                for (int o = SMP_MIN; o <= SMP_MAX; o++) {
                    const uint8_t *out =
                        reduce(isa, (smp_reduction)o, dtypes[d], 5, 0, 100, 0);

                    for (size_t i = 0; i < 100; i++) {
                        uint64_t got = 0;

                        memcpy(&got, out + i * bytes, bytes);
                        CHECK(is_nan(dtypes[d], got));
                    }
                }
            }
        }
    }
}

TEST(all_halves_are_widened_exactly_and_come_back)
{
    enum { ALL = 65536 };
    static _Alignas(64) uint16_t halves[ALL];
    static _Alignas(64) uint16_t back[ALL];
    static _Alignas(64) float    wide[ALL];

    for (size_t i = 0; i < ALL; i++) {
        halves[i] = (uint16_t)i;
    }
    for (smp_isa isa = 0; isa < SMP_ISAS; isa++) {
        const smp_kernels *kernels = smp_kernels_of(isa);

        for (int d = SMP_F16; d <= SMP_BF16 && kernels != NULL; d++) {
            int exponent = d == SMP_F16 ? 5 : 8;

            kernels->widen[d](wide, halves, ALL);
            kernels->narrow[d](back, wide, ALL);
            for (size_t i = 0; i < ALL; i++) {
                double want = reference_half(i, exponent, 15 - exponent);

                CHECK(isnan(want) ? isnan(wide[i]) : (double)wide[i] == want);
                CHECK(isnan(want) ? is_nan((smp_dtype)d, back[i]) : back[i] == i);
            }
        }
    }
}

/* Around every half: the value between it and the next, and the floats beside that. */
TEST(floats_are_rounded_to_the_nearest_half_and_to_even)
{
    enum { STEPS = 3 * 32768 };
    static _Alignas(64) float    wide[STEPS];
    static _Alignas(64) uint16_t got[STEPS];

    for (int d = SMP_F16; d <= SMP_BF16; d++) {
        int      exponent = d == SMP_F16 ? 5 : 8;
        uint64_t infinity = d == SMP_F16 ? 0x7c00 : 0x7f80;
        size_t   n = 0;

        for (uint64_t h = 0; h + 1 < infinity; h++) {
            double middle = (reference_half(h, exponent, 15 - exponent) +
                             reference_half(h + 1, exponent, 15 - exponent)) /
                            2;

            wide[n++] = nextafterf((float)middle, 0);
            wide[n++] = (float)(h % 2 == 0 ? middle : -middle);
            wide[n++] = nextafterf((float)middle, INFINITY);
        }
        for (smp_isa isa = 0; isa < SMP_ISAS; isa++) {
            const smp_kernels *kernels = smp_kernels_of(isa);

            if (kernels == NULL) {
                continue;
            }
            kernels->narrow[d](got, wide, n);
            for (size_t i = 0; i < n; i++) {
                CHECK(got[i] ==
                      reference_to_half((double)wide[i], exponent, 15 - exponent));
            }
        }
    }
}

/* All of them, exactly and back; between two, the nearer one, or the even one. */
TEST(floats_of_eight_bits_are_converted_as_they_are_defined)
{
    static const smp_dtype dtypes[] = {SMP_F8_E4M3FN, SMP_F8_E5M2};

    for (int d = 0; d < 2; d++) {
        smp_convert_kernel *widen = smp_kernels_of(SMP_ISA_SCALAR)->widen[dtypes[d]];
        smp_convert_kernel *narrow = smp_kernels_of(SMP_ISA_SCALAR)->narrow[dtypes[d]];
        uint64_t            largest = d == 0 ? 0x7e : 0x7b;

        for (unsigned i = 0; i < 256; i++) {
            uint8_t bits = (uint8_t)i;
            uint8_t back;
            double  want = reference_eighth(dtypes[d], i);
            float   wide;

            widen(&wide, &bits, 1);
            CHECK(isnan(want) ? isnan(wide) : (double)wide == want);
            narrow(&back, &wide, 1);
            CHECK(isnan(want) ? is_nan(dtypes[d], back) : back == bits);
        }
        for (uint64_t i = 0; i <= largest; i++) {
            double low = reference_eighth(dtypes[d], i);
            double high = i < largest ? reference_eighth(dtypes[d], i + 1)
                                      : 2 * low - reference_eighth(dtypes[d], i - 1);
            float  middle = (float)((low + high) / 2);
            float  near[] = {nextafterf(middle, 0), middle,
                             nextafterf(middle, INFINITY)};

            for (int k = 0; k < 6; k++) {
                float    value = k < 3 ? near[k] : -near[k - 3];
                uint64_t want = reference_to_eighth(dtypes[d], (double)value);
                uint8_t  got;

                narrow(&got, &value, 1);
                CHECK(got == want ||
                      (is_nan(dtypes[d], got) && is_nan(dtypes[d], want)));
            }
        }
    }
}

TEST(the_result_may_take_the_place_of_any_tensor)
{
    for (int n = 1; n <= 5; n++) {
        for (int place = 0; place < n; place++) {
            const void *in[TENSORS];

            for (int m = 0; m < n; m++) {
                in[m] = inputs[m];
            }
            fill(SMP_F32, 11, false);
            reduce(SMP_ISA_SCALAR, SMP_AVG, SMP_F32, n, 0, ELEMENTS, 0);
            smp_reduce(smp_kernels_best(), SMP_AVG, SMP_F32, inputs[place], in, NULL, n,
                       ELEMENTS, scratch);
            CHECK(same(SMP_F32, inputs[place], outputs[0], ELEMENTS));
        }
    }
}

/* Six tensors in three terms: four of them, and two alone. */
TEST(terms_give_what_their_tensors_do)
{
    enum { N = 6, FIRST = 4, COUNT = 3000 };
    static _Alignas(64) uint8_t term[(COUNT + 16) * 8];
    const void                 *in[N];
    double                      factors[N];

    for (smp_dtype d = 0; d < SMP_DTYPES; d++) {
        fill(d, 5, false);
        for (int m = 0; m < N; m++) {
            in[m] = inputs[m];
            factors[m] = reference_factor(m);
        }
        for (smp_reduction o = 0; o < SMP_REDUCTIONS; o++) {
            const smp_term terms[] = {{term, FIRST, 1},
                                      {inputs[FIRST], 1, factors[FIRST]},
                                      {inputs[FIRST + 1], 1, factors[FIRST + 1]}};

            if (!smp_reduction_defined(o, d)) {
                continue;
            }
            smp_reduce(smp_kernels_best(), o, d, outputs[0], in, factors, N, COUNT,
                       scratch);
            smp_reduce_term(smp_kernels_best(), o, d, term, in, factors, FIRST, COUNT,
                            scratch);
            smp_reduce_terms(smp_kernels_best(), o, d, outputs[1], terms, 3, COUNT,
                             scratch);
            if (!same(d, outputs[1], outputs[0], COUNT)) {
                fprintf(stderr, "%s of %s\n", smp_reduction_name(o), smp_dtype_name(d));
                check_fail();
            }
        }
    }
}

TEST(what_is_not_defined_is_said_to_be_so)
{
    CHECK(!smp_reduction_defined(SMP_BAND, SMP_F32));
    CHECK(!smp_reduction_defined(SMP_BXOR, SMP_BF16));
    CHECK(!smp_reduction_defined(SMP_AVG, SMP_BOOL));
    CHECK(!smp_reduction_defined(SMP_PREMUL_SUM, SMP_I64));
    CHECK(smp_reduction_defined(SMP_PREMUL_SUM, SMP_F16));
    CHECK(smp_reduction_defined(SMP_AVG, SMP_I8));
    CHECK_TEXT(smp_dtype_name(SMP_DTYPES), "unknown");
    CHECK_TEXT(smp_reduction_name(SMP_REDUCTIONS), "unknown");
}

RUN_TESTS
