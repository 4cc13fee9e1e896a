/* The timeline of a step, for Python.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_MODULES_TIMELINE_BINDING_H
#define SMP_PYTHON_MODULES_TIMELINE_BINDING_H

#include "python/values/torch_api.h"

/* Adds timeline(), and the names of phases and misses.  0, or -1 with an exception. */
int smp_timeline_binding_add(PyObject *module);

#endif
