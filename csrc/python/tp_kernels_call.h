/* A call of a kernel of tensor parallelism: its tensors are checked, and it runs on
 * their device.
 *
 * Ownership  Tensors and their data are borrowed; scratch is owned until smp_tp_run().
 * Threads    The GIL is held, and given away while a kernel runs.
 * Errors     An exception, and `failed`: then later functions do nothing.
 */
#ifndef SMP_PYTHON_TP_KERNELS_CALL_H
#define SMP_PYTHON_TP_KERNELS_CALL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "python/values/row.h"
#include "tp_kernels/gpu.h"

/* The tensors of a call as checked so far. */
typedef struct {
    bool         failed; /* with an exception */
    bool         known;
    smp_tp_dtype dtype; /* of all floats, when known */
    bool         placed;
    dl_device    device; /* of all tensors, when placed */
} smp_tp_seen;

/* For the tensors of a call always in float32. */
smp_tp_seen smp_tp_statistics_of(const smp_tp_seen *see);

/* The data of a dense tensor of `count` elements; NULL when it failed. */
void *smp_tp_numbers(smp_tp_seen *see, PyObject *tensor, const char *name,
                     smp_dtype want, size_t count);

/* The same for one of the call's floats; the first tells the dtype. */
void *smp_tp_floats(smp_tp_seen *see, PyObject *tensor, const char *name, size_t count);

/* NULL for None, too. */
void *smp_tp_floats_or_none(smp_tp_seen *see, PyObject *tensor, const char *name,
                            size_t count);

/* Scratch of a call: of the host, or torch's on the device: torch gives it out again
 * only behind the stream's present work. */
typedef struct {
    float    *floats;
    PyObject *tensor; /* owned; NULL: malloc's */
} smp_tp_scratch;

/* host_rows: of scratch where the host runs the call.  For smp_tp_run(); nothing when
 * it failed. */
smp_tp_scratch smp_tp_scratch_of(smp_tp_seen *see, smp_tp_gpu_kernel kernel,
                                 size_t rows, size_t columns, size_t host_rows);

/* Runs the call where its tensors are, and gives its scratch (or NULL) back.  None
 * (new). */
PyObject *smp_tp_run(const smp_tp_seen *see, smp_tp_gpu_kernel kernel, const void *call,
                     smp_tp_scratch *given);

#endif
