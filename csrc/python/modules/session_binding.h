/* The session as Python sees it: opened, connected, set up, closed.
 *
 * Threads  The GIL is held; the main thread, between steps.
 */
#ifndef SMP_PYTHON_MODULES_SESSION_BINDING_H
#define SMP_PYTHON_MODULES_SESSION_BINDING_H

#include "python/values/torch_api.h"

/* Adds the functions.  0, or -1 with an exception. */
int smp_session_binding_add(PyObject *module);

#endif
