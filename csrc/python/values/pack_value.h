/* Python values into a message: one walk, no pickle for types of the wire.
 *
 * Threads  The GIL is held.
 * Errors   0, or -1 with an exception with the type's name and the remedy.
 */
#ifndef SMP_PYTHON_VALUES_PACK_VALUE_H
#define SMP_PYTHON_VALUES_PACK_VALUE_H

#include "python/values/pack.h"

/* Appends a value. */
int smp_pack_value(smp_pack *pack, PyObject *value);

/* Appends a new value, taken; NULL: its exception. */
int smp_pack_new_value(smp_pack *pack, PyObject *value);

/* Appends the present contents of a list, dict, set or object, without a number. */
int smp_pack_contents(smp_pack *pack, PyObject *object);

#endif
