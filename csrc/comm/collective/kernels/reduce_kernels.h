/* Kernels: an operation on each element; and the sets of them.
 *
 * comm/collective/kernels/reduce.h defines each.
 */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_REDUCE_KERNELS_H
#define SMP_COMM_COLLECTIVE_KERNELS_REDUCE_KERNELS_H

#include <stddef.h>

#include "comm/collective/kernels/dtype.h"
#include "common/isa.h"

/* out[i] = left[i] op right[i]; out may be left or right. */
typedef void smp_binary_kernel(void *out, const void *left, const void *right,
                               size_t count);

/* out[i] = in[i] op value (a factor or divisor); out may be in. */
typedef void smp_scaling_kernel(void *out, const void *in, double value, size_t count);

/* out[i] = in[i] in another type. */
typedef void smp_convert_kernel(void *out, const void *in, size_t count);

/* NULL where a dtype has no such kernel, or only the one in plain C. */
typedef struct {
    smp_binary_kernel  *binary[SMP_DTYPES][SMP_BXOR + 1];
    smp_scaling_kernel *multiply[SMP_DTYPES];
    smp_scaling_kernel *divide[SMP_DTYPES];
    smp_convert_kernel *widen[SMP_DTYPES];  /* to f32: f16, bf16, f8 */
    smp_convert_kernel *narrow[SMP_DTYPES]; /* from f32 */
} smp_kernels;

extern const smp_kernels smp_kernels_scalar;

#if defined(__x86_64__)
extern const smp_kernels smp_kernels_avx2;   /* AVX2 and F16C */
extern const smp_kernels smp_kernels_avx512; /* AVX-512 F, BW, DQ and VL */
#endif

#endif
