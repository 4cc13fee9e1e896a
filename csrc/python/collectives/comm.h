/* smp._core.Comm: a rank's end of a set of ranks for collectives, with the carrier of
 * their groups.
 *
 * Threads  Made, used and given up under the GIL, released to wait.
 */
#ifndef SMP_PYTHON_COLLECTIVES_COMM_H
#define SMP_PYTHON_COLLECTIVES_COMM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the type.  0, or -1 with an exception. */
int smp_comm_add(PyObject *module);

#endif
