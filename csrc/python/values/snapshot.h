/* Whether an object was changed in place since a moment, as its callee may do.
 *
 * A snapshot is a shallow copy of what in-place changes would change, or the pickle of
 * an object that nothing else describes.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_VALUES_SNAPSHOT_H
#define SMP_PYTHON_VALUES_SNAPSHOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Of a list, dict, set or plain object (new); NULL with an exception. */
PyObject *smp_snapshot(PyObject *object);

/* Of an object that came as a pickle (new); NULL without an exception: it cannot be
 * pickled again, and is not watched. */
PyObject *smp_snapshot_pickle(PyObject *object);

/* Whether the object came as a pickle; false for NULL. */
bool smp_snapshot_is_pickle(PyObject *snapshot);

/* Whether the object differs from its snapshot; NULL: no.  -1 with an exception. */
int smp_snapshot_differs(PyObject *snapshot, PyObject *object);

#endif
