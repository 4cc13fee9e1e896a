/* Which objects travel as their class and what is in their __dict__.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_VALUES_PLAIN_CLASS_H
#define SMP_PYTHON_VALUES_PLAIN_CLASS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Whether a class is rebuilt from its __dict__ alone: it pickles as object does, keeps
 * everything there, and is no container of C. */
bool smp_is_plain_class(PyTypeObject *type);

#endif
