/* The kernels for processors with AVX-512 F, BW, DQ and VL. */
#include "comm/collective/kernels/reduce_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <stdint.h>

#    define SMP_VECTOR_BYTES 64
#    define SMP_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#    define SMP_WIDEN_F16(half) _mm512_cvtph_ps((__m256i)(half))
#    define SMP_NARROW_F16(single)                                                     \
        _mm512_cvtps_ph((__m512)(single), _MM_FROUND_TO_NEAREST_INT)
#    include "comm/collective/kernels/reduce_vector.h"

const smp_kernels smp_kernels_avx512 = SMP_VECTOR_KERNELS;

#endif
