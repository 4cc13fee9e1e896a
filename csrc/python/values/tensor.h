/* Tensors between PyTorch and memory of ours, by DLPack, without a copy.
 *
 * Threads  The GIL is held, except in a tensor's release function: it may run in any
 *          thread without the GIL.
 */
#ifndef SMP_PYTHON_VALUES_TENSOR_H
#define SMP_PYTHON_VALUES_TENSOR_H

#include "python/values/torch_api.h"

#define SMP_MAX_NDIM 64

/* A tensor's bytes stay with the sender: the receiver has a placeholder. */
#define SMP_IN_NO_MESSAGE 2

/* A tensor as it travels; shape and strides follow in the buffer. */
typedef struct {
    dl_dtype  dtype;
    dl_device device; /* where the caller has it */
    uint16_t  ndim;
    uint8_t   requires_grad;
    uint8_t   in_block; /* bytes are in block `place`, else at offset `place`; or
                           SMP_IN_NO_MESSAGE */
    uint32_t place;
    uint64_t bytes; /* of the span: from the first to behind the last element */
} smp_tensor_meta;

/* Bytes of one element. */
static inline uint64_t
smp_element_bytes(dl_dtype dtype)
{
    return ((uint64_t)dtype.bits * dtype.lanes + 7) / 8;
}

/* Bytes of the elements' span: expanded dimensions count once. */
uint64_t smp_tensor_span(const dl_tensor *t);

/* The tensor's pointer (in its device's memory), shape and strides, until control
 * returns to Python.  `*held` is a new reference to the tensor in `out`: `tensor`, or
 * the resolved one of its conjugate or negative view.  0, or -1 with an exception. */
int smp_tensor_borrow(PyObject *tensor, dl_tensor *out, PyObject **held);

/* The tensor's count of changes in place; -1 with an exception. */
long smp_tensor_version(PyObject *tensor);

/* A new tensor over `data` (host memory), with the meta's shape and strides.  release(
 * owner) runs once, when the tensor is gone or when this fails. */
PyObject *smp_tensor_wrap(const smp_tensor_meta *meta, const int64_t *shape,
                          const int64_t *strides, void       *data,
                          void (*release)(void *owner), void *owner);

/* A new one over `data` (host memory) with the elements of the meta's span in a row;
 * release as for smp_tensor_wrap(), or NULL: the caller keeps `data` longer. */
PyObject *smp_tensor_wrap_span(const smp_tensor_meta *meta, void  *data,
                               void (*release)(void *owner), void *owner);

/* The same with a copy of `data` in memory of its own; with NULL, room for it. */
PyObject *smp_tensor_copy_span(const smp_tensor_meta *meta, const void *data);

/* A new tensor with a copy of `data` in memory of its own; with NULL, room for it. */
PyObject *smp_tensor_copy_of(const smp_tensor_meta *meta, const int64_t *shape,
                             const int64_t *strides, const void *data);

#endif
