/* The ledger over PyTorch's .grad, for the engine's gradients during a step.
 *
 * A hook on each local parameter takes the engine's accumulated gradient, by microbatch
 * and request, and leaves .grad empty.  The ledger adds it up in order.  Outside a step
 * .grad is PyTorch's.
 *
 * Threads  The GIL is held; during a step, by the holder of the baton.
 * Errors   0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_MODULES_GRADIENTS_H
#define SMP_PYTHON_MODULES_GRADIENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

int smp_gradients_add_functions(PyObject *module);

int smp_gradients_open(int32_t microbatch, uint64_t order, int32_t entry);
int smp_gradients_close(int32_t microbatch, uint64_t order, int32_t entry);
int smp_gradients_promise(int32_t microbatch, uint64_t order, int32_t entry);
int smp_gradients_suspect(int32_t microbatch, int32_t entry);
int smp_gradients_backward(int32_t microbatch, int32_t backward);
int smp_gradients_done(int32_t microbatch);

/* Whether the entry has a parameter of this rank in common with the others. */
bool smp_gradients_share(int32_t entry, const int32_t *others, size_t nothers);

/* The flags of a backward, or its response: SMP_FLAG_UNUSED if some gradients of the
 * step may be zeros of outputs that no loss uses; note takes other ranks' flags. */
uint16_t smp_gradients_flags(void);
void     smp_gradients_note(uint16_t flags);

#endif
