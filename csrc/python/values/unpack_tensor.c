/* Descriptions of tensors are checked and become tensors, in place where they can. */
#include "python/values/unpack_tensor.h"

#include <stdlib.h>
#include <string.h>

#include "python/values/device.h"
#include "python/values/registry.h"
#include "python/values/wire.h"
#include "server/envelope.h"

static void
release_block(void *owner)
{
    smp_block_release(owner);
}

/* Checks a span against shape and strides, and against its block or data. */
static int
check_meta(const smp_unpack *unpack, const smp_tensor_meta *meta, int64_t *shape,
           int64_t *strides)
{
    dl_tensor t = {
        .ndim = meta->ndim, .dtype = meta->dtype, .shape = shape, .strides = strides};
    uint64_t limit = (uint64_t)1 << 48;
    int64_t  elements;
    bool     empty = false;

    if (meta->dtype.bits == 0 || meta->dtype.lanes == 0) {
        return smp_malformed("a tensor without a dtype");
    }
    for (int i = 0; i < meta->ndim; i++) {
        if (shape[i] < 0 || strides[i] < 0 || (uint64_t)shape[i] > limit ||
            (uint64_t)strides[i] > limit) {
            return smp_malformed("a tensor's shape or stride is out of range");
        }
        if (strides[i] > 0 && shape[i] > 0) {
            limit /= (uint64_t)shape[i];
            if ((uint64_t)strides[i] > ((uint64_t)1 << 48) / (uint64_t)shape[i]) {
                return smp_malformed("a tensor's stride is out of range");
            }
        }
    }
    for (int i = 0; i < meta->ndim; i++) {
        empty = empty || shape[i] == 0;
    }
    elements = empty ? 0 : 1;
    for (int i = 0; i < meta->ndim; i++) {
        if (__builtin_mul_overflow(elements, shape[i], &elements)) {
            return smp_malformed("a tensor has more elements than can be counted");
        }
    }
    if (smp_tensor_span(&t) != meta->bytes) {
        return smp_malformed(
            "a tensor announces %llu bytes, its shape and strides make %llu",
            (unsigned long long)meta->bytes, (unsigned long long)smp_tensor_span(&t));
    }
    if (meta->in_block == SMP_IN_NO_MESSAGE && unpack->described) {
        return 0;
    }
    if (meta->in_block) {
        if (unpack->message == NULL || meta->place >= unpack->message->nblocks ||
            unpack->message->blocks[meta->place] == NULL ||
            smp_block_bytes(unpack->message->blocks[meta->place]) < meta->bytes) {
            return smp_malformed("a tensor without its bytes");
        }
    } else if (meta->place > unpack->data_bytes ||
               meta->bytes > unpack->data_bytes - meta->place) {
        return smp_malformed("a tensor's bytes lie outside the message");
    }
    return 0;
}

/* Dimensions as a tuple of ints. */
static PyObject *
tuple_of(const int64_t *dims, uint16_t ndim)
{
    PyObject *tuple = PyTuple_New(ndim);

    for (uint16_t i = 0; tuple != NULL && i < ndim; i++) {
        PyObject *number = PyLong_FromLongLong(dims[i]);

        if (number == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, i, number);
        }
    }
    return tuple;
}

/* Calls stage_in or stage_placed; takes `row`. */
static PyObject *
lay_out(PyObject *stage, PyObject *row, const smp_tensor_meta *meta,
        const int64_t *shape, const int64_t *strides)
{
    PyObject *sizes = NULL;
    PyObject *steps = NULL;
    PyObject *tensor = NULL;

    if (row != NULL && (sizes = tuple_of(shape, meta->ndim)) != NULL &&
        (steps = tuple_of(strides, meta->ndim)) != NULL) {
        tensor = PyObject_CallFunctionObjArgs(stage, row, sizes, steps, NULL);
    }
    Py_XDECREF(row);
    Py_XDECREF(sizes);
    Py_XDECREF(steps);
    return tensor;
}

/* A tensor on this rank's device, out of the sender's device pool, or through host
 * memory: stage_in keeps that until the device has read it. */
static PyObject *
make_device_tensor(smp_unpack *unpack, const smp_tensor_meta *meta,
                   const int64_t *shape, const int64_t *strides)
{
    smp_comm *comm = unpack->comm;
    PyObject *tensor;
    PyObject *row;

    if (smp_registry.stage_in == NULL) {
        (void)smp_malformed("a tensor on a device where none is expected");
        return NULL;
    }
    if (meta->in_block) {
        smp_block *block = smp_message_take_block(unpack->message, meta->place);

        if (smp_block_data(block) == NULL) {
            row = smp_device_unpack(comm, unpack->message->source, block, meta);
            return lay_out(smp_registry.stage_placed, row, meta, shape, strides);
        }
        smp_device_pin(comm, block);
        row = smp_tensor_wrap_span(meta, smp_block_data(block), release_block, block);
    } else {
        row = smp_tensor_copy_span(meta, unpack->data + meta->place);
    }
    tensor = lay_out(smp_registry.stage_in, row, meta, shape, strides);
    if (tensor != NULL && meta->in_block &&
        smp_device_seen(comm, unpack->message->source, tensor) < 0) {
        Py_CLEAR(tensor);
    }
    return tensor;
}

/* A tensor with its values on the sender's rank. */
static PyObject *
make_placeholder(const smp_tensor_meta *meta, const int64_t *shape,
                 const int64_t *strides)
{
    static const int64_t none[1] = {0};
    static const int64_t step[1] = {1};
    smp_tensor_meta      empty = {.dtype = meta->dtype, .ndim = 1};
    PyObject            *like = smp_tensor_copy_of(&empty, none, step, NULL);
    PyObject            *sizes = like == NULL ? NULL : tuple_of(shape, meta->ndim);
    PyObject            *steps = sizes == NULL ? NULL : tuple_of(strides, meta->ndim);
    PyObject            *tensor = NULL;

    if (steps != NULL && smp_registry.hollow == NULL) {
        (void)smp_malformed("a tensor without its bytes");
    } else if (steps != NULL) {
        PyObject *on_device = meta->device.type == SMP_DL_CPU ? Py_False : Py_True;

        tensor = PyObject_CallFunctionObjArgs(smp_registry.hollow, like, on_device,
                                              sizes, steps, NULL);
    }
    Py_XDECREF(like);
    Py_XDECREF(sizes);
    Py_XDECREF(steps);
    return tensor;
}

static PyObject *
make_tensor(smp_unpack *unpack, const smp_tensor_meta *meta, const int64_t *shape,
            const int64_t *strides)
{
    smp_block *block;

    if (unpack->described && meta->in_block == SMP_IN_NO_MESSAGE) {
        return make_placeholder(meta, shape, strides);
    }
    if (meta->device.type != SMP_DL_CPU) {
        return make_device_tensor(unpack, meta, shape, strides);
    }
    if (!meta->in_block) {
        return smp_tensor_copy_of(meta, shape, strides, unpack->data + meta->place);
    }
    if (smp_block_data(unpack->message->blocks[meta->place]) == NULL) {
        (void)smp_malformed("a tensor of the host in the pool of a device");
        return NULL;
    }
    if (unpack->copy) {
        return smp_tensor_copy_of(meta, shape, strides,
                                  smp_block_data(unpack->message->blocks[meta->place]));
    }
    block = smp_message_take_block(unpack->message, meta->place);
    return smp_tensor_wrap(meta, shape, strides, smp_block_data(block), release_block,
                           block);
}

static int
read_tensors(smp_unpack *unpack, uint32_t ntensors, const uint8_t *meta_end)
{
    const uint8_t *at = unpack->meta;

    if (ntensors == 0) {
        return 0;
    }
    if (ntensors > (size_t)(meta_end - at) / sizeof(smp_tensor_meta)) {
        return smp_malformed("more tensors than it describes");
    }
    unpack->tensors = calloc(ntensors, sizeof(*unpack->tensors));
    unpack->requires_grad = calloc(ntensors, 1);
    if (unpack->tensors == NULL || unpack->requires_grad == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < ntensors; i++) {
        smp_tensor_meta meta;
        int64_t         shape[SMP_MAX_NDIM];
        int64_t         strides[SMP_MAX_NDIM];
        size_t          dims;

        if ((size_t)(meta_end - at) < sizeof(meta)) {
            return smp_malformed("a tensor's description is cut off");
        }
        memcpy(&meta, at, sizeof(meta));
        at += sizeof(meta);
        dims = (size_t)meta.ndim * sizeof(int64_t);
        if (meta.ndim > SMP_MAX_NDIM || (size_t)(meta_end - at) < 2 * dims) {
            return smp_malformed("a tensor's description is cut off");
        }
        memcpy(shape, at, dims);
        memcpy(strides, at + dims, dims);
        at += 2 * dims;
        if (check_meta(unpack, &meta, shape, strides) < 0) {
            return -1;
        }
        unpack->tensors[i] = make_tensor(unpack, &meta, shape, strides);
        if (unpack->tensors[i] == NULL) {
            return -1;
        }
        unpack->requires_grad[i] = meta.requires_grad;
        unpack->ntensors = i + 1;
    }
    return 0;
}

static int
open_bytes(smp_unpack *unpack, const uint8_t *bytes, size_t nbytes)
{
    smp_wire_sizes sizes;
    const uint8_t *at = bytes + sizeof(sizes);

    if (nbytes < sizeof(sizes)) {
        return smp_malformed("it is shorter than its sizes");
    }
    memcpy(&sizes, bytes, sizeof(sizes));
    nbytes -= sizeof(sizes);
    if (sizes.meta_bytes > nbytes || sizes.value_bytes > nbytes - sizes.meta_bytes ||
        sizes.data_bytes != nbytes - sizes.meta_bytes - sizes.value_bytes) {
        return smp_malformed("its parts are not as long as it says");
    }
    unpack->meta = at;
    unpack->values = at + sizes.meta_bytes;
    unpack->values_end = unpack->values + sizes.value_bytes;
    unpack->data = unpack->values_end;
    unpack->data_bytes = sizes.data_bytes;
    return read_tensors(unpack, sizes.tensors, unpack->values);
}

int
smp_unpack_init(smp_unpack *unpack, smp_comm *comm, smp_message *message,
                const smp_arguments *request, bool watch, bool copy)
{
    *unpack = (smp_unpack){.comm = comm,
                           .message = message,
                           .request = request,
                           .watch = watch,
                           .copy = copy};
    if (message->nbytes < sizeof(smp_envelope)) {
        return smp_malformed("it is shorter than its envelope");
    }
    return open_bytes(unpack, message->bytes + sizeof(smp_envelope),
                      message->nbytes - sizeof(smp_envelope));
}

int
smp_unpack_init_bytes(smp_unpack *unpack, const void *bytes, size_t nbytes)
{
    *unpack = (smp_unpack){.copy = true};
    return open_bytes(unpack, bytes, nbytes);
}

int
smp_unpack_init_described(smp_unpack *unpack, const void *bytes, size_t nbytes)
{
    *unpack = (smp_unpack){.copy = true, .described = true};
    return open_bytes(unpack, bytes, nbytes);
}

int
smp_unpack_init_given(smp_unpack *unpack, const void *values, size_t nbytes,
                      PyObject *const *tensors, size_t ntensors)
{
    *unpack = (smp_unpack){.values = values, .watch = true};
    unpack->values_end = unpack->values + nbytes;
    unpack->tensors = calloc(ntensors + 1, sizeof(*unpack->tensors));
    unpack->requires_grad = calloc(ntensors + 1, 1);
    if (unpack->tensors == NULL || unpack->requires_grad == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < ntensors; i++) {
        int requires_grad = smp_attr_true(tensors[i], smp_names.requires_grad);

        if (requires_grad < 0) {
            return -1;
        }
        unpack->tensors[i] = Py_NewRef(tensors[i]);
        unpack->requires_grad[i] = requires_grad != 0;
        unpack->ntensors = i + 1;
    }
    return 0;
}

PyObject *
smp_unpack_in_graph(const smp_unpack *unpack)
{
    PyObject *list = PyList_New(0);

    for (size_t i = 0; list != NULL && i < unpack->ntensors; i++) {
        if (unpack->requires_grad[i] && PyList_Append(list, unpack->tensors[i]) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

void
smp_unpack_exchange(smp_unpack *unpack, PyObject *tuple)
{
    Py_ssize_t at = 0;

    for (size_t i = 0; i < unpack->ntensors; i++) {
        if (unpack->requires_grad[i]) {
            Py_SETREF(unpack->tensors[i], Py_NewRef(PyTuple_GET_ITEM(tuple, at)));
            at++;
        }
    }
}
