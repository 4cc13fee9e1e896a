/* Addresses and sizes of gathered tensors, and the list of held ones. */
#include "python/collectives/gathers.h"

#include <stdlib.h>

#include "python/values/device.h"
#include "python/values/row.h"

/* One call's tensors. */
typedef struct {
    smp_row     in;
    dl_device   device;
    int         size;
    int         member;
    uint64_t   *outs;
    size_t     *counts;
    const char *group;
} view;

/* 0, or -1 with an exception. */
static int
see_beside(const view *v, PyObject *tensor, smp_row *out)
{
    dl_device device;

    if (smp_see_device_tensor(tensor, out, &device) < 0) {
        return -1;
    }
    if (out->dtype != v->in.dtype || out->kind != v->in.kind) {
        PyErr_Format(
            PyExc_TypeError,
            "smp: group '%s': all-gather: the input and the output have other dtypes",
            v->group);
        return -1;
    }
    if (device.type != v->device.type || device.id != v->device.id) {
        PyErr_Format(
            PyExc_ValueError,
            "smp: group '%s': all-gather: the input and the output are on two devices",
            v->group);
        return -1;
    }
    return 0;
}

static int
raise_size(const view *v, size_t out)
{
    PyErr_Format(PyExc_ValueError,
                 "smp: group '%s' of %d ranks: all-gather: an input of %zu and an "
                 "output of %zu elements do not go together",
                 v->group, v->size, v->in.count / v->in.per, out / v->in.per);
    return -1;
}

/* One tensor for all. */
static int
see_whole(const view *v, PyObject *tensor)
{
    size_t  bytes = v->in.count * smp_dtype_bytes(v->in.dtype);
    smp_row whole;

    if (see_beside(v, tensor, &whole) < 0) {
        return -1;
    }
    if (whole.count != v->in.count * (size_t)v->size) {
        return raise_size(v, whole.count);
    }
    for (int m = 0; m < v->size; m++) {
        v->counts[m] = v->in.count;
        v->outs[m] = (uint64_t)(uintptr_t)whole.data + (size_t)m * bytes;
    }
    return 0;
}

/* One for each member: a tuple. */
static int
see_parts(const view *v, PyObject *parts)
{
    if (PyTuple_GET_SIZE(parts) != v->size) {
        PyErr_Format(PyExc_ValueError,
                     "smp: group '%s' of %d ranks: all-gather: %zd outputs", v->group,
                     v->size, PyTuple_GET_SIZE(parts));
        return -1;
    }
    for (int m = 0; m < v->size; m++) {
        smp_row part;

        if (see_beside(v, PyTuple_GET_ITEM(parts, m), &part) < 0) {
            return -1;
        }
        v->counts[m] = part.count;
        v->outs[m] = (uint64_t)(uintptr_t)part.data;
    }
    return v->counts[v->member] == v->in.count ? 0
                                               : raise_size(v, v->counts[v->member]);
}

static bool
is_even(const size_t *counts, int n)
{
    for (int m = 1; m < n; m++) {
        if (counts[m] != counts[0]) {
            return false;
        }
    }
    return true;
}

static int
make_call(view *v, PyObject *in, PyObject *out, smp_call *call,
          smp_device_gather *gather)
{
    int failed;

    if (smp_see_device_tensor(in, &v->in, &v->device) < 0) {
        return -1;
    }
    if (!smp_device_is_drivers(v->device)) {
        PyErr_Format(PyExc_ValueError, "smp: group '%s': all-gather: not on a GPU",
                     v->group);
        return -1;
    }
    failed = PyTuple_Check(out) ? see_parts(v, out) : see_whole(v, out);
    if (failed < 0) {
        return -1;
    }
    *gather =
        (smp_device_gather){.in = (uint64_t)(uintptr_t)v->in.data, .outs = v->outs};
    *call = (smp_call){.operation = SMP_ALL_GATHER,
                       .dtype = v->in.dtype,
                       .kind = v->in.kind,
                       .count = v->in.count,
                       .counts = is_even(v->counts, v->size) ? NULL : v->counts,
                       .gather = gather};
    return 0;
}

int
smp_gathers_init(smp_gathers *gathers, PyObject *ins, PyObject *outs, int size,
                 int member, const char *group)
{
    Py_ssize_t n = PyTuple_GET_SIZE(ins);
    size_t     room = (size_t)n + 1;

    if (n != PyTuple_GET_SIZE(outs) || n == 0) {
        PyErr_Format(PyExc_ValueError,
                     "smp: group '%s': all-gather: %zd inputs and %zd outputs", group,
                     n, PyTuple_GET_SIZE(outs));
        return -1;
    }
    gathers->calls = calloc(room, sizeof(*gathers->calls));
    gathers->gathers = calloc(room, sizeof(*gathers->gathers));
    gathers->outs = calloc(room * (size_t)size, sizeof(*gathers->outs));
    gathers->counts = calloc(room * (size_t)size, sizeof(*gathers->counts));
    gathers->n = n;
    if (gathers->calls == NULL || gathers->gathers == NULL || gathers->outs == NULL ||
        gathers->counts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        view v = {.size = size,
                  .member = member,
                  .outs = gathers->outs + i * size,
                  .counts = gathers->counts + i * size,
                  .group = group};

        if (make_call(&v, PyTuple_GET_ITEM(ins, i), PyTuple_GET_ITEM(outs, i),
                      &gathers->calls[i], &gathers->gathers[i]) < 0) {
            return -1;
        }
        if (i != 0 && (v.device.type != gathers->device.type ||
                       v.device.id != gathers->device.id)) {
            PyErr_Format(PyExc_ValueError,
                         "smp: group '%s': all-gather: inputs on two devices", group);
            return -1;
        }
        gathers->device = v.device;
    }
    return 0;
}

void
smp_gathers_fini(smp_gathers *gathers)
{
    free(gathers->calls);
    free(gathers->gathers);
    free(gathers->outs);
    free(gathers->counts);
}

void
smp_gathers_mark(smp_gathers *gathers, const smp_device_mark *mark)
{
    for (Py_ssize_t i = 0; i < gathers->n; i++) {
        gathers->gathers[i].mark = mark;
    }
}

void
smp_held_sweep(smp_held **list, smp_exchange *exchange)
{
    smp_held *done = NULL;

    while (*list != NULL) {
        smp_held *held = *list;

        if (smp_exchange_is_over(exchange, held->mark)) {
            smp_exchange_put_mark(exchange, held->mark);
            *list = held->next;
            held->next = done;
            done = held;
        } else {
            list = &held->next;
        }
    }
    smp_held_clear(&done, true); /* last: a tensor's end may run any code */
}

void
smp_hold(smp_held **list, smp_exchange *exchange, smp_device_mark *mark, PyObject *ins,
         PyObject *outs)
{
    smp_held *held = malloc(sizeof(*held));

    if (held != NULL) {
        *held = (smp_held){*list, mark, ins, outs};
        *list = held;
    }
    if (exchange != NULL) {
        smp_held_sweep(list, exchange);
    }
}

void
smp_held_clear(smp_held **list, bool rests)
{
    while (*list != NULL) {
        smp_held *held = *list;

        *list = held->next;
        if (rests) {
            Py_XDECREF(held->ins);
            Py_XDECREF(held->outs);
        }
        free(held);
    }
}
