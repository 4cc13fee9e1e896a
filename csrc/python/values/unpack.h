/* A message back into Python values: the message, and its end.
 *
 * Two steps: the tensors (unpack_tensor.h), then the values around them
 * (unpack_value.h); in between the tensors may be exchanged (for the outputs of an
 * autograd node).  Every length and number is checked: bytes from no pack raise
 * ValueError.
 *
 * Ownership  An unpack takes its message, and owns its tensors and objects until fini;
 *            returned values are new references.
 * Threads    The GIL is held.
 * Errors     An exception.
 */
#ifndef SMP_PYTHON_VALUES_UNPACK_H
#define SMP_PYTHON_VALUES_UNPACK_H

#include "comm/messaging/comm.h"
#include "python/values/tensor.h"

/* A request's tensors and objects by number, for references in its answer. */
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
    const smp_arguments *request;       /* borrowed: the answered request's, or NULL */
    PyObject           **tensors;       /* owned references, by number */
    uint8_t             *requires_grad; /* by number */
    size_t               ntensors;
    PyObject           **objects; /* owned references, by number */
    PyObject **snapshots;         /* by number, owned: snapshot.h; NULL: not watched */
    size_t     nobjects;
    size_t     object_room;
    bool       watch;     /* take snapshots */
    bool       copy;      /* no tensor may keep a block */
    bool       described; /* tensors may be without their bytes */
    int        depth;
} smp_unpack;

/* After smp_unpack_init(), also after its failure. */
void smp_unpack_fini(smp_unpack *unpack);

/* Raises ValueError: the message is no pack's, for a reason as PyErr_Format() has it.
 * -1. */
int smp_malformed(const char *format, ...);

#endif
