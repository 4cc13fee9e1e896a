/* Adding up tensors element by element, always in the same order.
 *
 * n tensors are reduced along a binary tree over their numbers.  The tree is the whole
 * definition of the result, for any kernels and any pieces:
 *
 *     tree(i)      = in[i]
 *     tree(a .. b) = tree(a .. a+p) op tree(a+p .. b)
 *
 * with p the largest power of two below b - a; for five: ((0+1)+(2+3))+4.
 *
 * Rounding   f32, f64: at each op, to nearest even.  f16, bf16, f8: widened to f32
 *            without loss, every op (also AVG's division and PREMUL_SUM's factor) is
 *            one of f32, and the root of the tree is rounded once.  Integers wrap
 *            around.
 * SUM        of bool is or.  PRODUCT of bool is and.
 * MIN, MAX   NaN if either is; of two zeros with different signs, the right one.
 * BAND, BOR, BXOR  integers and bool.
 * AVG        SUM, then one division by n (of integers: towards zero).  Not bool.
 * PREMUL_SUM SUM of in[i] times the factor of i, in f32 (f64 for f64).  Floating types.
 *
 * The plain C kernels (comm/collective/kernels/reduce_scalar.c) are the definition.
 * The others, chosen by the processor at run time, give the same bits, except for the
 * choice between two NaNs of a sum or product.
 *
 * Threads  any; the caller's memory.
 */
#ifndef SMP_COMM_COLLECTIVE_KERNELS_REDUCE_H
#define SMP_COMM_COLLECTIVE_KERNELS_REDUCE_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/kernels/dtype.h"
#include "comm/collective/kernels/reduce_kernels.h"
#include "common/isa.h"

/* NULL: this processor cannot run them. */
const smp_kernels *smp_kernels_of(smp_isa isa);

/* The fastest set for this processor. */
const smp_kernels *smp_kernels_best(void);

/* Whether tensors of the dtype can be reduced so. */
bool smp_reduction_defined(smp_reduction, smp_dtype);

/* Bytes of scratch for smp_reduce(), and its most tensors. */
#define SMP_REDUCE_SCRATCH ((size_t)192 << 10)
#define SMP_REDUCE_TENSORS 1024

/* The type of the tree's terms, kept or sent: f32 for f16, bf16, f8. */
smp_dtype smp_term_dtype(smp_dtype dtype);

/* A given node of the tree: `n` tensors are below it. */
typedef struct {
    const void *data; /* n == 1: the tensor itself; else from smp_reduce_term() */
    int         n;
    double      factor; /* n == 1: its one, for PREMUL_SUM */
} smp_term;

/* out = tree(0 .. n) as a term of a larger tree: of smp_term_dtype(), not divided;
 * n >= 2.  The rest as below. */
void smp_reduce_term(const smp_kernels *kernels, smp_reduction reduction,
                     smp_dtype dtype, void *out, const void *const *in,
                     const double *factors, int n, size_t count, void *scratch);

/* out = tree(0 .. all), from terms: nodes of that tree that cover it, in order.  out
 * may be the data of a term with n == 1. */
void smp_reduce_terms(const smp_kernels *kernels, smp_reduction reduction,
                      smp_dtype dtype, void *out, const smp_term *terms, int nterms,
                      size_t count, void *scratch);

/* out = tree(0 .. n), of `count` elements; a defined reduction, 1 <= n <=
 * SMP_REDUCE_TENSORS.  factors[i] counts for PREMUL_SUM only, else NULL will do.  out
 * may be one of in[]; scratch is 64-byte aligned and overlaps nothing. */
void smp_reduce(const smp_kernels *kernels, smp_reduction reduction, smp_dtype dtype,
                void *out, const void *const *in, const double *factors, int n,
                size_t count, void *scratch);

#endif
