/* smp._core.Group: ranks with collectives of torch's tensors together.
 *
 * A Group makes work items (python/collectives/work_item.h); these keep their tensors
 * until they are over.
 *
 * Threads  Made, used and given up under the GIL, released to wait.
 */
#ifndef SMP_PYTHON_COLLECTIVES_GROUP_H
#define SMP_PYTHON_COLLECTIVES_GROUP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the types, and the numbers of operations and reductions.  0, or -1 with an
 * exception. */
int smp_group_add(PyObject *module);

#endif
