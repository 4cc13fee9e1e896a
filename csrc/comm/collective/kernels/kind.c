/* Names and sizes of types as DLPack tells them. */
#include "comm/collective/kernels/kind.h"

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

    if (kind == 0 || (unsigned)dtype >= SMP_DTYPES) { /* of a message that is none */
        return count;
    }
    per = smp_kind_bytes(kind, dtype) / smp_dtype_bytes(dtype);
    return per == 0 ? count : count / per;
}

void
smp_kind_name(smp_kind kind, smp_dtype dtype, char *out, size_t bytes)
{
    static const char *const families[] = {"int",    "uint",    "float", "opaque",
                                           "bfloat", "complex", "bool"};
    static const char *const whole[] = {
        [7] = "float8_e3m4",      [8] = "float8_e4m3",      [9] = "float8_e4m3b11fnuz",
        [10] = "float8_e4m3fn",   [11] = "float8_e4m3fnuz", [12] = "float8_e5m2",
        [13] = "float8_e5m2fnuz", [14] = "float8_e8m0fnu",  [15] = "float6_e2m3fn",
        [16] = "float6_e3m2fn",   [17] = "float4_e2m1fn",
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
    if (code < sizeof(families) / sizeof(families[0])) {
        snprintf(out, bytes, "%s%u%s", families[code], bits_of(kind), lanes);
    } else if (code < sizeof(whole) / sizeof(whole[0])) {
        snprintf(out, bytes, "%s%s", whole[code], lanes);
    } else {
        snprintf(out, bytes, "type%u_%u%s", code, bits_of(kind), lanes);
    }
}
