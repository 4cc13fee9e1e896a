/* Tensors and numbers in, kernels of csrc/tp_kernels called.  Each function has the
 * arguments of its struct there, in its order, `dtype` and `scratch` apart. */
#include "python/tp_kernels_binding.h"

#include <stdlib.h>

#include "python/tp_kernels_call.h"
#include "python/values/device.h"

/* The format of a smp_tp_dropout, and where its parts go. */
#define DROPOUT "(dKKKKK)"
#define DROPOUT_TO(d) &(d).p, &(d).seed, &(d).first, &(d).run, &(d).jump, &(d).width

_Static_assert(sizeof(unsigned long long) == sizeof(uint64_t), "the format's K");

/* The kernels rely on these bounds. */
static void
check_dropout(smp_tp_seen *see, const smp_tp_dropout *dropout)
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
    smp_tp_seen     see = {.failed = false};
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
    call.x = smp_tp_floats(&see, x, "x", call.rows * call.columns);
    call.bias = smp_tp_floats_or_none(&see, bias, "bias", call.columns);
    call.residual =
        smp_tp_floats_or_none(&see, residual, "residual", call.rows * call.columns);
    call.out = smp_tp_floats(&see, out, "out", call.rows * call.columns);
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    return smp_tp_run(&see, SMP_TP_GPU_RESIDUAL, &call, NULL);
}

PyDoc_STRVAR(tp_residual_backward_doc,
             "tp_residual_backward(rows, columns, dropout, grad, grad_x, grad_bias)\n"
             "--\n\n"
             "See smp_tp_residual_backward.  grad_bias may be None.");

static PyObject *
tp_residual_backward(PyObject *module, PyObject *args)
{
    smp_tp_residual_backward call = {.rows = 0};
    smp_tp_scratch           given = {.floats = NULL};
    smp_tp_seen              see = {.failed = false};
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
    call.grad = smp_tp_floats(&see, grad, "grad", call.rows * call.columns);
    call.grad_x = smp_tp_floats(&see, grad_x, "grad_x", call.rows * call.columns);
    call.grad_bias = smp_tp_floats_or_none(&see, grad_bias, "grad_bias", call.columns);
    if (grad_bias != Py_None) {
        given = smp_tp_scratch_of(&see, SMP_TP_GPU_RESIDUAL_BACKWARD, call.rows,
                                  call.columns, 2);
    }
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    call.scratch = given.floats;
    return smp_tp_run(&see, SMP_TP_GPU_RESIDUAL_BACKWARD, &call, &given);
}

/* The format of a smp_tp_sight. */
#define SIGHT "(pLKK)"

static smp_tp_sight
sight_of(smp_tp_seen *see, int causal, long long first_query,
         unsigned long long queries, unsigned long long window)
{
    if (queries < 1 && !see->failed) {
        PyErr_SetString(PyExc_ValueError, "sight: queries must be at least 1");
        see->failed = true;
    }
    return (smp_tp_sight){causal != 0, first_query, queries, window};
}

/* Reads a tuple's numbers into `to`; returns their count, or -1 with an exception. */
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
mask_of(smp_tp_seen *see, PyObject *object, size_t rows, size_t keys)
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
    mask.data = smp_tp_floats(see, tensor, "mask", (size_t)count);
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
    smp_tp_scratch     given = {.floats = NULL};
    smp_tp_seen        see = {.failed = false};
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
    call.scores = smp_tp_floats(&see, scores, "scores", call.rows * call.keys);
    call.mask = mask_of(&see, mask, call.rows, call.keys);
    call.probabilities =
        smp_tp_floats(&see, probabilities, "probabilities", call.rows * call.keys);
    call.out = smp_tp_floats_or_none(&see, out, "out", call.rows * call.keys);
    given = smp_tp_scratch_of(&see, SMP_TP_GPU_SOFTMAX, call.rows, call.keys, 1);
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    call.scratch = given.floats;
    return smp_tp_run(&see, SMP_TP_GPU_SOFTMAX, &call, &given);
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
    smp_tp_scratch          given = {.floats = NULL};
    smp_tp_seen             see = {.failed = false};
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
        smp_tp_floats(&see, probabilities, "probabilities", call.rows * call.keys);
    call.grad = smp_tp_floats(&see, grad, "grad", call.rows * call.keys);
    call.grad_scores =
        smp_tp_floats(&see, grad_scores, "grad_scores", call.rows * call.keys);
    given =
        smp_tp_scratch_of(&see, SMP_TP_GPU_SOFTMAX_BACKWARD, call.rows, call.keys, 1);
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    call.scratch = given.floats;
    return smp_tp_run(&see, SMP_TP_GPU_SOFTMAX_BACKWARD, &call, &given);
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
    smp_tp_seen see = {.failed = false};
    smp_tp_seen statistics;
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
    call.x = smp_tp_floats(&see, x, "x", count);
    call.bias = smp_tp_floats_or_none(&see, bias, "bias", call.columns);
    call.residual = smp_tp_floats_or_none(&see, residual, "residual", count);
    call.weight = smp_tp_floats_or_none(&see, weight, "weight", call.columns);
    call.shift = smp_tp_floats_or_none(&see, shift, "shift", call.columns);
    call.sum = smp_tp_floats(&see, sum, "sum", count);
    call.out = smp_tp_floats(&see, out, "out", count);
    statistics = smp_tp_statistics_of(&see);
    call.mean = smp_tp_floats(&statistics, both, "statistics", 2 * call.rows);
    if (statistics.failed) {
        return NULL;
    }
    call.rstd = call.mean + call.rows;
    call.dtype = see.dtype;
    return smp_tp_run(&see, SMP_TP_GPU_NORM, &call, NULL);
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
    smp_tp_scratch       given = {.floats = NULL};
    smp_tp_seen          see = {.failed = false};
    smp_tp_seen          statistics;
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
    call.grad_out = smp_tp_floats(&see, grad_out, "grad_out", count);
    call.grad_sum = smp_tp_floats_or_none(&see, grad_sum, "grad_sum", count);
    call.sum = smp_tp_floats(&see, sum, "sum", count);
    call.weight = smp_tp_floats_or_none(&see, weight, "weight", call.columns);
    call.grad_residual = smp_tp_floats(&see, grad_residual, "grad_residual", count);
    call.grad_x = smp_tp_floats_or_none(&see, grad_x, "grad_x", count);
    call.grad_bias = smp_tp_floats(&see, grad_bias, "grad_bias", call.columns);
    call.grad_weight = smp_tp_floats(&see, grad_weight, "grad_weight", call.columns);
    call.grad_shift = smp_tp_floats(&see, grad_shift, "grad_shift", call.columns);
    statistics = smp_tp_statistics_of(&see);
    call.mean = smp_tp_floats(&statistics, both, "statistics", 2 * call.rows);
    given = smp_tp_scratch_of(&statistics, SMP_TP_GPU_NORM_BACKWARD, call.rows,
                              call.columns, 6);
    if (statistics.failed) {
        return NULL;
    }
    call.rstd = call.mean + call.rows;
    call.dtype = see.dtype;
    call.scratch = given.floats;
    return smp_tp_run(&see, SMP_TP_GPU_NORM_BACKWARD, &call, &given);
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
    smp_tp_seen          see = {.failed = false};
    smp_tp_seen          statistics;
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
    call.logits = smp_tp_floats(&see, logits, "logits", call.rows * call.columns);
    call.targets = smp_tp_numbers(&see, targets, "targets", SMP_I64, call.rows);
    statistics = smp_tp_statistics_of(&see);
    call.top = smp_tp_floats(&statistics, top, "top", call.rows);
    call.sum = smp_tp_floats(&statistics, sum, "sum", call.rows);
    call.target = smp_tp_floats(&statistics, target, "target", call.rows);
    call.all = smp_tp_floats_or_none(&statistics, all, "all", call.rows);
    if (statistics.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    if (see.device.type != SMP_DL_CPU) {
        return smp_tp_run(&see, SMP_TP_GPU_CROSS_ENTROPY, &call, NULL);
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
    smp_tp_seen                   see = {.failed = false};
    smp_tp_seen                   statistics;
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
    call.logits = smp_tp_floats(&see, logits, "logits", call.rows * call.columns);
    call.targets = smp_tp_numbers(&see, targets, "targets", SMP_I64, call.rows);
    call.grad = smp_tp_floats(&see, grad, "grad", call.rows * call.columns);
    statistics = smp_tp_statistics_of(&see);
    call.top = smp_tp_floats(&statistics, top, "top", call.rows);
    call.sum = smp_tp_floats(&statistics, sum, "sum", call.rows);
    call.factors = smp_tp_floats(&statistics, factors, "factors", call.rows);
    if (statistics.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    return smp_tp_run(&see, SMP_TP_GPU_CROSS_ENTROPY_BACKWARD, &call, NULL);
}

/* Embeddings on a GPU are torch's. */
static void
check_on_host(smp_tp_seen *see, const char *kernel)
{
    if (!see->failed && see->device.type != SMP_DL_CPU) {
        PyErr_Format(PyExc_BufferError, "%s: tensors in host memory only", kernel);
        see->failed = true;
    }
}

PyDoc_STRVAR(tp_gather_doc, "tp_gather(count, rows, columns, start, table, ids, out)\n"
                            "--\n\n"
                            "See smp_tp_gather.");

static PyObject *
tp_gather(PyObject *module, PyObject *args)
{
    smp_tp_gather call = {.count = 0};
    smp_tp_seen   see = {.failed = false};
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
    call.table = smp_tp_floats(&see, table, "table", call.rows * call.columns);
    call.ids = smp_tp_numbers(&see, ids, "ids", SMP_I64, call.count);
    call.out = smp_tp_floats(&see, out, "out", call.count * call.columns);
    check_on_host(&see, "tp_gather");
    if (see.failed) {
        return NULL;
    }
    call.dtype = see.dtype;
    Py_BEGIN_ALLOW_THREADS;
    smp_tp_kernels_best()->gather(&call);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(tp_scatter_doc,
             "tp_scatter(count, rows, columns, start, padding, ids, grad, grad_table)\n"
             "--\n\n"
             "See smp_tp_scatter.");

static PyObject *
tp_scatter(PyObject *module, PyObject *args)
{
    smp_tp_scatter call = {.count = 0};
    smp_tp_seen    see = {.failed = false};
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
    call.ids = smp_tp_numbers(&see, ids, "ids", SMP_I64, call.count);
    call.grad = smp_tp_floats(&see, grad, "grad", call.count * call.columns);
    call.grad_table =
        smp_tp_floats(&see, grad_table, "grad_table", call.rows * call.columns);
    check_on_host(&see, "tp_scatter");
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
