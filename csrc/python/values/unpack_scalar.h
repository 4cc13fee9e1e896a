/* Scalars of a message: bytes, numbers and text.
 *
 * Threads  The GIL is held.
 * Errors   -1 or NULL with an exception, in particular at the end of the values.
 */
#ifndef SMP_PYTHON_VALUES_UNPACK_SCALAR_H
#define SMP_PYTHON_VALUES_UNPACK_SCALAR_H

#include "python/values/unpack.h"
#include "python/values/wire.h"

/* The next bytes; borrowed from the message. */
const void *smp_unpack_raw(smp_unpack *unpack, size_t nbytes);

/* The next number, from smp_pack_u32(). */
int smp_unpack_u32(smp_unpack *unpack, uint32_t *number);

/* A count of further values, checked against the bytes left: each takes at least
 * one. */
int smp_unpack_count(smp_unpack *unpack, uint32_t *count);

/* The bytes of smp_pack_sized() behind its tag; borrowed from the message. */
const char *smp_unpack_sized(smp_unpack *unpack, uint32_t *size);

/* The value behind the tag of an int, float, complex, str or bytes (new). */
PyObject *smp_unpack_int(smp_unpack *unpack);
PyObject *smp_unpack_big_int(smp_unpack *unpack);
PyObject *smp_unpack_float(smp_unpack *unpack);
PyObject *smp_unpack_complex(smp_unpack *unpack);
PyObject *smp_unpack_text(smp_unpack *unpack);
PyObject *smp_unpack_bytes(smp_unpack *unpack);

/* torch.<name>, if a dtype (new). */
PyObject *smp_unpack_dtype(smp_unpack *unpack);

#endif
