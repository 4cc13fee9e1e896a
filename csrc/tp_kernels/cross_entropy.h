/* Cross-entropy of logits with their columns split over ranks.
 *
 * Included by tp_kernels/bodies.h.
 */
#ifndef SMP_TP_KERNELS_CROSS_ENTROPY_H
#define SMP_TP_KERNELS_CROSS_ENTROPY_H

/* Columns read twice, the second time from the first cache.  A sum of float32 is no
 * longer; these are added up in double. */
#define CHUNK 2048

INLINE size_t
cross_entropy_of(const smp_tp_cross_entropy *call, smp_tp_dtype dtype)
{
    size_t n = call->columns;
    size_t wrong = call->rows;

    for (size_t r = 0; r < call->rows; r++) {
        const void *logits = row_of(call->logits, r, n, dtype);
        int64_t     target = call->targets[r];
        float       top = -INFINITY;
        double      sum = 0;
        double      all = 0;

        for (size_t from = 0; from < n; from += CHUNK) {
            size_t to = n - from < CHUNK ? n : from + CHUNK;
            lanes  tops = all_lanes(top);
            lanes  base;
            lanes  exps = all_lanes(0);
            lanes  values = all_lanes(0);
            float  before = top;

            for (size_t i = from; i < to; i += LANES) {
                lanes x = load(logits, i, to, dtype);

                values += x;
                tops = larger(tops, first_lanes(x, to - i, -INFINITY));
            }
            top = lanes_largest(tops);
            base = all_lanes(top == -INFINITY ? 0 : top);
            if (top > before && sum != 0) {
                sum *= (double)lanes_largest(exp_below_zero(all_lanes(before) - base));
            }
            for (size_t i = from; i < to; i += LANES) {
                lanes x = load(logits, i, to, dtype);

                exps += exp_below_zero(first_lanes(x, to - i, -INFINITY) - base);
            }
            sum += (double)lanes_sum(exps);
            all += (double)lanes_sum(values);
        }
        call->top[r] = top;
        call->sum[r] = (float)sum;
        call->target[r] = 0;
        if (call->all != NULL) {
            call->all[r] = (float)all;
        }
        if (target >= call->start && target < call->start + (int64_t)n) {
            lanes x = load(logits, (size_t)(target - call->start),
                           (size_t)(target - call->start) + 1, dtype);

            call->target[r] = lanes_sum(x);
        } else if ((target < 0 || target >= call->vocabulary) &&
                   target != call->ignored && wrong == call->rows) {
            wrong = r;
        }
    }
    return wrong;
}

INLINE void
cross_entropy_backward_of(const smp_tp_cross_entropy_backward *call, smp_tp_dtype dtype)
{
    size_t n = call->columns;

    for (size_t r = 0; r < call->rows; r++) {
        const void *logits = row_of(call->logits, r, n, dtype);
        void       *grad = row_to(call->grad, r, n, dtype);
        int64_t     target = call->targets[r] - call->start;
        entropy_row of = entropy_row_of(call, r);
        lanes       top = all_lanes(call->top[r]);
        float       at_target = 0;

        if (of.factor == 0) { /* also where the logits are infinite */
            for (size_t i = 0; i < n; i += LANES) {
                store(grad, i, n, all_lanes(0), dtype);
            }
            continue;
        }
        if (target >= 0 && target < (int64_t)n) { /* grad may be logits */
            at_target =
                lanes_sum(load(logits, (size_t)target, (size_t)target + 1, dtype));
        }
        for (size_t i = 0; i < n; i += LANES) {
            lanes e = exp_below_zero(load(logits, i, n, dtype) - top);

            store(grad, i, n, entropy_gradient(&of, e), dtype);
        }
        if (target >= 0 && target < (int64_t)n) {
            float e = lanes_largest(exp_below_zero(all_lanes(at_target) - top));

            store(grad, (size_t)target, (size_t)target + 1,
                  all_lanes(entropy_gradient_at_target(&of, e)), dtype);
        }
    }
}

KERNEL size_t
cross_entropy(const smp_tp_cross_entropy *call)
{
    switch (call->dtype) {
    case SMP_TP_F16:
        return cross_entropy_of(call, SMP_TP_F16);
    case SMP_TP_BF16:
        return cross_entropy_of(call, SMP_TP_BF16);
    case SMP_TP_F32:
    case SMP_TP_DTYPES:
        break;
    }
    return cross_entropy_of(call, SMP_TP_F32);
}

FOR_DTYPES(cross_entropy_backward, smp_tp_cross_entropy_backward,
           cross_entropy_backward_of)

#endif
