/* Classes of values: their travel by name, and the parts of their instances.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_VALUES_CLASSES_H
#define SMP_PYTHON_VALUES_CLASSES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Whether a class is rebuilt from its __dict__ alone: it pickles as object does, keeps
 * everything there, and is no container of C. */
bool smp_is_plain_class(PyTypeObject *type);

/* The constructor of a subclass of tuple from its items. */
typedef enum {
    SMP_TUPLE_OTHER,    /* none known */
    SMP_TUPLE_NAMED,    /* tuple.__new__, past the class's own */
    SMP_TUPLE_SEQUENCE, /* a call: a struct sequence, such as torch's results */
} smp_tuple_kind;

smp_tuple_kind smp_tuple_kind_of(PyTypeObject *type);

/* The class by its module and qualified name (new), both str; the module is looked up
 * or imported.  NULL with an exception. */
PyObject *smp_find_class(PyObject *module_name, PyObject *name);

/* cls.__new__(cls), without __init__ (new); NULL with an exception. */
PyObject *smp_bare_instance(PyTypeObject *cls);

/* The instance's __dict__ (new); NULL without an exception where it has none. */
PyObject *smp_instance_dict(PyObject *object);

#endif
