/* The kernels for processors with AVX2 and F16C. */
#include "comm/collective/kernels/reduce_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <stdint.h>

#    define SMP_VECTOR_BYTES 32
#    define SMP_TARGET __attribute__((target("avx2,f16c")))
#    define SMP_WIDEN_F16(half) _mm256_cvtph_ps((__m128i)(half))
#    define SMP_NARROW_F16(single)                                                     \
        _mm256_cvtps_ph((__m256)(single), _MM_FROUND_TO_NEAREST_INT)
#    include "comm/collective/kernels/reduce_vector.h"

const smp_kernels smp_kernels_avx2 = SMP_VECTOR_KERNELS;

#endif
