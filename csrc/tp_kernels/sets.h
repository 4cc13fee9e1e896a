/* The sets of kernels; see tp_kernels/tp_kernels.h. */
#ifndef SMP_TP_KERNELS_SETS_H
#define SMP_TP_KERNELS_SETS_H

#include "tp_kernels/tp_kernels.h"

extern const smp_tp_kernels smp_tp_kernels_scalar;

#if defined(__x86_64__)
extern const smp_tp_kernels smp_tp_kernels_avx2;
extern const smp_tp_kernels smp_tp_kernels_avx512;
#endif

#endif
