/* The values of placeholders: a request (SMP_FLAG_FETCH) to each owner of the chain.
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_FETCH_H
#define SMP_PYTHON_MODULES_FETCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the functions.  0, or -1 with an exception. */
int smp_fetch_add(PyObject *module);

#endif
