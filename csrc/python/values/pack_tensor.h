/* Tensors into a message: small ones inside, the others in blocks or the device pool.
 *
 * Threads  The GIL is held, and given away while a large tensor is copied.
 * Errors   0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_VALUES_PACK_TENSOR_H
#define SMP_PYTHON_VALUES_PACK_TENSOR_H

#include "python/values/pack.h"

/* Appends the tensor: by number where the other rank has it, else with its bytes. */
int smp_pack_tensor(smp_pack *pack, PyObject *tensor);

/* Appends the tensor as a new one, even if it is an argument of the request. */
int smp_pack_new_tensor(smp_pack *pack, PyObject *tensor);

#endif
