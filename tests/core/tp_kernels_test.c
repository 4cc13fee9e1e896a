/* The kernels of tensor parallelism: every set against a reference in double.
 * Spec: csrc/tp_kernels/tp_kernels.h. */
#include "tp_kernels/tp_kernels.h"

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "common/half.h"

static const smp_tp_dtype dtypes[] = {SMP_TP_F32, SMP_TP_F16, SMP_TP_BF16};

/* Of one result, relative to its terms: sums of float32, and one rounding. */
static double
tolerance(smp_tp_dtype dtype)
{
    return dtype == SMP_TP_F32 ? 4e-6 : dtype == SMP_TP_F16 ? 1e-3 : 8e-3;
}

/* Sizes around whole vectors. */
static const size_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 33, 63, 64, 65, 100, 257};
enum { SIZES = COUNT_OF(sizes) };

static uint64_t
mixed(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static double
get(const void *tensor, size_t i, smp_tp_dtype dtype)
{
    switch (dtype) {
    case SMP_TP_F16:
        return (double)smp_f16_to_f32(((const uint16_t *)tensor)[i]);
    case SMP_TP_BF16:
        return (double)smp_bf16_to_f32(((const uint16_t *)tensor)[i]);
    case SMP_TP_F32:
    case SMP_TP_DTYPES:
        break;
    }
    return (double)((const float *)tensor)[i];
}

static void
put(void *tensor, size_t i, smp_tp_dtype dtype, double value)
{
    switch (dtype) {
    case SMP_TP_F16:
        ((uint16_t *)tensor)[i] = smp_f32_to_f16((float)value);
        return;
    case SMP_TP_BF16:
        ((uint16_t *)tensor)[i] = smp_f32_to_bf16((float)value);
        return;
    case SMP_TP_F32:
    case SMP_TP_DTYPES:
        break;
    }
    ((float *)tensor)[i] = (float)value;
}

static void *drawings[32];
static int   ndrawings;

/* A tensor of its own allocation, so that the sanitizer sees its ends; values in (-2,
 * 2).  It lives until free_drawn(). */
static void *
drawn(uint64_t seed, size_t count, smp_tp_dtype dtype)
{
    void *tensor = malloc(count * smp_tp_dtype_bytes(dtype) + (count == 0));

    CHECK(ndrawings < (int)COUNT_OF(drawings));
    drawings[ndrawings++] = tensor;

    for (size_t i = 0; i < count; i++) {
        put(tensor, i, dtype, (double)(mixed(seed + 977 * i) >> 11) / 0x1p51 - 2);
    }
    return tensor;
}

static void
free_drawn(void)
{
    while (ndrawings > 0) {
        free(drawings[--ndrawings]);
    }
}

static bool
near(double got, double want, double scale, smp_tp_dtype dtype)
{
    bool is = isnan(want) ? isnan(got)
                          : got == want ||
                                fabs(got - want) <= tolerance(dtype) * (scale + 1e-3);

    if (!is) {
        fprintf(stderr, "got %.9g, want %.9g\n", got, want);
    }
    return is;
}

/* One word of the generator, as its authors print it. */
static uint32_t
philox(uint64_t counter, uint64_t key, int word)
{
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
    uint32_t k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};

    for (int round = 0; round < 7; round++) {
        uint64_t even = (uint64_t)c[0] * 0xd2511f53u;
        uint64_t odd = (uint64_t)c[2] * 0xcd9e8d57u;
        uint32_t next[4] = {(uint32_t)(odd >> 32) ^ c[1] ^ k[0], (uint32_t)odd,
                            (uint32_t)(even >> 32) ^ c[3] ^ k[1], (uint32_t)even};

        memcpy(c, next, sizeof(c));
        k[0] += 0x9e3779b9u;
        k[1] += 0xbb67ae85u;
    }
    return c[word];
}

/* What element (r, c) is multiplied with. */
static double
kept(const smp_tp_dropout *d, size_t r, size_t c)
{
    uint64_t index;
    uint32_t word;
    double   limit = floor(d->p * 0x1p16 + 0.5);

    if (d->p <= 0 || d->p >= 1) {
        return d->p <= 0;
    }
    index = d->first + r / d->run * d->jump + r % d->run * d->width + c;
    word = philox(index / 8, d->seed, (int)(index % 8 / 2));
    return (index % 2 == 0 ? word & 0xffff : word >> 16) >= fmin(limit, 0xffff)
               ? 1 / (1 - d->p)
               : 0;
}

/* Some ways in which a call's rows lie in the tensor. */
static smp_tp_dropout
way(size_t i, size_t columns)
{
    smp_tp_dropout ways[] = {
        {.p = 0, .run = 1},
        {.p = 0.1, .seed = 7, .run = 1, .jump = columns},
        {.p = 0.5,
         .seed = UINT64_MAX,
         .first = 3,
         .run = 2,
         .jump = 3 * columns + 5,
         .width = columns + 1},
        {.p = 0.25,
         .seed = 1,
         .first = UINT64_C(0x3fffffff0),
         .run = 1,
         .jump = columns},
        {.p = 1, .seed = 9, .run = 1, .jump = columns},
    };

    return ways[i % (COUNT_OF(ways))];
}

/* tp_gpu_test.c has a set of its own. */
#ifndef FOR_SETS
#    define FOR_SETS(kernels)                                                          \
        for (smp_isa isa_ = SMP_ISA_SCALAR; isa_ < SMP_ISAS; isa_++)                   \
            for (const smp_tp_kernels *kernels = smp_tp_kernels_of(isa_);              \
                 kernels != NULL; kernels = NULL)
#endif

/* Of Random123's kat_vectors, 7 rounds: counter 0 and key 0; the counter of ones does
 * not fit. */
TEST(the_generator_of_the_reference_gives_the_known_answer)
{
    CHECK(philox(0, 0, 0) == 0x5f6fb709u);
    CHECK(philox(0, 0, 1) == 0x0d893f64u);
    CHECK(philox(0, 0, 2) == 0x4f121f81u);
    CHECK(philox(0, 0, 3) == 0x4f730a48u);
}

TEST(dropout_keeps_what_the_generator_says)
{
    FOR_SETS(kernels)
    {
        for (size_t w = 0; w < 6; w++) {
            for (size_t s = 0; s < SIZES; s++) {
                enum { ROWS = 5 };
                size_t n = sizes[s];
                float *x = drawn(0, ROWS * n, SMP_TP_F32);
                float *out = drawn(0, ROWS * n, SMP_TP_F32);

                smp_tp_residual call = {.dtype = SMP_TP_F32,
                                        .rows = ROWS,
                                        .columns = n,
                                        .dropout = way(w, n),
                                        .x = x,
                                        .out = out};

                if (w == 5) { /* rounds to one, and is not */
                    call.dropout.p = 1 - 0x1p-20;
                }
                for (size_t i = 0; i < ROWS * n; i++) {
                    x[i] = 1;
                }
                kernels->residual(&call);
                for (size_t i = 0; i < ROWS * n; i++) {
                    CHECK(out[i] == (float)kept(&call.dropout, i / n, i % n));
                }
                free_drawn();
            }
        }
    }
}

TEST(residual_and_its_backward_give_what_the_definition_says)
{
    FOR_SETS(kernels)
    {
        for (size_t t = 0; t < 3 * SIZES * 5; t++) {
            smp_tp_dtype dtype = dtypes[t % 3];
            size_t       rows = t % 7 == 0 ? 300 : t % 4;
            size_t       n = sizes[t / 3 % SIZES];
            void        *x = drawn(t, rows * n, dtype);
            void        *bias = t % 5 == 1 ? NULL : drawn(t + 1, n, dtype);
            void        *residual = t % 5 == 2 ? NULL : drawn(t + 2, rows * n, dtype);
            void        *out = drawn(t + 3, rows * n, dtype);
            void        *grad_x = drawn(t + 4, rows * n, dtype);
            void        *grad_bias = bias == NULL ? NULL : drawn(t + 5, n, dtype);
            float       *scratch = drawn(t, 2 * SMP_TP_SCRATCH_ROW(n), SMP_TP_F32);

            smp_tp_residual          call = {.dtype = dtype,
                                             .rows = rows,
                                             .columns = n,
                                             .dropout = way(t / 3 / SIZES, n),
                                             .x = x,
                                             .bias = bias,
                                             .residual = residual,
                                             .out = out};
            smp_tp_residual_backward back = {
                .dtype = dtype,
                .rows = rows,
                .columns = n,
                .dropout = call.dropout,
                .grad = x,
                .grad_x = grad_x,
                .grad_bias = grad_bias,
                .scratch = bias == NULL ? NULL : scratch,
            };

            kernels->residual(&call);
            kernels->residual_backward(&back);
            for (size_t i = 0; i < rows * n; i++) {
                double factor = kept(&call.dropout, i / n, i % n);
                double b = bias == NULL ? 0 : get(bias, i % n, dtype);
                double r = residual == NULL ? 0 : get(residual, i, dtype);
                double want = r + factor * (get(x, i, dtype) + b);

                CHECK(near(get(out, i, dtype), want, 8, dtype));
                CHECK(near(get(grad_x, i, dtype), factor * get(x, i, dtype), 4, dtype));
            }
            for (size_t c = 0; bias != NULL && c < n; c++) {
                double want = 0;

                for (size_t r = 0; r < rows; r++) {
                    want += kept(&call.dropout, r, c) * get(x, r * n + c, dtype);
                }
                CHECK(near(get(grad_bias, c, dtype), want, 8 + fabs(want), dtype));
            }
            /* In place. */
            call.x = out;
            memcpy(out, x, rows * n * smp_tp_dtype_bytes(dtype));
            memcpy(grad_x, x, rows * n * smp_tp_dtype_bytes(dtype));
            kernels->residual(&call);
            call.x = grad_x;
            call.out = grad_x;
            kernels->residual(&call);
            CHECK(memcmp(out, grad_x, rows * n * smp_tp_dtype_bytes(dtype)) == 0);
            free_drawn();
        }
    }
}

/* Sums of two halves, many of them in the middle between two halves. */
TEST(results_are_rounded_to_the_nearest_half_and_to_even)
{
    enum { COUNT = 4099 };

    for (int d = 1; d < 3; d++) {
        uint16_t *x = drawn(1, COUNT, dtypes[d]);
        uint16_t *residual = drawn(2, COUNT, dtypes[d]);
        uint16_t *out = drawn(3, COUNT, dtypes[d]);

        x[0] = dtypes[d] == SMP_TP_F16 ? 0x7e01 : 0x7fc1; /* NaN */
        x[1] = dtypes[d] == SMP_TP_F16 ? 0xfc00 : 0xff80; /* -infinity */
        x[2] = residual[2] = dtypes[d] == SMP_TP_F16 ? 0x7bff : 0x7f7f;
        for (size_t i = 3; i < 100; i++) {
            x[i] = (uint16_t)i; /* subnormal */
            residual[i] = 0x8000;
        }
        FOR_SETS(kernels)
        {
            smp_tp_residual call = {.dtype = dtypes[d],
                                    .rows = 1,
                                    .columns = COUNT,
                                    .x = x,
                                    .residual = residual,
                                    .out = out};

            kernels->residual(&call);
            for (size_t i = 0; i < COUNT; i++) {
                double   sum = get(x, i, dtypes[d]) + get(residual, i, dtypes[d]);
                uint16_t want;

                put(&want, 0, dtypes[d], sum);
                CHECK(isnan(sum) ? isnan(get(out, i, dtypes[d])) : out[i] == want);
            }
        }
        free_drawn();
    }
}

TEST(layer_norm_after_the_residual_gives_what_the_definition_says)
{
    FOR_SETS(kernels)
    {
        for (size_t t = 0; t < 3 * SIZES * 5; t++) {
            enum { COLUMNS = 257 };
            smp_tp_dtype dtype = dtypes[t % 3];
            size_t       rows = t % 7 == 0 ? 300 : t % 4;
            size_t       n = sizes[t / 3 % SIZES];
            double       eps = t % 2 == 0 ? 1e-5 : 0.1;
            void        *x = drawn(t, rows * n, dtype);
            void        *bias = t % 5 == 1 ? NULL : drawn(t + 1, n, dtype);
            void        *residual = t % 5 == 2 ? NULL : drawn(t + 2, rows * n, dtype);
            void        *weight = t % 4 == 3 ? NULL : drawn(t + 3, n, dtype);
            void        *shift = t % 4 == 3 ? NULL : drawn(t + 4, n, dtype);
            void        *sum = drawn(t + 5, rows * n, dtype);
            void        *out = drawn(t + 6, rows * n, dtype);
            float       *mean = drawn(t, rows, SMP_TP_F32);
            float       *rstd = drawn(t, rows, SMP_TP_F32);
            void        *grad_out = drawn(t + 7, rows * n, dtype);
            void        *grad_sum = t % 5 == 3 ? NULL : drawn(t + 8, rows * n, dtype);
            void        *grad_residual = drawn(t + 9, rows * n, dtype);
            void        *grad_x = t % 5 == 4 ? NULL : drawn(t + 10, rows * n, dtype);
            void        *grad_bias = drawn(t + 11, n, dtype);
            void        *grad_weight = drawn(t + 12, n, dtype);
            void        *grad_shift = drawn(t + 13, n, dtype);
            float       *scratch = drawn(t, 6 * SMP_TP_SCRATCH_ROW(n), SMP_TP_F32);
            double       sums[3][COLUMNS] = {{0}};

            smp_tp_norm          call = {.dtype = dtype,
                                         .rows = rows,
                                         .columns = n,
                                         .dropout = way(t / 3 / SIZES, n),
                                         .x = x,
                                         .bias = bias,
                                         .residual = residual,
                                         .weight = weight,
                                         .shift = shift,
                                         .eps = (float)eps,
                                         .sum = sum,
                                         .out = out,
                                         .mean = mean,
                                         .rstd = rstd};
            smp_tp_norm_backward back = {.dtype = dtype,
                                         .rows = rows,
                                         .columns = n,
                                         .dropout = call.dropout,
                                         .grad_out = grad_out,
                                         .grad_sum = grad_sum,
                                         .sum = sum,
                                         .weight = weight,
                                         .mean = mean,
                                         .rstd = rstd,
                                         .grad_residual = grad_residual,
                                         .grad_x = grad_x,
                                         .grad_bias = grad_bias,
                                         .grad_weight = grad_weight,
                                         .grad_shift = grad_shift,
                                         .scratch = scratch};

            kernels->norm(&call);
            kernels->norm_backward(&back);
            for (size_t r = 0; r < rows; r++) {
                double m = 0;
                double squares = 0;
                double along_one = 0;
                double along_y = 0;
                double s;

                for (size_t c = 0; c < n; c++) {
                    double b = bias == NULL ? 0 : get(bias, c, dtype);
                    double v = residual == NULL ? 0 : get(residual, r * n + c, dtype);

                    v += kept(&call.dropout, r, c) * (get(x, r * n + c, dtype) + b);
                    CHECK(near(get(sum, r * n + c, dtype), v, 8, dtype));
                    m += get(sum, r * n + c, dtype) / (double)n;
                }
                for (size_t c = 0; c < n; c++) {
                    squares += pow(get(sum, r * n + c, dtype) - m, 2);
                }
                s = 1 / sqrt(squares / (double)n + eps);
                for (size_t c = 0; c < n; c++) {
                    double y = (get(sum, r * n + c, dtype) - m) * s;
                    double w = weight == NULL ? 1 : get(weight, c, dtype);
                    double b = shift == NULL ? 0 : get(shift, c, dtype);
                    double g = get(grad_out, r * n + c, dtype);

                    CHECK(near(get(out, r * n + c, dtype), y * w + b,
                               4 * (1 + s) + fabs(y * w), dtype));
                    along_one += g * w / (double)n;
                    along_y += g * w * y / (double)n;
                    sums[1][c] += g * y;
                    sums[2][c] += g;
                }
                for (size_t c = 0; c < n; c++) {
                    double y = (get(sum, r * n + c, dtype) - m) * s;
                    double w = weight == NULL ? 1 : get(weight, c, dtype);
                    double g = get(grad_out, r * n + c, dtype) * w;
                    double factor = kept(&call.dropout, r, c);
                    double scale = 4 + 16 * s * (1 + s);

                    g = (g - along_one - y * along_y) * s;
                    g += grad_sum == NULL ? 0 : get(grad_sum, r * n + c, dtype);
                    CHECK(near(get(grad_residual, r * n + c, dtype), g, scale, dtype));
                    CHECK(grad_x == NULL || near(get(grad_x, r * n + c, dtype),
                                                 factor * g, 4 * scale, dtype));
                    sums[0][c] += factor * g;
                }
            }
            for (size_t c = 0; c < n; c++) {
                double scale = 40 * (double)rows;
                double rstd_of_one =
                    n == 1 ? 1 / sqrt(eps) : 1; /* it has no variance */

                CHECK(near(get(grad_bias, c, dtype), sums[0][c], scale * rstd_of_one,
                           dtype));
                CHECK(near(get(grad_weight, c, dtype), sums[1][c], scale, dtype));
                CHECK(near(get(grad_shift, c, dtype), sums[2][c], scale, dtype));
            }
            free_drawn();
        }
    }
}

/* Whether a row sees a key. */
static bool
sees(const smp_tp_sight *sight, size_t row, size_t key)
{
    int64_t at;

    if (!sight->causal) {
        return true;
    }
    at = sight->first_query + (int64_t)(row % sight->queries);
    return (int64_t)key <= at &&
           (sight->window == 0 || (int64_t)key > at - (int64_t)sight->window);
}

/* Some masks of rows [2, 3, queries]. */
static smp_tp_mask
mask_at(size_t i, void *data, size_t queries, size_t keys)
{
    smp_tp_mask masks[] = {
        {.data = NULL},
        {.data = data, .dims = 3, .shape = {2, 3, queries}, .strides = {keys, 0, 0}},
        {.data = data,
         .dims = 3,
         .shape = {2, 3, queries},
         .strides = {keys * queries, 0, keys}},
        {.data = data, .dims = 3, .shape = {2, 3, queries}, .strides = {0, keys, 0}},
    };

    return masks[i % 4];
}

static size_t
mask_element(const smp_tp_mask *mask, size_t row, size_t queries)
{
    return row / queries / 3 * mask->strides[0] + row / queries % 3 * mask->strides[1] +
           row % queries * mask->strides[2];
}

static void
reference_softmax(const double *scores, size_t n, double *probabilities)
{
    double top = -INFINITY;
    double sum = 0;

    for (size_t k = 0; k < n; k++) {
        top = fmax(top, scores[k]);
    }
    for (size_t k = 0; k < n; k++) {
        probabilities[k] = top == -INFINITY ? 0 : exp(scores[k] - top);
        sum += probabilities[k];
    }
    for (size_t k = 0; k < n; k++) {
        probabilities[k] /= sum == 0 ? 1 : sum;
    }
}

/* One call of softmax, then its backward from what it saved; scores up to 2 * huge. */
static void
check_softmax(const smp_tp_kernels *kernels, size_t t, double huge)
{
    enum { KEYS = 257 };
    smp_tp_dtype dtype = dtypes[t % 3];
    size_t       n = sizes[t / 3 % SIZES];
    size_t       queries = 1 + t % 5;
    size_t       rows = t % 11 == 0 ? 0 : 6 * queries;
    double       scale = t % 2 == 0 ? 1 : 0.125;
    smp_tp_sight sights[] = {
        {.causal = false},
        {.causal = true, .queries = queries, .first_query = (int64_t)n - 2},
        {.causal = true, .queries = queries, .first_query = -1},
        {.causal = true, .queries = queries, .first_query = 3, .window = 1},
        {.causal = true, .queries = queries, .first_query = 3, .window = 2},
        {.causal = true, .queries = queries, .first_query = 40, .window = 19},
    };
    void  *scores = drawn(t, rows * n, dtype);
    void  *added = drawn(t + 1, 6 * queries * n, dtype);
    void  *probabilities = drawn(t + 2, rows * n, dtype);
    void  *out = drawn(t + 3, rows * n, dtype);
    void  *grad = drawn(t + 4, rows * n, dtype);
    void  *grad_scores = drawn(t + 5, rows * n, dtype);
    float *scratch = drawn(t, SMP_TP_SCRATCH_ROW(n), SMP_TP_F32);

    smp_tp_softmax          call = {.dtype = dtype,
                                    .rows = rows,
                                    .keys = n,
                                    .scale = (float)scale,
                                    .sight = sights[t / 7 % (COUNT_OF(sights))],
                                    .dropout = way(t / 3, n),
                                    .scores = scores,
                                    .mask = mask_at(t / 2, added, queries, n),
                                    .probabilities = probabilities,
                                    .out = out,
                                    .scratch = scratch};
    smp_tp_softmax_backward back = {.dtype = dtype,
                                    .rows = rows,
                                    .keys = n,
                                    .scale = (float)scale,
                                    .sight = call.sight,
                                    .dropout = call.dropout,
                                    .probabilities = probabilities,
                                    .grad = grad,
                                    .grad_scores = grad_scores,
                                    .scratch = scratch};

    for (size_t i = 0; i < rows * n; i++) {
        put(scores, i, dtype, get(scores, i, dtype) * huge);
    }
    for (size_t i = 0; i < 6 * queries * n; i++) {
        if (mixed(i + t) % 3 == 0 || i < n) { /* all of the mask's first row */
            put(added, i, dtype, -INFINITY);
        }
    }
    kernels->softmax(&call);
    kernels->softmax_backward(&back);
    for (size_t r = 0; r < rows; r++) {
        double row[KEYS];
        double want[KEYS];
        double dot = 0;

        for (size_t k = 0; k < n; k++) {
            row[k] = get(scores, r * n + k, dtype) * scale;
            if (call.mask.data != NULL) {
                row[k] += get(added, mask_element(&call.mask, r, queries) + k, dtype);
            }
            if (!sees(&call.sight, r, k)) {
                row[k] = -INFINITY;
            }
        }
        reference_softmax(row, n, want);
        for (size_t k = 0; k < n; k++) {
            double p = get(probabilities, r * n + k, dtype);
            double factor = kept(&call.dropout, r, k);

            /* The scores themselves have the rounding of float32. */
            CHECK(near(p, want[k], (1 + huge / 10) * want[k], dtype));
            CHECK(near(get(out, r * n + k, dtype), factor * want[k],
                       (1 + huge / 10) * factor * want[k], dtype));
            dot += p * factor * get(grad, r * n + k, dtype);
        }
        for (size_t k = 0; k < n; k++) {
            double g = kept(&call.dropout, r, k) * get(grad, r * n + k, dtype);
            double p = get(probabilities, r * n + k, dtype);

            CHECK(near(get(grad_scores, r * n + k, dtype), scale * p * (g - dot),
                       scale * p * 4, dtype));
        }
    }
    free_drawn();
}

TEST(softmax_and_its_backward_give_what_the_definition_says)
{
    FOR_SETS(kernels)
    {
        for (size_t t = 0; t < 3 * SIZES * 20; t++) {
            check_softmax(kernels, t, 1);
        }
    }
}

TEST(softmax_of_huge_scores_is_finite)
{
    FOR_SETS(kernels)
    {
        float scores[] = {-3.4e38f, 0, 3.4e38f, 3.4e38f};
        float probabilities[4];
        float scratch[16];

        smp_tp_softmax call = {.rows = 1,
                               .keys = 4,
                               .scale = 1,
                               .scores = scores,
                               .probabilities = probabilities,
                               .scratch = scratch};

        for (size_t t = 0; t < 3 * SIZES * 5; t++) {
            check_softmax(kernels, t, 3e4);
        }
        kernels->softmax(&call);
        CHECK(probabilities[0] == 0 && probabilities[1] == 0);
        CHECK(probabilities[2] == 0.5f && probabilities[3] == 0.5f);
    }
}

TEST(softmax_is_as_exact_as_float32_allows)
{
    enum { KEYS = 4096 };
    static float scores[KEYS];
    static float probabilities[KEYS];
    static float scratch[KEYS];
    double       sum = 0;

    for (size_t k = 0; k < KEYS; k++) {
        scores[k] = -95.0f * (float)k / KEYS;
        sum += exp((double)scores[k]);
    }
    FOR_SETS(kernels)
    {
        smp_tp_softmax call = {.rows = 1,
                               .keys = KEYS,
                               .scale = 1,
                               .scores = scores,
                               .probabilities = probabilities,
                               .scratch = scratch};

        kernels->softmax(&call);
        for (size_t k = 0; k < KEYS; k++) {
            double want = exp((double)scores[k]) / sum;

            CHECK(fabs((double)probabilities[k] - want) < 1e-6 * want + 1.2e-38);
        }
    }
}

TEST(softmax_of_a_nan_is_nan)
{
    FOR_SETS(kernels)
    {
        for (size_t bad = 0; bad < 20; bad++) {
            float scores[20] = {0};
            float mask[20];
            float probabilities[20];
            float scratch[32];

            smp_tp_softmax call = {.rows = 1,
                                   .keys = 20,
                                   .scale = 1,
                                   .scores = scores,
                                   .probabilities = probabilities,
                                   .scratch = scratch};

            scores[bad] = NAN;
            kernels->softmax(&call);
            CHECK(isnan(probabilities[0]) && isnan(probabilities[19]));
            for (size_t k = 0; k < 20; k++) {
                mask[k] = -INFINITY;
            }
            call.mask = (smp_tp_mask){.data = mask};
            kernels->softmax(&call);
            CHECK(isnan(probabilities[0]) && isnan(probabilities[19]));
        }
    }
}

TEST(cross_entropy_and_its_backward_give_what_the_definition_says)
{
    static const size_t columns[] = {0, 1, 15, 16, 17, 65, 257, 2047, 2048, 2049, 5000};
    enum { COLUMNS = COUNT_OF(columns), ROWS = 7 };

    FOR_SETS(kernels)
    {
        for (size_t t = 0; t < 3 * COLUMNS * 4; t++) {
            smp_tp_dtype dtype = dtypes[t % 3];
            size_t       n = columns[t / 3 % COLUMNS];
            size_t       rows = t % 10 == 9 ? 0 : ROWS;
            int64_t      start = t % 4 == 0 ? 0 : 31;
            double       smoothing = t % 2 == 0 ? 0 : 0.1;
            double       huge = t / 3 / COLUMNS == 1 ? 3e4 : 1;
            void        *logits = drawn(t, rows * n, dtype);
            void        *grad = drawn(t + 1, rows * n, dtype);
            float        top[ROWS];
            float        sum[ROWS];
            float        target[ROWS];
            float        all[ROWS];
            float        factors[ROWS] = {1, 0.5f, 0, -2, 1e-3f, 7, 1};
            int64_t      targets[ROWS] = {
                     start,     start + (int64_t)n - 1, -100, start + (int64_t)n,
                     start - 1, start + (int64_t)n / 2, 0};

            smp_tp_cross_entropy          call = {.dtype = dtype,
                                                  .rows = rows,
                                                  .columns = n,
                                                  .start = start,
                                                  .vocabulary = start + (int64_t)n + 1,
                                                  .ignored = start == 0 ? -1 : -100,
                                                  .logits = logits,
                                                  .targets = targets,
                                                  .top = top,
                                                  .sum = sum,
                                                  .target = target,
                                                  .all = t % 3 == 0 ? NULL : all};
            smp_tp_cross_entropy_backward back = {.dtype = dtype,
                                                  .rows = rows,
                                                  .columns = n,
                                                  .start = start,
                                                  .vocabulary = call.vocabulary,
                                                  .smoothing = (float)smoothing,
                                                  .logits = logits,
                                                  .targets = targets,
                                                  .top = top,
                                                  .sum = sum,
                                                  .factors = factors,
                                                  .grad = grad};
            size_t                        wrong = start == 0 && rows > 0 ? 2 : rows;

            if (n == 0) {
                targets[1] = start;
            }
            for (size_t i = 0; i < rows * n; i++) {
                put(logits, i, dtype, get(logits, i, dtype) * huge);
            }
            CHECK(kernels->cross_entropy(&call) == wrong);
            for (size_t r = 0; r < rows; r++) {
                double highest = -INFINITY;
                double want = 0;
                double values = 0;

                for (size_t c = 0; c < n; c++) {
                    highest = fmax(highest, get(logits, r * n + c, dtype));
                    values += get(logits, r * n + c, dtype);
                }
                for (size_t c = 0; c < n; c++) {
                    want += exp(get(logits, r * n + c, dtype) - highest);
                }
                CHECK((double)top[r] == highest);
                CHECK(near((double)sum[r], want, want, SMP_TP_F32));
                CHECK(call.all == NULL ||
                      near((double)all[r], values, (double)(n + 1) * huge, SMP_TP_F32));
                for (int64_t c = targets[r] - start; c >= 0 && c < (int64_t)n; c++) {
                    CHECK((double)target[r] == get(logits, r * n + (size_t)c, dtype));
                    break;
                }
                if (targets[r] < start || targets[r] >= start + (int64_t)n) {
                    CHECK(target[r] == 0);
                }
                if (factors[r] == 0) { /* whatever the row is */
                    top[r] = INFINITY;
                    sum[r] = 0;
                    continue;
                }
                /* What other ranks' columns do to the statistics. */
                top[r] = n == 0 ? 0 : top[r] + (r % 2 == 0 ? 0 : 0.5f);
                sum[r] = sum[r] * (r % 2 == 0 ? 1 : (float)exp(-0.5)) + (float)(r % 3) +
                         (n == 0 ? 1 : 0);
            }
            kernels->cross_entropy_backward(&back);
            for (size_t i = 0; i < rows * n; i++) {
                size_t r = i / n;
                double p = exp(get(logits, i, dtype) - (double)top[r]) / (double)sum[r];
                double is = targets[r] == start + (int64_t)(i % n) ? 1 : 0;
                double want =
                    p - (1 - smoothing) * is - smoothing / (double)call.vocabulary;

                if (factors[r] == 0) {
                    CHECK(get(grad, i, dtype) == 0);
                    continue;
                }
                CHECK(near(get(grad, i, dtype), want * (double)factors[r],
                           fabs((double)factors[r]) * (p + is + 0.01), dtype));
            }
            /* In place. */
            back.grad = logits;
            kernels->cross_entropy_backward(&back);
            CHECK(memcmp(logits, grad, rows * n * smp_tp_dtype_bytes(dtype)) == 0);
            free_drawn();
        }
    }
}

/* Of a vocabulary as models have it: float32 sums do not lose the small terms. */
TEST(cross_entropy_of_many_columns_is_exact)
{
    enum { COLUMNS = 300000 };
    float *logits = drawn(3, COLUMNS, SMP_TP_F32);

    for (size_t up = 0; up < 2; up++) {
        double want = 0;

        /* Rising and falling: the largest comes last, or first. */
        for (size_t c = 0; c < COLUMNS; c++) {
            size_t step = up ? c : COLUMNS - 1 - c;

            logits[c] = (float)step * (40.0f / COLUMNS) - 60;
        }
        for (size_t c = 0; c < COLUMNS; c++) {
            want += exp((double)logits[c] - (double)logits[up ? COLUMNS - 1 : 0]);
        }
        FOR_SETS(kernels)
        {
            const int64_t target = 5;
            float         top;
            float         sum;
            float         own;

            smp_tp_cross_entropy call = {.rows = 1,
                                         .columns = COLUMNS,
                                         .vocabulary = COLUMNS,
                                         .logits = logits,
                                         .targets = &target,
                                         .top = &top,
                                         .sum = &sum,
                                         .target = &own};

            CHECK(kernels->cross_entropy(&call) == 1);
            CHECK(fabs((double)sum - want) < 2e-6 * want);
        }
    }
    free_drawn();
}

TEST(gather_and_scatter_take_the_rows_of_the_slice)
{
    FOR_SETS(kernels)
    {
        for (size_t t = 0; t < 3 * SIZES * 4; t++) {
            enum { COUNT = 40 };
            smp_tp_dtype dtype = dtypes[t % 3];
            size_t       n = sizes[t / 3 % SIZES];
            size_t       rows = t % 5 == 0 ? 0 : 9;
            size_t       count = t % 7 == 0 ? 0 : COUNT;
            void        *table = drawn(t, rows * n, dtype);
            void        *out = drawn(t + 1, count * n, dtype);
            void        *grad = drawn(t + 2, count * n, dtype);
            void        *grad_table = drawn(t + 3, rows * n, dtype);
            int64_t     *ids = malloc(COUNT * sizeof(*ids));
            int64_t     *lists = malloc((rows + COUNT) * sizeof(*lists));

            smp_tp_gather  call = {.dtype = dtype,
                                   .count = count,
                                   .rows = rows,
                                   .columns = n,
                                   .start = 5,
                                   .table = table,
                                   .ids = ids,
                                   .out = out};
            smp_tp_scatter back = {.dtype = dtype,
                                   .count = count,
                                   .rows = rows,
                                   .columns = n,
                                   .start = 5,
                                   .padding = t % 2 == 0 ? -1 : 8,
                                   .ids = ids,
                                   .grad = grad,
                                   .grad_table = grad_table,
                                   .lists = lists};

            for (size_t i = 0; i < COUNT; i++) { /* 13 is the last one; 7 is nowhere */
                ids[i] = (int64_t)(mixed(t + i) % 18) - 1;
                ids[i] = ids[i] == 7 ? 14 : ids[i];
            }
            kernels->gather(&call);
            kernels->scatter(&back);
            for (size_t i = 0; i < count; i++) {
                int64_t at = ids[i] - 5;
                bool    here = at >= 0 && at < (int64_t)rows;

                for (size_t c = 0; c < n; c++) {
                    double want = here ? get(table, (size_t)at * n + c, dtype) : 0;

                    CHECK(get(out, i * n + c, dtype) == want);
                }
            }
            for (size_t i = 0; i < rows * n; i++) {
                double want = 0;
                double scale = 1;

                for (size_t k = 0; k < count; k++) {
                    if (ids[k] == (int64_t)(i / n) + 5 && ids[k] != back.padding) {
                        want += get(grad, k * n + i % n, dtype);
                        scale += 2;
                    }
                }
                /* One rounding: of the sum, not of each addition. */
                CHECK(near(get(grad_table, i, dtype), want,
                           dtype == SMP_TP_F32 ? scale : fabs(want), dtype));
            }
            free(ids);
            free(lists);
            free_drawn();
        }
    }
}

RUN_TESTS
