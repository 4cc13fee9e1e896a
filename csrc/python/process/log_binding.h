/* The core's log (common/log.h) for Python.
 *
 * Threads  any.
 */
#ifndef SMP_PYTHON_PROCESS_LOG_BINDING_H
#define SMP_PYTHON_PROCESS_LOG_BINDING_H

#include <Python.h>

/* Adds log(), log_rank() and take_warning().  0, or -1 with an exception. */
int smp_python_add_log(PyObject *module);

#endif
