/* A message back into Python values.
 *
 * Two steps: the tensors, then the values that hold them; in between the tensors may be
 * exchanged (for the outputs of an autograd node).  Every length and number is checked:
 * bytes that no pack wrote give ValueError.
 *
 * Ownership  An unpack takes its message, and owns the tensors and objects it made
 *            until fini; values returned are new references.
 * Threads    The GIL is held.
 */
#ifndef SMP_PYTHON_VALUES_UNPACK_H
#define SMP_PYTHON_VALUES_UNPACK_H

#include "comm/comm.h"
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
    PyObject **snapshots; /* shallow copies of objects' contents, or their pickles;
                             may be NULL */
    size_t nobjects;
    size_t object_room;
    bool   watch; /* take snapshots */
    bool   copy;  /* no tensor may keep a block */
    int    depth;
} smp_unpack;

/* Reads the tensors of a message of the comm.  Takes the message in any case. */
int smp_unpack_init(smp_unpack *unpack, smp_comm *comm, smp_message *message,
                    const smp_arguments *request, bool watch, bool copy);

/* The same for bytes of smp_pack_bytes(), borrowed until fini. */
int  smp_unpack_init_bytes(smp_unpack *unpack, const void *bytes, size_t nbytes);
void smp_unpack_fini(smp_unpack *unpack);

/* The next value. */
PyObject *smp_unpack_value(smp_unpack *unpack);
int       smp_unpack_u32(smp_unpack *unpack, uint32_t *number);

/* Whether object i differs from its snapshot; -1 with an exception. */
int smp_unpack_changed(const smp_unpack *unpack, size_t i);

/* Whether object i came as a pickle: what changes in it cannot travel back. */
bool smp_unpack_is_pickled(const smp_unpack *unpack, size_t i);

/* Replaces the contents of `object` by the next contents in the message. */
int smp_unpack_contents_into(smp_unpack *unpack, PyObject *object);

#endif
