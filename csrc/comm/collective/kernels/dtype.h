/* The elements of tensors, and their operations. */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_DTYPE_H
#define SMP_COMM_COLLECTIVE_KERNELS_DTYPE_H

#include <stddef.h>

/* Dtypes of tensors; their values travel between ranks. */
typedef enum {
    SMP_U8,
    SMP_I8,
    SMP_I32,
    SMP_I64,
    SMP_F16,
    SMP_BF16,
    SMP_F32,
    SMP_F64,
    SMP_BOOL,      /* one byte, 0 or 1 */
    SMP_F8_E4M3FN, /* without infinities: too large values become NaN */
    SMP_F8_E5M2,
    SMP_DTYPES
} smp_dtype;

typedef enum {
    SMP_SUM,
    SMP_PRODUCT,
    SMP_MIN,
    SMP_MAX,
    SMP_BAND,
    SMP_BOR,
    SMP_BXOR,
    SMP_AVG,
    SMP_PREMUL_SUM,
    SMP_REDUCTIONS
} smp_reduction;

size_t      smp_dtype_bytes(smp_dtype dtype);  /* of one element */
const char *smp_dtype_name(smp_dtype dtype);   /* "float32"; static storage */
const char *smp_reduction_name(smp_reduction); /* "sum"; static storage */

#endif
