/* Python values into a message: one walk, no pickle for what the wire knows. */
#include "python/values/pack.h"

#include <stdlib.h>
#include <string.h>

#include "python/values/device.h"
#include "python/values/plain_class.h"
#include "python/values/rank_names.h"
#include "python/values/registry.h"
#include "python/values/wire.h"

/* ------------------------------------------------------------------- buffers */

static int
reserve(smp_buffer *buffer, size_t more)
{
    if (buffer->size + more > buffer->room) {
        size_t   room = buffer->room == 0 ? 256 : 2 * buffer->room;
        uint8_t *moved;

        while (room < buffer->size + more) {
            room *= 2;
        }
        moved = realloc(buffer->at, room);
        if (moved == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        buffer->at = moved;
        buffer->room = room;
    }
    return 0;
}

static int
put(smp_buffer *buffer, const void *bytes, size_t nbytes)
{
    if (reserve(buffer, nbytes) < 0) {
        return -1;
    }
    if (nbytes > 0) {
        memcpy(buffer->at + buffer->size, bytes, nbytes);
        buffer->size += nbytes;
    }
    return 0;
}

static int
put_tag(smp_pack *pack, smp_tag tag)
{
    uint8_t byte = (uint8_t)tag;

    return put(&pack->values, &byte, 1);
}

static int
put_size(smp_pack *pack, smp_tag tag, size_t size)
{
    if (size > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError,
                     "smp: a value with %zu elements cannot go to another rank, which "
                     "takes %u at most",
                     size, UINT32_MAX);
        return -1;
    }
    if (put_tag(pack, tag) < 0) {
        return -1;
    }
    return smp_pack_u32(pack, (uint32_t)size);
}

int
smp_pack_u32(smp_pack *pack, uint32_t number)
{
    return put(&pack->values, &number, sizeof(number));
}

/* Makes room for one more element in an array of pointers. */
static int
grow_array(void *array, size_t count, size_t *room)
{
    void **moved;

    if (count < *room) {
        return 0;
    }
    moved = realloc(*(void **)array, 2 * (*room + 8) * sizeof(void *));
    if (moved == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *(void **)array = moved;
    *room = 2 * (*room + 8);
    return 0;
}

/* ------------------------------------------------------------------- tensors */

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
    return put(&pack->data, data, (size_t)meta->bytes);
}

/* Raises for a rank that nothing can be sent to; 0 for another status. */
static int
raise_gone(const smp_pack *pack, smp_status status)
{
    if (status == SMP_ERR_CLOSED) {
        PyErr_Format(PyExc_ConnectionError,
                     "smp: %s has left the job in order, and this rank still "
                     "needs it: all ranks must make the same number of steps [%s]",
                     smp_rank_name(pack->dest), smp_status_name(status));
    } else if (status == SMP_ERR_PEER_LOST) {
        PyErr_Format(PyExc_ConnectionError, "smp: sending to %s: %s [%s]",
                     smp_rank_name(pack->dest), smp_status_text(status),
                     smp_status_name(status));
    } else {
        return 0;
    }
    return -1;
}

/* A block for the tensor, which the pack owns. */
static smp_block *
add_block(smp_pack *pack, smp_tensor_meta *meta)
{
    smp_block *block;
    smp_status status;

    if (grow_array(&pack->blocks, pack->nblocks, &pack->block_room) < 0) {
        return NULL;
    }
    status = smp_comm_block(pack->comm, pack->dest, (size_t)meta->bytes, &block);
    if (raise_gone(pack, status) < 0) {
        return NULL;
    }
    if (status != SMP_OK) {
        PyErr_Format(PyExc_MemoryError, "smp: %llu bytes for a tensor to rank %d: %s",
                     (unsigned long long)meta->bytes, pack->dest,
                     smp_status_text(status));
        return NULL;
    }
    meta->in_block = 1;
    meta->place = (uint32_t)pack->nblocks;
    pack->blocks[pack->nblocks++] = block;
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
    block = add_block(pack, meta);
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

/* Waits until the blocks hold what the device was told to write there. */
static int
stage_wait(smp_pack *pack)
{
    PyObject *done;

    if (!pack->staged) {
        return 0;
    }
    done = PyObject_CallNoArgs(smp_registry.stage_wait);
    Py_XDECREF(done);
    pack->staged = false;
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
    if (grow_array(&pack->blocks, pack->nblocks, &pack->block_room) < 0 ||
        smp_device_pack(pack->comm, pack->dest, t, meta->bytes, &block) < 0) {
        return -1;
    }
    if (block != NULL) {
        meta->in_block = 1;
        meta->place = (uint32_t)pack->nblocks;
        pack->blocks[pack->nblocks++] = block;
        *done = true;
    }
    return 0;
}

/* The same for a tensor on a device: its copy into a block goes on until stage_wait(),
 * so that one wait does for all tensors of a message. */
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
        block = add_block(pack, meta);
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
             stage_wait(pack) < 0 || smp_torch.dlpack->borrow(host, &copied) != 0 ||
             put_inside(pack, copied.data, meta) < 0;
    Py_XDECREF(host);
    return failed ? -1 : 0;
}

/* `tensor` is what t describes. */
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
    if (meta.bytes > 0 && t->data == NULL) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "smp: a tensor without data (a meta or fake tensor, or one whose "
            "storage was freed) cannot go to another rank");
        return -1;
    }
    if ((t->device.type == SMP_DL_CPU ? put_bytes(pack, t, &meta)
                                      : put_device_bytes(pack, tensor, t, &meta)) < 0 ||
        put(&pack->meta, &meta, sizeof(meta)) < 0 ||
        put(&pack->meta, t->shape, dims) < 0 ||
        put(&pack->meta, t->strides, dims) < 0) {
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
    uint64_t element = ((uint64_t)t->dtype.bits * t->dtype.lanes + 7) / 8;

    for (int i = 0; i < t->ndim; i++) {
        if (t->strides[i] != 0) {
            elements *= (uint64_t)t->shape[i];
        }
    }
    return smp_tensor_span(t) > 4 * elements * element + 4096;
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
    if (smp_registry.dense != NULL && is_sparse_view(&t)) {
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

static int
grow_tensors(smp_pack *pack)
{
    uint8_t *flags;

    if (pack->ntensors < pack->tensor_room) {
        return 0;
    }
    if (grow_array(&pack->tensors, pack->ntensors, &pack->tensor_room) < 0) {
        return -1;
    }
    flags = realloc(pack->in_graph, pack->tensor_room);
    if (flags == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    pack->in_graph = flags;
    return 0;
}

/* Whether Python code may have left something on the tensor that is not in its values.
 */
static bool
is_laden(PyObject *tensor)
{
    PyTypeObject *type = Py_TYPE(tensor);
    PyObject    **dict;

    if (type != smp_torch.tensor && type != smp_torch.parameter) {
        return true;
    }
    dict = _PyObject_GetDictPtr(tensor);
    return dict != NULL && *dict != NULL && PyDict_GET_SIZE(*dict) > 0;
}

/* Numbers a tensor that is not numbered yet, with its bytes. */
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
        put_tensor_data(pack, tensor, requires_grad != 0) < 0) {
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

/* A parameter or buffer that this rank does not own goes by number: its data is
 * elsewhere. */
static int
put_parameter(smp_pack *pack, PyObject *tensor, bool *done)
{
    int64_t number = smp_registry_find(smp_registry.parameter_numbers, tensor);
    long    owner;

    *done = false;
    if (number < 0) {
        return 0;
    }
    owner = PyLong_AsLong(PyList_GET_ITEM(smp_registry.parameter_owners, number));
    if (owner != smp_registry.rank) {
        *done = true;
        if (put_tag(pack, TAG_PARAMETER) < 0) {
            return -1;
        }
        return smp_pack_u32(pack, (uint32_t)number);
    }
    return 0;
}

/* An object that is there twice keeps the first number. */
static int
number_all(smp_ptrmap *numbers, PyObject *const *objects, size_t n)
{
    uint32_t number;

    for (size_t i = 0; i < n; i++) {
        if (objects[i] != NULL && !smp_ptrmap_get(numbers, objects[i], &number) &&
            !smp_ptrmap_add(numbers, objects[i], (uint32_t)i)) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return 0;
}

/* Before what the request holds is looked up.  All of it has been read by now. */
static int
know_arguments(smp_pack *pack)
{
    const smp_unpack *request = pack->request;

    if (request == NULL || pack->knows_arguments) {
        return 0;
    }
    pack->knows_arguments = true;
    if (number_all(&pack->argument_tensors, request->tensors, request->ntensors) < 0) {
        return -1;
    }
    return number_all(&pack->argument_objects, request->objects, request->nobjects);
}

/* When the tensor is an argument of the request that this answers, changed or not, the
 * caller uses its own. */
static int
put_argument_tensor(smp_pack *pack, PyObject *tensor, bool *done)
{
    uint32_t number;

    *done = false;
    if (know_arguments(pack) < 0) {
        return -1;
    }
    if (!smp_ptrmap_get(&pack->argument_tensors, tensor, &number)) {
        return 0;
    }
    *done = true;
    return put_size(pack, TAG_ARGUMENT_TENSOR, number);
}

int
smp_pack_new_tensor(smp_pack *pack, PyObject *tensor)
{
    uint32_t number;

    if (!smp_ptrmap_get(&pack->tensor_numbers, tensor, &number) &&
        add_tensor(pack, tensor, &number) < 0) {
        return -1;
    }
    return put_size(pack, TAG_TENSOR, number);
}

static int
put_tensor(smp_pack *pack, PyObject *tensor)
{
    bool done = false;

    if (Py_TYPE(tensor) != smp_torch.tensor && smp_registry.parameter_numbers != NULL) {
        if (put_parameter(pack, tensor, &done) < 0) {
            return -1;
        }
    }
    if (!done && put_argument_tensor(pack, tensor, &done) < 0) {
        return -1;
    }
    return done ? 0 : smp_pack_new_tensor(pack, tensor);
}

/* ------------------------------------------------------------------- numbers */

static int
put_int(smp_pack *pack, PyObject *value)
{
    int       overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);

    if (overflow != 0) {
        PyObject   *text = PyNumber_ToBase(value, 16); /* decimal has a limit */
        Py_ssize_t  size;
        const char *utf8 = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, &size);
        int failed = utf8 == NULL || put_size(pack, TAG_BIG_INT, (size_t)size) < 0 ||
                             put(&pack->values, utf8, (size_t)size) < 0
                         ? -1
                         : 0;

        Py_XDECREF(text);
        return failed;
    }
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (put_tag(pack, TAG_INT) < 0) {
        return -1;
    }
    return put(&pack->values, &number, sizeof(number));
}

static int
put_text(smp_pack *pack, smp_tag tag, PyObject *text)
{
    PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    int       failed;

    if (bytes == NULL) {
        return -1;
    }
    failed = put_size(pack, tag, (size_t)PyBytes_GET_SIZE(bytes)) < 0 ||
             put(&pack->values, PyBytes_AS_STRING(bytes),
                 (size_t)PyBytes_GET_SIZE(bytes)) < 0;
    Py_DECREF(bytes);
    return failed ? -1 : 0;
}

/* str(value) without its first `skip` characters. */
static int
put_str_of(smp_pack *pack, smp_tag tag, PyObject *value, Py_ssize_t skip)
{
    PyObject *text = PyObject_Str(value);
    PyObject *tail;
    int       failed;

    if (text == NULL) {
        return -1;
    }
    tail = PyUnicode_Substring(text, skip, PyUnicode_GET_LENGTH(text));
    Py_DECREF(text);
    if (tail == NULL) {
        return -1;
    }
    failed = put_text(pack, tag, tail);
    Py_DECREF(tail);
    return failed;
}

/* ---------------------------------------------------------------- containers */

static int
put_class_name(smp_pack *pack, PyTypeObject *type)
{
    PyObject *module = PyObject_GetAttr((PyObject *)type, smp_names.module);
    PyObject *name = PyObject_GetAttr((PyObject *)type, smp_names.qualname);
    int       failed = module == NULL || name == NULL || !PyUnicode_Check(module) ||
                 put_text(pack, TAG_STR, module) < 0 ||
                 put_text(pack, TAG_STR, name) < 0;

    Py_XDECREF(module);
    Py_XDECREF(name);
    return failed ? -1 : 0;
}

static int
put_items(smp_pack *pack, PyObject *const *items, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        if (smp_pack_value(pack, items[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* To pack an item can run Python, which may change what holds it. */
static int
raise_resized(PyObject *container)
{
    PyErr_Format(PyExc_RuntimeError,
                 "smp: a %s changed its size while it was packed for another rank",
                 Py_TYPE(container)->tp_name);
    return -1;
}

/* n: how many items it has, as has been written. */
static int
put_iterable(smp_pack *pack, PyObject *iterable, Py_ssize_t n)
{
    PyObject  *iterator = PyObject_GetIter(iterable);
    PyObject  *item;
    Py_ssize_t packed = 0;

    if (iterator == NULL) {
        return -1;
    }
    while ((item = PyIter_Next(iterator)) != NULL) {
        int failed = smp_pack_value(pack, item);

        Py_DECREF(item);
        packed++;
        if (failed < 0 || packed > n) {
            break;
        }
    }
    Py_DECREF(iterator);
    if (PyErr_Occurred()) {
        return -1;
    }
    return packed == n ? 0 : raise_resized(iterable);
}

/* An OrderedDict has an order of its own, which move_to_end changes. */
static int
put_ordered_pairs(smp_pack *pack, PyObject *dict)
{
    PyObject *keys = PyODict_Type.tp_iter(dict);
    int       failed = keys == NULL;
    PyObject *key;

    while (!failed && (key = PyIter_Next(keys)) != NULL) {
        PyObject *value = PyDict_GetItemWithError(dict, key); /* borrowed */

        Py_XINCREF(value);
        failed = value == NULL || smp_pack_value(pack, key) < 0 ||
                 smp_pack_value(pack, value) < 0;
        Py_XDECREF(value);
        Py_DECREF(key);
    }
    Py_XDECREF(keys);
    return failed || PyErr_Occurred() ? -1 : 0;
}

static int
put_pairs(smp_pack *pack, PyObject *dict)
{
    Py_ssize_t n = PyDict_GET_SIZE(dict);
    Py_ssize_t at = 0;
    Py_ssize_t packed = 0;
    PyObject  *key;
    PyObject  *value;

    if (smp_pack_u32(pack, (uint32_t)n) < 0) {
        return -1;
    }
    if (PyODict_Check(dict)) {
        return put_ordered_pairs(pack, dict);
    }
    while (PyDict_Next(dict, &at, &key, &value)) {
        int failed;

        Py_INCREF(key);
        Py_INCREF(value);
        failed = smp_pack_value(pack, key) < 0 || smp_pack_value(pack, value) < 0;
        Py_DECREF(key);
        Py_DECREF(value);
        if (failed) {
            return -1;
        }
        packed++;
        if (PyDict_GET_SIZE(dict) != n) {
            break;
        }
    }
    if (packed != n || PyDict_GET_SIZE(dict) != n) {
        return raise_resized(dict);
    }
    return 0;
}

/* The instance's __dict__, a new reference; NULL without an exception when none. */
static PyObject *
instance_dict(PyObject *object)
{
    PyObject *dict = PyObject_GetAttr(object, smp_names.dict);

    if (dict == NULL) {
        PyErr_Clear();
    } else if (!PyDict_Check(dict)) {
        Py_CLEAR(dict);
    }
    return dict;
}

static int
put_instance_dict(smp_pack *pack, PyObject *object)
{
    PyObject *dict = instance_dict(object);
    int       failed;

    if (dict == NULL) {
        return put_tag(pack, TAG_NONE);
    }
    failed = put_tag(pack, TAG_DICT) < 0 || put_pairs(pack, dict) < 0;
    Py_DECREF(dict);
    return failed ? -1 : 0;
}

int
smp_pack_contents(smp_pack *pack, PyObject *object)
{
    if (PyList_Check(object)) {
        if (smp_pack_u32(pack, (uint32_t)PyList_GET_SIZE(object)) < 0 ||
            put_iterable(pack, object, PyList_GET_SIZE(object)) < 0) {
            return -1;
        }
        return PyList_CheckExact(object) ? 0 : put_instance_dict(pack, object);
    }
    if (PyDict_Check(object)) {
        if (put_pairs(pack, object) < 0) {
            return -1;
        }
        return PyDict_CheckExact(object) ? 0 : put_instance_dict(pack, object);
    }
    if (PySet_Check(object)) {
        if (smp_pack_u32(pack, (uint32_t)PySet_GET_SIZE(object)) < 0) {
            return -1;
        }
        return put_iterable(pack, object, PySet_GET_SIZE(object));
    }
    return put_instance_dict(pack, object);
}

/* Numbers an object that the callee could change; *done when it has a number already,
 * which is then written. */
static int
number_object(smp_pack *pack, PyObject *object, bool *done)
{
    uint32_t number;

    *done = true;
    if (smp_ptrmap_get(&pack->object_numbers, object, &number)) {
        return put_size(pack, TAG_SEEN, number);
    }
    if (know_arguments(pack) < 0) {
        return -1;
    }
    if (smp_ptrmap_get(&pack->argument_objects, object, &number)) {
        return put_size(pack, TAG_ARGUMENT_OBJECT, number);
    }
    *done = false;
    if (grow_array(&pack->objects, pack->nobjects, &pack->object_room) < 0) {
        return -1;
    }
    if (!smp_ptrmap_add(&pack->object_numbers, object, (uint32_t)pack->nobjects)) {
        PyErr_NoMemory();
        return -1;
    }
    pack->objects[pack->nobjects++] = Py_NewRef(object);
    return 0;
}

/* Writes a mutable object once, under a number; a second time its number. */
static int
put_object(smp_pack *pack, PyObject *object, smp_tag tag)
{
    bool done;

    if (number_object(pack, object, &done) < 0) {
        return -1;
    }
    if (done) {
        return 0;
    }
    if (put_tag(pack, tag) < 0) {
        return -1;
    }
    if ((tag == TAG_MAPPED || tag == TAG_LISTED || tag == TAG_OBJECT ||
         tag == TAG_DEFAULTED) &&
        put_class_name(pack, Py_TYPE(object)) < 0) {
        return -1;
    }
    if (tag == TAG_DEFAULTED) {
        PyObject *factory = PyObject_GetAttr(object, smp_names.default_factory);
        int       failed = factory == NULL ? -1 : smp_pack_value(pack, factory);

        Py_XDECREF(factory);
        if (failed < 0) {
            return -1;
        }
    }
    return smp_pack_contents(pack, object);
}

static int
put_tuple(smp_pack *pack, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    PyObject     *fields;

    if (type == smp_torch.size) {
        if (put_size(pack, TAG_SIZE, (size_t)PyTuple_GET_SIZE(value)) < 0) {
            return -1;
        }
    } else if (type == &PyTuple_Type) {
        if (put_size(pack, TAG_TUPLE, (size_t)PyTuple_GET_SIZE(value)) < 0) {
            return -1;
        }
    } else {
        fields = PyObject_GetAttr((PyObject *)type, smp_names._fields);
        if (fields == NULL) {
            PyErr_Clear();
            fields = PyObject_GetAttrString((PyObject *)type, "n_sequence_fields");
        }
        if (fields == NULL) {
            PyErr_Clear();
            return 1; /* a tuple subclass that only pickle knows */
        }
        Py_DECREF(fields);
        if (put_tag(pack, TAG_NAMED) < 0 || put_class_name(pack, type) < 0 ||
            smp_pack_u32(pack, (uint32_t)PyTuple_GET_SIZE(value)) < 0) {
            return -1;
        }
    }
    return put_items(pack, &PyTuple_GET_ITEM(value, 0), PyTuple_GET_SIZE(value));
}

static int
put_slice(smp_pack *pack, PyObject *value)
{
    PySliceObject *slice = (PySliceObject *)value;

    if (put_tag(pack, TAG_SLICE) < 0 || smp_pack_value(pack, slice->start) < 0 ||
        smp_pack_value(pack, slice->stop) < 0) {
        return -1;
    }
    return smp_pack_value(pack, slice->step);
}

static int
put_pickle(smp_pack *pack, PyObject *value)
{
    PyObject *pair;
    PyObject *bytes;
    PyObject *tensors;
    bool      done;
    int       failed;

    if (smp_registry.dumps == NULL) {
        PyErr_Format(PyExc_TypeError, "smp: cannot send a %s to another rank",
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    if (number_object(pack, value, &done) < 0) {
        return -1;
    }
    if (done) {
        return 0;
    }
    pair = PyObject_CallOneArg(smp_registry.dumps, value);
    if (pair == NULL) {
        return -1;
    }
    bytes = PyTuple_GET_ITEM(pair, 0);
    tensors = PyTuple_GET_ITEM(pair, 1);
    failed = put_size(pack, TAG_PICKLE, (size_t)PyBytes_GET_SIZE(bytes)) < 0 ||
             put(&pack->values, PyBytes_AS_STRING(bytes),
                 (size_t)PyBytes_GET_SIZE(bytes)) < 0 ||
             smp_pack_u32(pack, (uint32_t)PyList_GET_SIZE(tensors)) < 0 ||
             put_iterable(pack, tensors, PyList_GET_SIZE(tensors)) < 0;
    Py_DECREF(pair);
    return failed ? -1 : 0;
}

/* Values whose type is exactly one of Python's own; 1 when it is not. */
static int
put_builtin(smp_pack *pack, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);

    if (type == &PyLong_Type) {
        return put_int(pack, value);
    }
    if (type == &PyFloat_Type) {
        double number = PyFloat_AS_DOUBLE(value);

        if (put_tag(pack, TAG_FLOAT) < 0) {
            return -1;
        }
        return put(&pack->values, &number, sizeof(number));
    }
    if (type == &PyUnicode_Type) {
        return put_text(pack, TAG_STR, value);
    }
    if (type == &PyList_Type) {
        return put_object(pack, value, TAG_LIST);
    }
    if (type == &PyDict_Type) {
        return put_object(pack, value, TAG_DICT);
    }
    if (type == &PySet_Type) {
        return put_object(pack, value, TAG_SET);
    }
    if (type == &PyBytes_Type) {
        if (put_size(pack, TAG_BYTES, (size_t)PyBytes_GET_SIZE(value)) < 0) {
            return -1;
        }
        return put(&pack->values, PyBytes_AS_STRING(value),
                   (size_t)PyBytes_GET_SIZE(value));
    }
    if (type == &PyComplex_Type) {
        Py_complex number = PyComplex_AsCComplex(value);

        if (put_tag(pack, TAG_COMPLEX) < 0) {
            return -1;
        }
        return put(&pack->values, &number, sizeof(number));
    }
    if (type == &PyFrozenSet_Type) {
        if (put_size(pack, TAG_FROZENSET, (size_t)PySet_GET_SIZE(value)) < 0) {
            return -1;
        }
        return put_iterable(pack, value, PySet_GET_SIZE(value));
    }
    if (type == &PySlice_Type) {
        return put_slice(pack, value);
    }
    return 1;
}

/* The rest: torch's types, classes, subclasses and plain objects; 1 when none. */
static int
put_known(smp_pack *pack, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);

    if (type == smp_torch.dtype) {
        return put_str_of(pack, TAG_DTYPE, value, 6); /* behind "torch." */
    }
    if (type == smp_torch.device) {
        return put_str_of(pack, TAG_DEVICE, value, 0);
    }
    if (PyTuple_Check(value)) {
        return put_tuple(pack, value);
    }
    if (PyType_Check(value)) {
        if (put_tag(pack, TAG_CLASS) < 0) {
            return -1;
        }
        return put_class_name(pack, (PyTypeObject *)value);
    }
    if (PyObject_TypeCheck(value, smp_torch.module)) {
        int64_t number = smp_registry_find(smp_registry.module_numbers, value);

        return number < 0 ? 1 : put_size(pack, TAG_MODULE, (size_t)number);
    }
    if (PyDict_Check(value)) {
        bool defaulted = PyObject_TypeCheck(value, smp_torch.defaultdict);

        return put_object(pack, value, defaulted ? TAG_DEFAULTED : TAG_MAPPED);
    }
    if (PyList_Check(value)) {
        return put_object(pack, value, TAG_LISTED);
    }
    if (smp_is_plain_class(type)) {
        return put_object(pack, value, TAG_OBJECT);
    }
    return 1;
}

int
smp_pack_value(smp_pack *pack, PyObject *value)
{
    int result;

    if (value == Py_None) {
        return put_tag(pack, TAG_NONE);
    }
    if (value == Py_True || value == Py_False) {
        return put_tag(pack, value == Py_True ? TAG_TRUE : TAG_FALSE);
    }
    if (value == Py_Ellipsis) {
        return put_tag(pack, TAG_ELLIPSIS);
    }
    if (smp_is_tensor(value)) {
        return put_tensor(pack, value);
    }
    if (++pack->depth > SMP_MAX_DEPTH) {
        PyErr_Format(PyExc_RecursionError,
                     "smp: a value nested deeper than %d cannot go to another rank",
                     SMP_MAX_DEPTH);
        return -1;
    }
    result = put_builtin(pack, value);
    if (result == 1) {
        result = put_known(pack, value);
    }
    if (result == 1) {
        result = put_pickle(pack, value);
    }
    pack->depth--;
    return result;
}

/* ------------------------------------------------------------------ lifetime */

void
smp_pack_init(smp_pack *pack, smp_comm *comm, int dest, const smp_unpack *request)
{
    *pack = (smp_pack){.comm = comm, .dest = dest, .request = request, .graph = true};
    smp_ptrmap_init(&pack->tensor_numbers);
    smp_ptrmap_init(&pack->object_numbers);
    smp_ptrmap_init(&pack->argument_tensors);
    smp_ptrmap_init(&pack->argument_objects);
}

void
smp_pack_fini(smp_pack *pack)
{
    if (pack->staged) { /* never sent: nobody may have the blocks before */
        PyObject *type;
        PyObject *value;
        PyObject *traceback;

        PyErr_Fetch(&type, &value, &traceback);
        if (stage_wait(pack) < 0) {
            PyErr_WriteUnraisable(smp_registry.stage_wait);
        }
        PyErr_Restore(type, value, traceback);
    }
    for (size_t i = 0; i < pack->ntensors; i++) {
        Py_DECREF(pack->tensors[i]);
    }
    for (size_t i = 0; i < pack->nobjects; i++) {
        Py_DECREF(pack->objects[i]);
    }
    for (size_t i = 0; i < pack->nblocks; i++) {
        smp_block_release(pack->blocks[i]);
    }
    smp_ptrmap_fini(&pack->tensor_numbers);
    smp_ptrmap_fini(&pack->object_numbers);
    smp_ptrmap_fini(&pack->argument_tensors);
    smp_ptrmap_fini(&pack->argument_objects);
    free(pack->tensors);
    free(pack->in_graph);
    free(pack->objects);
    free(pack->blocks);
    free(pack->meta.at);
    free(pack->values.at);
    free(pack->data.at);
}

/* Writes everything behind `head` bytes that are left free, into one buffer. */
static int
join(smp_pack *pack, size_t head, smp_buffer *out)
{
    smp_wire_sizes sizes = {
        .tensors = (uint32_t)pack->ntensors,
        .meta_bytes = (uint32_t)pack->meta.size,
        .value_bytes = (uint32_t)pack->values.size,
        .data_bytes = pack->data.size,
    };

    *out = (smp_buffer){0};
    if (pack->meta.size > UINT32_MAX || pack->values.size > UINT32_MAX) {
        PyErr_Format(
            PyExc_OverflowError,
            "smp: a value of %zu bytes beside its tensors cannot go to another "
            "rank; %u are the most",
            pack->values.size + pack->meta.size, UINT32_MAX);
        return -1;
    }
    if (reserve(out, head + sizeof(sizes) + pack->meta.size + pack->values.size +
                         pack->data.size) < 0) {
        return -1;
    }
    out->size = head;
    (void)put(out, &sizes, sizeof(sizes));
    (void)put(out, pack->meta.at, pack->meta.size);
    (void)put(out, pack->values.at, pack->values.size);
    (void)put(out, pack->data.at, pack->data.size);
    return 0;
}

int
smp_pack_send(smp_pack *pack, const smp_envelope *envelope)
{
    smp_buffer whole;
    smp_status status;
    size_t     nblocks = pack->nblocks;

    if (join(pack, sizeof(*envelope), &whole) < 0) {
        return -1;
    }
    if (stage_wait(pack) < 0) {
        free(whole.at);
        return -1;
    }
    memcpy(whole.at, envelope, sizeof(*envelope));
    pack->nblocks = 0; /* the comm takes them, whatever it returns */
    status = smp_comm_send(pack->comm, pack->dest, whole.at, whole.size, pack->blocks,
                           nblocks);
    free(whole.at);
    if (raise_gone(pack, status) < 0) {
        return -1;
    }
    if (status != SMP_OK) {
        PyErr_Format(PyExc_ConnectionError, "smp: sending to %s: %s [%s]",
                     smp_rank_name(pack->dest), smp_status_text(status),
                     smp_status_name(status));
        return -1;
    }
    return 0;
}

PyObject *
smp_pack_bytes(smp_pack *pack)
{
    smp_buffer whole;
    PyObject  *bytes;

    if (join(pack, 0, &whole) < 0) {
        return NULL;
    }
    bytes = PyBytes_FromStringAndSize((const char *)whole.at, (Py_ssize_t)whole.size);
    free(whole.at);
    return bytes;
}
