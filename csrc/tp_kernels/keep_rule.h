/* The rule of a call's dropout, one for all its elements; see smp_tp_dropout.
 *
 * Included by tp_kernels/keep.h, and by tp_kernels/gpu.c, which works it out for a GPU.
 */
#ifndef SMP_TP_KERNELS_KEEP_RULE_H
#define SMP_TP_KERNELS_KEEP_RULE_H

#include "tp_kernels/tp_kernels.h"

#ifndef INLINE
#    define INLINE static inline
#endif

#define KEEP_ROUNDS 7

typedef struct {
    uint32_t keys[KEEP_ROUNDS][2];
    uint16_t threshold; /* 0 where all are kept, the largest where none is */
    bool     random;    /* else `every` holds for each element */
    bool     every;
    float    scale; /* the factor of a kept element */
} keep_rule;

INLINE keep_rule
keep_rule_of(const smp_tp_dropout *dropout)
{
    keep_rule keep = {.random = dropout->p > 0 && dropout->p < 1};

    keep.every = !(dropout->p > 0);
    keep.scale = (float)(1 / (1 - dropout->p)); /* of p == 1 nothing is kept */
    for (uint32_t round = 0; round < KEEP_ROUNDS; round++) {
        keep.keys[round][0] = (uint32_t)dropout->seed + round * 0x9e3779b9u;
        keep.keys[round][1] = (uint32_t)(dropout->seed >> 32) + round * 0xbb67ae85u;
    }
    keep.threshold = keep.every ? 0 : UINT16_MAX;
    if (keep.random) {
        uint32_t nearest = (uint32_t)(dropout->p * 0x1p16 + 0.5);

        keep.threshold = (uint16_t)(nearest < UINT16_MAX ? nearest : UINT16_MAX);
    }
    return keep;
}

/* The global index of an element of the call. */
INLINE uint64_t
keep_index(const smp_tp_dropout *dropout, size_t row, size_t column)
{
    return dropout->first + row / dropout->run * dropout->jump +
           row % dropout->run * dropout->width + column;
}

#endif
