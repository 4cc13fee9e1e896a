/* Tensors over memory of ours: one allocation a tensor, freed without the GIL. */
#include "python/values/tensor.h"

#include <stdlib.h>
#include <string.h>

#include "python/values/registry.h"

/* A wrapped tensor's description, and the owner of its memory. */
typedef struct {
    dl_managed managed; /* first: the deleter gets its address */
    void (*release)(void *owner);
    void   *owner;
    bool   *deleted; /* told when it goes while a tensor is being made; else NULL */
    int64_t dims[];  /* shape, then strides */
} holder;

static void
delete_holder(dl_managed *managed)
{
    holder *h = (holder *)managed;

    if (h->deleted != NULL) {
        *h->deleted = true;
    }
    if (h->release != NULL) {
        h->release(h->owner);
    }
    free(h);
}

uint64_t
smp_tensor_span(const dl_tensor *t)
{
    uint64_t last = 0;

    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0) {
            return 0;
        }
        last += (uint64_t)(t->shape[i] - 1) * (uint64_t)t->strides[i];
    }
    return (last + 1) * smp_element_bytes(t->dtype);
}

/* Replaces *held by the result of calling its method `name`. */
static int
resolve(PyObject **held, PyObject *name)
{
    PyObject *resolved = PyObject_CallMethodNoArgs(*held, name);

    if (resolved == NULL) {
        return -1;
    }
    Py_SETREF(*held, resolved);
    return 0;
}

/* Whether the method `name` of the tensor says true; -1 with an exception. */
static int
says(PyObject *tensor, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, name);
    int       is = answer == Py_True;

    Py_XDECREF(answer);
    return answer == NULL ? -1 : is;
}

int
smp_tensor_borrow(PyObject *tensor, dl_tensor *out, PyObject **held)
{
    int is;

    *held = smp_is_placeholder(tensor)
                ? PyObject_CallMethodNoArgs(tensor, smp_names.packed)
                : Py_NewRef(tensor);
    if (*held == NULL) {
        return -1;
    }
    tensor = *held;
    is = says(tensor, smp_names.is_neg);
    if (is < 0 || (is && resolve(held, smp_names.resolve_neg) < 0)) {
        goto err;
    }
    if (smp_torch.dlpack->borrow(*held, out) != 0) {
        goto err;
    }
    if (out->dtype.code == SMP_DL_COMPLEX) {
        is = says(*held, smp_names.is_conj);
        if (is < 0 || (is && (resolve(held, smp_names.resolve_conj) < 0 ||
                              smp_torch.dlpack->borrow(*held, out) != 0))) {
            goto err;
        }
    }
    out->data = (char *)out->data + out->byte_offset;
    return 0;

err:
    Py_CLEAR(*held);
    return -1;
}

/* Takes the holder.  A refusal of torch's may come before or after its call of the
 * deleter. */
static PyObject *
to_python(holder *h)
{
    void *tensor;
    bool  deleted = false;

    h->deleted = &deleted;
    if (smp_torch.dlpack->to_python(&h->managed, &tensor) != 0) {
        if (!deleted) {
            delete_holder(&h->managed);
        }
        return NULL;
    }
    h->deleted = NULL;
    return tensor;
}

static holder *
make_holder(const smp_tensor_meta *meta, const int64_t *shape, const int64_t *strides,
            size_t extra)
{
    size_t  dims = (size_t)meta->ndim * sizeof(int64_t);
    holder *h = malloc(sizeof(*h) + 2 * dims + extra);

    if (h == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(h->dims, shape, dims);
    memcpy(h->dims + meta->ndim, strides, dims);
    h->managed = (dl_managed){
        .version = {SMP_DLPACK_MAJOR, 0},
        .deleter = delete_holder,
        .tensor = {.device = {SMP_DL_CPU, 0},
                   .ndim = meta->ndim,
                   .dtype = meta->dtype,
                   .shape = h->dims,
                   .strides = h->dims + meta->ndim},
    };
    h->release = NULL;
    h->owner = NULL;
    h->deleted = NULL;
    return h;
}

PyObject *
smp_tensor_wrap(const smp_tensor_meta *meta, const int64_t *shape,
                const int64_t *strides, void *data, void (*release)(void *owner),
                void *owner)
{
    holder *h = make_holder(meta, shape, strides, 0);

    if (h == NULL) {
        if (release != NULL) {
            release(owner);
        }
        return NULL;
    }
    h->release = release;
    h->owner = owner;
    h->managed.tensor.data = data;
    return to_python(h);
}

PyObject *
smp_tensor_copy_of(const smp_tensor_meta *meta, const int64_t *shape,
                   const int64_t *strides, const void *data)
{
    enum { ALIGN = 64 }; /* as in torch's own allocator */
    holder *h = make_holder(meta, shape, strides, (size_t)meta->bytes + ALIGN);

    if (h == NULL) {
        return NULL;
    }
    if (meta->bytes > 0) {
        uintptr_t end = (uintptr_t)(h->dims + 2 * (size_t)meta->ndim);
        void     *at = (void *)((end + ALIGN - 1) & ~(uintptr_t)(ALIGN - 1));

        if (data != NULL) {
            memcpy(at, data, (size_t)meta->bytes);
        }
        h->managed.tensor.data = at;
    }
    return to_python(h);
}

/* The meta of the same span with one dimension; its stride is 1. */
static smp_tensor_meta
row_of(const smp_tensor_meta *meta, int64_t *length)
{
    smp_tensor_meta row = *meta;

    row.ndim = 1;
    *length = (int64_t)(meta->bytes / smp_element_bytes(meta->dtype));
    return row;
}

PyObject *
smp_tensor_wrap_span(const smp_tensor_meta *meta, void  *data,
                     void (*release)(void *owner), void *owner)
{
    const int64_t   stride = 1;
    int64_t         length;
    smp_tensor_meta row = row_of(meta, &length);

    return smp_tensor_wrap(&row, &length, &stride, data, release, owner);
}

PyObject *
smp_tensor_copy_span(const smp_tensor_meta *meta, const void *data)
{
    const int64_t   stride = 1;
    int64_t         length;
    smp_tensor_meta row = row_of(meta, &length);

    return smp_tensor_copy_of(&row, &length, &stride, data);
}

long
smp_tensor_version(PyObject *tensor)
{
    PyObject *number = PyObject_GetAttr(tensor, smp_names._version);
    long      version = number == NULL ? -1 : PyLong_AsLong(number);

    Py_XDECREF(number);
    return version;
}
