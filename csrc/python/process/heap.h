/* The process's heap: where PyTorch's tensors on the CPU lie.
 *
 * Threads  any.
 */
#ifndef SMP_PYTHON_PROCESS_HEAP_H
#define SMP_PYTHON_PROCESS_HEAP_H

#include <Python.h>

/* Adds share_heap() and trim_heap().  0, or -1 with an exception. */
int smp_heap_add_functions(PyObject *module);

/* The math library's memory for this thread's next product goes back to the heap; for a
 * thread about to let another one work. */
void smp_heap_give_scratch(void);

#endif
