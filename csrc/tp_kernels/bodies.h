/* The kernels for CPUs, written once for vectors of LANES floats.
 *
 * Included once by each file that makes a set of kernels (tp_kernels/scalar.c, avx2.c,
 * avx512.c), which defines before it:
 *
 *   LANES, lanes         a vector of floats, with C's operators
 *   WIDES, wides         a vector of words of 64 bits, with them too
 *   KERNEL, INLINE       before a kernel, and before a function inside one
 *   load, store          elements i .. min(i + LANES, end) of a tensor; other lanes 0
 *   first_lanes          lanes from `count` on become `rest`
 *   chosen               lanes with a bit of 0 become 0
 *   larger(a, b)         b where one of them is NaN
 *   zero_where_below     y, 0 where x is below the limit
 *   times_power_of_two   y * 2^n, where n is the lowest 9 bits of a float
 *   halves_kept          bit i: half i % 8 of counter i / 8 is at least the threshold
 */
#ifndef SMP_TP_KERNELS_BODIES_H
#define SMP_TP_KERNELS_BODIES_H

#include "tp_kernels/formulas.h"

#include "tp_kernels/keep.h"
#include "tp_kernels/keep_stream.h"

/* The function `name` for the call's dtype, each with a copy of `body` of its own. */
#define FOR_DTYPES(name, type, body)                                                   \
    KERNEL void name(const type *call)                                                 \
    {                                                                                  \
        switch (call->dtype) {                                                         \
        case SMP_TP_F32:                                                               \
            body(call, SMP_TP_F32);                                                    \
            break;                                                                     \
        case SMP_TP_F16:                                                               \
            body(call, SMP_TP_F16);                                                    \
            break;                                                                     \
        case SMP_TP_BF16:                                                              \
            body(call, SMP_TP_BF16);                                                   \
            break;                                                                     \
        case SMP_TP_DTYPES:                                                            \
            break;                                                                     \
        }                                                                              \
    }

/* e^x for x <= 0, within 1 ulp or 2; 0 for a subnormal result.  x = n ln 2 + r; the
 * polynomial is from Cephes' expf(), for |r| <= ln 2 / 2. */
INLINE lanes
exp_below_zero(lanes x)
{
    static const float terms[] = {1.3981999507e-3f,
                                  8.3334519073e-3f,
                                  4.1665795894e-2f,
                                  1.6666665459e-1f,
                                  5.0000001201e-1f,
                                  1,
                                  1};
    lanes              shift = all_lanes(0x1.8p23f); /* rounds to a whole number */
    lanes              shifted = product_sum(x, all_lanes(1.44269504f), shift);
    lanes              n = shifted - shift;
    lanes              r = product_sum(n, all_lanes(-0.693359375f), x);
    lanes              y = all_lanes(1.9875691500e-4f);

    r = product_sum(n, all_lanes(2.12194440e-4f), r);
    for (size_t i = 0; i < sizeof(terms) / sizeof(terms[0]); i++) {
        y = product_sum(y, r, all_lanes(terms[i]));
    }
    return zero_where_below(times_power_of_two(y, shifted), x, -87.33654f);
}

#include "tp_kernels/cross_entropy.h"
#include "tp_kernels/embedding.h"
#include "tp_kernels/residual.h"

#include "tp_kernels/norm.h" /* after residual.h: it takes the rows from there */

#include "tp_kernels/softmax.h"

#define SMP_TP_KERNELS                                                                 \
    {                                                                                  \
        .softmax = softmax, .softmax_backward = softmax_backward,                      \
        .residual = residual, .residual_backward = residual_backward, .norm = norm,    \
        .norm_backward = norm_backward, .cross_entropy = cross_entropy,                \
        .cross_entropy_backward = cross_entropy_backward, .gather = gather,            \
        .scatter = scatter,                                                            \
    }

#endif
