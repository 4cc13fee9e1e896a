/* The functions of the fat binary, and their parameters.
 *
 * A kernel is compiled for each dtype and form, since each has registers of its own.
 * Forms of a kernel of rows:
 *
 *   warp        a row is a warp's, and in registers: up to 1,024 columns
 *   block       a block's: up to 8,192
 *   loop        a block's, and read again for each pass
 *   odd_warp    rows that do not begin at multiples of 16 bytes: read again for each
 *   odd_block   pass, an element at a time
 *
 * A kernel of columns is `whole` or `odd`, and one of logits a `warp`'s or a `block`'s.
 */
#ifndef SMP_TP_KERNELS_GPU_ENTRIES_H
#define SMP_TP_KERNELS_GPU_ENTRIES_H

#include "tp_kernels/gpu_plan.h"

/* X(name, type of the call, body) for each. */
#define SMP_TP_GPU_ENTRIES(X)                                                          \
    SMP_TP_GPU_ROWS(X, softmax, smp_tp_softmax)                                        \
    SMP_TP_GPU_ROWS(X, softmax_backward, smp_tp_softmax_backward)                      \
    SMP_TP_GPU_ROWS(X, norm, smp_tp_norm)                                              \
    SMP_TP_GPU_ROWS(X, norm_means, smp_tp_norm_backward)                               \
    SMP_TP_GPU_COLUMNS(X, norm_backward, smp_tp_norm_backward)                         \
    SMP_TP_GPU_COLUMNS(X, residual, smp_tp_residual)                                   \
    SMP_TP_GPU_COLUMNS(X, residual_backward, smp_tp_residual_backward)                 \
    SMP_TP_GPU_LOGITS(X, cross_entropy, smp_tp_cross_entropy)                          \
    SMP_TP_GPU_LOGITS(X, cross_entropy_backward, smp_tp_cross_entropy_backward)        \
    X(column_sums, smp_tp_gpu_sums, column_sums(call))

#define SMP_TP_GPU_ROWS(X, kernel, type)                                               \
    SMP_TP_GPU_ROWS_OF(X, kernel, type, f32, SMP_TP_F32)                               \
    SMP_TP_GPU_ROWS_OF(X, kernel, type, f16, SMP_TP_F16)                               \
    SMP_TP_GPU_ROWS_OF(X, kernel, type, bf16, SMP_TP_BF16)

#define SMP_TP_GPU_ROWS_OF(X, kernel, type, name, dtype)                               \
    X(kernel##_##name##_warp, type,                                                    \
      kernel<dtype, false, SMP_TP_GPU_HELD, true>(call, plan))                         \
    X(kernel##_##name##_block, type,                                                   \
      kernel<dtype, true, SMP_TP_GPU_HELD, true>(call, plan))                          \
    X(kernel##_##name##_loop, type, kernel<dtype, true, 0, true>(call, plan))          \
    X(kernel##_##name##_odd_warp, type, kernel<dtype, false, 0, false>(call, plan))    \
    X(kernel##_##name##_odd_block, type, kernel<dtype, true, 0, false>(call, plan))

#define SMP_TP_GPU_COLUMNS(X, kernel, type)                                            \
    SMP_TP_GPU_COLUMNS_OF(X, kernel, type, f32, SMP_TP_F32)                            \
    SMP_TP_GPU_COLUMNS_OF(X, kernel, type, f16, SMP_TP_F16)                            \
    SMP_TP_GPU_COLUMNS_OF(X, kernel, type, bf16, SMP_TP_BF16)

#define SMP_TP_GPU_COLUMNS_OF(X, kernel, type, name, dtype)                            \
    X(kernel##_##name##_whole, type, kernel<dtype, true>(call, plan))                  \
    X(kernel##_##name##_odd, type, kernel<dtype, false>(call, plan))

#define SMP_TP_GPU_LOGITS(X, kernel, type)                                             \
    SMP_TP_GPU_LOGITS_OF(X, kernel, type, f32, SMP_TP_F32)                             \
    SMP_TP_GPU_LOGITS_OF(X, kernel, type, f16, SMP_TP_F16)                             \
    SMP_TP_GPU_LOGITS_OF(X, kernel, type, bf16, SMP_TP_BF16)

#define SMP_TP_GPU_LOGITS_OF(X, kernel, type, name, dtype)                             \
    X(kernel##_##name##_warp, type, kernel<dtype, false>(call))                        \
    X(kernel##_##name##_block, type, kernel<dtype, true>(call))

#endif
