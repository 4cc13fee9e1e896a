/* The numbers common to all ranks. */
#include "python/values/registry.h"

smp_registry_table smp_registry;

int
smp_registry_add(PyObject *numbers, const void *address, Py_ssize_t number)
{
    PyObject *key = PyLong_FromVoidPtr((void *)address);
    PyObject *value = PyLong_FromSsize_t(number);
    int       failed =
        key == NULL || value == NULL || PyDict_SetItem(numbers, key, value) < 0;

    Py_XDECREF(key);
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

int64_t
smp_registry_find(PyObject *numbers, const void *address)
{
    PyObject *key;
    PyObject *found;

    if (numbers == NULL) {
        return -1;
    }
    key = PyLong_FromVoidPtr((void *)address);
    if (key == NULL) {
        PyErr_Clear();
        return -1;
    }
    found = PyDict_GetItem(numbers, key);
    Py_DECREF(key);
    return found == NULL ? -1 : PyLong_AsLongLong(found);
}
