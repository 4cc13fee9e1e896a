/* The kernels of tensor parallelism as Python sees them: _core.tp_*().
 *
 * Tensors are dense, all in host memory or on one GPU, float32, float16 or bfloat16.
 * Outputs are written in place, on a GPU behind the work of its current stream.
 * Another tensor raises, and smp/tensor_parallel/rows/kernels.py passes none.
 *
 * Threads    With the GIL, given away while a kernel runs.
 */
#ifndef SMP_PYTHON_TP_KERNELS_BINDING_H
#define SMP_PYTHON_TP_KERNELS_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds the functions.  0, or -1 with an exception. */
int smp_python_add_tp_kernels(PyObject *module);

#endif
