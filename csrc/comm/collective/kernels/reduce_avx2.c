/* The kernels for processors with AVX2 and F16C. */
#include "comm/collective/kernels/reduce_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <stdint.h>

#    define SMP_VECTOR_BYTES 32
#    define SMP_TARGET __attribute__((target("avx2,f16c")))
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
        _mm256_storeu_ps(o + i, _mm256_cvtph_ps(_mm_loadu_si128(
                                    (const __m128i *)(const void *)(x + i))));
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
        _mm_storeu_si128(
            (__m128i *)(void *)(o + i),
            _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    }
    smp_kernels_scalar.narrow[SMP_F16](o + whole, x + whole, count - whole);
}

#    include "comm/collective/kernels/reduce_vector.h"

const smp_kernels smp_kernels_avx2 = SMP_VECTOR_KERNELS;

#endif
