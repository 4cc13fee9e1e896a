/* Objects sent by number: earlier ones of the message, those of the answered request,
 * and the modules and parameters numbered alike on every rank.
 *
 * Ownership  The pack holds a reference to each numbered object, until fini.
 * Threads    The GIL is held.
 * Errors     0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_VALUES_PACK_MEMO_H
#define SMP_PYTHON_VALUES_PACK_MEMO_H

#include "python/values/pack.h"

/* Writes the number of a tensor of the other rank's: a parameter or buffer of another
 * rank, or, changed or not, an argument of the request.  *done: whether it is one. */
int smp_pack_tensor_there(smp_pack *pack, PyObject *tensor, bool *done);

/* Writes the number of a module; *done: whether it has one. */
int smp_pack_module(smp_pack *pack, PyObject *module, bool *done);

/* Numbers an object open to changes by the callee; *done when it has a number already,
 * then written. */
int smp_pack_object_once(smp_pack *pack, PyObject *object, bool *done);

#endif
