/* The generator of dropout; see smp_tp_dropout.
 *
 * Included by tp_kernels/bodies.h and tp_kernels/gpu.cu.
 */
#ifndef SMP_TP_KERNELS_KEEP_H
#define SMP_TP_KERNELS_KEEP_H

#include "tp_kernels/keep_rule.h"

/* The four words of each of WIDES counters, from `counter` on.  Words have 32 bits; the
 * higher bits do not count. */
INLINE void
keep_words(const keep_rule *keep, uint64_t counter, wides c[4])
{
    wides start = counters_from(counter);
    wides zero = {0};

    c[0] = start;
    c[1] = start >> 32;
    c[2] = zero;
    c[3] = zero;
    for (int round = 0; round < KEEP_ROUNDS; round++) {
        wides even = wide_product(c[0], 0xd2511f53u);
        wides odd = wide_product(c[2], 0xcd9e8d57u);

        c[0] = (odd >> 32) ^ c[1] ^ keep->keys[round][0];
        c[1] = odd;
        c[2] = (even >> 32) ^ c[3] ^ keep->keys[round][1];
        c[3] = even;
    }
}

#endif
