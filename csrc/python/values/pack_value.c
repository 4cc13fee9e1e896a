/* Containers, objects and pickles, into a message. */
#include "python/values/pack_value.h"

#include "python/values/classes.h"
#include "python/values/pack_memo.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_tensor.h"
#include "python/values/registry.h"
#include "python/values/wire.h"

/* ------------------------------------------------------------------- contents */

/* Packing an item can run Python code, and this may change the item's container. */
static int
raise_resized(PyObject *container)
{
    PyErr_Format(PyExc_RuntimeError,
                 "smp: a %s changed its size while it was packed for another rank",
                 Py_TYPE(container)->tp_name);
    return -1;
}

/* The number n of its items, and then the items. */
static int
put_iterable(smp_pack *pack, PyObject *iterable, Py_ssize_t n)
{
    PyObject  *iterator;
    PyObject  *item;
    Py_ssize_t packed = 0;

    if (smp_pack_u32(pack, (uint32_t)n) < 0 ||
        (iterator = PyObject_GetIter(iterable)) == NULL) {
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

/* An OrderedDict has an order of its own, changed by move_to_end. */
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

static int
put_instance_dict(smp_pack *pack, PyObject *object)
{
    PyObject *dict = smp_instance_dict(object);
    int       failed;

    if (dict == NULL) {
        return smp_pack_tag(pack, TAG_NONE);
    }
    failed = smp_pack_tag(pack, TAG_DICT) < 0 || put_pairs(pack, dict) < 0;
    Py_DECREF(dict);
    return failed ? -1 : 0;
}

int
smp_pack_contents(smp_pack *pack, PyObject *object)
{
    if (PyList_Check(object)) {
        if (put_iterable(pack, object, PyList_GET_SIZE(object)) < 0) {
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
        return put_iterable(pack, object, PySet_GET_SIZE(object));
    }
    return put_instance_dict(pack, object);
}

/* -------------------------------------------------------------------- objects */

/* Writes a mutable object once, under a number; a second time its number. */
static int
put_object(smp_pack *pack, PyObject *object, smp_tag tag)
{
    bool done;

    if (smp_pack_object_once(pack, object, &done) < 0) {
        return -1;
    }
    if (done) {
        return 0;
    }
    if (smp_pack_tag(pack, tag) < 0) {
        return -1;
    }
    if ((tag == TAG_MAPPED || tag == TAG_LISTED || tag == TAG_OBJECT ||
         tag == TAG_DEFAULTED) &&
        smp_pack_class_name(pack, Py_TYPE(object)) < 0) {
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
    if (smp_pack_object_once(pack, value, &done) < 0) {
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
    failed = smp_pack_bytes(pack, TAG_PICKLE, bytes) < 0 ||
             put_iterable(pack, tensors, PyList_GET_SIZE(tensors)) < 0;
    Py_DECREF(pair);
    return failed ? -1 : 0;
}

/* ---------------------------------------------------------- immutable containers */

/* 1 for a subclass known only to pickle. */
static int
put_tuple(smp_pack *pack, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    size_t        n = (size_t)PyTuple_GET_SIZE(value);
    int           failed;

    if (type == smp_torch.size || type == &PyTuple_Type) {
        failed = smp_pack_number(pack, type == &PyTuple_Type ? TAG_TUPLE : TAG_SIZE, n);
    } else if (smp_tuple_kind_of(type) == SMP_TUPLE_OTHER) {
        return 1;
    } else {
        failed = smp_pack_tag(pack, TAG_NAMED) < 0 ||
                 smp_pack_class_name(pack, type) < 0 ||
                 smp_pack_u32(pack, (uint32_t)n) < 0;
    }
    for (size_t i = 0; !failed && i < n; i++) {
        failed = smp_pack_value(pack, PyTuple_GET_ITEM(value, i));
    }
    return failed ? -1 : 0;
}

static int
put_slice(smp_pack *pack, PyObject *value)
{
    PySliceObject *slice = (PySliceObject *)value;

    if (smp_pack_tag(pack, TAG_SLICE) < 0 || smp_pack_value(pack, slice->start) < 0 ||
        smp_pack_value(pack, slice->stop) < 0) {
        return -1;
    }
    return smp_pack_value(pack, slice->step);
}

/* ----------------------------------------------------------------- by their types */

/* Values of exactly one of Python's own types; 1 for another type. */
static int
put_builtin(smp_pack *pack, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);

    if (type == &PyLong_Type) {
        return smp_pack_int(pack, value);
    }
    if (type == &PyFloat_Type) {
        return smp_pack_float(pack, value);
    }
    if (type == &PyUnicode_Type) {
        return smp_pack_text(pack, TAG_STR, value);
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
        return smp_pack_bytes(pack, TAG_BYTES, value);
    }
    if (type == &PyComplex_Type) {
        return smp_pack_complex(pack, value);
    }
    if (type == &PyFrozenSet_Type) {
        if (smp_pack_tag(pack, TAG_FROZENSET) < 0) {
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
        return smp_pack_str_of(pack, TAG_DTYPE, value, 6); /* behind "torch." */
    }
    if (type == smp_torch.device) {
        return smp_pack_str_of(pack, TAG_DEVICE, value, 0);
    }
    if (PyTuple_Check(value)) {
        return put_tuple(pack, value);
    }
    if (PyType_Check(value)) {
        if (smp_pack_tag(pack, TAG_CLASS) < 0) {
            return -1;
        }
        return smp_pack_class_name(pack, (PyTypeObject *)value);
    }
    if (PyObject_TypeCheck(value, smp_torch.module)) {
        bool done;
        int  failed = smp_pack_module(pack, value, &done);

        return done ? failed : 1;
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
        return smp_pack_tag(pack, TAG_NONE);
    }
    if (value == Py_True || value == Py_False) {
        return smp_pack_tag(pack, value == Py_True ? TAG_TRUE : TAG_FALSE);
    }
    if (value == Py_Ellipsis) {
        return smp_pack_tag(pack, TAG_ELLIPSIS);
    }
    if (smp_is_tensor(value)) {
        return smp_pack_tensor(pack, value);
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

int
smp_pack_new_value(smp_pack *pack, PyObject *value)
{
    const int failed = value == NULL ? -1 : smp_pack_value(pack, value);

    Py_XDECREF(value);
    return failed;
}
