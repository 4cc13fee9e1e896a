/* Torch's tensors as rows of numbers, for collectives and messages.
 *
 * A tensor must be in host memory (or on a device), without gaps, in the order of its
 * indices; others raise BufferError, and the caller comes with copies
 * (smp/collectives/dense.py).
 */
#ifndef SMP_PYTHON_VALUES_ROW_H
#define SMP_PYTHON_VALUES_ROW_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/kernels/dtype.h"
#include "comm/collective/kernels/kind.h"
#include "python/values/dlpack_abi.h"

typedef struct {
    smp_dtype dtype;
    smp_kind  kind;  /* of the tensor's elements; 0: of dtype, */
    size_t    per;   /* ... else so many of these */
    bool      sums;  /* they may be added up, */
    bool      all;   /* and all else be done with them */
    void     *data;  /* borrowed: lives as long as the tensor */
    size_t    count; /* of dtype */
} smp_row;

/* 0, or -1 with an exception. */
int smp_see_tensor(PyObject *tensor, smp_row *out);

/* The same for one on a device, *device, where its data are. */
int smp_see_device_tensor(PyObject *tensor, smp_row *out, dl_device *device);

/* The same for one anywhere. */
int smp_see_tensor_anywhere(PyObject *tensor, smp_row *out, dl_device *device);

#endif
