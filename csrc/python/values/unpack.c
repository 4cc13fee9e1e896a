/* A message back into Python values; trusts nothing that it reads. */
#include "python/values/unpack.h"

#include <stdlib.h>
#include <string.h>

#include "python/values/device.h"
#include "python/values/plain_class.h"
#include "python/values/registry.h"
#include "python/values/torch_api.h"
#include "python/values/wire.h"
#include "server/envelope.h"

/* ------------------------------------------------------------------- reading */

static int
malformed(const char *what)
{
    PyErr_Format(PyExc_ValueError, "smp: malformed message: %s", what);
    return -1;
}

/* The next nbytes of the values, or NULL. */
static const void *
take(smp_unpack *unpack, size_t nbytes)
{
    const void *at = unpack->values;

    if ((size_t)(unpack->values_end - unpack->values) < nbytes) {
        (void)malformed("it ends too early");
        return NULL;
    }
    unpack->values += nbytes;
    return at;
}

int
smp_unpack_u32(smp_unpack *unpack, uint32_t *number)
{
    const void *at = take(unpack, sizeof(*number));

    if (at == NULL) {
        return -1;
    }
    memcpy(number, at, sizeof(*number));
    return 0;
}

/* A count of values that must still fit: each takes at least one byte. */
static int
take_count(smp_unpack *unpack, uint32_t *count)
{
    if (smp_unpack_u32(unpack, count) < 0) {
        return -1;
    }
    if (*count > (size_t)(unpack->values_end - unpack->values)) {
        return malformed("a count larger than the message");
    }
    return 0;
}

/* ------------------------------------------------------------------- tensors */

static void
release_block(void *owner)
{
    smp_block_release(owner);
}

/* A span that matches shape and strides, and that lies inside its block or data. */
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
        return malformed("a tensor without a dtype");
    }
    for (int i = 0; i < meta->ndim; i++) {
        if (shape[i] < 0 || strides[i] < 0 || (uint64_t)shape[i] > limit ||
            (uint64_t)strides[i] > limit) {
            return malformed("a tensor's shape or stride is out of range");
        }
        if (strides[i] > 0 && shape[i] > 0) {
            limit /= (uint64_t)shape[i];
            if ((uint64_t)strides[i] > ((uint64_t)1 << 48) / (uint64_t)shape[i]) {
                return malformed("a tensor's stride is out of range");
            }
        }
    }
    for (int i = 0; i < meta->ndim; i++) {
        empty = empty || shape[i] == 0;
    }
    elements = empty ? 0 : 1;
    for (int i = 0; i < meta->ndim; i++) {
        if (__builtin_mul_overflow(elements, shape[i], &elements)) {
            return malformed("a tensor has more elements than can be counted");
        }
    }
    if (smp_tensor_span(&t) != meta->bytes) {
        PyErr_Format(PyExc_ValueError,
                     "smp: malformed message: a tensor announces %llu bytes, its shape "
                     "and strides make %llu",
                     (unsigned long long)meta->bytes,
                     (unsigned long long)smp_tensor_span(&t));
        return -1;
    }
    if (meta->in_block) {
        if (unpack->message == NULL || meta->place >= unpack->message->nblocks ||
            unpack->message->blocks[meta->place] == NULL ||
            smp_block_bytes(unpack->message->blocks[meta->place]) < meta->bytes) {
            return malformed("a tensor without its bytes");
        }
    } else if (meta->place > unpack->data_bytes ||
               meta->bytes > unpack->data_bytes - meta->place) {
        return malformed("a tensor's bytes lie outside the message");
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
 * memory, which stage_in keeps until the device has read it. */
static PyObject *
make_device_tensor(smp_unpack *unpack, const smp_tensor_meta *meta,
                   const int64_t *shape, const int64_t *strides)
{
    smp_comm *comm = unpack->comm;
    PyObject *tensor;
    PyObject *row;

    if (smp_registry.stage_in == NULL) {
        (void)malformed("a tensor on a device where none is expected");
        return NULL;
    }
    if (meta->in_block) {
        smp_block *block = smp_message_take_block(unpack->message, meta->place);

        if (smp_block_data(block) == NULL) {
            row = smp_device_unpack(comm, unpack->message->source, block, meta);
            return lay_out(smp_registry.stage_placed, row, meta, shape, strides);
        }
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

static PyObject *
make_tensor(smp_unpack *unpack, const smp_tensor_meta *meta, const int64_t *shape,
            const int64_t *strides)
{
    smp_block *block;

    if (meta->device.type != SMP_DL_CPU) {
        return make_device_tensor(unpack, meta, shape, strides);
    }
    if (!meta->in_block) {
        return smp_tensor_copy_of(meta, shape, strides, unpack->data + meta->place);
    }
    if (smp_block_data(unpack->message->blocks[meta->place]) == NULL) {
        (void)malformed("a tensor of the host in the pool of a device");
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
        return malformed("more tensors than it describes");
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
            return malformed("a tensor's description is cut off");
        }
        memcpy(&meta, at, sizeof(meta));
        at += sizeof(meta);
        dims = (size_t)meta.ndim * sizeof(int64_t);
        if (meta.ndim > SMP_MAX_NDIM || (size_t)(meta_end - at) < 2 * dims) {
            return malformed("a tensor's description is cut off");
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
        return malformed("it is shorter than its sizes");
    }
    memcpy(&sizes, bytes, sizeof(sizes));
    nbytes -= sizeof(sizes);
    if (sizes.meta_bytes > nbytes || sizes.value_bytes > nbytes - sizes.meta_bytes ||
        sizes.data_bytes != nbytes - sizes.meta_bytes - sizes.value_bytes) {
        return malformed("its parts are not as long as it says");
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
        return malformed("it is shorter than its envelope");
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

void
smp_unpack_fini(smp_unpack *unpack)
{
    for (size_t i = 0; i < unpack->ntensors; i++) {
        Py_XDECREF(unpack->tensors[i]);
    }
    for (size_t i = 0; i < unpack->nobjects; i++) {
        Py_XDECREF(unpack->objects[i]);
        Py_XDECREF(unpack->snapshots[i]);
    }
    free(unpack->tensors);
    free(unpack->requires_grad);
    free(unpack->objects);
    free(unpack->snapshots);
    smp_message_free(unpack->message);
}

/* ------------------------------------------------------------------- objects */

/* Numbers a mutable object before its contents are read: they may refer to it.  NULL
 * for one that is made of its contents. */
static int
add_object(smp_unpack *unpack, PyObject *object, size_t *number)
{
    if (unpack->nobjects == unpack->object_room) {
        size_t     room = 2 * unpack->object_room + 8;
        PyObject **moved = realloc(unpack->objects, room * sizeof(*moved));

        if (moved != NULL) {
            unpack->objects = moved;
            moved = realloc(unpack->snapshots, room * sizeof(*moved));
        }
        if (moved == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        unpack->snapshots = moved;
        unpack->object_room = room;
    }
    *number = unpack->nobjects;
    unpack->objects[*number] = Py_XNewRef(object);
    unpack->snapshots[*number] = NULL;
    unpack->nobjects += 1;
    return 0;
}

/* The instance's __dict__, a new reference, or NULL without an exception. */
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

/* A dict with the pairs of an OrderedDict in its own order. */
static PyObject *
ordered_copy(PyObject *ordered)
{
    PyObject *keys = PyODict_Type.tp_iter(ordered);
    PyObject *copy = keys == NULL ? NULL : PyDict_New();
    PyObject *key;

    while (copy != NULL && (key = PyIter_Next(keys)) != NULL) {
        PyObject *value = PyDict_GetItemWithError(ordered, key);

        if (value == NULL || PyDict_SetItem(copy, key, value) < 0) {
            Py_CLEAR(copy);
        }
        Py_DECREF(key);
    }
    Py_XDECREF(keys);
    return copy;
}

/* A shallow copy of what in-place changes would change: (items, __dict__). */
static PyObject *
snapshot_of(PyObject *object)
{
    PyObject *items = NULL;
    PyObject *dict = NULL;
    PyObject *pair;

    if (PyList_Check(object)) {
        items = PyList_AsTuple(object);
    } else if (PyDict_Check(object)) {
        items = PyODict_Check(object) ? ordered_copy(object) : PyDict_Copy(object);
    } else if (PySet_Check(object)) {
        items = PyFrozenSet_New(object);
    } else {
        items = Py_NewRef(Py_None);
    }
    if (items == NULL) {
        return NULL;
    }
    if (!PyList_CheckExact(object) && !PyDict_CheckExact(object) &&
        !PySet_CheckExact(object)) {
        PyObject *own = instance_dict(object);

        if (own != NULL) {
            dict = PyDict_Copy(own);
            Py_DECREF(own);
        }
    }
    pair = PyTuple_Pack(2, items, dict == NULL ? Py_None : dict);
    Py_DECREF(items);
    Py_XDECREF(dict);
    return pair;
}

/* Same keys in the same order, each with the same object. */
static bool
same_dict(PyObject *a, PyObject *b)
{
    Py_ssize_t at_a = 0;
    Py_ssize_t at_b = 0;
    PyObject  *key_a;
    PyObject  *key_b;
    PyObject  *value_a;
    PyObject  *value_b;

    if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) {
        return false;
    }
    while (PyDict_Next(a, &at_a, &key_a, &value_a) &&
           PyDict_Next(b, &at_b, &key_b, &value_b)) {
        if (key_a != key_b || value_a != value_b) {
            return false;
        }
    }
    return true;
}

static int
same_items(PyObject *object, PyObject *items)
{
    if (PyList_Check(object)) {
        if (PyList_GET_SIZE(object) != PyTuple_GET_SIZE(items)) {
            return 0;
        }
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); i++) {
            if (PyList_GET_ITEM(object, i) != PyTuple_GET_ITEM(items, i)) {
                return 0;
            }
        }
        return 1;
    }
    if (PyODict_Check(object)) {
        PyObject *now = ordered_copy(object);
        int       same = now == NULL ? -1 : same_dict(now, items);

        Py_XDECREF(now);
        return same;
    }
    if (PyDict_Check(object)) {
        return same_dict(object, items);
    }
    if (PySet_Check(object)) {
        return PyObject_RichCompareBool(object, items, Py_EQ);
    }
    return 1;
}

/* Whether the object pickles as it did, with the same tensors; those may have changed.
 */
static int
same_pickle(PyObject *object, PyObject *before)
{
    PyObject *now = PyObject_CallOneArg(smp_registry.dumps, object);
    PyObject *outside;
    PyObject *outside_before = PyTuple_GET_ITEM(before, 1);
    int       same;

    if (now == NULL) {
        return -1;
    }
    outside = PyTuple_GET_ITEM(now, 1);
    same = PyObject_RichCompareBool(PyTuple_GET_ITEM(now, 0),
                                    PyTuple_GET_ITEM(before, 0), Py_EQ);
    if (same == 1 && PyList_GET_SIZE(outside) != PyList_GET_SIZE(outside_before)) {
        same = 0;
    }
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(outside); i++) {
        same = PyList_GET_ITEM(outside, i) == PyList_GET_ITEM(outside_before, i);
    }
    Py_DECREF(now);
    return same;
}

bool
smp_unpack_is_pickled(const smp_unpack *unpack, size_t i)
{
    return unpack->snapshots[i] != NULL &&
           PyBytes_Check(PyTuple_GET_ITEM(unpack->snapshots[i], 0));
}

int
smp_unpack_changed(const smp_unpack *unpack, size_t i)
{
    PyObject *object = unpack->objects[i];
    PyObject *snapshot = unpack->snapshots[i];
    PyObject *before;
    PyObject *now;
    int       same;

    if (snapshot == NULL) {
        return 0;
    }
    if (smp_unpack_is_pickled(unpack, i)) {
        same = same_pickle(object, snapshot);
        return same < 0 ? -1 : !same;
    }
    same = same_items(object, PyTuple_GET_ITEM(snapshot, 0));
    if (same <= 0) {
        return same < 0 ? -1 : 1;
    }
    before = PyTuple_GET_ITEM(snapshot, 1);
    if (before == Py_None) {
        return 0;
    }
    now = instance_dict(object);
    same = now != NULL && same_dict(now, before);
    Py_XDECREF(now);
    return !same;
}

/* -------------------------------------------------------------------- classes */

/* The class that module and qualified name in the message stand for; modules are only
 * looked up or imported, never run from the message. */
static PyObject *
take_class(smp_unpack *unpack)
{
    static PyObject *known; /* (module, name) -> class */
    PyObject        *module_name = smp_unpack_value(unpack);
    PyObject        *name = module_name == NULL ? NULL : smp_unpack_value(unpack);
    PyObject        *key = NULL;
    PyObject        *found = NULL;

    if (name == NULL || !PyUnicode_Check(module_name) || !PyUnicode_Check(name)) {
        if (!PyErr_Occurred()) {
            (void)malformed("a class without a name");
        }
        goto done;
    }
    if (known == NULL && (known = PyDict_New()) == NULL) {
        goto done;
    }
    key = PyTuple_Pack(2, module_name, name);
    if (key == NULL) {
        goto done;
    }
    found = Py_XNewRef(PyDict_GetItemWithError(known, key));
    if (found != NULL || PyErr_Occurred()) {
        goto done;
    }
    found = PyImport_GetModule(module_name);
    if (found == NULL && !PyErr_Occurred()) {
        found = PyImport_Import(module_name);
    }
    if (found != NULL) {
        PyObject *dot = PyUnicode_FromString(".");
        PyObject *parts = dot == NULL ? NULL : PyUnicode_Split(name, dot, -1);

        Py_XDECREF(dot);
        for (Py_ssize_t i = 0;
             parts != NULL && found != NULL && i < PyList_GET_SIZE(parts); i++) {
            Py_SETREF(found, PyObject_GetAttr(found, PyList_GET_ITEM(parts, i)));
        }
        if (parts == NULL) {
            Py_CLEAR(found);
        }
        Py_XDECREF(parts);
    }
    if (found == NULL || !PyType_Check(found)) {
        PyErr_Clear();
        PyErr_Format(
            PyExc_TypeError,
            "smp: a value of class %U.%U came from another rank, and this rank "
            "cannot import that class; define it at the top level of a module",
            module_name, name);
        Py_CLEAR(found);
        goto done;
    }
    if (PyDict_SetItem(known, key, found) < 0) {
        Py_CLEAR(found);
    }
done:
    Py_XDECREF(key);
    Py_XDECREF(module_name);
    Py_XDECREF(name);
    return found;
}

/* cls.__new__(cls), without __init__. */
static PyObject *
bare_instance(PyObject *cls)
{
    PyTypeObject *type = (PyTypeObject *)cls;
    PyObject     *none = PyTuple_New(0);
    PyObject     *made = NULL;

    if (none != NULL) {
        made = PyBaseObject_Type.tp_new == type->tp_new || type->tp_new == NULL
                   ? type->tp_alloc(type, 0)
                   : type->tp_new(type, none, NULL);
    }
    Py_XDECREF(none);
    return made;
}

/* ------------------------------------------------------------------- contents */

static int
read_into_list(smp_unpack *unpack, PyObject *list)
{
    uint32_t count;

    if (take_count(unpack, &count) < 0 ||
        PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL) < 0) {
        return -1;
    }
    for (uint32_t i = 0; i < count; i++) {
        PyObject *item = smp_unpack_value(unpack);
        int       failed = item == NULL ? -1 : PyList_Append(list, item);

        Py_XDECREF(item);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

static int
set_pair(PyObject *dict, PyObject *key, PyObject *value)
{
    return PyODict_Check(dict) ? PyODict_SetItem(dict, key, value)
                               : PyDict_SetItem(dict, key, value);
}

static int
clear_dict(PyObject *dict)
{
    if (PyODict_Check(dict)) {
        PyObject *done =
            PyObject_CallMethod((PyObject *)&PyODict_Type, "clear", "O", dict);

        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    PyDict_Clear(dict);
    return 0;
}

static int
read_into_dict(smp_unpack *unpack, PyObject *dict)
{
    uint32_t count;

    if (take_count(unpack, &count) < 0 || clear_dict(dict) < 0) {
        return -1;
    }
    for (uint32_t i = 0; i < count; i++) {
        PyObject *key = smp_unpack_value(unpack);
        PyObject *value = key == NULL ? NULL : smp_unpack_value(unpack);
        int       failed = value == NULL ? -1 : set_pair(dict, key, value);

        Py_XDECREF(key);
        Py_XDECREF(value);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

static int
read_into_set(smp_unpack *unpack, PyObject *set)
{
    uint32_t count;

    if (take_count(unpack, &count) < 0 || PySet_Clear(set) < 0) {
        return -1;
    }
    for (uint32_t i = 0; i < count; i++) {
        PyObject *item = smp_unpack_value(unpack);
        int       failed = item == NULL ? -1 : PySet_Add(set, item);

        Py_XDECREF(item);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

static int
read_instance_dict(smp_unpack *unpack, PyObject *object)
{
    const uint8_t *tag = take(unpack, 1);
    PyObject      *dict;
    int            failed;

    if (tag == NULL) {
        return -1;
    }
    if (*tag == TAG_NONE) {
        return 0;
    }
    dict = *tag == TAG_DICT ? instance_dict(object) : NULL;
    if (dict == NULL) {
        return malformed("an object without a __dict__");
    }
    failed = read_into_dict(unpack, dict);
    Py_DECREF(dict);
    return failed;
}

int
smp_unpack_contents_into(smp_unpack *unpack, PyObject *object)
{
    if (PyList_Check(object)) {
        if (read_into_list(unpack, object) < 0) {
            return -1;
        }
        return PyList_CheckExact(object) ? 0 : read_instance_dict(unpack, object);
    }
    if (PyDict_Check(object)) {
        if (read_into_dict(unpack, object) < 0) {
            return -1;
        }
        return PyDict_CheckExact(object) ? 0 : read_instance_dict(unpack, object);
    }
    if (PySet_Check(object)) {
        return read_into_set(unpack, object);
    }
    return read_instance_dict(unpack, object);
}

/* What a defaultdict calls for a key that it does not have. */
static int
read_factory(smp_unpack *unpack, PyObject *object)
{
    PyObject *factory = smp_unpack_value(unpack);
    int       failed = -1;

    if (factory != NULL && !PyObject_TypeCheck(object, smp_torch.defaultdict)) {
        (void)malformed("a class of another kind");
    } else if (factory != NULL) {
        failed = PyObject_SetAttr(object, smp_names.default_factory, factory);
    }
    Py_XDECREF(factory);
    return failed;
}

static PyObject *
take_object(smp_unpack *unpack, smp_tag tag)
{
    PyObject *cls = NULL;
    PyObject *object = NULL;
    size_t    number;

    switch ((int)tag) {
    case TAG_LIST:
        object = PyList_New(0);
        break;
    case TAG_DICT:
        object = PyDict_New();
        break;
    case TAG_SET:
        object = PySet_New(NULL);
        break;
    default:
        cls = take_class(unpack);
        if (cls == NULL) {
            return NULL;
        }
        if (((tag == TAG_MAPPED || tag == TAG_DEFAULTED) &&
             !PyType_IsSubtype((PyTypeObject *)cls, &PyDict_Type)) ||
            (tag == TAG_LISTED &&
             !PyType_IsSubtype((PyTypeObject *)cls, &PyList_Type)) ||
            (tag == TAG_DEFAULTED &&
             !PyType_IsSubtype((PyTypeObject *)cls, smp_torch.defaultdict)) ||
            (tag == TAG_OBJECT && !smp_is_plain_class((PyTypeObject *)cls))) {
            (void)malformed("a class of another kind");
        } else {
            object = bare_instance(cls);
        }
        Py_DECREF(cls);
    }
    if (object == NULL) {
        return NULL;
    }
    if (add_object(unpack, object, &number) < 0 ||
        (tag == TAG_DEFAULTED && read_factory(unpack, object) < 0) ||
        smp_unpack_contents_into(unpack, object) < 0) {
        Py_DECREF(object);
        return NULL;
    }
    if (unpack->watch) {
        unpack->snapshots[number] = snapshot_of(object);
        if (unpack->snapshots[number] == NULL) {
            Py_DECREF(object);
            return NULL;
        }
    }
    return object;
}

/* ------------------------------------------------------------- immutable values */

static PyObject *
take_text(smp_unpack *unpack)
{
    uint32_t    size;
    const char *text;

    if (smp_unpack_u32(unpack, &size) < 0 || (text = take(unpack, size)) == NULL) {
        return NULL;
    }
    return PyUnicode_DecodeUTF8(text, size, "surrogatepass");
}

static PyObject *
take_tuple(smp_unpack *unpack)
{
    uint32_t  count;
    PyObject *tuple;

    if (take_count(unpack, &count) < 0) {
        return NULL;
    }
    tuple = PyTuple_New(count);
    for (uint32_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *item = smp_unpack_value(unpack);

        if (item == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, item);
    }
    return tuple;
}

/* Takes items. */
static PyObject *
call_with(PyTypeObject *type, PyObject *items)
{
    PyObject *made =
        items == NULL ? NULL : PyObject_CallOneArg((PyObject *)type, items);

    Py_XDECREF(items);
    return made;
}

/* A named tuple keeps its __new__ out of it; a struct sequence is called. */
static PyObject *
take_named(smp_unpack *unpack)
{
    PyObject *cls = take_class(unpack);
    PyObject *items = cls == NULL ? NULL : take_tuple(unpack);
    PyObject *made = NULL;

    if (items != NULL) {
        bool tuple = PyType_IsSubtype((PyTypeObject *)cls, &PyTuple_Type);

        if (tuple && PyObject_HasAttr(cls, smp_names._fields)) {
            PyObject *args = PyTuple_Pack(1, items);

            made = args == NULL ? NULL
                                : PyTuple_Type.tp_new((PyTypeObject *)cls, args, NULL);
            Py_XDECREF(args);
        } else if (tuple && PyObject_HasAttrString(cls, "n_sequence_fields")) {
            made = PyObject_CallOneArg(cls, items);
        } else {
            (void)malformed("a named tuple of a class that is none");
        }
    }
    Py_XDECREF(cls);
    Py_XDECREF(items);
    return made;
}

/* torch.<name>, if that is a dtype. */
static PyObject *
take_dtype(smp_unpack *unpack)
{
    PyObject *name = take_text(unpack);
    PyObject *dtype = name == NULL ? NULL : PyObject_GetAttr(smp_torch.torch, name);

    Py_XDECREF(name);
    if (dtype != NULL && Py_TYPE(dtype) != smp_torch.dtype) {
        (void)malformed("a dtype that is none");
        Py_CLEAR(dtype);
    }
    return dtype;
}

static PyObject *
take_slice(smp_unpack *unpack)
{
    PyObject *start = smp_unpack_value(unpack);
    PyObject *stop = start == NULL ? NULL : smp_unpack_value(unpack);
    PyObject *step = stop == NULL ? NULL : smp_unpack_value(unpack);
    PyObject *slice = step == NULL ? NULL : PySlice_New(start, stop, step);

    Py_XDECREF(start);
    Py_XDECREF(stop);
    Py_XDECREF(step);
    return slice;
}

/* What loads() makes of the bytes and what stands beside them. */
static PyObject *
load_pickle(smp_unpack *unpack)
{
    uint32_t    size;
    const void *bytes;
    PyObject   *tensors;
    PyObject   *value = NULL;

    if (smp_unpack_u32(unpack, &size) < 0 || (bytes = take(unpack, size)) == NULL) {
        return NULL;
    }
    tensors = PyList_New(0);
    if (tensors != NULL && read_into_list(unpack, tensors) == 0) {
        if (smp_registry.loads == NULL) {
            (void)malformed("a pickle where none is expected");
        } else {
            value = PyObject_CallFunction(smp_registry.loads, "y#O", bytes,
                                          (Py_ssize_t)size, tensors);
        }
    }
    Py_XDECREF(tensors);
    return value;
}

static PyObject *
take_pickle(smp_unpack *unpack)
{
    PyObject *value;
    size_t    number;

    if (add_object(unpack, NULL, &number) < 0 ||
        (value = load_pickle(unpack)) == NULL) {
        return NULL;
    }
    unpack->objects[number] = Py_NewRef(value);
    if (unpack->watch) {
        unpack->snapshots[number] = PyObject_CallOneArg(smp_registry.dumps, value);
        PyErr_Clear(); /* what cannot be pickled again is not watched */
    }
    return value;
}

/* A new reference to element `number` of `table`, a C array or a list. */
static PyObject *
take_numbered(smp_unpack *unpack, PyObject *const *table, size_t count, PyObject *list)
{
    uint32_t number;

    if (smp_unpack_u32(unpack, &number) < 0) {
        return NULL;
    }
    if (list != NULL) {
        if (number < (size_t)PyList_GET_SIZE(list)) {
            return Py_NewRef(PyList_GET_ITEM(list, number));
        }
    } else if (number < count && table[number] != NULL) {
        return Py_NewRef(table[number]);
    }
    (void)malformed("a number that names nothing");
    return NULL;
}

/* A parameter of this rank; or a buffer, whose place the list has: the dict and the
 * name of whichever tensor is there now. */
static PyObject *
take_parameter(smp_unpack *unpack)
{
    PyObject *found = take_numbered(unpack, NULL, 0, smp_registry.parameters);
    PyObject *buffer;

    if (found == NULL || !PyTuple_Check(found)) {
        return found;
    }
    buffer =
        PyDict_GetItemWithError(PyTuple_GET_ITEM(found, 0), PyTuple_GET_ITEM(found, 1));
    if (buffer == NULL && PyErr_Occurred() == NULL) {
        PyErr_Format(PyExc_AttributeError,
                     "smp: an argument is the buffer %R, which its module has removed",
                     PyTuple_GET_ITEM(found, 1));
    }
    Py_XINCREF(buffer);
    Py_DECREF(found);
    return buffer;
}

static PyObject *
take_scalar(smp_unpack *unpack, smp_tag tag)
{
    const void *at;

    if (tag == TAG_INT) {
        long long number;

        if ((at = take(unpack, sizeof(number))) == NULL) {
            return NULL;
        }
        memcpy(&number, at, sizeof(number));
        return PyLong_FromLongLong(number);
    }
    if (tag == TAG_FLOAT) {
        double number;

        if ((at = take(unpack, sizeof(number))) == NULL) {
            return NULL;
        }
        memcpy(&number, at, sizeof(number));
        return PyFloat_FromDouble(number);
    }
    if (tag == TAG_COMPLEX) {
        Py_complex number;

        if ((at = take(unpack, sizeof(number))) == NULL) {
            return NULL;
        }
        memcpy(&number, at, sizeof(number));
        return PyComplex_FromCComplex(number);
    }
    {
        PyObject *text = take_text(unpack);
        PyObject *number = text == NULL ? NULL : PyLong_FromUnicodeObject(text, 16);

        Py_XDECREF(text);
        return number;
    }
}

static PyObject *
take_bytes(smp_unpack *unpack)
{
    uint32_t    size;
    const char *bytes;

    if (smp_unpack_u32(unpack, &size) < 0 || (bytes = take(unpack, size)) == NULL) {
        return NULL;
    }
    return PyBytes_FromStringAndSize(bytes, size);
}

static PyObject *
take_tagged(smp_unpack *unpack, smp_tag tag)
{
    const smp_arguments *request = unpack->request;

    switch (tag) {
    case TAG_NONE:
        Py_RETURN_NONE;
    case TAG_TRUE:
        Py_RETURN_TRUE;
    case TAG_FALSE:
        Py_RETURN_FALSE;
    case TAG_ELLIPSIS:
        return Py_NewRef(Py_Ellipsis);
    case TAG_INT:
    case TAG_BIG_INT:
    case TAG_FLOAT:
    case TAG_COMPLEX:
        return take_scalar(unpack, tag);
    case TAG_STR:
        return take_text(unpack);
    case TAG_BYTES:
        return take_bytes(unpack);
    case TAG_SLICE:
        return take_slice(unpack);
    case TAG_TUPLE:
        return take_tuple(unpack);
    case TAG_SIZE:
        return call_with(smp_torch.size, take_tuple(unpack));
    case TAG_FROZENSET:
        return call_with(&PyFrozenSet_Type, take_tuple(unpack));
    case TAG_NAMED:
        return take_named(unpack);
    case TAG_DTYPE:
        return take_dtype(unpack);
    case TAG_DEVICE:
        return call_with(smp_torch.device, take_text(unpack));
    case TAG_CLASS:
        return take_class(unpack);
    case TAG_TENSOR:
        return take_numbered(unpack, unpack->tensors, unpack->ntensors, NULL);
    case TAG_MODULE:
        return take_numbered(unpack, NULL, 0, smp_registry.modules);
    case TAG_PARAMETER:
        return take_parameter(unpack);
    case TAG_PICKLE:
        return take_pickle(unpack);
    case TAG_LIST:
    case TAG_DICT:
    case TAG_SET:
    case TAG_MAPPED:
    case TAG_LISTED:
    case TAG_OBJECT:
    case TAG_DEFAULTED:
        return take_object(unpack, tag);
    case TAG_SEEN:
        return take_numbered(unpack, unpack->objects, unpack->nobjects, NULL);
    case TAG_ARGUMENT_TENSOR:
        if (request != NULL) {
            return take_numbered(unpack, request->tensors, request->ntensors, NULL);
        }
        break;
    case TAG_ARGUMENT_OBJECT:
        if (request != NULL) {
            return take_numbered(unpack, request->objects, request->nobjects, NULL);
        }
        break;
    }
    (void)malformed("an unknown kind of value");
    return NULL;
}

PyObject *
smp_unpack_value(smp_unpack *unpack)
{
    const uint8_t *tag = take(unpack, 1);
    PyObject      *value;

    if (tag == NULL) {
        return NULL;
    }
    if (++unpack->depth > SMP_MAX_DEPTH) {
        (void)malformed("it is nested too deeply");
        unpack->depth--;
        return NULL;
    }
    value = take_tagged(unpack, (smp_tag)*tag);
    unpack->depth--;
    return value;
}
