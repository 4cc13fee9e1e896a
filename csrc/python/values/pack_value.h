/* Python values into a message: one walk, no pickle for what the wire knows.
 *
 * Threads  The GIL is held.
 * Errors   0, or -1 with an exception that names the type and what to do.
 */
#ifndef SMP_PYTHON_VALUES_PACK_VALUE_H
#define SMP_PYTHON_VALUES_PACK_VALUE_H

#include "python/values/pack.h"

/* Appends a value. */
int smp_pack_value(smp_pack *pack, PyObject *value);

/* Appends the present contents of a list, dict, set or object, without a number. */
int smp_pack_contents(smp_pack *pack, PyObject *object);

#endif
