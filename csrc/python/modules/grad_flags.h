/* Flags of parameters that a script may change between two steps.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_MODULES_GRAD_FLAGS_H
#define SMP_PYTHON_MODULES_GRAD_FLAGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the function.  0, or -1 with an exception. */
int smp_grad_flags_add(PyObject *module);

#endif
