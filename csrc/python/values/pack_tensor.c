/* A tensor's bytes find their place, and its description its number. */
#include "python/values/pack_tensor.h"

#include <stdlib.h>
#include <string.h>

#include "python/values/device.h"
#include "python/values/pack_memo.h"
#include "python/values/pack_scalar.h"
#include "python/values/registry.h"

static int
put_inside(smp_pack *pack, const void *data, smp_tensor_meta *meta)
{
    if (pack->data.size > UINT32_MAX) { /* place could not say where */
        PyErr_Format(PyExc_OverflowError,
                     "smp: the small tensors of one call have more than %u bytes",
                     UINT32_MAX);
        return -1;
    }
    meta->place = (uint32_t)pack->data.size;
    return smp_buffer_put(&pack->data, data, (size_t)meta->bytes);
}

/* The block is the tensor's; the pack takes it, and has room for it. */
static void
add_block(smp_pack *pack, smp_block *block, smp_tensor_meta *meta)
{
    meta->in_block = 1;
    meta->place = (uint32_t)pack->nblocks;
    pack->blocks[pack->nblocks++] = block;
}

/* A block for the tensor, owned by the pack. */
static smp_block *
make_block(smp_pack *pack, const dl_tensor *t, smp_tensor_meta *meta)
{
    smp_block *block;
    smp_status status;

    if (smp_array_reserve(&pack->blocks, pack->nblocks, &pack->block_room) < 0) {
        return NULL;
    }
    status = smp_device_is_drivers(t->device)
                 ? smp_comm_block_for_device(pack->comm, pack->dest, t->device.id,
                                             (size_t)meta->bytes, &block)
                 : smp_comm_block(pack->comm, pack->dest, (size_t)meta->bytes, &block);
    if (status == SMP_ERR_CLOSED || status == SMP_ERR_PEER_LOST) {
        (void)smp_pack_raise_unsent(pack, status);
        return NULL;
    }
    if (status != SMP_OK) {
        PyErr_Format(PyExc_MemoryError, "smp: %llu bytes for a tensor to rank %d: %s",
                     (unsigned long long)meta->bytes, pack->dest,
                     smp_status_text(status));
        return NULL;
    }
    add_block(pack, block, meta);
    return block;
}

/* Copies the span of `t`, in host memory, into a block, or into the message when it is
 * small. */
static int
put_bytes(smp_pack *pack, const dl_tensor *t, smp_tensor_meta *meta)
{
    smp_block *block;

    if (pack->comm == NULL || meta->bytes <= SMP_VALUE_INLINE) {
        return put_inside(pack, t->data, meta);
    }
    block = make_block(pack, t, meta);
    if (block == NULL) {
        return -1;
    }
    if (meta->bytes >= 1 << 20) {
        Py_BEGIN_ALLOW_THREADS;
        memcpy(smp_block_data(block), t->data, (size_t)meta->bytes);
        Py_END_ALLOW_THREADS;
    } else {
        memcpy(smp_block_data(block), t->data, (size_t)meta->bytes);
    }
    return 0;
}

/* stage_out(tensor, host); takes host. */
static int
stage_out(PyObject *tensor, PyObject *host)
{
    PyObject *done = host == NULL ? NULL
                                  : PyObject_CallFunctionObjArgs(smp_registry.stage_out,
                                                                 tensor, host, NULL);

    Py_XDECREF(host);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Copies the span into the device pool, where both ranks have one: *done. */
static int
put_in_pool(smp_pack *pack, const dl_tensor *t, smp_tensor_meta *meta, bool *done)
{
    smp_block *block;

    *done = false;
    if (pack->comm == NULL) {
        return 0;
    }
    if (smp_array_reserve(&pack->blocks, pack->nblocks, &pack->block_room) < 0 ||
        smp_device_pack(pack->comm, pack->dest, t, meta->bytes, &block) < 0) {
        return -1;
    }
    if (block != NULL) {
        add_block(pack, block, meta);
        *done = true;
    }
    return 0;
}

/* The same for a tensor on a device: its copy into a block goes on until
 * smp_pack_wait_for_device(), so one wait does for all tensors of a message. */
static int
put_device_bytes(smp_pack *pack, PyObject *tensor, const dl_tensor *t,
                 smp_tensor_meta *meta)
{
    smp_block *block;
    dl_tensor  copied;
    PyObject  *host;
    bool       done;
    int        failed;

    if (meta->bytes == 0) {
        return 0;
    }
    if (put_in_pool(pack, t, meta, &done) < 0 || done) {
        return done ? 0 : -1;
    }
    if (pack->comm != NULL) {
        block = make_block(pack, t, meta);
        if (block == NULL) {
            return -1;
        }
        pack->staged = true;
        return stage_out(tensor,
                         smp_tensor_wrap_span(meta, smp_block_data(block), NULL, NULL));
    }
    host = smp_tensor_copy_span(meta, NULL);
    pack->staged = true;
    failed = host == NULL || stage_out(tensor, Py_NewRef(host)) < 0 ||
             smp_pack_wait_for_device(pack) < 0 ||
             smp_torch.dlpack->borrow(host, &copied) != 0 ||
             put_inside(pack, copied.data, meta) < 0;
    Py_XDECREF(host);
    return failed ? -1 : 0;
}

/* t describes `tensor`. */
static int
put_described(smp_pack *pack, PyObject *tensor, const dl_tensor *t, bool requires_grad)
{
    smp_tensor_meta meta = {
        .dtype = t->dtype,
        .device = t->device,
        .ndim = (uint16_t)t->ndim,
        .requires_grad = requires_grad,
        .bytes = smp_tensor_span(t),
    };
    size_t dims = (size_t)t->ndim * sizeof(int64_t);

    if (t->ndim > SMP_MAX_NDIM) {
        PyErr_Format(
            PyExc_ValueError,
            "smp: a tensor with %d dimensions cannot go to another rank; %d are "
            "the most",
            t->ndim, SMP_MAX_NDIM);
        return -1;
    }
    if (pack->parts == SMP_PACK_DESCRIBED) {
        meta.in_block = SMP_IN_NO_MESSAGE;
    } else if (meta.bytes > 0 && t->data == NULL) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "smp: a tensor without data (a meta or fake tensor, or one whose "
            "storage was freed) cannot go to another rank");
        return -1;
    }
    if ((pack->parts == SMP_PACK_DESCRIBED ? 0
         : t->device.type == SMP_DL_CPU
             ? put_bytes(pack, t, &meta)
             : put_device_bytes(pack, tensor, t, &meta)) < 0 ||
        smp_buffer_put(&pack->meta, &meta, sizeof(meta)) < 0 ||
        smp_buffer_put(&pack->meta, t->shape, dims) < 0 ||
        smp_buffer_put(&pack->meta, t->strides, dims) < 0) {
        return -1;
    }
    return 0;
}

/* A span much larger than its elements (a column of a large matrix) is not worth
 * sending whole. */
static bool
is_sparse_view(const dl_tensor *t)
{
    uint64_t elements = 1;

    for (int i = 0; i < t->ndim; i++) {
        if (t->strides[i] != 0) {
            elements *= (uint64_t)t->shape[i];
        }
    }
    return smp_tensor_span(t) > 4 * elements * smp_element_bytes(t->dtype) + 4096;
}

/* PyTorch's own error is about pointers and sizes.  A keyboard interrupt and the like
 * stay. */
static int
raise_unsendable(PyObject *tensor)
{
    if (smp_registry.unsendable != NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyObject *type;
        PyObject *error;
        PyObject *traceback;
        PyObject *said;

        PyErr_Fetch(&type, &error, &traceback);
        said = PyObject_CallFunctionObjArgs(smp_registry.unsendable, tensor,
                                            error == NULL ? Py_None : error, NULL);
        if (said != NULL) {
            PyErr_SetObject(PyExc_TypeError, said);
        }
        Py_XDECREF(said);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
    }
    return -1;
}

/* Describes and copies the tensor as number ntensors. */
static int
put_tensor_data(smp_pack *pack, PyObject *tensor, bool requires_grad)
{
    dl_tensor t;
    PyObject *held;
    int       failed;

    if (smp_tensor_borrow(tensor, &t, &held) < 0) {
        return raise_unsendable(tensor);
    }
    if (t.device.type != SMP_DL_CPU && smp_registry.stage_out == NULL) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "smp: only tensors in host memory can be sent before smp.init()");
        Py_DECREF(held);
        return -1;
    }
    if (pack->parts == SMP_PACK_WHOLE && smp_registry.dense != NULL &&
        is_sparse_view(&t)) {
        PyObject *dense = PyObject_CallOneArg(smp_registry.dense, held);

        Py_SETREF(held, dense);
        if (dense == NULL || smp_torch.dlpack->borrow(dense, &t) != 0) {
            Py_XDECREF(held);
            return -1;
        }
    }
    failed = put_described(pack, held, &t, requires_grad);
    Py_DECREF(held);
    return failed;
}

/* Makes room for one more. */
static int
grow_tensors(smp_pack *pack)
{
    size_t   room = pack->tensor_room;
    uint8_t *flags;

    if (pack->ntensors < room) {
        return 0;
    }
    if (smp_array_reserve(&pack->tensors, pack->ntensors, &room) < 0) {
        return -1;
    }
    flags = realloc(pack->in_graph, room);
    if (flags == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    pack->in_graph = flags;
    pack->tensor_room = room;
    return 0;
}

/* Whether the tensor may carry more from Python code than its values.
 */
static bool
is_laden(PyObject *tensor)
{
    PyTypeObject *type = Py_TYPE(tensor);
    PyObject    **dict;

    if (smp_is_placeholder(tensor)) {
        return false;
    }
    if (type != smp_torch.tensor && type != smp_torch.parameter) {
        return true;
    }
    dict = _PyObject_GetDictPtr(tensor);
    return dict != NULL && *dict != NULL && PyDict_GET_SIZE(*dict) > 0;
}

/* Numbers a new tensor, with its bytes. */
static int
add_tensor(smp_pack *pack, PyObject *tensor, uint32_t *number)
{
    int requires_grad = 0;

    if (pack->graph) {
        requires_grad = smp_attr_true(tensor, smp_names.requires_grad);
        if (requires_grad < 0) {
            return -1;
        }
    }
    if (grow_tensors(pack) < 0 ||
        (pack->parts != SMP_PACK_NUMBERED &&
         put_tensor_data(pack, tensor, requires_grad != 0) < 0)) {
        return -1;
    }
    *number = (uint32_t)pack->ntensors;
    if (!smp_ptrmap_add(&pack->tensor_numbers, tensor, *number)) {
        PyErr_NoMemory();
        return -1;
    }
    pack->in_graph[pack->ntensors] = requires_grad != 0;
    pack->tensors[pack->ntensors++] = Py_NewRef(tensor);
    if (pack->laden == NULL && is_laden(tensor)) {
        pack->laden = tensor;
    }
    return 0;
}

/* For a parameter split by tensor parallelism, another rank gets the whole. */
static int
add_whole(smp_pack *pack, PyObject *part, uint32_t *number)
{
    PyObject *whole = PyObject_CallOneArg(smp_registry.whole, part);
    int       failed = whole == NULL || add_tensor(pack, whole, number) < 0;

    Py_XDECREF(whole);
    if (!failed && !smp_ptrmap_add(&pack->tensor_numbers, part, *number)) {
        PyErr_NoMemory();
        failed = 1;
    }
    return failed ? -1 : 0;
}

static bool
is_split(PyObject *tensor)
{
    return smp_registry.split_tensor != NULL &&
           PyType_IsSubtype(Py_TYPE(tensor), (PyTypeObject *)smp_registry.split_tensor);
}

int
smp_pack_new_tensor(smp_pack *pack, PyObject *tensor)
{
    uint32_t number;

    if (!smp_ptrmap_get(&pack->tensor_numbers, tensor, &number) &&
        (is_split(tensor) && pack->parts != SMP_PACK_NUMBERED ? add_whole : add_tensor)(
            pack, tensor, &number) < 0) {
        return -1;
    }
    return smp_pack_number(pack, TAG_TENSOR, number);
}

int
smp_pack_tensor(smp_pack *pack, PyObject *tensor)
{
    bool done;

    if (smp_pack_tensor_there(pack, tensor, &done) < 0) {
        return -1;
    }
    return done ? 0 : smp_pack_new_tensor(pack, tensor);
}
