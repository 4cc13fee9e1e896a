/* The processor's vector instructions; each kind has a set of kernels.
 *
 * Threads  any.
 */
#ifndef SMP_COMMON_ISA_H
#define SMP_COMMON_ISA_H

#include <stdbool.h>

typedef enum {
    SMP_ISA_SCALAR, /* plain C */
    SMP_ISA_AVX2,   /* with FMA and F16C */
    SMP_ISA_AVX512, /* AVX-512 F, BW, DQ and VL */
    SMP_ISAS
} smp_isa;

/* Whether this processor, and the system on it, can run them. */
bool smp_isa_runs(smp_isa isa);

#endif
