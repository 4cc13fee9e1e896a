/* A message back into Python values: what is being read, and its end.
 *
 * Two steps: the tensors (unpack_tensor.h), then the values that hold them
 * (unpack_value.h); in between the tensors may be exchanged (for the outputs of an
 * autograd node).  Every length and number is checked: bytes that no pack wrote give
 * ValueError.
 *
 * Ownership  An unpack takes its message, and owns the tensors and objects it made
 *            until fini; values returned are new references.
 * Threads    The GIL is held.
 * Errors     An exception.
 */
#ifndef SMP_PYTHON_VALUES_UNPACK_H
#define SMP_PYTHON_VALUES_UNPACK_H

#include "comm/messaging/comm.h"
#include "python/values/tensor.h"

/* What was sent with a request, by number: what its answer may refer to. */
typedef struct {
    PyObject *const *tensors; /* borrowed, as objects */
    size_t           ntensors;
    PyObject *const *objects;
    size_t           nobjects;
} smp_arguments;

typedef struct {
    smp_comm            *comm;    /* borrowed; NULL for bytes */
    smp_message         *message; /* owned; NULL for bytes */
    const uint8_t       *meta;
    const uint8_t       *values; /* the next value */
    const uint8_t       *values_end;
    const uint8_t       *data;
    uint64_t             data_bytes;
    const smp_arguments *request;       /* borrowed: of what this answers, or NULL */
    PyObject           **tensors;       /* owned references, by number */
    uint8_t             *requires_grad; /* by number */
    size_t               ntensors;
    PyObject           **objects; /* owned references, by number */
    PyObject **snapshots;         /* by number, owned: snapshot.h; NULL: not watched */
    size_t     nobjects;
    size_t     object_room;
    bool       watch; /* take snapshots */
    bool       copy;  /* no tensor may keep a block */
    int        depth;
} smp_unpack;

/* After smp_unpack_init(), also where that failed. */
void smp_unpack_fini(smp_unpack *unpack);

/* Raises ValueError: the message is no pack's, for a reason as PyErr_Format() has it.
 * -1. */
int smp_malformed(const char *format, ...);

#endif
