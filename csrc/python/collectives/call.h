/* Calls of a group from Python's arguments: tensors in host memory, an operation and
 * its arguments.  Sizes and dtypes are checked here, because the core writes to any
 * given address; the agreement with other members' calls is checked in the core.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_COLLECTIVES_CALL_H
#define SMP_PYTHON_COLLECTIVES_CALL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm/collective/checks/call.h"

/* The called group. */
typedef struct {
    const char *name; /* borrowed */
    int         size;
    int         member;
} smp_callee;

/* One call for each of the tensors. */
typedef struct {
    size_t   *counts; /* [2 * size], or NULL; owned */
    smp_call *calls;  /* `one`, or allocated */
    size_t    n;
    smp_call  one;
} smp_tensor_calls;

/* From (operation, ins, outs, reduction, root, factor, counts, out_counts, timeout_s,
 * sparse=0, assumed=0, in_rows=0, out_rows=0, key=0); ins, outs and the counts may be
 * None, without ins: in place.  Gives the tensors as tuples, or NULL: the caller keeps
 * them, also after a failure, until the calls are over. 0, or -1 with an exception:
 * BufferError if a tensor is not dense. fini takes one filled by init, also in part, or
 * all zero; a filled one must not move. */
int  smp_tensor_calls_init(smp_tensor_calls *self, const smp_callee *group,
                           PyObject *const *args, Py_ssize_t nargs, PyObject **ins,
                           PyObject **outs);
void smp_tensor_calls_fini(smp_tensor_calls *self);

#endif
