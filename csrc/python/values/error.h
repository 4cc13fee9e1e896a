/* Exceptions that carry a status of the core: smp._core.Error, which is never raised
 * itself, and its kinds.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_VALUES_ERROR_H
#define SMP_PYTHON_VALUES_ERROR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "common/status.h"

/* smp._core.GroupError, of collectives: a torch.distributed.DistBackendError, too;
 * smp._core.PeerError, of ranks that are gone: a ConnectionError; and
 * smp._core.StepError, of ranks whose steps do not fit: a RuntimeError.  Borrowed. */
extern PyObject *smp_error_of_group;
extern PyObject *smp_error_of_peer;
extern PyObject *smp_error_of_step;

/* Keys of the two calls of a mismatch; 0: none. */
typedef struct {
    uint32_t of[2];
} smp_error_keys;

/* Raises one of them with the text (as PyErr_Format() has it), ending with the status's
 * name.  Its `status` is that name, its `keys` those that are not 0.  keys: NULL for
 * none.  NULL. */
PyObject *smp_error_raise(PyObject *kind, smp_status status, const smp_error_keys *keys,
                          const char *format, ...);

int smp_error_add(PyObject *module);

#endif
