/* What a message names by number: objects that it has already, those of the request
 * that it answers, and the modules and parameters that every rank numbers alike.
 *
 * Ownership  The pack holds a reference to what it numbers, until fini.
 * Threads    The GIL is held.
 * Errors     0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_VALUES_PACK_MEMO_H
#define SMP_PYTHON_VALUES_PACK_MEMO_H

#include "python/values/pack.h"

/* Writes the number of a tensor that the other rank has: a parameter or buffer that
 * this rank does not own, or, changed or not, an argument of the request.  *done:
 * whether it is one. */
int smp_pack_tensor_there(smp_pack *pack, PyObject *tensor, bool *done);

/* Writes the number of a module; *done: whether it has one. */
int smp_pack_module(smp_pack *pack, PyObject *module, bool *done);

/* Numbers an object that the callee could change; *done when it has a number already,
 * which is then written. */
int smp_pack_object_once(smp_pack *pack, PyObject *object, bool *done);

#endif
