/* Outputs of a chain (chain.h) without a use so far: smp/modules/placeholders.py.
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_PLACEHOLDERS_H
#define SMP_PYTHON_MODULES_PLACEHOLDERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Fetches the values of placeholders still alive, at the end of their task.  list: of
 * weak references; NULL: none.  0, or -1 with an exception. */
int smp_placeholders_fetch(PyObject *list);

/* The places of those still alive without values, for their owners to keep: a list
 * (new) of (number of the call in its chain, number among its tensors); NULL with an
 * exception. */
PyObject *smp_placeholders_missing(PyObject *list);

/* The tensor that this one is an alias of, as x[:] is (new); NULL without an exception:
 * it is none. */
PyObject *smp_aliased(PyObject *tensor);

#endif
