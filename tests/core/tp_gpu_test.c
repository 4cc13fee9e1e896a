/* The GPU's kernels on lanes that take turns (stand_in_gpu.cpp), launched through the
 * driver's stand-in: all that tp_kernels_test.c has for the other sets.
 * Spec: csrc/tp_kernels/gpu.h. */
#define _GNU_SOURCE
#define FOR_SETS(kernels)                                                              \
    for (const smp_tp_kernels *kernels = on_lanes(); kernels != NULL; kernels = NULL)

#include "tp_kernels/gpu.h"

static const smp_tp_kernels *on_lanes(void);

#include "tp_kernels_test.c"

#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>

#include "device/driver.h"
#include "stand_in_library.h"
#include "tp_kernels/sets.h"

/* What a build with nvcc has; the stand-in takes any. */
extern const unsigned char smp_tp_gpu_image[];
const unsigned char        smp_tp_gpu_image[] = {0};

static const stand_in_table *
driver(void)
{
    static const stand_in_table *table;

    if (table == NULL) {
        void *opened;

        find_library();
        opened = dlopen(library, RTLD_NOW);
        table = opened == NULL ? NULL : dlsym(opened, "stand_in");
        if (table == NULL) {
            fprintf(stderr, "%s\n", dlerror());
            abort();
        }
    }
    return table;
}

static void
set(void *arg)
{
    atomic_store((_Atomic bool *)arg, true);
}

/* Waits for what the default stream has been given. */
static void
finish(void)
{
    _Atomic bool over = false;

    driver()->launch(NULL, set, (void *)(uintptr_t)&over);
    while (!atomic_load(&over)) {
        (void)sched_yield();
    }
}

static void
run(smp_tp_gpu_kernel kernel, const void *call)
{
    char why[SMP_TP_GPU_TEXT];

    if (!smp_tp_gpu_launch(0, NULL, kernel, call, why)) {
        fprintf(stderr, "%s\n", why);
        abort();
    }
    finish();
}

#define SET(name, type, kernel)                                                        \
    static void name##_on_lanes(const smp_tp_##type *call)                             \
    {                                                                                  \
        run(kernel, call);                                                             \
    }

/* With its scratch. */
#define SET_WITH_SCRATCH(name, type, kernel, width)                                    \
    static void name##_on_lanes(const smp_tp_##type *call)                             \
    {                                                                                  \
        smp_tp_##type own = *call;                                                     \
                                                                                       \
        own.scratch = malloc(smp_tp_gpu_scratch(kernel, call->rows, call->width) + 1); \
        run(kernel, &own);                                                             \
        free(own.scratch);                                                             \
    }

SET(softmax, softmax, SMP_TP_GPU_SOFTMAX)
SET(softmax_backward, softmax_backward, SMP_TP_GPU_SOFTMAX_BACKWARD)
SET(residual, residual, SMP_TP_GPU_RESIDUAL)
SET_WITH_SCRATCH(residual_backward, residual_backward, SMP_TP_GPU_RESIDUAL_BACKWARD,
                 columns)
SET(norm, norm, SMP_TP_GPU_NORM)
SET_WITH_SCRATCH(norm_backward, norm_backward, SMP_TP_GPU_NORM_BACKWARD, columns)
SET(cross_entropy_backward, cross_entropy_backward, SMP_TP_GPU_CROSS_ENTROPY_BACKWARD)

/* Which target is wrong the host says. */
static size_t
cross_entropy_on_lanes(const smp_tp_cross_entropy *call)
{
    const size_t wrong = smp_tp_kernels_scalar.cross_entropy(call);

    run(SMP_TP_GPU_CROSS_ENTROPY, call);
    return wrong;
}

/* Those of an embedding are torch's on a GPU. */
static void
gather_on_the_host(const smp_tp_gather *call)
{
    smp_tp_kernels_scalar.gather(call);
}

static void
scatter_on_the_host(const smp_tp_scatter *call)
{
    smp_tp_kernels_scalar.scatter(call);
}

static const smp_tp_kernels *
on_lanes(void)
{
    static const smp_tp_kernels kernels = {
        .softmax = softmax_on_lanes,
        .softmax_backward = softmax_backward_on_lanes,
        .residual = residual_on_lanes,
        .residual_backward = residual_backward_on_lanes,
        .norm = norm_on_lanes,
        .norm_backward = norm_backward_on_lanes,
        .cross_entropy = cross_entropy_on_lanes,
        .cross_entropy_backward = cross_entropy_backward_on_lanes,
        .gather = gather_on_the_host,
        .scatter = scatter_on_the_host};

    (void)driver();
    return &kernels;
}

/* Rows in the registers of a warp, of a block, and of no one; some begin at odd
 * addresses.  `also` counts the dtypes' elements before the first one. */
static const struct {
    size_t columns;
    size_t before;
} wide[] = {{1016, 0}, {1024, 0}, {1024, 3}, {1032, 0}, {2047, 0}, {2056, 0},
            {4096, 1}, {8192, 0}, {8200, 0}, {8201, 0}, {8200, 8}};

/* The same values, from an address that is off by so many elements. */
static void *
drawn_at(uint64_t seed, size_t before, size_t count, smp_tp_dtype dtype)
{
    return (char *)drawn(seed, before + count, dtype) +
           before * smp_tp_dtype_bytes(dtype);
}

static void
check_alike(const void *got, const void *want, size_t count, double scale,
            smp_tp_dtype dtype)
{
    for (size_t i = 0; i < count; i++) {
        CHECK(near(get(got, i, dtype), get(want, i, dtype),
                   scale + fabs(get(want, i, dtype)), dtype));
    }
}

enum { ROWS = 9, OUTPUTS = 8 };

/* Outputs of a call on the host, and on lanes. */
typedef struct {
    void *of[2][OUTPUTS];
} outputs;

static outputs
outputs_at(size_t before, size_t count, smp_tp_dtype dtype)
{
    outputs out;

    for (int on = 0; on < 2; on++) {
        for (uint64_t i = 0; i < 5; i++) {
            out.of[on][i] = drawn_at(i, before, count, dtype);
        }
    }
    return out;
}

TEST(wide_rows_get_what_the_host_gives)
{
    const smp_tp_kernels *const sets[] = {&smp_tp_kernels_scalar, on_lanes()};

    for (size_t t = 0; t < 3 * COUNT_OF(wide); t++) {
        smp_tp_dtype dtype = dtypes[t % 3];
        size_t       n = wide[t / 3].columns;
        size_t       before = wide[t / 3].before;
        void        *x = drawn_at(t + 20, before, ROWS * n, dtype);
        void        *residual = drawn_at(t + 21, before, ROWS * n, dtype);
        void        *bias = drawn_at(t + 22, before, n, dtype);
        void        *weight = drawn_at(t + 23, before, n, dtype);
        outputs      rows = outputs_at(before, ROWS * n, dtype);
        outputs      sums = outputs_at(before, n, dtype);
        float        statistics[2][2][ROWS];
        float       *scratch = drawn(0, 6 * SMP_TP_SCRATCH_ROW(n), SMP_TP_F32);

        for (int on = 0; on < 2; on++) {
            void *const             *row = rows.of[on];
            void *const             *sum = sums.of[on];
            smp_tp_norm              call = {.dtype = dtype,
                                             .rows = ROWS,
                                             .columns = n,
                                             .dropout = way(t + 1, n),
                                             .x = x,
                                             .bias = bias,
                                             .residual = residual,
                                             .weight = weight,
                                             .shift = bias,
                                             .eps = 1e-5f,
                                             .sum = row[0],
                                             .out = row[1],
                                             .mean = statistics[on][0],
                                             .rstd = statistics[on][1]};
            smp_tp_norm_backward     back = {.dtype = dtype,
                                             .rows = ROWS,
                                             .columns = n,
                                             .dropout = call.dropout,
                                             .grad_out = x,
                                             .grad_sum = residual,
                                             .sum = rows.of[0][0],
                                             .weight = weight,
                                             .mean = statistics[0][0],
                                             .rstd = statistics[0][1],
                                             .grad_residual = row[2],
                                             .grad_x = row[3],
                                             .grad_bias = sum[0],
                                             .grad_weight = sum[1],
                                             .grad_shift = sum[2],
                                             .scratch = scratch};
            smp_tp_residual_backward dropped = {.dtype = dtype,
                                                .rows = ROWS,
                                                .columns = n,
                                                .dropout = call.dropout,
                                                .grad = residual,
                                                .grad_x = row[4],
                                                .grad_bias = sum[3],
                                                .scratch = scratch};

            sets[on]->norm(&call);
            sets[on]->norm_backward(&back);
            sets[on]->residual_backward(&dropped);
        }
        for (int i = 0; i < 5; i++) {
            check_alike(rows.of[1][i], rows.of[0][i], ROWS * n, 8, dtype);
        }
        for (int i = 0; i < 4; i++) {
            check_alike(sums.of[1][i], sums.of[0][i], n, 8 * ROWS, dtype);
        }
        free_drawn();
    }
}

TEST(wide_scores_get_what_the_host_gives)
{
    const smp_tp_kernels *const sets[] = {&smp_tp_kernels_scalar, on_lanes()};
    const smp_tp_sight          sights[] = {
                 {.causal = false},
                 {.causal = true, .queries = 3, .first_query = 700},
                 {.causal = true, .queries = 3, .first_query = 1500, .window = 801}};

    for (size_t t = 0; t < 3 * COUNT_OF(wide) * COUNT_OF(sights); t++) {
        smp_tp_dtype dtype = dtypes[t % 3];
        size_t       n = wide[t / 3 % COUNT_OF(wide)].columns;
        size_t       before = wide[t / 3 % COUNT_OF(wide)].before;
        void        *scores = drawn_at(t + 20, before, ROWS * n, dtype);
        void        *grad = drawn_at(t + 21, before, ROWS * n, dtype);
        void        *mask = drawn_at(t + 22, before, 3 * n, dtype);
        outputs      rows = outputs_at(before, ROWS * n, dtype);
        float       *scratch = drawn(0, SMP_TP_SCRATCH_ROW(n), SMP_TP_F32);

        for (size_t i = 0; i < n; i++) {
            put(mask, i, dtype, -INFINITY); /* of three rows all */
        }
        for (int on = 0; on < 2; on++) {
            void *const   *row = rows.of[on];
            smp_tp_softmax call = {
                .dtype = dtype,
                .rows = ROWS,
                .keys = n,
                .scale = 0.7f,
                .sight = sights[t / 3 / COUNT_OF(wide)],
                .dropout = way(t, n),
                .scores = scores,
                .mask = {.data = mask, .dims = 2, .shape = {3, 3}, .strides = {n, 0}},
                .probabilities = row[0],
                .out = row[1],
                .scratch = scratch};
            smp_tp_softmax_backward back = {.dtype = dtype,
                                            .rows = ROWS,
                                            .keys = n,
                                            .scale = 0.7f,
                                            .sight = call.sight,
                                            .dropout = call.dropout,
                                            .probabilities = rows.of[0][0],
                                            .grad = grad,
                                            .grad_scores = row[2],
                                            .scratch = scratch};

            sets[on]->softmax(&call);
            sets[on]->softmax_backward(&back);
            /* In place. */
            memcpy(row[3], scores, ROWS * n * smp_tp_dtype_bytes(dtype));
            call.scores = call.probabilities = row[3];
            call.out = NULL;
            sets[on]->softmax(&call);
            CHECK(memcmp(row[3], row[0], ROWS * n * smp_tp_dtype_bytes(dtype)) == 0);
        }
        for (int i = 0; i < 3; i++) {
            check_alike(rows.of[1][i], rows.of[0][i], ROWS * n, 1e-4, dtype);
        }
        free_drawn();
    }
}

static bool
has_no_context(void)
{
    char              why[SMP_DRIVER_TEXT];
    const smp_driver *loaded = smp_driver_load(why);
    void             *context;

    return loaded->context_pop(&context) != SMP_DRIVER_OK;
}

TEST(a_device_that_cannot_be_used_says_why_each_time)
{
    smp_tp_residual call = {.columns = 0};
    char            why[SMP_TP_GPU_TEXT];

    (void)driver();
    CHECK(!smp_tp_gpu_open(-1, why) && strcmp(why, "device -1 is not in [0, 64)") == 0);
    CHECK(!smp_tp_gpu_open(64, why) && strcmp(why, "device 64 is not in [0, 64)") == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(!smp_tp_gpu_open(63, strcpy(why, "")) && strstr(why, "cuDeviceGet: "));
    }
    driver()->fail("cuModuleGetFunction", 70, 701);
    CHECK(!smp_tp_gpu_open(1, why) && strstr(why, "cuModuleGetFunction: "));
    CHECK(driver()->failed() && has_no_context());
    driver()->fail(NULL, 0, 0);
    CHECK(!smp_tp_gpu_launch(1, NULL, SMP_TP_GPU_RESIDUAL, &call, strcpy(why, "")));
    CHECK(strstr(why, "cuModuleGetFunction: "));
}

TEST(a_launch_leaves_the_context_that_was)
{
    float sums[3][1];
    float scratch[3 * 32];

    smp_tp_norm_backward call = {.columns = 1,
                                 .grad_bias = sums[0],
                                 .grad_weight = sums[1],
                                 .grad_shift = sums[2],
                                 .scratch = scratch};
    char                 why[SMP_TP_GPU_TEXT];

    (void)driver();
    CHECK(smp_tp_gpu_scratch(SMP_TP_GPU_NORM_BACKWARD, 0, 1) <= sizeof(scratch));
    CHECK(smp_tp_gpu_open(0, why) && has_no_context());
    /* The columns, and then their sums; there is no row. */
    for (int nth = 0; nth <= 2; nth++) {
        driver()->fail("cuLaunchKernel", nth, nth == 0 ? 0 : 701);
        CHECK(smp_tp_gpu_launch(0, NULL, SMP_TP_GPU_NORM_BACKWARD, &call, why) ==
              (nth == 0));
        CHECK(nth == 0 || strstr(why, "cuLaunchKernel: "));
        driver()->fail(NULL, 0, 0);
        finish();
        CHECK(has_no_context());
    }
}
