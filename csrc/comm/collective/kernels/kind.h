/* The callers' meaning of a tensor's elements without a dtype in the core: the core
 * moves such a tensor as a row of a dtype of its own, and compares the callers'
 * meanings.
 *
 * Source  dlpack.h 1.3 (https://github.com/dmlc/dlpack): codes of types.
 */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_KIND_H
#define SMP_COMM_COLLECTIVE_KERNELS_KIND_H

#include <stddef.h>
#include <stdint.h>

#include "comm/collective/kernels/dtype.h"

/* DLPack's codes of types. */
enum {
    SMP_DL_INT,
    SMP_DL_UINT,
    SMP_DL_FLOAT,
    SMP_DL_OPAQUE,
    SMP_DL_BFLOAT,
    SMP_DL_COMPLEX,
    SMP_DL_BOOL,
    SMP_DL_FLOAT8_E3M4,
    SMP_DL_FLOAT8_E4M3,
    SMP_DL_FLOAT8_E4M3B11FNUZ,
    SMP_DL_FLOAT8_E4M3FN,
    SMP_DL_FLOAT8_E4M3FNUZ,
    SMP_DL_FLOAT8_E5M2,
    SMP_DL_FLOAT8_E5M2FNUZ,
    SMP_DL_FLOAT8_E8M0FNU,
    SMP_DL_FLOAT6_E2M3FN,
    SMP_DL_FLOAT6_E3M2FN,
    SMP_DL_FLOAT4_E2M1FN,
    SMP_DL_CODES
};

/* DLPack's code, bits and lanes; 0: it is the dtype itself. */
typedef uint32_t smp_kind;

static inline smp_kind
smp_kind_of(uint8_t code, uint8_t bits, uint16_t lanes)
{
    return (smp_kind)code | (smp_kind)bits << 8 | (smp_kind)lanes << 16;
}

/* Bytes of one element. */
size_t smp_kind_bytes(smp_kind kind, smp_dtype dtype);

/* The number of the caller's elements in so many of the dtype, of whatever a message
 * says.
 */
uint64_t smp_kind_count(smp_kind kind, smp_dtype dtype, uint64_t count);

/* "complex64", "float8_e5m2"; cut off at `bytes`. */
void smp_kind_name(smp_kind kind, smp_dtype dtype, char *out, size_t bytes);

#endif
