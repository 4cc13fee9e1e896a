/* The mathematics of an element, for a vector of floats.
 *
 * Included by tp_kernels/bodies.h for CPUs and by tp_kernels/gpu.cu, so that no formula
 * is written twice.  Loops and sums are the includer's.
 */
#ifndef SMP_TP_KERNELS_FORMULAS_H
#define SMP_TP_KERNELS_FORMULAS_H

#include "tp_kernels/tp_kernels.h"

/* Row `row` of a tensor; NULL of NULL. */
INLINE const void *
row_of(const void *tensor, size_t row, size_t columns, smp_tp_dtype dtype)
{
    size_t bytes = dtype == SMP_TP_F32 ? 4 : 2;

    return tensor == NULL ? NULL : (const char *)tensor + row * columns * bytes;
}

INLINE void *
row_to(void *tensor, size_t row, size_t columns, smp_tp_dtype dtype)
{
    size_t bytes = dtype == SMP_TP_F32 ? 4 : 2;

    return tensor == NULL ? NULL : (char *)tensor + row * columns * bytes;
}

/* Bit i of `kept`: of lane i.  scale: the rule's. */
INLINE lanes
dropped(lanes x, lanes scale, uint32_t kept)
{
    return chosen(x * scale, kept);
}

INLINE lanes
normal(lanes x, lanes mean, lanes rstd)
{
    return (x - mean) * rstd;
}

/* The gradient of a norm's input; g: of its output, times the weight.  along_one,
 * along_y: the row's means of g and of g * y. */
INLINE lanes
normal_gradient(lanes g, lanes y, lanes along_one, lanes along_y, lanes rstd)
{
    return (g - along_one - y * along_y) * rstd;
}

/* The gradient of a score; g: of the probability p, dot: the row's sum of g * p. */
INLINE lanes
softmax_gradient(lanes p, lanes g, lanes dot, lanes scale)
{
    return p * (g - dot) * scale;
}

/* The factor of a row's exponentials; sum: of them. */
INLINE float
softmax_factor(float sum)
{
    return sum == 0 ? 0 : 1 / sum;
}

/* A row's numbers for the gradient of its logits. */
typedef struct {
    float factor;
    float scale; /* of the exponentials */
    float shift; /* of all columns */
    float sum;
    float target; /* of the target's probability: less so much */
    float every;  /* the same for each column */
} entropy_row;

INLINE entropy_row
entropy_row_of(const smp_tp_cross_entropy_backward *call, size_t row)
{
    entropy_row out = {.factor = call->factors[row]};

    out.sum = call->sum[row];
    out.target = 1 - call->smoothing;
    out.every = call->smoothing / (float)call->vocabulary;
    out.scale = out.factor / out.sum;
    out.shift = -out.every * out.factor;
    return out;
}

/* e: exp(logit - top). */
INLINE lanes
entropy_gradient(const entropy_row *of, lanes e)
{
    return product_sum(e, all_lanes(of->scale), all_lanes(of->shift));
}

INLINE float
entropy_gradient_at_target(const entropy_row *of, float e)
{
    return (e / of->sum - of->target - of->every) * of->factor;
}

/* Keys seen by a row. */
typedef struct {
    size_t from;
    size_t to;
} row_sight;

INLINE row_sight
keys_seen(const smp_tp_sight *see, size_t row, size_t keys)
{
    row_sight sight = {.from = 0, .to = keys};
    int64_t   last;

    if (!see->causal) {
        return sight;
    }
    last = see->first_query + (int64_t)(row % see->queries);
    if (last + 1 < (int64_t)keys) {
        sight.to = last < 0 ? 0 : (size_t)last + 1;
    }
    if (see->window > 0 && last >= (int64_t)see->window) {
        sight.from = (size_t)last + 1 - see->window;
        sight.from = sight.from < sight.to ? sight.from : sight.to;
    }
    return sight;
}

#endif
