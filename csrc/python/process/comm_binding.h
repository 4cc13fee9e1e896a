/* Python's view of a comm, and transports from other extensions. */
#ifndef SMP_PYTHON_PROCESS_COMM_BINDING_H
#define SMP_PYTHON_PROCESS_COMM_BINDING_H

#include <Python.h>

#include "comm/messaging/comm.h"

/* [(transport or None, messages sent, bytes sent), ...] by rank; NULL: no rank.  New
 * reference, or NULL with an exception. */
PyObject *smp_python_peers(smp_comm *comm);

/* Raises the MemoryError of a comm without room for its pools, of `pool` bytes here.
 * NULL. */
PyObject *smp_python_no_room(const char *doing, size_t pool);

/* Adds the functions.  0, or -1 with an exception. */
int smp_python_add_comm(PyObject *module);

#endif
