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
run(smp_tp_gpu_kernel kernel, const void *call, size_t rows)
{
    char why[SMP_TP_GPU_TEXT];

    if (!smp_tp_gpu_launch(0, NULL, kernel, call, rows, why)) {
        fprintf(stderr, "%s\n", why);
        abort();
    }
    finish();
}

#define SET(name, type, kernel)                                                        \
    static void name##_on_lanes(const smp_tp_##type *call)                             \
    {                                                                                  \
        run(kernel, call, call->rows);                                                 \
    }

/* With the scratch that the warps want. */
#define SET_WITH_SCRATCH(name, type, kernel, width)                                    \
    static void name##_on_lanes(const smp_tp_##type *call)                             \
    {                                                                                  \
        smp_tp_##type own = *call;                                                     \
                                                                                       \
        own.scratch = malloc(smp_tp_gpu_scratch(kernel, call->rows, call->width) + 1); \
        run(kernel, &own, call->rows);                                                 \
        free(own.scratch);                                                             \
    }

SET_WITH_SCRATCH(softmax, softmax, SMP_TP_GPU_SOFTMAX, keys)
SET_WITH_SCRATCH(softmax_backward, softmax_backward, SMP_TP_GPU_SOFTMAX_BACKWARD, keys)
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

    run(SMP_TP_GPU_CROSS_ENTROPY, call, call->rows);
    return wrong;
}

static void
gather_on_lanes(const smp_tp_gather *call)
{
    run(SMP_TP_GPU_GATHER, call, call->count);
}

/* There is none on a GPU. */
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
        .gather = gather_on_lanes,
        .scatter = scatter_on_the_host};

    (void)driver();
    return &kernels;
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
    smp_tp_gather call = {.columns = 0};
    char          why[SMP_TP_GPU_TEXT];

    (void)driver();
    CHECK(!smp_tp_gpu_open(-1, why) && strcmp(why, "device -1 is not in [0, 64)") == 0);
    CHECK(!smp_tp_gpu_open(64, why) && strcmp(why, "device 64 is not in [0, 64)") == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(!smp_tp_gpu_open(63, strcpy(why, "")) && strstr(why, "cuDeviceGet: "));
    }
    driver()->fail("cuModuleGetFunction", SMP_TP_GPU_KERNELS, 701);
    CHECK(!smp_tp_gpu_open(1, why) && strstr(why, "cuModuleGetFunction: "));
    CHECK(driver()->failed() && has_no_context());
    driver()->fail(NULL, 0, 0);
    CHECK(!smp_tp_gpu_launch(1, NULL, SMP_TP_GPU_GATHER, &call, 1, strcpy(why, "")));
    CHECK(strstr(why, "cuModuleGetFunction: "));
}

TEST(a_launch_leaves_the_context_that_was)
{
    float sums[3][1];
    float scratch[6 * 32 * 32];

    smp_tp_norm_backward call = {.columns = 1,
                                 .grad_bias = sums[0],
                                 .grad_weight = sums[1],
                                 .grad_shift = sums[2],
                                 .scratch = scratch};
    char                 why[SMP_TP_GPU_TEXT];

    (void)driver();
    CHECK(smp_tp_gpu_scratch(SMP_TP_GPU_NORM_BACKWARD, 0, 1) <= sizeof(scratch));
    CHECK(smp_tp_gpu_open(0, why) && has_no_context());
    /* The kernel itself, and then a launch for each sum. */
    for (int nth = 0; nth <= 4; nth++) {
        driver()->fail("cuLaunchKernel", nth, nth == 0 ? 0 : 701);
        CHECK(smp_tp_gpu_launch(0, NULL, SMP_TP_GPU_NORM_BACKWARD, &call, 0, why) ==
              (nth == 0));
        CHECK(nth == 0 || strstr(why, "cuLaunchKernel: "));
        driver()->fail(NULL, 0, 0);
        finish();
        CHECK(has_no_context());
    }
}
