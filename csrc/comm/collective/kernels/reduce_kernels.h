/* The sets of kernels; see comm/collective/kernels/reduce.h. */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_REDUCE_KERNELS_H
#define SMP_COMM_COLLECTIVE_KERNELS_REDUCE_KERNELS_H

#include "comm/collective/kernels/reduce.h"

extern const smp_kernels smp_kernels_scalar;

#if defined(__x86_64__)
extern const smp_kernels smp_kernels_avx2;   /* AVX2 and F16C */
extern const smp_kernels smp_kernels_avx512; /* AVX-512 F, BW, DQ and VL */
#endif

#endif
