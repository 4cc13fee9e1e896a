/* Containers, objects and pickles, out of a message. */
#include "python/values/unpack_value.h"

#include "python/values/classes.h"
#include "python/values/registry.h"
#include "python/values/snapshot.h"
#include "python/values/unpack_memo.h"
#include "python/values/unpack_scalar.h"
#include "python/values/wire.h"

/* ------------------------------------------------------------------- contents */

/* Adds the next `count` values to a list or set. */
static int
read_items(smp_unpack *unpack, uint32_t count, PyObject *into,
           int (*add)(PyObject *into, PyObject *item))
{
    for (uint32_t i = 0; i < count; i++) {
        PyObject *item = smp_unpack_value(unpack);
        int       failed = item == NULL ? -1 : add(into, item);

        Py_XDECREF(item);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

static int
read_into_list(smp_unpack *unpack, PyObject *list)
{
    uint32_t count;

    if (smp_unpack_count(unpack, &count) < 0 ||
        PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL) < 0) {
        return -1;
    }
    return read_items(unpack, count, list, PyList_Append);
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

    if (smp_unpack_count(unpack, &count) < 0 || clear_dict(dict) < 0) {
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

    if (smp_unpack_count(unpack, &count) < 0 || PySet_Clear(set) < 0) {
        return -1;
    }
    return read_items(unpack, count, set, PySet_Add);
}

static int
read_instance_dict(smp_unpack *unpack, PyObject *object)
{
    const uint8_t *tag = smp_unpack_raw(unpack, 1);
    PyObject      *dict;
    int            failed;

    if (tag == NULL) {
        return -1;
    }
    if (*tag == TAG_NONE) {
        return 0;
    }
    dict = *tag == TAG_DICT ? smp_instance_dict(object) : NULL;
    if (dict == NULL) {
        return smp_malformed("an object without a __dict__");
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

/* -------------------------------------------------------------------- objects */

/* The class by the message's module and qualified name. */
static PyObject *
take_class(smp_unpack *unpack)
{
    PyObject *module_name = smp_unpack_value(unpack);
    PyObject *name = module_name == NULL ? NULL : smp_unpack_value(unpack);
    PyObject *found = NULL;

    if (name != NULL && PyUnicode_Check(module_name) && PyUnicode_Check(name)) {
        found = smp_find_class(module_name, name);
    } else if (name != NULL) {
        (void)smp_malformed("a class without a name");
    }
    Py_XDECREF(module_name);
    Py_XDECREF(name);
    return found;
}

/* A defaultdict's factory of missing values. */
static int
read_factory(smp_unpack *unpack, PyObject *object)
{
    PyObject *factory = smp_unpack_value(unpack);
    int       failed = -1;

    if (factory != NULL && !PyObject_TypeCheck(object, smp_torch.defaultdict)) {
        (void)smp_malformed("a class of another kind");
    } else if (factory != NULL) {
        failed = PyObject_SetAttr(object, smp_names.default_factory, factory);
    }
    Py_XDECREF(factory);
    return failed;
}

/* Whether the class's instances are of the tag's kind. */
static bool
fits(PyTypeObject *cls, smp_tag tag)
{
    switch ((int)tag) {
    case TAG_MAPPED:
        return PyType_IsSubtype(cls, &PyDict_Type);
    case TAG_DEFAULTED:
        return PyType_IsSubtype(cls, smp_torch.defaultdict);
    case TAG_LISTED:
        return PyType_IsSubtype(cls, &PyList_Type);
    default:
        return smp_is_plain_class(cls);
    }
}

static PyObject *
take_object(smp_unpack *unpack, smp_tag tag)
{
    PyObject *cls;
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
        if (fits((PyTypeObject *)cls, tag)) {
            object = smp_bare_instance((PyTypeObject *)cls);
        } else {
            (void)smp_malformed("a class of another kind");
        }
        Py_DECREF(cls);
    }
    if (object == NULL) {
        return NULL;
    }
    if (smp_unpack_add_object(unpack, object, &number) < 0 ||
        (tag == TAG_DEFAULTED && read_factory(unpack, object) < 0) ||
        smp_unpack_contents_into(unpack, object) < 0) {
        Py_DECREF(object);
        return NULL;
    }
    if (unpack->watch) {
        unpack->snapshots[number] = smp_snapshot(object);
        if (unpack->snapshots[number] == NULL) {
            Py_DECREF(object);
            return NULL;
        }
    }
    return object;
}

/* The object from loads(), of the bytes and the tensors beside them. */
static PyObject *
load_pickle(smp_unpack *unpack)
{
    uint32_t    size;
    const char *bytes = smp_unpack_sized(unpack, &size);
    PyObject   *tensors;
    PyObject   *value = NULL;

    if (bytes == NULL) {
        return NULL;
    }
    tensors = PyList_New(0);
    if (tensors != NULL && read_into_list(unpack, tensors) == 0) {
        if (smp_registry.loads == NULL) {
            (void)smp_malformed("a pickle where none is expected");
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

    if (smp_unpack_add_object(unpack, NULL, &number) < 0 ||
        (value = load_pickle(unpack)) == NULL) {
        return NULL;
    }
    unpack->objects[number] = Py_NewRef(value);
    if (unpack->watch) {
        unpack->snapshots[number] = smp_snapshot_pickle(value);
    }
    return value;
}

/* ---------------------------------------------------------- immutable containers */

static PyObject *
take_tuple(smp_unpack *unpack)
{
    uint32_t  count;
    PyObject *tuple;

    if (smp_unpack_count(unpack, &count) < 0) {
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

static PyObject *
take_named(smp_unpack *unpack)
{
    PyObject *cls = take_class(unpack);
    PyObject *items = cls == NULL ? NULL : take_tuple(unpack);
    PyObject *args;
    PyObject *made = NULL;

    if (items != NULL) {
        switch (smp_tuple_kind_of((PyTypeObject *)cls)) {
        case SMP_TUPLE_NAMED:
            args = PyTuple_Pack(1, items);
            made = args == NULL ? NULL
                                : PyTuple_Type.tp_new((PyTypeObject *)cls, args, NULL);
            Py_XDECREF(args);
            break;
        case SMP_TUPLE_SEQUENCE:
            made = PyObject_CallOneArg(cls, items);
            break;
        case SMP_TUPLE_OTHER:
            (void)smp_malformed("a named tuple of a class that is none");
        }
    }
    Py_XDECREF(cls);
    Py_XDECREF(items);
    return made;
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

/* ----------------------------------------------------------------- by their tags */

static PyObject *
take_tagged(smp_unpack *unpack, smp_tag tag)
{
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
        return smp_unpack_int(unpack);
    case TAG_BIG_INT:
        return smp_unpack_big_int(unpack);
    case TAG_FLOAT:
        return smp_unpack_float(unpack);
    case TAG_COMPLEX:
        return smp_unpack_complex(unpack);
    case TAG_STR:
        return smp_unpack_text(unpack);
    case TAG_BYTES:
        return smp_unpack_bytes(unpack);
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
        return smp_unpack_dtype(unpack);
    case TAG_DEVICE:
        return call_with(smp_torch.device, smp_unpack_text(unpack));
    case TAG_CLASS:
        return take_class(unpack);
    case TAG_TENSOR:
    case TAG_MODULE:
    case TAG_PARAMETER:
    case TAG_SEEN:
    case TAG_ARGUMENT_TENSOR:
    case TAG_ARGUMENT_OBJECT:
        return smp_unpack_by_number(unpack, tag);
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
    }
    (void)smp_malformed("an unknown kind of value");
    return NULL;
}

PyObject *
smp_unpack_value(smp_unpack *unpack)
{
    const uint8_t *tag = smp_unpack_raw(unpack, 1);
    PyObject      *value;

    if (tag == NULL) {
        return NULL;
    }
    if (++unpack->depth > SMP_MAX_DEPTH) {
        (void)smp_malformed("it is nested too deeply");
        unpack->depth--;
        return NULL;
    }
    value = take_tagged(unpack, (smp_tag)*tag);
    unpack->depth--;
    return value;
}
