/* The kinds of classes, and classes by name. */
#include "python/values/classes.h"

#include "python/values/torch_api.h"

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

smp_tuple_kind
smp_tuple_kind_of(PyTypeObject *type)
{
    if (!PyType_IsSubtype(type, &PyTuple_Type)) {
        return SMP_TUPLE_OTHER;
    }
    return PyObject_HasAttr((PyObject *)type, smp_names._fields) ? SMP_TUPLE_NAMED
           : PyObject_HasAttrString((PyObject *)type, "n_sequence_fields")
               ? SMP_TUPLE_SEQUENCE
               : SMP_TUPLE_OTHER;
}

/* found.a.b of a qualified name "a.b"; takes found. */
static PyObject *
follow(PyObject *found, PyObject *name)
{
    PyObject *dot = PyUnicode_FromString(".");
    PyObject *parts = dot == NULL ? NULL : PyUnicode_Split(name, dot, -1);

    Py_XDECREF(dot);
    for (Py_ssize_t i = 0; parts != NULL && found != NULL && i < PyList_GET_SIZE(parts);
         i++) {
        Py_SETREF(found, PyObject_GetAttr(found, PyList_GET_ITEM(parts, i)));
    }
    if (parts == NULL) {
        Py_CLEAR(found);
    }
    Py_XDECREF(parts);
    return found;
}

PyObject *
smp_find_class(PyObject *module_name, PyObject *name)
{
    static PyObject *known; /* (module, name) -> class */
    PyObject        *key;
    PyObject        *found;

    if (known == NULL && (known = PyDict_New()) == NULL) {
        return NULL;
    }
    key = PyTuple_Pack(2, module_name, name);
    if (key == NULL) {
        return NULL;
    }
    found = Py_XNewRef(PyDict_GetItemWithError(known, key));
    if (found != NULL || PyErr_Occurred()) {
        Py_DECREF(key);
        return found;
    }
    found = PyImport_GetModule(module_name);
    if (found == NULL && !PyErr_Occurred()) {
        found = PyImport_Import(module_name);
    }
    if (found != NULL) {
        found = follow(found, name);
    }
    if (found == NULL || !PyType_Check(found)) {
        PyErr_Clear();
        PyErr_Format(
            PyExc_TypeError,
            "smp: a value of class %U.%U came from another rank, and this rank "
            "cannot import that class; define it at the top level of a module",
            module_name, name);
        Py_CLEAR(found);
    } else if (PyDict_SetItem(known, key, found) < 0) {
        Py_CLEAR(found);
    }
    Py_DECREF(key);
    return found;
}

PyObject *
smp_bare_instance(PyTypeObject *cls)
{
    PyObject *none = PyTuple_New(0);
    PyObject *made = NULL;

    if (none != NULL) {
        made = PyBaseObject_Type.tp_new == cls->tp_new || cls->tp_new == NULL
                   ? cls->tp_alloc(cls, 0)
                   : cls->tp_new(cls, none, NULL);
    }
    Py_XDECREF(none);
    return made;
}

PyObject *
smp_instance_dict(PyObject *object)
{
    PyObject *dict = PyObject_GetAttr(object, smp_names.dict);

    if (dict == NULL) {
        PyErr_Clear();
    } else if (!PyDict_Check(dict)) {
        Py_CLEAR(dict);
    }
    return dict;
}
