/* The hooks of a module: they run in Python, around its call.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_MODULES_HOOKS_H
#define SMP_PYTHON_MODULES_HOOKS_H

#include "python/values/torch_api.h"

/* Whether the module, perhaps NULL or None, has any. */
bool smp_has_hooks(PyObject *module);

#endif
