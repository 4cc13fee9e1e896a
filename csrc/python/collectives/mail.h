/* smp._core.send() and .Receipt: tensors from rank to rank.
 *
 * Threads  Under the GIL, released to wait.
 */
#ifndef SMP_PYTHON_COLLECTIVES_MAIL_H
#define SMP_PYTHON_COLLECTIVES_MAIL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds them.  0, or -1 with an exception. */
int smp_mail_add(PyObject *module);

#endif
