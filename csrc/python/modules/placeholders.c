/* All placeholders of a list, as Python fetches them. */
#include "python/modules/placeholders.h"

#include "python/values/registry.h"
#include "python/values/torch_api.h"

int
smp_placeholders_fetch(PyObject *list)
{
    PyObject *live = NULL;
    PyObject *done = NULL;

    if (list == NULL || PyList_GET_SIZE(list) == 0) {
        return 0;
    }
    live = PyList_New(0);
    for (Py_ssize_t i = 0; live != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *tensor = PyObject_CallNoArgs(PyList_GET_ITEM(list, i));
        int       failed =
            tensor == NULL || (tensor != Py_None && PyList_Append(live, tensor) < 0);

        Py_XDECREF(tensor);
        if (failed) {
            Py_CLEAR(live);
        }
    }
    if (live != NULL) {
        done = PyList_GET_SIZE(live) == 0
                   ? Py_NewRef(Py_None)
                   : PyObject_CallMethodOneArg(PyList_GET_ITEM(live, 0),
                                               smp_names.fetch_all, live);
    }
    Py_XDECREF(live);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *
smp_placeholders_missing(PyObject *list)
{
    const Py_ssize_t n = list == NULL ? 0 : PyList_GET_SIZE(list);
    PyObject        *places = PyList_New(0);

    for (Py_ssize_t i = 0; places != NULL && i < n; i++) {
        PyObject *tensor = PyObject_CallNoArgs(PyList_GET_ITEM(list, i));
        PyObject *values = NULL;
        PyObject *origin = NULL;
        int       failed = tensor == NULL;

        if (!failed && tensor != Py_None) {
            values = PyObject_GetAttr(tensor, smp_names.values);
            origin = PyObject_GetAttr(tensor, smp_names.origin);
            failed = values == NULL || origin == NULL ||
                     (values == Py_None &&
                      PyList_Append(places, PyTuple_GET_ITEM(origin, 1)) < 0);
        }
        Py_XDECREF(tensor);
        Py_XDECREF(values);
        Py_XDECREF(origin);
        if (failed) {
            Py_CLEAR(places);
        }
    }
    return places;
}

PyObject *
smp_aliased(PyObject *tensor)
{
    PyObject *base = smp_registry.placeholder == NULL
                         ? NULL
                         : PyObject_CallMethodOneArg(smp_registry.placeholder,
                                                     smp_names.aliased, tensor);

    if (base == NULL) {
        PyErr_Clear();
    } else if (base == Py_None) {
        Py_CLEAR(base);
    }
    return base;
}
