/* Names and sizes of types as DLPack tells them. */
#include "comm/collective/kernels/kind.h"

#include <stdbool.h>
#include <stdio.h>

static unsigned
code_of(smp_kind kind)
{
    return kind & 0xff;
}

static unsigned
bits_of(smp_kind kind)
{
    return kind >> 8 & 0xff;
}

static unsigned
lanes_of(smp_kind kind)
{
    return kind >> 16;
}

size_t
smp_kind_bytes(smp_kind kind, smp_dtype dtype)
{
    return kind == 0 ? smp_dtype_bytes(dtype)
                     : ((size_t)bits_of(kind) * lanes_of(kind) + 7) / 8;
}

uint64_t
smp_kind_count(smp_kind kind, smp_dtype dtype, uint64_t count)
{
    size_t per;

    if (kind == 0 || (unsigned)dtype >= SMP_DTYPES) { /* of a malformed message */
        return count;
    }
    per = smp_kind_bytes(kind, dtype) / smp_dtype_bytes(dtype);
    return per == 0 ? count : count / per;
}

void
smp_kind_name(smp_kind kind, smp_dtype dtype, char *out, size_t bytes)
{
    static const struct {
        const char *name;
        bool        sized; /* its bits follow */
    } codes[SMP_DL_CODES] = {
        [SMP_DL_INT] = {"int", true},
        [SMP_DL_UINT] = {"uint", true},
        [SMP_DL_FLOAT] = {"float", true},
        [SMP_DL_OPAQUE] = {"opaque", true},
        [SMP_DL_BFLOAT] = {"bfloat", true},
        [SMP_DL_COMPLEX] = {"complex", true},
        [SMP_DL_BOOL] = {"bool", true},
        [SMP_DL_FLOAT8_E3M4] = {"float8_e3m4", false},
        [SMP_DL_FLOAT8_E4M3] = {"float8_e4m3", false},
        [SMP_DL_FLOAT8_E4M3B11FNUZ] = {"float8_e4m3b11fnuz", false},
        [SMP_DL_FLOAT8_E4M3FN] = {"float8_e4m3fn", false},
        [SMP_DL_FLOAT8_E4M3FNUZ] = {"float8_e4m3fnuz", false},
        [SMP_DL_FLOAT8_E5M2] = {"float8_e5m2", false},
        [SMP_DL_FLOAT8_E5M2FNUZ] = {"float8_e5m2fnuz", false},
        [SMP_DL_FLOAT8_E8M0FNU] = {"float8_e8m0fnu", false},
        [SMP_DL_FLOAT6_E2M3FN] = {"float6_e2m3fn", false},
        [SMP_DL_FLOAT6_E3M2FN] = {"float6_e3m2fn", false},
        [SMP_DL_FLOAT4_E2M1FN] = {"float4_e2m1fn", false},
    };
    unsigned code = code_of(kind);
    char     lanes[8] = "";

    if (kind == 0) {
        snprintf(out, bytes, "%s", smp_dtype_name(dtype));
        return;
    }
    if (lanes_of(kind) != 1) {
        snprintf(lanes, sizeof(lanes), "_x%u", lanes_of(kind));
    }
    if (code < SMP_DL_CODES && codes[code].sized) {
        snprintf(out, bytes, "%s%u%s", codes[code].name, bits_of(kind), lanes);
    } else if (code < SMP_DL_CODES) {
        snprintf(out, bytes, "%s%s", codes[code].name, lanes);
    } else {
        snprintf(out, bytes, "type%u_%u%s", code, bits_of(kind), lanes);
    }
}
