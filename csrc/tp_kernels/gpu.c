/* Loading the GPU's kernels, and launching them. */
#include "tp_kernels/gpu.h"

#include "tp_kernels/gpu_plan.h"

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

/* Columns of a row in the registers of a warp, and of a block. */
#define WARP_COLUMNS ((size_t)WARP * 8 * SMP_TP_GPU_HELD)
#define BLOCK_COLUMNS ((size_t)SMP_TP_GPU_BLOCK * 8 * SMP_TP_GPU_HELD)

/* Blocks of a kernel of rows: many, so that the last ones are few. */
#define MOST_BLOCKS 4096

/* Blocks of a kernel of columns with sums: two for each of an H100's 132 processors,
 * and the same on every GPU, so that sums have one order; and without. */
#define BLOCKS_OF_SUMS 264
#define BLOCKS_OF_COLUMNS 16384

/* A row has fewer: the kernels count its columns in 32 bits. */
#define MOST_COLUMNS ((size_t)1 << 31)

/* Rows of a thread there. */
#define LEAST_ROWS 8
#define MOST_ROWS 512 /* of a sum of float32 */

/* In the order of gpu_entries.h. */
typedef enum { WARP_FORM, BLOCK_FORM, LOOP, ODD_WARP, ODD_BLOCK, FORMS } rows_form;
typedef enum { WHOLE, ODD } columns_form;

typedef enum { OF_ROWS, OF_COLUMNS, OF_LOGITS } family;

/* Parts of others, beside the kernels of gpu.h. */
enum { NORM_MEANS = SMP_TP_GPU_KERNELS, KERNELS };

static const struct {
    const char *name;
    family      family;
} kernels[KERNELS] = {
    [SMP_TP_GPU_SOFTMAX] = {"softmax", OF_ROWS},
    [SMP_TP_GPU_SOFTMAX_BACKWARD] = {"softmax_backward", OF_ROWS},
    [SMP_TP_GPU_RESIDUAL] = {"residual", OF_COLUMNS},
    [SMP_TP_GPU_RESIDUAL_BACKWARD] = {"residual_backward", OF_COLUMNS},
    [SMP_TP_GPU_NORM] = {"norm", OF_ROWS},
    [SMP_TP_GPU_NORM_BACKWARD] = {"norm_backward", OF_COLUMNS},
    [SMP_TP_GPU_CROSS_ENTROPY] = {"cross_entropy", OF_LOGITS},
    [SMP_TP_GPU_CROSS_ENTROPY_BACKWARD] = {"cross_entropy_backward", OF_LOGITS},
    [NORM_MEANS] = {"norm_means", OF_ROWS},
};

static const char *const dtypes[SMP_TP_DTYPES] = {
    [SMP_TP_F32] = "f32", [SMP_TP_F16] = "f16", [SMP_TP_BF16] = "bf16"};

/* NULL: the family has no more. */
static const char *const forms[][FORMS] = {
    [OF_ROWS] = {"warp", "block", "loop", "odd_warp", "odd_block"},
    [OF_COLUMNS] = {"whole", "odd"},
    [OF_LOGITS] = {"warp", "block"},
};

/* One device's; written under the lock until it is known. */
typedef struct {
    bool  tried;
    bool  open;
    void *context; /* the driver's primary one, as torch's; kept until the end */
    void *functions[KERNELS][SMP_TP_DTYPES][FORMS];
    void *column_sums;
    char  why[SMP_TP_GPU_TEXT];
} loaded;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static loaded          devices[MOST_DEVICES];

/* Threads: with the lock. */
static bool
find_function(const smp_driver *driver, void *module, const char *name, void **to,
              char why[SMP_TP_GPU_TEXT])
{
    char full[64];

    snprintf(full, sizeof(full), "smp_tp_gpu_%s", name);
    return smp_driver_ok(driver, "cuModuleGetFunction",
                         driver->module_function(to, module, full), why);
}

/* Threads: with the lock. */
static bool
find_functions(const smp_driver *driver, void *module, loaded *at)
{
    char name[48];

    for (int k = 0; k < KERNELS; k++) {
        const char *const *form = forms[kernels[k].family];

        for (int d = 0; d < SMP_TP_DTYPES; d++) {
            for (int f = 0; f < FORMS && form[f] != NULL; f++) {
                snprintf(name, sizeof(name), "%s_%s_%s", kernels[k].name, dtypes[d],
                         form[f]);
                if (!find_function(driver, module, name, &at->functions[k][d][f],
                                   at->why)) {
                    return false;
                }
            }
        }
    }
    return find_function(driver, module, "column_sums", &at->column_sums, at->why);
}

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
                       driver->module_load(&module, smp_tp_gpu_image), at->why) &&
         find_functions(driver, module, at);
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

static size_t
divided(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/* The plan of a kernel of columns, but for the dropout.  One group at least leaves sums
 * of 0 without rows. */
static smp_tp_gpu_plan
parts_of(size_t rows, size_t columns, bool sums)
{
    const size_t eights = columns == 0 ? 1 : divided(columns, 8);
    const size_t slabs = divided(eights, SMP_TP_GPU_BLOCK);
    const size_t across = divided(eights, slabs);
    const size_t at_once = SMP_TP_GPU_BLOCK / across;
    const size_t most = divided(rows, at_once * LEAST_ROWS);
    const size_t least = divided(rows, at_once * MOST_ROWS);
    size_t       groups = (sums ? BLOCKS_OF_SUMS : BLOCKS_OF_COLUMNS) / slabs;

    groups = groups > most ? most : groups;
    groups = groups < least ? least : groups;
    groups = groups == 0 ? 1 : groups;
    return (smp_tp_gpu_plan){.across = (unsigned)across,
                             .at_once = (unsigned)at_once,
                             .slabs = (unsigned)slabs,
                             .groups = (unsigned)groups};
}

size_t
smp_tp_gpu_scratch(smp_tp_gpu_kernel kernel, size_t rows, size_t columns)
{
    const size_t sums =
        parts_of(rows, columns, true).groups * SMP_TP_SCRATCH_ROW(columns);

    switch (kernel) {
    case SMP_TP_GPU_RESIDUAL_BACKWARD:
        return sums * sizeof(float);
    case SMP_TP_GPU_NORM_BACKWARD: /* means of rows, then sums */
        return (SMP_TP_SCRATCH_ROW(2 * rows) + 3 * sums) * sizeof(float);
    default:
        return 0;
    }
}

/* A call's matrix. */
typedef struct {
    smp_tp_dtype dtype;
    size_t       rows;
    size_t       columns;
    keep_rule    keep;
    bool         whole; /* all rows begin at multiples of 16 bytes, and end there */
} matrix;

static matrix
matrix_of(smp_tp_dtype dtype, size_t rows, size_t columns,
          const smp_tp_dropout *dropout, const void *const *tensors, size_t count)
{
    matrix out = {.dtype = dtype, .rows = rows, .columns = columns};

    if (dropout != NULL) {
        out.keep = keep_rule_of(dropout);
    }

    out.whole = columns % 8 == 0;
    for (size_t i = 0; i < count; i++) {
        out.whole &= (uintptr_t)tensors[i] % 16 == 0;
    }
    return out;
}

#define MATRIX(call, width, dropout, ...)                                              \
    matrix_of((call)->dtype, (call)->rows, (call)->width, dropout,                     \
              (const void *const[]){__VA_ARGS__},                                      \
              sizeof((const void *const[]){__VA_ARGS__}) / sizeof(void *))

static matrix
matrix_of_softmax(const smp_tp_softmax *call)
{
    matrix out = MATRIX(call, keys, &call->dropout, call->scores, call->mask.data,
                        call->probabilities, call->out);

    for (int d = 0; d < call->mask.dims; d++) {
        out.whole &= call->mask.shape[d] == 1 || call->mask.strides[d] % 8 == 0;
    }
    return out;
}

static matrix
matrix_of_softmax_backward(const smp_tp_softmax_backward *call)
{
    return MATRIX(call, keys, &call->dropout, call->probabilities, call->grad,
                  call->grad_scores);
}

static matrix
matrix_of_residual(const smp_tp_residual *call)
{
    return MATRIX(call, columns, &call->dropout, call->x, call->bias, call->residual,
                  call->out);
}

static matrix
matrix_of_residual_backward(const smp_tp_residual_backward *call)
{
    return MATRIX(call, columns, &call->dropout, call->grad, call->grad_x);
}

static matrix
matrix_of_norm(const smp_tp_norm *call)
{
    return MATRIX(call, columns, &call->dropout, call->x, call->bias, call->residual,
                  call->weight, call->shift, call->sum, call->out);
}

static matrix
matrix_of_norm_backward(const smp_tp_norm_backward *call)
{
    return MATRIX(call, columns, &call->dropout, call->grad_out, call->grad_sum,
                  call->sum, call->weight, call->grad_residual, call->grad_x);
}

static matrix
matrix_of_cross_entropy(const smp_tp_cross_entropy *call)
{
    return MATRIX(call, columns, NULL, call->logits);
}

static matrix
matrix_of_cross_entropy_backward(const smp_tp_cross_entropy_backward *call)
{
    return MATRIX(call, columns, NULL, call->logits, call->grad);
}

static matrix
matrix_of_call(smp_tp_gpu_kernel kernel, const void *call)
{
    switch (kernel) {
    case SMP_TP_GPU_SOFTMAX:
        return matrix_of_softmax(call);
    case SMP_TP_GPU_SOFTMAX_BACKWARD:
        return matrix_of_softmax_backward(call);
    case SMP_TP_GPU_RESIDUAL:
        return matrix_of_residual(call);
    case SMP_TP_GPU_RESIDUAL_BACKWARD:
        return matrix_of_residual_backward(call);
    case SMP_TP_GPU_NORM:
        return matrix_of_norm(call);
    case SMP_TP_GPU_NORM_BACKWARD:
        return matrix_of_norm_backward(call);
    case SMP_TP_GPU_CROSS_ENTROPY:
        return matrix_of_cross_entropy(call);
    case SMP_TP_GPU_CROSS_ENTROPY_BACKWARD:
    case SMP_TP_GPU_KERNELS:
        break;
    }
    return matrix_of_cross_entropy_backward(call);
}

/* A call under way, for launch(). */
typedef struct {
    const smp_driver *driver;
    const loaded     *device;
    void             *stream;
    char             *why;
} place;

static bool
launch(const place *on, void *function, const void *call, const smp_tp_gpu_plan *plan,
       size_t blocks)
{
    /* The driver copies them. */
    void *parameters[] = {(void *)(uintptr_t)call, (void *)(uintptr_t)plan};

    return smp_driver_ok(on->driver, "cuLaunchKernel",
                         on->driver->launch(function, (unsigned)blocks, 1, 1,
                                            SMP_TP_GPU_BLOCK, 1, 1, 0, on->stream,
                                            parameters, NULL),
                         on->why);
}

/* A kernel with a warp or a block for each row. */
static bool
launch_rows(const place *on, int kernel, const void *call, const matrix *m)
{
    const smp_tp_gpu_plan plan = {.keep = m->keep};
    const bool            warp = m->columns <= WARP_COLUMNS;
    const size_t          at_once = warp ? SMP_TP_GPU_BLOCK / WARP : 1;
    const size_t          blocks = divided(m->rows, at_once);
    rows_form             form = warp ? WARP_FORM : BLOCK_FORM;

    if (kernels[kernel].family == OF_ROWS && !m->whole) {
        form = warp ? ODD_WARP : ODD_BLOCK;
    } else if (kernels[kernel].family == OF_ROWS && m->columns > BLOCK_COLUMNS) {
        form = LOOP;
    }
    /* All with the same number of rows, but the last. */
    return blocks == 0 ||
           launch(on, on->device->functions[kernel][m->dtype][form], call, &plan,
                  divided(blocks, divided(blocks, MOST_BLOCKS)));
}

static bool
launch_columns(const place *on, int kernel, const void *call, const matrix *m,
               bool sums)
{
    smp_tp_gpu_plan plan = parts_of(m->rows, m->columns, sums);

    plan.keep = m->keep;
    return launch(on, on->device->functions[kernel][m->dtype][m->whole ? WHOLE : ODD],
                  call, &plan, (size_t)plan.slabs * plan.groups);
}

/* Adds up the sums that a kernel of columns has left in `first`. */
static bool
add_up(const place *on, const matrix *m, const float *first, size_t kinds,
       void *const *out)
{
    const smp_tp_gpu_plan plan = parts_of(m->rows, m->columns, true);
    smp_tp_gpu_sums       sums = {.dtype = m->dtype,
                                  .columns = m->columns,
                                  .parts = plan.groups,
                                  .kinds = kinds,
                                  .first = first};

    memcpy(sums.out, out, kinds * sizeof(*out));
    return m->columns == 0 || launch(on, on->device->column_sums, &sums, &plan,
                                     kinds * divided(m->columns, WARP));
}

static bool
launch_residual_backward(const place *on, const smp_tp_residual_backward *call,
                         const matrix *m)
{
    if (call->grad_bias == NULL) {
        return m->rows == 0 ||
               launch_columns(on, SMP_TP_GPU_RESIDUAL_BACKWARD, call, m, false);
    }
    return launch_columns(on, SMP_TP_GPU_RESIDUAL_BACKWARD, call, m, true) &&
           add_up(on, m, call->scratch, 1, &call->grad_bias);
}

static bool
launch_norm_backward(const place *on, const smp_tp_norm_backward *call, const matrix *m)
{
    void *const outs[] = {call->grad_bias, call->grad_weight, call->grad_shift};

    return launch_rows(on, NORM_MEANS, call, m) &&
           launch_columns(on, SMP_TP_GPU_NORM_BACKWARD, call, m, true) &&
           add_up(on, m, call->scratch + SMP_TP_SCRATCH_ROW(2 * m->rows), 3, outs);
}

static bool
launch_all(const place *on, smp_tp_gpu_kernel kernel, const void *call)
{
    const matrix m = matrix_of_call(kernel, call);

    if (m.columns >= MOST_COLUMNS) {
        snprintf(on->why, SMP_TP_GPU_TEXT, "a row of %zu columns, of less than %zu",
                 m.columns, MOST_COLUMNS);
        return false;
    }
    switch (kernel) {
    case SMP_TP_GPU_RESIDUAL_BACKWARD:
        return launch_residual_backward(on, call, &m);
    case SMP_TP_GPU_NORM_BACKWARD:
        return launch_norm_backward(on, call, &m);
    default:
        return m.rows == 0 || (kernels[kernel].family == OF_COLUMNS
                                   ? launch_columns(on, kernel, call, &m, false)
                                   : launch_rows(on, kernel, call, &m));
    }
}

bool
smp_tp_gpu_launch(int device, void *stream, smp_tp_gpu_kernel kernel, const void *call,
                  char why[SMP_TP_GPU_TEXT])
{
    place on = {.stream = stream, .why = why};
    bool  ok;

    if (!smp_tp_gpu_open(device, why)) {
        return false;
    }
    on.device = &devices[device];
    on.driver = smp_driver_load(why);
    if (on.driver == NULL || !smp_driver_enter(on.driver, on.device->context, why)) {
        return false;
    }
    ok = launch_all(&on, kernel, call);
    smp_driver_leave(on.driver);
    return ok;
}
