/* The values of a message, behind its tensors: the second step of an unpack.
 *
 * Threads  The GIL is held.
 * Errors   -1 or NULL with an exception.
 */
#ifndef SMP_PYTHON_VALUES_UNPACK_VALUE_H
#define SMP_PYTHON_VALUES_UNPACK_VALUE_H

#include "python/values/unpack.h"

/* The next value (new). */
PyObject *smp_unpack_value(smp_unpack *unpack);

/* Replaces the contents of a list, dict, set or object by the next contents in the
 * message, from smp_pack_contents(). */
int smp_unpack_contents_into(smp_unpack *unpack, PyObject *object);

#endif
