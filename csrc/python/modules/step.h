/* Steps as Python sees them: from begin to end, their backwards, the gates on the way.
 *
 * Threads  The GIL is held, and given away while a step runs and a task waits.
 */
#ifndef SMP_PYTHON_MODULES_STEP_H
#define SMP_PYTHON_MODULES_STEP_H

#include "python/values/torch_api.h"

/* Adds the functions, and the phases' names.  0, or -1 with an exception. */
int smp_step_add(PyObject *module);

#endif
