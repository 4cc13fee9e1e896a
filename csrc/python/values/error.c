/* Four classes, and how the three that are raised are made. */
#include "python/values/error.h"

#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

#include "python/values/torch_api.h"

PyObject *smp_error_of_group;
PyObject *smp_error_of_peer;
PyObject *smp_error_of_step;

/* A tuple of the keys. */
static PyObject *
keys_of(const smp_error_keys *keys)
{
    PyObject *list = PyList_New(0);
    PyObject *tuple;

    for (int i = 0; i < 2 && keys != NULL && list != NULL; i++) {
        PyObject *key = PyLong_FromUnsignedLong(keys->of[i]);

        if (key == NULL || (keys->of[i] != 0 && PyList_Append(list, key) < 0)) {
            Py_CLEAR(list);
        }
        Py_XDECREF(key);
    }
    tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

PyObject *
smp_error_raise(PyObject *kind, smp_status status, const smp_error_keys *keys,
                const char *format, ...)
{
    PyObject *name = PyUnicode_FromString(smp_status_name(status));
    PyObject *unlike = keys_of(keys);
    PyObject *text;
    PyObject *whole = NULL;
    PyObject *error = NULL;
    va_list   arguments;

    va_start(arguments, format);
    text = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    if (text != NULL && name != NULL) {
        whole = PyUnicode_FromFormat("%U [%U]", text, name);
    }
    if (whole != NULL) {
        error = PyObject_CallOneArg(kind, whole);
    }
    if (error != NULL && unlike != NULL &&
        PyObject_SetAttrString(error, "status", name) == 0 &&
        PyObject_SetAttrString(error, "keys", unlike) == 0) {
        PyErr_SetObject(kind, error);
    }
    Py_XDECREF(error);
    Py_XDECREF(whole);
    Py_XDECREF(text);
    Py_XDECREF(unlike);
    Py_XDECREF(name);
    return NULL;
}

/* A class of that name, also of `other`; the module has it.  Borrowed, or NULL. */
static PyObject *
add_kind(PyObject *module, const char *name, PyObject *base, PyObject *other)
{
    PyObject *bases = PyTuple_Pack(2, base, other);
    PyObject *kind = bases == NULL ? NULL : PyErr_NewException(name, bases, NULL);

    Py_XDECREF(bases);
    if (kind == NULL ||
        PyModule_AddObjectRef(module, strrchr(name, '.') + 1, kind) < 0) {
        Py_XDECREF(kind);
        return NULL;
    }
    Py_DECREF(kind); /* the module's */
    return kind;
}

int
smp_error_add(PyObject *module)
{
    PyObject *attributes = Py_BuildValue("{s:s,s:()}", "status", "", "keys");
    PyObject *base = NULL;
    bool      added = false;

    if (attributes != NULL) {
        base = PyErr_NewException("smp._core.Error", PyExc_Exception, attributes);
    }
    if (base != NULL && PyModule_AddObjectRef(module, "Error", base) == 0) {
        smp_error_of_group =
            add_kind(module, "smp._core.GroupError", base, smp_torch.backend_error);
        smp_error_of_peer =
            smp_error_of_group == NULL
                ? NULL
                : add_kind(module, "smp._core.PeerError", base, PyExc_ConnectionError);
        smp_error_of_step =
            smp_error_of_peer == NULL
                ? NULL
                : add_kind(module, "smp._core.StepError", base, PyExc_RuntimeError);
        added = smp_error_of_step != NULL;
    }
    Py_XDECREF(attributes);
    Py_XDECREF(base);
    return added ? 0 : -1;
}
