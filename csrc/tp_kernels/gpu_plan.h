/* The second parameter of a GPU's kernels, and that of the sums of columns.
 *
 * Included by tp_kernels/gpu.c, and for the kernels by tp_kernels/gpu_entries.h.
 */
#ifndef SMP_TP_KERNELS_GPU_PLAN_H
#define SMP_TP_KERNELS_GPU_PLAN_H

#include "tp_kernels/keep_rule.h"

/* Threads of a block. */
#define SMP_TP_GPU_BLOCK 256

/* Eights of a row that a thread holds. */
#define SMP_TP_GPU_HELD 4

/* The host's part of a call: the dropout's rule, and in a kernel of columns the parts
 * of the matrix. */
typedef struct {
    keep_rule keep;
    unsigned  across;  /* threads of a block beside one another, eight columns each */
    unsigned  at_once; /* rows of a block at once */
    unsigned  slabs;   /* blocks beside one another */
    unsigned  groups;  /* blocks below one another, each with a sum of each column */
} smp_tp_gpu_plan;

#define SMP_TP_GPU_KINDS 3 /* of sums in one call, at most */

/* out[k][c] = the sum of part i's row k, of SMP_TP_SCRATCH_ROW(columns) floats. */
typedef struct {
    smp_tp_dtype dtype; /* of out */
    size_t       columns;
    size_t       parts;
    size_t       kinds;
    const float *first; /* [parts, kinds, row] */
    void        *out[SMP_TP_GPU_KINDS];
} smp_tp_gpu_sums;

#endif
