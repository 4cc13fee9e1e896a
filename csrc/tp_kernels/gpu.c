/* Loading the GPU's kernels, and launching them. */
#include "tp_kernels/gpu.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "device/driver.h"

_Static_assert(SMP_TP_GPU_TEXT == SMP_DRIVER_TEXT, "one room for both");

/* The fat binary; NULL: built without nvcc. */
extern const unsigned char smp_tp_gpu_image[]
    __attribute__((weak, visibility("hidden")));

#define MOST_DEVICES 64
#define WARP 32
#define WARPS (SMP_TP_GPU_BLOCK / WARP) /* of a block */

/* Enough for a GPU; the same on each, so that sums have one order.  Sums of columns
 * want scratch for each warp. */
#define MOST_WARPS 4096
#define MOST_WARPS_WITH_SUMS 512

static const char *const names[SMP_TP_GPU_KERNELS] = {
    [SMP_TP_GPU_SOFTMAX] = "smp_tp_gpu_softmax",
    [SMP_TP_GPU_SOFTMAX_BACKWARD] = "smp_tp_gpu_softmax_backward",
    [SMP_TP_GPU_RESIDUAL] = "smp_tp_gpu_residual",
    [SMP_TP_GPU_RESIDUAL_BACKWARD] = "smp_tp_gpu_residual_backward",
    [SMP_TP_GPU_NORM] = "smp_tp_gpu_norm",
    [SMP_TP_GPU_NORM_BACKWARD] = "smp_tp_gpu_norm_backward",
    [SMP_TP_GPU_CROSS_ENTROPY] = "smp_tp_gpu_cross_entropy",
    [SMP_TP_GPU_CROSS_ENTROPY_BACKWARD] = "smp_tp_gpu_cross_entropy_backward",
    [SMP_TP_GPU_GATHER] = "smp_tp_gpu_gather",
    [SMP_TP_GPU_COLUMN_SUMS] = "smp_tp_gpu_column_sums",
};

/* One device's; written under the lock until it is known. */
typedef struct {
    bool  tried;
    bool  open;
    void *context; /* the driver's primary one, as torch's; kept until the end */
    void *functions[SMP_TP_GPU_KERNELS];
    char  why[SMP_TP_GPU_TEXT];
} loaded;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static loaded          devices[MOST_DEVICES];

/* Threads: with the lock. */
static bool
load_functions(const smp_driver *driver, loaded *at)
{
    void *module;
    bool  ok;

    if (!smp_driver_enter(driver, at->context, at->why)) {
        return false;
    }
    ok = smp_driver_ok(driver, "cuModuleLoadData",
                       driver->module_load(&module, smp_tp_gpu_image), at->why);
    for (int k = 0; ok && k < SMP_TP_GPU_KERNELS; k++) {
        ok = smp_driver_ok(driver, "cuModuleGetFunction",
                           driver->module_function(&at->functions[k], module, names[k]),
                           at->why);
    }
    smp_driver_leave(driver);
    return ok;
}

/* Threads: with the lock. */
static bool
load(int number, loaded *at)
{
    const smp_driver *driver;
    int               device;

    if (!smp_tp_gpu_is_built()) {
        snprintf(at->why, sizeof(at->why), "smp was built without nvcc");
        return false;
    }
    driver = smp_driver_load(at->why);
    return driver != NULL &&
           smp_driver_ok(driver, "cuDeviceGet", driver->device_get(&device, number),
                         at->why) &&
           smp_driver_ok(driver, "cuDevicePrimaryCtxRetain",
                         driver->context_retain(&at->context, device), at->why) &&
           load_functions(driver, at);
}

bool
smp_tp_gpu_is_built(void)
{
    return smp_tp_gpu_image != NULL;
}

bool
smp_tp_gpu_open(int device, char why[SMP_TP_GPU_TEXT])
{
    loaded *at;
    bool    open;

    if (device < 0 || device >= MOST_DEVICES) {
        snprintf(why, SMP_TP_GPU_TEXT, "device %d is not in [0, %d)", device,
                 MOST_DEVICES);
        return false;
    }
    at = &devices[device];
    pthread_mutex_lock(&lock);
    if (!at->tried) {
        at->tried = true;
        at->open = load(device, at);
    }
    open = at->open;
    if (!open) {
        memcpy(why, at->why, SMP_TP_GPU_TEXT);
    }
    pthread_mutex_unlock(&lock);
    return open;
}

static bool
has_sums(smp_tp_gpu_kernel kernel)
{
    return kernel == SMP_TP_GPU_RESIDUAL_BACKWARD || kernel == SMP_TP_GPU_NORM_BACKWARD;
}

/* The warps of a call; at least one, which leaves sums of 0 without rows. */
static size_t
warps_for(smp_tp_gpu_kernel kernel, size_t rows)
{
    const size_t most = has_sums(kernel) ? MOST_WARPS_WITH_SUMS : MOST_WARPS;
    const size_t all = (rows + WARPS - 1) / WARPS * WARPS;

    return all == 0 ? WARPS : all < most ? all : most;
}

/* Floats of scratch of one warp. */
static size_t
scratch_of_warp(smp_tp_gpu_kernel kernel, size_t columns)
{
    const size_t row = SMP_TP_SCRATCH_ROW(columns);

    switch (kernel) {
    case SMP_TP_GPU_SOFTMAX:
    case SMP_TP_GPU_SOFTMAX_BACKWARD:
        return row;
    case SMP_TP_GPU_RESIDUAL_BACKWARD:
        return 2 * row;
    case SMP_TP_GPU_NORM_BACKWARD:
        return 6 * row;
    default:
        return 0;
    }
}

size_t
smp_tp_gpu_scratch(smp_tp_gpu_kernel kernel, size_t rows, size_t columns)
{
    return warps_for(kernel, rows) * scratch_of_warp(kernel, columns) * sizeof(float);
}

/* A call under way, for launch(). */
typedef struct {
    const smp_driver *driver;
    const loaded     *device;
    void             *stream;
    char             *why;
} place;

static bool
launch(const place *on, smp_tp_gpu_kernel kernel, const void *call, size_t blocks)
{
    void *parameters[] = {(void *)(uintptr_t)call}; /* the driver copies it */

    return smp_driver_ok(on->driver, "cuLaunchKernel",
                         on->driver->launch(on->device->functions[kernel],
                                            (unsigned)blocks, 1, 1, SMP_TP_GPU_BLOCK, 1,
                                            1, 0, on->stream, parameters, NULL),
                         on->why);
}

/* Adds up each warp's pair number `nth` of rows of scratch. */
static bool
add_up(const place *on, smp_tp_gpu_sums sums, const float *scratch, size_t nth)
{
    const size_t row = SMP_TP_SCRATCH_ROW(sums.columns);

    sums.first = scratch + 2 * nth * row + row;
    return sums.columns == 0 ||
           launch(on, SMP_TP_GPU_COLUMN_SUMS, &sums,
                  (sums.columns + SMP_TP_GPU_BLOCK - 1) / SMP_TP_GPU_BLOCK);
}

static bool
add_up_residual(const place *on, const smp_tp_residual_backward *call, size_t warps)
{
    smp_tp_gpu_sums sums = {
        .dtype = call->dtype,
        .columns = call->columns,
        .parts = warps,
        .apart = scratch_of_warp(SMP_TP_GPU_RESIDUAL_BACKWARD, call->columns),
        .out = call->grad_bias};

    return call->grad_bias == NULL || add_up(on, sums, call->scratch, 0);
}

static bool
add_up_norm(const place *on, const smp_tp_norm_backward *call, size_t warps)
{
    void *const     outs[] = {call->grad_bias, call->grad_weight, call->grad_shift};
    smp_tp_gpu_sums sums = {
        .dtype = call->dtype,
        .columns = call->columns,
        .parts = warps,
        .apart = scratch_of_warp(SMP_TP_GPU_NORM_BACKWARD, call->columns)};
    bool ok = true;

    for (size_t i = 0; ok && i < sizeof(outs) / sizeof(outs[0]); i++) {
        sums.out = outs[i];
        ok = add_up(on, sums, call->scratch, i);
    }
    return ok;
}

bool
smp_tp_gpu_launch(int device, void *stream, smp_tp_gpu_kernel kernel, const void *call,
                  size_t rows, char why[SMP_TP_GPU_TEXT])
{
    place  on = {.stream = stream, .why = why};
    size_t warps = warps_for(kernel, rows);
    bool   ok;

    if (!smp_tp_gpu_open(device, why)) {
        return false;
    }
    on.device = &devices[device];
    on.driver = smp_driver_load(why);
    if (on.driver == NULL || !smp_driver_enter(on.driver, on.device->context, why)) {
        return false;
    }
    ok = (rows == 0 && !has_sums(kernel)) || launch(&on, kernel, call, warps / WARPS);
    if (ok && kernel == SMP_TP_GPU_RESIDUAL_BACKWARD) {
        ok = add_up_residual(&on, call, warps);
    } else if (ok && kernel == SMP_TP_GPU_NORM_BACKWARD) {
        ok = add_up_norm(&on, call, warps);
    }
    smp_driver_leave(on.driver);
    return ok;
}
