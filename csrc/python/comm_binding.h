/* Transports from other extensions: _core.register_transport(). */
#ifndef SMP_PYTHON_COMM_BINDING_H
#define SMP_PYTHON_COMM_BINDING_H

#include <Python.h>

/* Adds the function.  0, or -1 with an exception. */
int smp_python_add_comm(PyObject *module);

#endif
