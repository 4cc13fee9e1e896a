/* Snapshots of containers, plain objects and pickles, and how they are compared. */
#include "python/values/snapshot.h"

#include "python/values/classes.h"
#include "python/values/registry.h"

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

/* A tuple: items, __dict__ or None. */
PyObject *
smp_snapshot(PyObject *object)
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
        PyObject *own = smp_instance_dict(object);

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

PyObject *
smp_snapshot_pickle(PyObject *object)
{
    PyObject *snapshot = PyObject_CallOneArg(smp_registry.dumps, object);

    PyErr_Clear();
    return snapshot;
}

bool
smp_snapshot_is_pickle(PyObject *snapshot)
{
    return snapshot != NULL && PyBytes_Check(PyTuple_GET_ITEM(snapshot, 0));
}

int
smp_snapshot_differs(PyObject *snapshot, PyObject *object)
{
    PyObject *before;
    PyObject *now;
    int       same;

    if (snapshot == NULL) {
        return 0;
    }
    if (smp_snapshot_is_pickle(snapshot)) {
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
    now = smp_instance_dict(object);
    same = now != NULL && same_dict(now, before);
    Py_XDECREF(now);
    return !same;
}
