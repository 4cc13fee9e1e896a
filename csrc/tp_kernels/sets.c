/* The choice of a set of kernels for a processor. */
#include "tp_kernels/sets.h"

size_t
smp_tp_dtype_bytes(smp_tp_dtype dtype)
{
    return dtype == SMP_TP_F32 ? 4 : 2;
}

const smp_tp_kernels *
smp_tp_kernels_of(smp_isa isa)
{
    static const smp_tp_kernels *const sets[SMP_ISAS] = {
        [SMP_ISA_SCALAR] = &smp_tp_kernels_scalar,
#if defined(__x86_64__)
        [SMP_ISA_AVX2] = &smp_tp_kernels_avx2,
        [SMP_ISA_AVX512] = &smp_tp_kernels_avx512,
#endif
    };

    return smp_isa_runs(isa) ? sets[isa] : NULL;
}

const smp_tp_kernels *
smp_tp_kernels_best(void)
{
    for (smp_isa isa = SMP_ISAS; isa-- > SMP_ISA_SCALAR;) {
        const smp_tp_kernels *kernels = smp_tp_kernels_of(isa);

        if (kernels != NULL) {
            return kernels;
        }
    }
    return &smp_tp_kernels_scalar;
}
