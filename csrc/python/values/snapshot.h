/* The test for an object's change in place since its snapshot, as by a callee.
 *
 * A snapshot is a shallow copy of the parts open to changes in place, or the pickle of
 * an object without other means.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_VALUES_SNAPSHOT_H
#define SMP_PYTHON_VALUES_SNAPSHOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* The snapshot of a list, dict, set or plain object (new); NULL with an exception. */
PyObject *smp_snapshot(PyObject *object);

/* The snapshot of an object from a pickle (new); NULL without an exception: it cannot
 * be pickled again, and is not watched. */
PyObject *smp_snapshot_pickle(PyObject *object);

/* Whether the object came as a pickle; false for NULL. */
bool smp_snapshot_is_pickle(PyObject *snapshot);

/* Whether the object differs from its snapshot; NULL: no.  -1 with an exception. */
int smp_snapshot_differs(PyObject *snapshot, PyObject *object);

#endif
