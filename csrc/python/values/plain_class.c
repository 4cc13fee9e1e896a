/* What a class says of its instances. */
#include "python/values/plain_class.h"

bool
smp_is_plain_class(PyTypeObject *type)
{
    static PyObject *reduce_ex, *reduce, *base_reduce_ex, *base_reduce, *slots;
    PyObject        *own;
    bool             plain = true;

    if (reduce_ex == NULL) {
        reduce_ex = PyUnicode_InternFromString("__reduce_ex__");
        reduce = PyUnicode_InternFromString("__reduce__");
        slots = PyUnicode_InternFromString("__slots__");
        base_reduce_ex = PyObject_GetAttr((PyObject *)&PyBaseObject_Type, reduce_ex);
        base_reduce = PyObject_GetAttr((PyObject *)&PyBaseObject_Type, reduce);
    }
    if (type->tp_dictoffset == 0 || !(type->tp_flags & Py_TPFLAGS_HEAPTYPE) ||
        type->tp_itemsize != 0) {
        return false;
    }
    own = PyObject_GetAttr((PyObject *)type, reduce_ex);
    plain = own == base_reduce_ex;
    Py_XDECREF(own);
    if (plain) {
        own = PyObject_GetAttr((PyObject *)type, reduce);
        plain = own == base_reduce;
        Py_XDECREF(own);
    }
    for (PyTypeObject *t = type; plain && t != NULL && t != &PyBaseObject_Type;
         t = t->tp_base) {
        PyObject *names;

        if (!(t->tp_flags & Py_TPFLAGS_HEAPTYPE)) { /* tp_dict may be NULL there */
            plain = false;
            break;
        }
        names = PyDict_GetItem(t->tp_dict, slots);
        plain = names == NULL || !PyObject_IsTrue(names);
    }
    PyErr_Clear();
    return plain;
}
