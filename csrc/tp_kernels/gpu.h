/* The kernels of tensor parallelism on a GPU; tp_kernels/tp_kernels.h says their
 * results.
 *
 * They come as a fat binary in this library, if built with nvcc, and are loaded and
 * launched through the driver: nothing is linked.  A thread reads 16 bytes at once,
 * where rows begin at multiples of these.  A warp or a block has a row, which softmax
 * and norms hold in registers then; or a thread has eight columns of many rows.  Sums
 * of columns are added up by a kernel of their own.
 *
 * Status     Not yet run on a GPU in this form.  The tests run the kernels on threads
 *            taking turns on a CPU.  Python compares each kernel with torch's operators
 *            at its first use on a device (smp/tensor_parallel/rows/gpu_kernels.py).
 * Ownership  As there; all memory, scratch too, is the device's.  Scratch begins at a
 *            multiple of 4 bytes.
 * Threads    any.
 */
#ifndef SMP_TP_KERNELS_GPU_H
#define SMP_TP_KERNELS_GPU_H

#include "tp_kernels/tp_kernels.h"

/* Room for a failure's text. */
#define SMP_TP_GPU_TEXT 160

typedef enum {
    SMP_TP_GPU_SOFTMAX,
    SMP_TP_GPU_SOFTMAX_BACKWARD,
    SMP_TP_GPU_RESIDUAL,
    SMP_TP_GPU_RESIDUAL_BACKWARD,
    SMP_TP_GPU_NORM,
    SMP_TP_GPU_NORM_BACKWARD,
    SMP_TP_GPU_CROSS_ENTROPY,
    SMP_TP_GPU_CROSS_ENTROPY_BACKWARD,
    SMP_TP_GPU_KERNELS
} smp_tp_gpu_kernel;

/* Whether this library holds kernels. */
bool smp_tp_gpu_is_built(void);

/* Bytes of scratch for a call with so many rows and columns (keys). */
size_t smp_tp_gpu_scratch(smp_tp_gpu_kernel kernel, size_t rows, size_t columns);

/* Whether there are kernels, and the device's driver takes them; the first
 * call for a device loads them.  False: `why` says why. */
bool smp_tp_gpu_open(int device, char why[SMP_TP_GPU_TEXT]);

/* Launches a kernel on the stream (0: the default one) and returns.  call: its struct.
 * False: not all of it runs; `why` names the failure. */
bool smp_tp_gpu_launch(int device, void *stream, smp_tp_gpu_kernel kernel,
                       const void *call, char why[SMP_TP_GPU_TEXT]);

#endif
