/* The kernels for processors with AVX-512 F, BW, DQ and VL. */
#include "comm/collective/kernels/reduce_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <stdint.h>

#    define SMP_VECTOR_BYTES 64
#    define SMP_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#    define LANES (SMP_VECTOR_BYTES / sizeof(float))

/* The processor's own conversions; their rounding is the instruction's, whatever the
 * thread's mode is. */
SMP_TARGET static void
widen_f16(void *out, const void *in, size_t count)
{
    size_t          whole = count / LANES * LANES;
    float          *o = out;
    const uint16_t *x = in;

    for (size_t i = 0; i < whole; i += LANES) {
        _mm512_storeu_ps(o + i, _mm512_cvtph_ps(_mm256_loadu_si256(
                                    (const __m256i *)(const void *)(x + i))));
    }
    smp_kernels_scalar.widen[SMP_F16](o + whole, x + whole, count - whole);
}

SMP_TARGET static void
narrow_f16(void *out, const void *in, size_t count)
{
    size_t       whole = count / LANES * LANES;
    uint16_t    *o = out;
    const float *x = in;

    for (size_t i = 0; i < whole; i += LANES) {
        _mm256_storeu_si256(
            (__m256i *)(void *)(o + i),
            _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    }
    smp_kernels_scalar.narrow[SMP_F16](o + whole, x + whole, count - whole);
}

#    include "comm/collective/kernels/reduce_vector.h"

const smp_kernels smp_kernels_avx512 = SMP_VECTOR_KERNELS;

#endif
