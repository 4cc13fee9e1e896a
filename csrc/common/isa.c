#include "common/isa.h"

#if defined(__x86_64__)
#    include <cpuid.h>

/* clang 14 has no name for it in __builtin_cpu_supports(). */
static bool
has_f16c(void)
{
    unsigned a;
    unsigned b;
    unsigned c;
    unsigned d;

    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool
smp_isa_runs(smp_isa isa)
{
    switch (isa) {
    case SMP_ISA_SCALAR:
        return true;
#if defined(__x86_64__)
    case SMP_ISA_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               has_f16c();
    case SMP_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    case SMP_ISA_AVX2:
    case SMP_ISA_AVX512:
#endif
    case SMP_ISAS:
        break;
    }
    return false;
}
