/* Sizes and names. */
#include "comm/collective/kernels/dtype.h"

#include <stdint.h>

static const struct {
    const char *name;
    uint8_t     bytes;
} dtypes[SMP_DTYPES] = {
    [SMP_U8] = {"uint8", 1},
    [SMP_I8] = {"int8", 1},
    [SMP_I32] = {"int32", 4},
    [SMP_I64] = {"int64", 8},
    [SMP_F16] = {"float16", 2},
    [SMP_BF16] = {"bfloat16", 2},
    [SMP_F32] = {"float32", 4},
    [SMP_F64] = {"float64", 8},
    [SMP_BOOL] = {"bool", 1},
    [SMP_F8_E4M3FN] = {"float8_e4m3fn", 1},
    [SMP_F8_E5M2] = {"float8_e5m2", 1},
};

size_t
smp_dtype_bytes(smp_dtype dtype)
{
    return dtypes[dtype].bytes;
}

const char *
smp_dtype_name(smp_dtype dtype)
{
    return (unsigned)dtype < SMP_DTYPES ? dtypes[dtype].name : "unknown";
}

const char *
smp_reduction_name(smp_reduction reduction)
{
    static const char *const names[SMP_REDUCTIONS] = {
        [SMP_SUM] = "sum",
        [SMP_PRODUCT] = "product",
        [SMP_MIN] = "min",
        [SMP_MAX] = "max",
        [SMP_BAND] = "band",
        [SMP_BOR] = "bor",
        [SMP_BXOR] = "bxor",
        [SMP_AVG] = "avg",
        [SMP_PREMUL_SUM] = "premultiplied sum",
    };

    return (unsigned)reduction < SMP_REDUCTIONS ? names[reduction] : "unknown";
}
