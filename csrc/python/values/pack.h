/* Python values into a message: its parts, and the sending.  Values are added by
 * pack_value.h, tensors by pack_tensor.h.
 *
 * Ownership  A pack holds a reference to every tensor and object it has numbered, until
 *            fini: the caller needs them to write back the callee's changes.
 * Threads    The GIL is held.
 * Errors     An exception with the type's name and the remedy.
 */
#ifndef SMP_PYTHON_VALUES_PACK_H
#define SMP_PYTHON_VALUES_PACK_H

#include "comm/messaging/comm.h"
#include "python/values/buffer.h"
#include "python/values/ptrmap.h"
#include "python/values/unpack.h"
#include "server/envelope.h"

/* The parts of a tensor in a message. */
typedef enum {
    SMP_PACK_WHOLE,     /* its description and its bytes */
    SMP_PACK_DESCRIBED, /* its description: the receiver makes a placeholder */
    SMP_PACK_NUMBERED,  /* none: it has a number among the values */
} smp_pack_parts;

typedef struct {
    smp_comm         *comm; /* borrowed; NULL: small and large tensors alike inside */
    int               dest;
    const smp_unpack *request; /* borrowed: the request this answers, or NULL */
    smp_buffer        meta;
    smp_buffer        values;
    smp_buffer        data;
    smp_ptrmap        tensor_numbers;
    smp_ptrmap        object_numbers;
    smp_ptrmap        argument_tensors; /* the request's, by number; */
    smp_ptrmap        argument_objects;
    bool              knows_arguments; /* ... filled when first asked for */
    PyObject        **tensors;         /* owned references, by number */
    uint8_t          *in_graph;        /* owned, by number: written as requiring grad */
    size_t            ntensors;
    size_t            tensor_room;
    PyObject        **objects; /* owned references, by number */
    size_t            nobjects;
    size_t            object_room;
    smp_block       **blocks; /* owned until sent */
    size_t            nblocks;
    size_t            block_room;
    int               depth;
    PyObject *laden; /* borrowed: the first tensor of a subclass, or with attributes */
    smp_pack_parts parts;
    bool           staged; /* a device may still be writing into blocks */
    bool graph; /* tensors with requires_grad are written as such; without it none is */
} smp_pack;

/* comm and request are borrowed until fini. */
void smp_pack_init(smp_pack *pack, smp_comm *comm, int dest, const smp_unpack *request);
void smp_pack_fini(smp_pack *pack);

/* A packed request's objects for references in the answer; borrowed from the pack, with
 * no additions meanwhile. */
static inline smp_arguments
smp_pack_arguments(const smp_pack *pack)
{
    return (smp_arguments){pack->tensors, pack->ntensors, pack->objects,
                           pack->nobjects};
}

/* Appends the tensors written as requiring grad.  0, or -1 with an exception. */
int smp_pack_add_in_graph(const smp_pack *pack, PyObject *list);

/* Sends the packed values, after the envelope.  0, or -1 with an exception. */
int smp_pack_send(smp_pack *pack, const smp_envelope *envelope);

/* The packed values, without the envelope, as bytes (new); for packs without a comm. */
PyObject *smp_pack_as_bytes(smp_pack *pack);

/* Waits for the device's writes into the blocks.  0, or -1 with an exception. */
int smp_pack_wait_for_device(smp_pack *pack);

/* Raises ConnectionError for the comm's status of the destination.  -1. */
int smp_pack_raise_unsent(const smp_pack *pack, smp_status status);

#endif
