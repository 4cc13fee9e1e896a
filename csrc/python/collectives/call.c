/* Arguments read, tensors seen, sizes and dtypes compared. */
#include "python/collectives/call.h"

#include <stdbool.h>
#include <stdlib.h>

#include "comm/collective/kernels/reduce.h"
#include "python/values/row.h"

static size_t
sum(const size_t *counts, int n)
{
    size_t total = 0;

    for (int i = 0; i < n; i++) {
        total += counts[i];
    }
    return total;
}

/* Whether `whole` has the parts of all members; `part` is this one's. */
static bool
makes_up(const smp_callee *group, const size_t *counts, size_t whole, size_t part)
{
    if (counts != NULL) {
        return whole == sum(counts, group->size) && part == counts[group->member];
    }
    return whole == part * (size_t)group->size;
}

/* Whether the sizes of in and out, of elements of `per` numbers, go together; sets the
 * call's count. */
static bool
sizes_fit(const smp_callee *group, smp_call *call, size_t in, size_t out, size_t per)
{
    bool is_root = group->member == call->root;

    call->count = in;
    switch (call->operation) {
    case SMP_REDUCE_SCATTER:
        call->count = out;
        return makes_up(group, call->counts, in, out);
    case SMP_ALL_GATHER:
        return makes_up(group, call->counts, out, in);
    case SMP_GATHER:
        return !is_root || makes_up(group, NULL, out, in);
    case SMP_SCATTER:
        call->count = out;
        return !is_root || makes_up(group, NULL, in, out);
    case SMP_ALL_TO_ALL:
        if (call->counts != NULL) {
            return in == sum(call->counts, group->size) &&
                   out == sum(call->out_counts, group->size);
        }
        call->count = in / (size_t)group->size;
        return in == out && in % ((size_t)group->size * per) == 0;
    default:
        return in == out;
    }
}

static bool
reduces(smp_operation operation)
{
    return operation == SMP_ALL_REDUCE || operation == SMP_REDUCE ||
           operation == SMP_REDUCE_SCATTER;
}

static bool
may_reduce(const smp_row *r, smp_reduction reduction)
{
    bool adds =
        reduction == SMP_SUM || reduction == SMP_AVG || reduction == SMP_PREMUL_SUM;

    return (r->all || (r->sums && adds)) && smp_reduction_defined(reduction, r->dtype);
}

/* Sets the call's counts, in the tensor's elements. */
static void
scale_counts(const smp_tensor_calls *self, smp_call *call, int n, size_t per)
{
    for (int i = 0; i < 2 * n; i++) {
        self->counts[i] *= per;
    }
    call->counts = self->counts;
    call->out_counts = call->operation == SMP_ALL_TO_ALL ? self->counts + n : NULL;
}

/* Where a tensor has no place in an operation it is NULL; in place, both are the same.
 * 0, or -1 with an exception. */
static int
fill_call(const smp_tensor_calls *self, const smp_callee *group, smp_call *call,
          PyObject *in, PyObject *out)
{
    smp_row from;
    smp_row to;

    if (call->operation == SMP_BARRIER) {
        return 0;
    }
    if (smp_see_tensor(in != NULL ? in : out, &from) < 0) {
        return -1;
    }
    to = from;
    if (in != NULL && out != NULL && in != out && smp_see_tensor(out, &to) < 0) {
        return -1;
    }
    if (from.dtype != to.dtype || from.kind != to.kind) {
        PyErr_Format(PyExc_TypeError,
                     "smp: group '%s': %s: the input and the output have other dtypes",
                     group->name, smp_operation_name(call->operation));
        return -1;
    }
    if (reduces(call->operation) && !may_reduce(&from, call->reduction)) {
        PyObject *dtype = PyObject_GetAttrString(in != NULL ? in : out, "dtype");

        PyErr_Format(PyExc_TypeError, "smp: group '%s': %s (%s) of %S is not defined",
                     group->name, smp_operation_name(call->operation),
                     smp_reduction_name(call->reduction), dtype);
        Py_XDECREF(dtype);
        return -1;
    }
    if (self->counts != NULL) {
        scale_counts(self, call, group->size, from.per);
    }
    if (!sizes_fit(group, call, from.count, to.count, from.per)) {
        PyErr_Format(
            PyExc_ValueError,
            "smp: group '%s' of %d ranks: %s: an input of %zu and an output of "
            "%zu elements do not go together",
            group->name, group->size, smp_operation_name(call->operation),
            from.count / from.per, to.count / from.per);
        return -1;
    }
    call->dtype = from.dtype;
    call->kind = from.kind;
    call->in = from.data;
    call->out = to.data;
    return 0;
}

/* Tensor i of a tuple or None: borrowed. */
static PyObject *
item(PyObject *tensors, Py_ssize_t i)
{
    return tensors != NULL && i < PyTuple_GET_SIZE(tensors)
               ? PyTuple_GET_ITEM(tensors, i)
               : NULL;
}

/* A tuple of the sequence's items; NULL for None.  0, or -1 with an exception. */
static int
keep_tensors(PyObject *sequence, PyObject **out)
{
    *out = sequence == Py_None ? NULL : PySequence_Tuple(sequence);
    return *out == NULL && sequence != Py_None ? -1 : 0;
}

/* Reads a list of ints: counts[0 .. group's size).  0, or -1 with an exception. */
static int
read_counts(const smp_callee *group, smp_operation operation, PyObject *list,
            size_t *counts)
{
    Py_ssize_t given = PyList_Check(list) ? PyList_GET_SIZE(list) : -1;

    if (given != group->size) {
        PyErr_Format(PyExc_ValueError,
                     "smp: group '%s' of %d ranks: %s: %zd sizes, one for each rank is "
                     "wanted",
                     group->name, group->size, smp_operation_name(operation), given);
        return -1;
    }
    for (int i = 0; i < group->size; i++) {
        Py_ssize_t count = PyLong_AsSsize_t(PyList_GET_ITEM(list, i));

        if (count < 0) {
            if (PyErr_Occurred() == NULL) {
                PyErr_Format(PyExc_ValueError,
                             "smp: group '%s': %s: size %d is %zd, which is negative",
                             group->name, smp_operation_name(operation), i, count);
            }
            return -1;
        }
        counts[i] = (size_t)count;
    }
    return 0;
}

/* The arguments of Group.work_item() and .run(); see there. */
enum { OPERATION, INS, OUTS, REDUCTION, ROOT, FACTOR, COUNTS, OUT_COUNTS, TIMEOUT };
enum { SPARSE = TIMEOUT + 1, ASSUMED, IN_ROWS, OUT_ROWS, KEY, MOST, FEWEST = SPARSE };

static int
read_arguments(smp_tensor_calls *self, const smp_callee *group, PyObject *const *args,
               Py_ssize_t nargs)
{
    size_t    n = (size_t)group->size;
    smp_call *call = &self->one;
    double    timeout_s = PyFloat_AsDouble(args[TIMEOUT]);

    call->operation = (smp_operation)PyLong_AsLong(args[OPERATION]);
    call->reduction = (smp_reduction)PyLong_AsLong(args[REDUCTION]);
    call->root = (int)PyLong_AsLong(args[ROOT]);
    call->factor = PyFloat_AsDouble(args[FACTOR]);
    if (nargs > SPARSE) {
        call->hints.sparse = (uint8_t)PyLong_AsLong(args[SPARSE]);
    }
    if (nargs > ASSUMED) {
        call->hints.assumed = PyLong_AsUnsignedLongLong(args[ASSUMED]);
    }
    if (nargs > OUT_ROWS) {
        call->in_rows = PyLong_AsSize_t(args[IN_ROWS]);
        call->out_rows = PyLong_AsSize_t(args[OUT_ROWS]);
    }
    if (nargs > KEY) {
        call->hints.key = (uint32_t)PyLong_AsUnsignedLong(args[KEY]);
    }
    call->hints.timeout_ns = timeout_s > 1e9 ? -1 : (int64_t)(timeout_s * 1e9);
    if (PyErr_Occurred() != NULL) {
        return -1;
    }
    if (args[COUNTS] != Py_None) {
        self->counts = calloc(2 * n, sizeof(*self->counts));
        if (self->counts == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        if (read_counts(group, call->operation, args[COUNTS], self->counts) < 0 ||
            (args[OUT_COUNTS] != Py_None &&
             read_counts(group, call->operation, args[OUT_COUNTS], self->counts + n) <
                 0)) {
            return -1;
        }
    }
    return 0;
}

int
smp_tensor_calls_init(smp_tensor_calls *self, const smp_callee *group,
                      PyObject *const *args, Py_ssize_t nargs, PyObject **ins,
                      PyObject **outs)
{
    Py_ssize_t n_in;
    Py_ssize_t n_out;

    if (nargs < FEWEST || nargs > MOST) {
        PyErr_Format(PyExc_TypeError, "%d to %d arguments are wanted", FEWEST, MOST);
        return -1;
    }
    if (read_arguments(self, group, args, nargs) < 0 ||
        keep_tensors(args[INS], ins) < 0 || keep_tensors(args[OUTS], outs) < 0) {
        return -1;
    }
    n_in = *ins == NULL ? 0 : PyTuple_GET_SIZE(*ins);
    n_out = *outs == NULL ? 0 : PyTuple_GET_SIZE(*outs);
    self->n = (size_t)(n_in > n_out ? n_in : n_out);
    self->n += self->one.operation == SMP_BARRIER;
    self->calls = self->n == 1 ? &self->one : calloc(self->n + 1, sizeof(*self->calls));
    if (self->calls == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->n; i++) {
        self->calls[i] = self->one;
        if (fill_call(self, group, &self->calls[i], item(*ins, (Py_ssize_t)i),
                      item(*outs, (Py_ssize_t)i)) < 0) {
            return -1;
        }
    }
    return 0;
}

void
smp_tensor_calls_fini(smp_tensor_calls *self)
{
    if (self->calls != &self->one) {
        free(self->calls);
    }
    free(self->counts);
}
