/* Collectives of modules, in the order of their TP_GROUP: smp._core.Collective.
 *
 * Threads  The GIL is held, and given away while a task waits.
 */
#ifndef SMP_PYTHON_MODULES_LINEUP_H
#define SMP_PYTHON_MODULES_LINEUP_H

#include "python/values/torch_api.h"

/* Adds the type and the functions.  0, or -1 with an exception. */
int smp_lineup_add(PyObject *module);

#endif
