/* The caller's side of a remote call: its request, and its response's values.
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_CALL_H
#define SMP_PYTHON_MODULES_CALL_H

#include "python/values/torch_api.h"

/* Adds the functions.  0, or -1 with an exception. */
int smp_call_add(PyObject *module);

#endif
