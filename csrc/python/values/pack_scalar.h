/* Scalars of a message: tags, numbers, bytes and text.
 *
 * Threads  The GIL is held.
 * Errors   0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_VALUES_PACK_SCALAR_H
#define SMP_PYTHON_VALUES_PACK_SCALAR_H

#include "python/values/pack.h"
#include "python/values/wire.h"

int smp_pack_tag(smp_pack *pack, smp_tag tag);

/* A number for smp_unpack_u32(). */
int smp_pack_u32(smp_pack *pack, uint32_t number);

/* A tag, and behind it a number; OverflowError for a larger one than 32 bits. */
int smp_pack_number(smp_pack *pack, smp_tag tag, size_t number);

/* A tag, a size, and so many bytes. */
int smp_pack_sized(smp_pack *pack, smp_tag tag, const void *bytes, size_t nbytes);

/* An object of exactly the named class. */
int smp_pack_int(smp_pack *pack, PyObject *value);
int smp_pack_float(smp_pack *pack, PyObject *value);
int smp_pack_complex(smp_pack *pack, PyObject *value);
int smp_pack_bytes(smp_pack *pack, smp_tag tag, PyObject *bytes);
int smp_pack_text(smp_pack *pack, smp_tag tag, PyObject *text);

/* str(value) without its first `skip` characters, as text. */
int smp_pack_str_of(smp_pack *pack, smp_tag tag, PyObject *value, Py_ssize_t skip);

/* A class: its module and its qualified name, as two values. */
int smp_pack_class_name(smp_pack *pack, PyTypeObject *type);

#endif
