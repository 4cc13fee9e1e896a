/* The partition as Python sees it: _core.partition() and _core.partition_hash().
 *
 * Threads    With the GIL; it is kept, a decision takes far less than a switch.
 */
#ifndef SMP_PYTHON_PARTITION_BINDING_H
#define SMP_PYTHON_PARTITION_BINDING_H

#include <Python.h>

/* Adds the two functions and _core.PartitionConflict, a ValueError with the numbers of
 * two modules as `args`.  0, or -1 with an exception. */
int smp_python_add_partition(PyObject *module);

#endif
