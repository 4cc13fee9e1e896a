/* Torch's tensors as rows of numbers, for collectives and messages.
 *
 * A tensor must be in host memory, without gaps, in the order of its indices; others
 * raise BufferError, and the caller comes with copies (smp/collectives/dense.py).
 */
#ifndef SMP_PYTHON_COLLECTIVE_TENSOR_H
#define SMP_PYTHON_COLLECTIVE_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/reduce.h"

typedef struct {
    smp_dtype dtype;
    size_t    per;   /* of these in one element of the tensor */
    bool      sums;  /* they may be added up, */
    bool      all;   /* and all else be done with them */
    void     *data;  /* borrowed: lives as long as the tensor */
    size_t    count; /* of dtype */
} smp_row;

/* 0, or -1 with an exception. */
int smp_see_tensor(PyObject *tensor, smp_row *out);

#endif
