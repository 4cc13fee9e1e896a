/* A message is opened, and its tensors are made: the first step of an unpack.
 *
 * Threads  The GIL is held.
 * Errors   -1 or NULL with an exception; smp_unpack_fini() is due in any case.
 */
#ifndef SMP_PYTHON_VALUES_UNPACK_TENSOR_H
#define SMP_PYTHON_VALUES_UNPACK_TENSOR_H

#include "python/values/unpack.h"

/* Reads the tensors of a message of the comm.  Takes the message in any case.  The
 * request is borrowed until fini; NULL: this answers none. */
int smp_unpack_init(smp_unpack *unpack, smp_comm *comm, smp_message *message,
                    const smp_arguments *request, bool watch, bool copy);

/* The same for bytes of smp_pack_as_bytes(), borrowed until fini. */
int smp_unpack_init_bytes(smp_unpack *unpack, const void *bytes, size_t nbytes);

/* The same, with placeholders for tensors described without their bytes. */
int smp_unpack_init_described(smp_unpack *unpack, const void *bytes, size_t nbytes);

/* The same for values alone, borrowed until fini, around tensors of this rank; its
 * objects are watched. */
int smp_unpack_init_given(smp_unpack *unpack, const void *values, size_t nbytes,
                          PyObject *const *tensors, size_t ntensors);

/* A list (new) of the tensors sent as requiring grad, in their order. */
PyObject *smp_unpack_in_graph(const smp_unpack *unpack);

/* Puts the items of a tuple, as many, in the place of those. */
void smp_unpack_exchange(smp_unpack *unpack, PyObject *tuple);

#endif
