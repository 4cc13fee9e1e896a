/* smp._core.Group and .Order: collectives of torch's tensors.
 *
 * A Group makes Orders, which keep their tensors until they are over.
 *
 * Threads  Made, used and given up under the GIL, which is released to wait.
 */
#ifndef SMP_PYTHON_COLLECTIVE_GROUP_H
#define SMP_PYTHON_COLLECTIVE_GROUP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm/collective/queue.h"

/* What smp_carrier_finished() gave: takes the queue's reference.  A new reference to
 * its owner; NULL: it has none. */
PyObject *smp_order_owner(smp_order *order);

/* Adds the types.  0, or -1 with an exception. */
int smp_group_add(PyObject *module);

#endif
