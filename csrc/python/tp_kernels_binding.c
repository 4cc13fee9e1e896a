/* Tensors and numbers in, kernels of csrc/tp_kernels called.  Each function has the
 * arguments of its struct there, in that order, `dtype` and `scratch` apart. */
#define PY_SSIZE_T_CLEAN
#include "python/tp_kernels_binding.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "python/values/device.h"
#include "python/values/row.h"
#include "tp_kernels/gpu.h"

/* What is known of a call's tensors so far. */
typedef struct {
    bool         failed; /* with an exception */
    bool         known;
    smp_tp_dtype dtype; /* of all floats, when known */
    bool         placed;
    dl_device    device; /* of all tensors, when placed */
} seen;

/* Of the tensors of a call that are float32 whatever the others are. */
static seen
statistics_of(const seen *see)
{
    return (seen){.failed = see->failed,
                  .known = true,
                  .dtype = SMP_TP_F32,
                  .placed = see->placed,
                  .device = see->device};
}

/* 0, or -1 with an exception: it is elsewhere than the others, or no row. */
static int
see_placed(seen *see, PyObject *tensor, const char *name, smp_row *row)
{
    dl_device device;

    if (smp_see_tensor_anywhere(tensor, row, &device) < 0) {
        return -1;
    }
    if (!see->placed) {
        see->placed = true;
        see->device = device;
    }
    if (device.type != see->device.type || device.id != see->device.id) {
        PyErr_Format(PyExc_ValueError, "%s: on another device than the other tensors",
                     name);
        return -1;
    }
    if (device.type != SMP_DL_CPU && !smp_device_is_drivers(device)) {
        PyErr_Format(PyExc_BufferError, "%s: neither in host memory nor on a GPU",
                     name);
        return -1;
    }
    return 0;
}

/* The data of a dense tensor of `count` elements; NULL when it failed. */
static void *
numbers(seen *see, PyObject *tensor, const char *name, smp_dtype want, size_t count)
{
    smp_row row;

    if (see->failed) {
        return NULL;
    }
    if (see_placed(see, tensor, name, &row) < 0) {
        see->failed = true;
        return NULL;
    }
    if (row.dtype != want || row.per != 1 || row.count != count) {
        PyErr_Format(PyExc_ValueError, "%s: %zu elements of %s, got %zu of %s", name,
                     count, smp_dtype_name(want), row.count, smp_dtype_name(row.dtype));
        see->failed = true;
        return NULL;
    }
    return row.data;
}

/* The same for one of the call's floats; the first tells the dtype. */
static void *
floats(seen *see, PyObject *tensor, const char *name, size_t count)
{
    static const smp_dtype dtypes[SMP_TP_DTYPES] = {
        [SMP_TP_F32] = SMP_F32, [SMP_TP_F16] = SMP_F16, [SMP_TP_BF16] = SMP_BF16};
    smp_row row;

    if (see->failed) {
        return NULL;
    }
    if (!see->known) {
        if (see_placed(see, tensor, name, &row) < 0) {
            see->failed = true;
            return NULL;
        }
        while (see->dtype < SMP_TP_DTYPES && dtypes[see->dtype] != row.dtype) {
            see->dtype++;
        }
        if (see->dtype == SMP_TP_DTYPES) {
            PyErr_Format(PyExc_TypeError, "%s: float32, float16 or bfloat16, got %s",
                         name, smp_dtype_name(row.dtype));
            see->failed = true;
            return NULL;
        }
        see->known = true;
    }
    return numbers(see, tensor, name, dtypes[see->dtype], count);
}

/* NULL for None, too. */
static void *
floats_or_none(seen *see, PyObject *tensor, const char *name, size_t count)
{
    return tensor == Py_None ? NULL : floats(see, tensor, name, count);
}

/* Scratch of a call: of the host, or memory of torch's on the device, which gives it
 * out again only behind what the stream has now. */
typedef struct {
    float    *floats;
    PyObject *tensor; /* owned; NULL: malloc's */
} scratch;

static void
set_error(void *unused, const char *kind, const char *message)
{
    (void)unused;
    PyErr_Format(PyExc_RuntimeError, "smp: scratch of a kernel: %s: %s", kind, message);
}

static void
allocate_on_device(seen *see, scratch *out, size_t bytes)
{
    int64_t     length = (int64_t)(bytes / sizeof(float) + 1);
    int64_t     stride = 1;
    dl_tensor   wanted = {.device = see->device,
                          .ndim = 1,
                          .dtype = {SMP_DL_FLOAT, 32, 1},
                          .shape = &length,
                          .strides = &stride};
    dl_managed *managed = NULL;
    dl_tensor   made;
    void       *tensor;

    if (smp_torch.dlpack->allocate(&wanted, &managed, NULL, set_error) != 0 ||
        smp_torch.dlpack->to_python(managed, &tensor) != 0) {
        if (!PyErr_Occurred()) {
            PyErr_NoMemory();
        }
        see->failed = true;
        return;
    }
    out->tensor = tensor;
    see->failed = smp_torch.dlpack->borrow(tensor, &made) != 0;
    out->floats = (float *)(void *)((char *)made.data + made.byte_offset);
}

/* host_rows: of scratch where the host runs the call.  To be given back; nothing when
 * it failed. */
static scratch
scratch_of(seen *see, smp_tp_gpu_kernel kernel, size_t rows, size_t columns,
           size_t host_rows)
{
    scratch out = {.floats = NULL};

    if (see->failed) {
        return out;
    }
    if (see->device.type != SMP_DL_CPU) {
        allocate_on_device(see, &out, smp_tp_gpu_scratch(kernel, rows, columns));
        return out;
    }
    out.floats =
        malloc((host_rows * SMP_TP_SCRATCH_ROW(columns) + 1) * sizeof(*out.floats));
    if (out.floats == NULL) {
        PyErr_NoMemory();
        see->failed = true;
    }
    return out;
}

static void
give_back(scratch *given)
{
    if (given->tensor == NULL) {
        free(given->floats);
    }
    Py_CLEAR(given->tensor);
}

/* Threads: without the GIL. */
static void
run_on_host(smp_tp_gpu_kernel kernel, const void *call)
{
    const smp_tp_kernels *kernels = smp_tp_kernels_best();

    switch (kernel) {
    case SMP_TP_GPU_SOFTMAX:
        kernels->softmax(call);
        break;
    case SMP_TP_GPU_SOFTMAX_BACKWARD:
        kernels->softmax_backward(call);
        break;
    case SMP_TP_GPU_RESIDUAL:
        kernels->residual(call);
        break;
    case SMP_TP_GPU_RESIDUAL_BACKWARD:
        kernels->residual_backward(call);
        break;
    case SMP_TP_GPU_NORM:
        kernels->norm(call);
        break;
    case SMP_TP_GPU_NORM_BACKWARD:
        kernels->norm_backward(call);
        break;
    case SMP_TP_GPU_CROSS_ENTROPY_BACKWARD:
        kernels->cross_entropy_backward(call);
        break;
    case SMP_TP_GPU_GATHER:
        kernels->gather(call);
        break;
    case SMP_TP_GPU_CROSS_ENTROPY: /* has a result: tp_cross_entropy() */
    case SMP_TP_GPU_COLUMN_SUMS:   /* a part of others */
    case SMP_TP_GPU_KERNELS:
        break;
    }
}

/* On the calling thread's current stream.  False with an exception. */
static bool
run_on_gpu(const seen *see, smp_tp_gpu_kernel kernel, const void *call, size_t rows)
{
    char  why[SMP_TP_GPU_TEXT];
    void *stream;
    bool  ok;

    if (smp_device_stream(see->device, &stream) != 0) {
        return false;
    }
    Py_BEGIN_ALLOW_THREADS;
    ok = smp_tp_gpu_launch(see->device.id, stream, kernel, call, rows, why);
    Py_END_ALLOW_THREADS;
    if (!ok) {
        PyErr_Format(PyExc_RuntimeError, "smp: a kernel on GPU %d: %s",
                     (int)see->device.id, why);
    }
    return ok;
}

/* Runs the call where its tensors are, and gives its scratch (or NULL) back. */
static PyObject *
run(const seen *see, smp_tp_gpu_kernel kernel, const void *call, size_t rows,
    scratch *given)
{
    bool ok = true;

    if (see->device.type != SMP_DL_CPU) {
        ok = run_on_gpu(see, kernel, call, rows);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        run_on_host(kernel, call);
        Py_END_ALLOW_THREADS;
    }
    if (given != NULL) {
        give_back(given);
    }
    return ok ? Py_NewRef(Py_None) : NULL;
}

/* The format of a smp_tp_dropout, and where its parts go. */
#define DROPOUT "(dKKKKK)"
#define DROPOUT_TO(d) &(d).p, &(d).seed, &(d).first, &(d).run, &(d).jump, &(d).width

_Static_assert(sizeof(unsigned long long) == sizeof(uint64_t), "the format's K");

/* What the kernels rely on. */
static void
check_dropout(seen *see, const smp_tp_dropout *dropout)
{
    if (!see->failed && !(dropout->p >= 0 && dropout->p <= 1 && dropout->run >= 1)) {
        PyErr_SetString(PyExc_ValueError,
                        "dropout: p must be in [0, 1] and run at least 1");
        see->failed = true;
    }
}

PyDoc_STRVAR(
    tp_residual_doc,
    "tp_residual(rows, columns, dropout, x, bias, residual, out)\n"
    "--\n\n"
    "See smp_tp_residual.  dropout is (p, seed, first, run, jump, width); bias\n"
    "and residual may be None.");

static PyObject *
tp_residual(PyObject *module, PyObject *args)
{
    smp_tp_residual call = {.rows = 0};
    seen            see = {.failed = false};
    Py_ssize_t      rows;
    Py_ssize_t      columns;
    PyObject       *x;
    PyObject       *bias;
    PyObject       *residual;
    PyObject       *out;

    (void)module;
    if (!PyArg_ParseTuple(args, "nn" DROPOUT "OOOO:tp_residual", &rows, &columns,
                          DROPOUT_TO(call.dropout), &x, &bias, &residual, &out)) {
        return NULL;
    }
    call.rows = (size_t)rows;
    call.columns = (size_t)columns;
    check_dropout(&see, &call.dropout);
    call.x = floats(&see, x, "x", call.rows * call.columns);
    call.bias = floats_or_none(&see, bias, "bias", call.columns);
    call.residual =
        floats_or_none(&see, residual, "residual", call.rows * call.columns);
    call.out = floats(&see, out, "out", call.rows * call.columns);
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    return run(&see, SMP_TP_GPU_RESIDUAL, &call, call.rows, NULL);
}

PyDoc_STRVAR(tp_residual_backward_doc,
             "tp_residual_backward(rows, columns, dropout, grad, grad_x, grad_bias)\n"
             "--\n\n"
             "See smp_tp_residual_backward.  grad_bias may be None.");

static PyObject *
tp_residual_backward(PyObject *module, PyObject *args)
{
    smp_tp_residual_backward call = {.rows = 0};
    scratch                  given = {.floats = NULL};
    seen                     see = {.failed = false};
    Py_ssize_t               rows;
    Py_ssize_t               columns;
    PyObject                *grad;
    PyObject                *grad_x;
    PyObject                *grad_bias;

    (void)module;
    if (!PyArg_ParseTuple(args, "nn" DROPOUT "OOO:tp_residual_backward", &rows,
                          &columns, DROPOUT_TO(call.dropout), &grad, &grad_x,
                          &grad_bias)) {
        return NULL;
    }
    call.rows = (size_t)rows;
    call.columns = (size_t)columns;
    check_dropout(&see, &call.dropout);
    call.grad = floats(&see, grad, "grad", call.rows * call.columns);
    call.grad_x = floats(&see, grad_x, "grad_x", call.rows * call.columns);
    call.grad_bias = floats_or_none(&see, grad_bias, "grad_bias", call.columns);
    if (grad_bias != Py_None) {
        given =
            scratch_of(&see, SMP_TP_GPU_RESIDUAL_BACKWARD, call.rows, call.columns, 2);
    }
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    call.scratch = given.floats;
    return run(&see, SMP_TP_GPU_RESIDUAL_BACKWARD, &call, call.rows, &given);
}

/* The format of a smp_tp_sight. */
#define SIGHT "(pLKK)"

static smp_tp_sight
sight_of(seen *see, int causal, long long first_query, unsigned long long queries,
         unsigned long long window)
{
    if (queries < 1 && !see->failed) {
        PyErr_SetString(PyExc_ValueError, "sight: queries must be at least 1");
        see->failed = true;
    }
    return (smp_tp_sight){causal != 0, first_query, queries, window};
}

/* Numbers of a tuple into `to`; how many, or -1 with an exception. */
static int
sizes(PyObject *tuple, size_t to[SMP_TP_MASK_DIMS])
{
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);

    if (n > SMP_TP_MASK_DIMS) {
        PyErr_Format(PyExc_ValueError, "mask: at most %d dimensions of rows, got %zd",
                     SMP_TP_MASK_DIMS, n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        to[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(tuple, i));
        if (to[i] == (size_t)-1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return (int)n;
}

/* The mask of a call: None, or (tensor, its elements, shape of the rows, strides). */
static smp_tp_mask
mask_of(seen *see, PyObject *object, size_t rows, size_t keys)
{
    smp_tp_mask mask = {.data = NULL};
    PyObject   *tensor;
    PyObject   *shape;
    PyObject   *strides;
    Py_ssize_t  count;
    size_t      end = keys;
    size_t      all = 1;

    if (see->failed || object == Py_None) {
        return mask;
    }
    see->failed = !PyArg_ParseTuple(object, "OnO!O!", &tensor, &count, &PyTuple_Type,
                                    &shape, &PyTuple_Type, &strides) ||
                  (mask.dims = sizes(shape, mask.shape)) < 0 ||
                  sizes(strides, mask.strides) < 0;
    mask.data = floats(see, tensor, "mask", (size_t)count);
    if (see->failed) {
        return mask;
    }
    for (int i = 0; i < mask.dims; i++) {
        all *= mask.shape[i];
        end += mask.shape[i] == 0 ? 0 : (mask.shape[i] - 1) * mask.strides[i];
    }
    if (PyTuple_GET_SIZE(strides) != mask.dims || all != rows ||
        (rows > 0 && end > (size_t)count)) {
        PyErr_SetString(PyExc_ValueError, "mask: shape and strides leave the tensor");
        see->failed = true;
    }
    return mask;
}

PyDoc_STRVAR(
    tp_softmax_doc,
    "tp_softmax(rows, keys, scale, sight, dropout, scores, mask,\n"
    "           probabilities, out)\n"
    "--\n\n"
    "See smp_tp_softmax.  sight is (causal, first_query, queries, window), mask\n"
    "None or (tensor, elements, shape, strides), out may be None.");

static PyObject *
tp_softmax(PyObject *module, PyObject *args)
{
    smp_tp_softmax     call = {.rows = 0};
    scratch            given = {.floats = NULL};
    seen               see = {.failed = false};
    Py_ssize_t         rows;
    Py_ssize_t         keys;
    int                causal;
    long long          first_query;
    unsigned long long queries;
    unsigned long long window;
    PyObject          *scores;
    PyObject          *mask;
    PyObject          *probabilities;
    PyObject          *out;

    (void)module;
    if (!PyArg_ParseTuple(args, "nnf" SIGHT DROPOUT "OOOO:tp_softmax", &rows, &keys,
                          &call.scale, &causal, &first_query, &queries, &window,
                          DROPOUT_TO(call.dropout), &scores, &mask, &probabilities,
                          &out)) {
        return NULL;
    }
    call.rows = (size_t)rows;
    call.keys = (size_t)keys;
    call.sight = sight_of(&see, causal, first_query, queries, window);
    check_dropout(&see, &call.dropout);
    call.scores = floats(&see, scores, "scores", call.rows * call.keys);
    call.mask = mask_of(&see, mask, call.rows, call.keys);
    call.probabilities =
        floats(&see, probabilities, "probabilities", call.rows * call.keys);
    call.out = floats_or_none(&see, out, "out", call.rows * call.keys);
    given = scratch_of(&see, SMP_TP_GPU_SOFTMAX, call.rows, call.keys, 1);
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    call.scratch = given.floats;
    return run(&see, SMP_TP_GPU_SOFTMAX, &call, call.rows, &given);
}

PyDoc_STRVAR(tp_softmax_backward_doc,
             "tp_softmax_backward(rows, keys, scale, sight, dropout, probabilities,\n"
             "                    grad, grad_scores)\n"
             "--\n\n"
             "See smp_tp_softmax_backward.");

static PyObject *
tp_softmax_backward(PyObject *module, PyObject *args)
{
    smp_tp_softmax_backward call = {.rows = 0};
    scratch                 given = {.floats = NULL};
    seen                    see = {.failed = false};
    Py_ssize_t              rows;
    Py_ssize_t              keys;
    int                     causal;
    long long               first_query;
    unsigned long long      queries;
    unsigned long long      window;
    PyObject               *probabilities;
    PyObject               *grad;
    PyObject               *grad_scores;

    (void)module;
    if (!PyArg_ParseTuple(args, "nnf" SIGHT DROPOUT "OOO:tp_softmax_backward", &rows,
                          &keys, &call.scale, &causal, &first_query, &queries, &window,
                          DROPOUT_TO(call.dropout), &probabilities, &grad,
                          &grad_scores)) {
        return NULL;
    }
    call.rows = (size_t)rows;
    call.keys = (size_t)keys;
    call.sight = sight_of(&see, causal, first_query, queries, window);
    check_dropout(&see, &call.dropout);
    call.probabilities =
        floats(&see, probabilities, "probabilities", call.rows * call.keys);
    call.grad = floats(&see, grad, "grad", call.rows * call.keys);
    call.grad_scores = floats(&see, grad_scores, "grad_scores", call.rows * call.keys);
    given = scratch_of(&see, SMP_TP_GPU_SOFTMAX_BACKWARD, call.rows, call.keys, 1);
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    call.scratch = given.floats;
    return run(&see, SMP_TP_GPU_SOFTMAX_BACKWARD, &call, call.rows, &given);
}

PyDoc_STRVAR(tp_norm_doc,
             "tp_norm(rows, columns, dropout, x, bias, residual, weight, shift, eps,\n"
             "        sum, out, statistics)\n"
             "--\n\n"
             "See smp_tp_norm.  bias, residual, weight and shift may be None;\n"
             "statistics is [2, rows], mean and rstd.");

static PyObject *
tp_norm(PyObject *module, PyObject *args)
{
    smp_tp_norm call = {.rows = 0};
    seen        see = {.failed = false};
    seen        statistics;
    Py_ssize_t  rows;
    Py_ssize_t  columns;
    size_t      count;
    PyObject   *x;
    PyObject   *bias;
    PyObject   *residual;
    PyObject   *weight;
    PyObject   *shift;
    PyObject   *sum;
    PyObject   *out;
    PyObject   *both;

    (void)module;
    if (!PyArg_ParseTuple(args, "nn" DROPOUT "OOOOOfOOO:tp_norm", &rows, &columns,
                          DROPOUT_TO(call.dropout), &x, &bias, &residual, &weight,
                          &shift, &call.eps, &sum, &out, &both)) {
        return NULL;
    }
    call.rows = (size_t)rows;
    call.columns = (size_t)columns;
    count = call.rows * call.columns;
    check_dropout(&see, &call.dropout);
    call.x = floats(&see, x, "x", count);
    call.bias = floats_or_none(&see, bias, "bias", call.columns);
    call.residual = floats_or_none(&see, residual, "residual", count);
    call.weight = floats_or_none(&see, weight, "weight", call.columns);
    call.shift = floats_or_none(&see, shift, "shift", call.columns);
    call.sum = floats(&see, sum, "sum", count);
    call.out = floats(&see, out, "out", count);
    statistics = statistics_of(&see);
    call.mean = floats(&statistics, both, "statistics", 2 * call.rows);
    if (statistics.failed) {
        return NULL;
    }
    call.rstd = call.mean + call.rows;
    call.dtype = see.dtype;
    return run(&see, SMP_TP_GPU_NORM, &call, call.rows, NULL);
}

PyDoc_STRVAR(
    tp_norm_backward_doc,
    "tp_norm_backward(rows, columns, dropout, grad_out, grad_sum, sum, weight,\n"
    "                 statistics, grad_residual, grad_x, grad_bias,\n"
    "                 grad_weight, grad_shift)\n"
    "--\n\n"
    "See smp_tp_norm_backward.  grad_sum, weight and grad_x may be None.");

static PyObject *
tp_norm_backward(PyObject *module, PyObject *args)
{
    smp_tp_norm_backward call = {.rows = 0};
    scratch              given = {.floats = NULL};
    seen                 see = {.failed = false};
    seen                 statistics;
    Py_ssize_t           rows;
    Py_ssize_t           columns;
    size_t               count;
    PyObject            *grad_out;
    PyObject            *grad_sum;
    PyObject            *sum;
    PyObject            *weight;
    PyObject            *both;
    PyObject            *grad_residual;
    PyObject            *grad_x;
    PyObject            *grad_bias;
    PyObject            *grad_weight;
    PyObject            *grad_shift;

    (void)module;
    if (!PyArg_ParseTuple(args, "nn" DROPOUT "OOOOOOOOOO:tp_norm_backward", &rows,
                          &columns, DROPOUT_TO(call.dropout), &grad_out, &grad_sum,
                          &sum, &weight, &both, &grad_residual, &grad_x, &grad_bias,
                          &grad_weight, &grad_shift)) {
        return NULL;
    }
    call.rows = (size_t)rows;
    call.columns = (size_t)columns;
    count = call.rows * call.columns;
    check_dropout(&see, &call.dropout);
    call.grad_out = floats(&see, grad_out, "grad_out", count);
    call.grad_sum = floats_or_none(&see, grad_sum, "grad_sum", count);
    call.sum = floats(&see, sum, "sum", count);
    call.weight = floats_or_none(&see, weight, "weight", call.columns);
    call.grad_residual = floats(&see, grad_residual, "grad_residual", count);
    call.grad_x = floats_or_none(&see, grad_x, "grad_x", count);
    call.grad_bias = floats(&see, grad_bias, "grad_bias", call.columns);
    call.grad_weight = floats(&see, grad_weight, "grad_weight", call.columns);
    call.grad_shift = floats(&see, grad_shift, "grad_shift", call.columns);
    statistics = statistics_of(&see);
    call.mean = floats(&statistics, both, "statistics", 2 * call.rows);
    given =
        scratch_of(&statistics, SMP_TP_GPU_NORM_BACKWARD, call.rows, call.columns, 6);
    if (statistics.failed) {
        return NULL;
    }
    call.rstd = call.mean + call.rows;
    call.dtype = see.dtype;
    call.scratch = given.floats;
    return run(&see, SMP_TP_GPU_NORM_BACKWARD, &call, call.rows, &given);
}

PyDoc_STRVAR(
    tp_cross_entropy_doc,
    "tp_cross_entropy(rows, columns, (start, vocabulary, ignored), logits,\n"
    "                 targets, top, sum, target, all)\n"
    "--\n\n"
    "See smp_tp_cross_entropy.  Returns what it returns, on a GPU None: there the\n"
    "targets are the caller's to check.  all may be None.");

static PyObject *
tp_cross_entropy(PyObject *module, PyObject *args)
{
    smp_tp_cross_entropy call = {.rows = 0};
    seen                 see = {.failed = false};
    seen                 statistics;
    Py_ssize_t           rows;
    Py_ssize_t           columns;
    long long            start;
    long long            vocabulary;
    long long            ignored;
    PyObject            *logits;
    PyObject            *targets;
    PyObject            *top;
    PyObject            *sum;
    PyObject            *target;
    PyObject            *all;
    size_t               wrong;

    (void)module;
    if (!PyArg_ParseTuple(args, "nn(LLL)OOOOOO:tp_cross_entropy", &rows, &columns,
                          &start, &vocabulary, &ignored, &logits, &targets, &top, &sum,
                          &target, &all)) {
        return NULL;
    }
    call.rows = (size_t)rows;
    call.columns = (size_t)columns;
    call.start = start;
    call.vocabulary = vocabulary;
    call.ignored = ignored;
    call.logits = floats(&see, logits, "logits", call.rows * call.columns);
    call.targets = numbers(&see, targets, "targets", SMP_I64, call.rows);
    statistics = statistics_of(&see);
    call.top = floats(&statistics, top, "top", call.rows);
    call.sum = floats(&statistics, sum, "sum", call.rows);
    call.target = floats(&statistics, target, "target", call.rows);
    call.all = floats_or_none(&statistics, all, "all", call.rows);
    if (statistics.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    if (see.device.type != SMP_DL_CPU) {
        return run(&see, SMP_TP_GPU_CROSS_ENTROPY, &call, call.rows, NULL);
    }
    Py_BEGIN_ALLOW_THREADS;
    wrong = smp_tp_kernels_best()->cross_entropy(&call);
    Py_END_ALLOW_THREADS;
    return PyLong_FromSize_t(wrong);
}

PyDoc_STRVAR(
    tp_cross_entropy_backward_doc,
    "tp_cross_entropy_backward(rows, columns, (start, vocabulary), smoothing,\n"
    "                          logits, targets, top, sum, factors, grad)\n"
    "--\n\n"
    "See smp_tp_cross_entropy_backward.");

static PyObject *
tp_cross_entropy_backward(PyObject *module, PyObject *args)
{
    smp_tp_cross_entropy_backward call = {.rows = 0};
    seen                          see = {.failed = false};
    seen                          statistics;
    Py_ssize_t                    rows;
    Py_ssize_t                    columns;
    long long                     start;
    long long                     vocabulary;
    PyObject                     *logits;
    PyObject                     *targets;
    PyObject                     *top;
    PyObject                     *sum;
    PyObject                     *factors;
    PyObject                     *grad;

    (void)module;
    if (!PyArg_ParseTuple(args, "nn(LL)fOOOOOO:tp_cross_entropy_backward", &rows,
                          &columns, &start, &vocabulary, &call.smoothing, &logits,
                          &targets, &top, &sum, &factors, &grad)) {
        return NULL;
    }
    call.rows = (size_t)rows;
    call.columns = (size_t)columns;
    call.start = start;
    call.vocabulary = vocabulary;
    call.logits = floats(&see, logits, "logits", call.rows * call.columns);
    call.targets = numbers(&see, targets, "targets", SMP_I64, call.rows);
    call.grad = floats(&see, grad, "grad", call.rows * call.columns);
    statistics = statistics_of(&see);
    call.top = floats(&statistics, top, "top", call.rows);
    call.sum = floats(&statistics, sum, "sum", call.rows);
    call.factors = floats(&statistics, factors, "factors", call.rows);
    if (statistics.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    return run(&see, SMP_TP_GPU_CROSS_ENTROPY_BACKWARD, &call, call.rows, NULL);
}

PyDoc_STRVAR(tp_gather_doc, "tp_gather(count, rows, columns, start, table, ids, out)\n"
                            "--\n\n"
                            "See smp_tp_gather.");

static PyObject *
tp_gather(PyObject *module, PyObject *args)
{
    smp_tp_gather call = {.count = 0};
    seen          see = {.failed = false};
    Py_ssize_t    count;
    Py_ssize_t    rows;
    Py_ssize_t    columns;
    long long     start;
    PyObject     *table;
    PyObject     *ids;
    PyObject     *out;

    (void)module;
    if (!PyArg_ParseTuple(args, "nnnLOOO:tp_gather", &count, &rows, &columns, &start,
                          &table, &ids, &out)) {
        return NULL;
    }
    call.count = (size_t)count;
    call.rows = (size_t)rows;
    call.columns = (size_t)columns;
    call.start = start;
    call.table = floats(&see, table, "table", call.rows * call.columns);
    call.ids = numbers(&see, ids, "ids", SMP_I64, call.count);
    call.out = floats(&see, out, "out", call.count * call.columns);
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    return run(&see, SMP_TP_GPU_GATHER, &call, call.count, NULL);
}

PyDoc_STRVAR(tp_scatter_doc,
             "tp_scatter(count, rows, columns, start, padding, ids, grad, grad_table)\n"
             "--\n\n"
             "See smp_tp_scatter.");

static PyObject *
tp_scatter(PyObject *module, PyObject *args)
{
    smp_tp_scatter call = {.count = 0};
    seen           see = {.failed = false};
    Py_ssize_t     count;
    Py_ssize_t     rows;
    Py_ssize_t     columns;
    long long      start;
    long long      padding;
    PyObject      *ids;
    PyObject      *grad;
    PyObject      *grad_table;

    (void)module;
    if (!PyArg_ParseTuple(args, "nnnLLOOO:tp_scatter", &count, &rows, &columns, &start,
                          &padding, &ids, &grad, &grad_table)) {
        return NULL;
    }
    call.count = (size_t)count;
    call.rows = (size_t)rows;
    call.columns = (size_t)columns;
    call.start = start;
    call.padding = padding;
    call.ids = numbers(&see, ids, "ids", SMP_I64, call.count);
    call.grad = floats(&see, grad, "grad", call.count * call.columns);
    call.grad_table = floats(&see, grad_table, "grad_table", call.rows * call.columns);
    if (!see.failed && see.device.type != SMP_DL_CPU) {
        PyErr_SetString(PyExc_BufferError, "tp_scatter: tensors in host memory only");
        see.failed = true;
    }
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    call.lists = malloc((call.rows + call.count + 1) * sizeof(*call.lists));
    if (call.lists == NULL) {
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS;
    smp_tp_kernels_best()->scatter(&call);
    Py_END_ALLOW_THREADS;
    free(call.lists);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(tp_gpu_open_doc,
             "tp_gpu_open(tensor)\n"
             "--\n\n"
             "Why kernels do not run where the tensor is; None: they do.");

static PyObject *
tp_gpu_open(PyObject *module, PyObject *tensor)
{
    smp_row   row;
    dl_device device;
    char      why[SMP_TP_GPU_TEXT];
    bool      open;

    (void)module;
    if (smp_see_device_tensor(tensor, &row, &device) < 0) {
        return NULL;
    }
    if (!smp_device_is_drivers(device)) {
        return PyUnicode_FromString("it is no CUDA device");
    }
    Py_BEGIN_ALLOW_THREADS;
    open = smp_tp_gpu_open(device.id, why);
    Py_END_ALLOW_THREADS;
    return open ? Py_NewRef(Py_None) : PyUnicode_FromString(why);
}

static PyMethodDef functions[] = {
    {"tp_gpu_open", tp_gpu_open, METH_O, tp_gpu_open_doc},
    {"tp_softmax", tp_softmax, METH_VARARGS, tp_softmax_doc},
    {"tp_softmax_backward", tp_softmax_backward, METH_VARARGS, tp_softmax_backward_doc},
    {"tp_residual", tp_residual, METH_VARARGS, tp_residual_doc},
    {"tp_residual_backward", tp_residual_backward, METH_VARARGS,
     tp_residual_backward_doc},
    {"tp_norm", tp_norm, METH_VARARGS, tp_norm_doc},
    {"tp_norm_backward", tp_norm_backward, METH_VARARGS, tp_norm_backward_doc},
    {"tp_cross_entropy", tp_cross_entropy, METH_VARARGS, tp_cross_entropy_doc},
    {"tp_cross_entropy_backward", tp_cross_entropy_backward, METH_VARARGS,
     tp_cross_entropy_backward_doc},
    {"tp_gather", tp_gather, METH_VARARGS, tp_gather_doc},
    {"tp_scatter", tp_scatter, METH_VARARGS, tp_scatter_doc},
    {NULL, NULL, 0, NULL},
};

int
smp_python_add_tp_kernels(PyObject *module)
{
    if (PyModule_AddObjectRef(module, "has_gpu_kernels",
                              smp_tp_gpu_is_built() ? Py_True : Py_False) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
