/* Objects received by number: the message's own tensors and objects, those of the
 * answered request, and the modules and parameters numbered alike on every rank.
 *
 * Threads  The GIL is held.
 * Errors   -1 or NULL with an exception.
 */
#ifndef SMP_PYTHON_VALUES_UNPACK_MEMO_H
#define SMP_PYTHON_VALUES_UNPACK_MEMO_H

#include "python/values/unpack.h"
#include "python/values/wire.h"

/* The object of TAG_TENSOR, TAG_SEEN, TAG_ARGUMENT_TENSOR, TAG_ARGUMENT_OBJECT,
 * TAG_MODULE or TAG_PARAMETER (new), by the number behind the tag. */
PyObject *smp_unpack_by_number(smp_unpack *unpack, smp_tag tag);

/* Numbers a mutable object before its contents are read: they may refer to it.  NULL
 * for an object made from its contents. */
int smp_unpack_add_object(smp_unpack *unpack, PyObject *object, size_t *number);

#endif
