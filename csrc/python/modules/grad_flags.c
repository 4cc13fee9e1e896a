/* requires_grad of all parameters: each step asks thousands for it. */
#include "python/modules/grad_flags.h"

#include <string.h>

#include "common/mix.h"
#include "python/values/torch_api.h"

/* As parameters' class computes it; NULL: read as of any object. */
static PyGetSetDef *of_parameter;

static int
flag_of(PyObject *parameter)
{
    PyObject *value;
    int       flag;

    if (of_parameter == NULL || !Py_IS_TYPE(parameter, smp_torch.parameter)) {
        return smp_attr_true(parameter, smp_names.requires_grad);
    }
    value = of_parameter->get(parameter, of_parameter->closure);
    flag = value == NULL ? -1 : value == Py_True;
    Py_XDECREF(value);
    return flag;
}

/* The number of values of the dicts in the list; -1 with an exception. */
static Py_ssize_t
count(PyObject *dicts)
{
    Py_ssize_t n = 0;

    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts); i++) {
        if (!PyDict_Check(PyList_GET_ITEM(dicts, i))) {
            PyErr_SetString(PyExc_TypeError, "grad_flags() takes a list of dicts");
            return -1;
        }
        n += PyDict_GET_SIZE(PyList_GET_ITEM(dicts, i));
    }
    return n;
}

/* grad_flags([{name: parameter or None}, ...]) -> bytes: a flag for each, and a hash of
 * the objects, while these live. */
static PyObject *
py_grad_flags(PyObject *module, PyObject *args)
{
    PyObject  *dicts;
    PyObject  *bytes;
    PyObject  *parameter;
    Py_ssize_t n;
    Py_ssize_t next;
    uint64_t   which = 0;
    int        flag = 0;
    char      *at;
    char      *end;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &dicts) || (n = count(dicts)) < 0 ||
        (bytes = PyBytes_FromStringAndSize(NULL, n + (Py_ssize_t)sizeof(which))) ==
            NULL) {
        return NULL;
    }
    at = PyBytes_AS_STRING(bytes);
    end = at + n;
    for (Py_ssize_t i = 0; flag >= 0 && i < PyList_GET_SIZE(dicts); i++) {
        next = 0;
        while (PyDict_Next(PyList_GET_ITEM(dicts, i), &next, NULL, &parameter)) {
            flag = 2;
            if (parameter != Py_None) { /* a subclass may run Python code */
                Py_INCREF(parameter);
                flag = flag_of(parameter);
                Py_DECREF(parameter);
            }
            if (flag < 0 || at == end) {
                break;
            }
            which = smp_mix(which, (uintptr_t)parameter);
            *at++ = (char)flag;
        }
    }
    if (at != end && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError,
                        "smp: parameters came or went while a step began");
    }
    if (PyErr_Occurred()) {
        Py_DECREF(bytes);
        return NULL;
    }
    memcpy(end, &which, sizeof(which));
    return bytes;
}

static PyMethodDef functions[] = {
    {"grad_flags", py_grad_flags, METH_VARARGS,
     "grad_flags([{name: parameter or None}, ...]) -> bytes"},
    {NULL, NULL, 0, NULL},
};

int
smp_grad_flags_add(PyObject *module)
{
    PyObject *found =
        PyObject_GetAttr((PyObject *)smp_torch.parameter, smp_names.requires_grad);

    if (found == NULL) {
        return -1;
    }
    if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) { /* lives as long as its class */
        of_parameter = ((PyGetSetDescrObject *)found)->d_getset;
    }
    Py_DECREF(found);
    return PyModule_AddFunctions(module, functions);
}
