/* The codec by itself as Python sees it, for tests and small exchanges: _core.pack()
 * and _core.unpack().
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_VALUES_CODEC_BINDING_H
#define SMP_PYTHON_VALUES_CODEC_BINDING_H

#include "python/values/torch_api.h"

/* Adds the functions.  0, or -1 with an exception. */
int smp_codec_add(PyObject *module);

#endif
