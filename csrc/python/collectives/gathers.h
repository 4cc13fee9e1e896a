/* All-gathers of tensors on devices, as calls of a group; and the references that keep
 * such tensors for a device.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_COLLECTIVES_GATHERS_H
#define SMP_PYTHON_COLLECTIVES_GATHERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "comm/collective/group.h"
#include "python/values/dlpack_abi.h"

/* Calls of a group of `size`, one for each of the tensors. */
typedef struct {
    smp_call          *calls; /* owned, like all below */
    smp_device_gather *gathers;
    uint64_t          *outs;   /* [n * size] */
    size_t            *counts; /* [n * size] */
    Py_ssize_t         n;
    dl_device          device; /* of all tensors */
} smp_gathers;

/* From tuples of tensors and of their outputs: a tensor for all, or a tuple of one for
 * each member.  0, or -1 with an exception: BufferError if they are not dense. fini
 * takes an all-zero one. */
int  smp_gathers_init(smp_gathers *gathers, PyObject *ins, PyObject *outs, int size,
                      int member, const char *group);
void smp_gathers_fini(smp_gathers *gathers);

/* Has them use the mark. */
void smp_gathers_mark(smp_gathers *gathers, const smp_device_mark *mark);

/* Tensors perhaps still used by a device. */
typedef struct smp_held {
    struct smp_held *next;
    smp_device_mark *mark; /* borrowed from the exchange */
    PyObject        *ins;  /* owned, or NULL, like outs */
    PyObject        *outs;
} smp_held;

/* Takes the references and the mark; lets go of all finished ones, if there still is an
 * exchange.  Without memory the tensors stay for ever. */
void smp_hold(smp_held **list, smp_exchange *exchange, smp_device_mark *mark,
              PyObject *ins, PyObject *outs);
void smp_held_sweep(smp_held **list, smp_exchange *exchange);

/* The exchange is gone; false: the device may use them for ever. */
void smp_held_clear(smp_held **list, bool rests);

#endif
