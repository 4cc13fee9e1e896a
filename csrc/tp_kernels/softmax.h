/* Masked softmax with dropout.
 *
 * Included by tp_kernels/bodies.h.
 */
#ifndef SMP_TP_KERNELS_SOFTMAX_H
#define SMP_TP_KERNELS_SOFTMAX_H

/* A row's place in the mask. */
typedef struct {
    size_t first; /* element for key 0 */
    size_t at[SMP_TP_MASK_DIMS];
} mask_row;

INLINE void
next_mask_row(mask_row *row, const smp_tp_mask *mask)
{
    for (int d = mask->dims - 1; d >= 0; d--) {
        if (++row->at[d] < mask->shape[d]) {
            row->first += mask->strides[d];
            return;
        }
        row->at[d] = 0;
        row->first -= (mask->shape[d] - 1) * mask->strides[d];
    }
}

/* Zeros for the keys unseen by the row. */
INLINE void
write_unseen(void *row, const row_sight *sight, size_t keys, smp_tp_dtype dtype)
{
    for (size_t i = 0; i < sight->from; i += LANES) {
        store(row, i, sight->from, all_lanes(0), dtype);
    }
    for (size_t i = sight->to; i < keys; i += LANES) {
        store(row, i, keys, all_lanes(0), dtype);
    }
}

INLINE void
softmax_of(const smp_tp_softmax *call, smp_tp_dtype dtype)
{
    size_t      n = call->keys;
    keep_stream keep = keep_of(&call->dropout);
    lanes       keep_by = all_lanes(keep.rule.scale);
    lanes       scale = all_lanes(call->scale);
    mask_row    place = {.first = 0};

    for (size_t r = 0; r < call->rows; r++) {
        const void *scores = row_of(call->scores, r, n, dtype);
        const void *mask = row_of(call->mask.data, place.first, 1, dtype);
        void       *probabilities = row_to(call->probabilities, r, n, dtype);
        void       *out = row_to(call->out, r, n, dtype);
        float      *exps = call->scratch;
        row_sight   sight = keys_seen(&call->sight, r, n);
        lanes       top = all_lanes(-INFINITY);
        lanes       total = all_lanes(0);
        float       peak;
        float       sum;

        /* exps holds those of sight.from and on. */
        for (size_t i = sight.from; i < sight.to; i += LANES) {
            lanes s = load(scores, i, sight.to, dtype) * scale;

            if (mask != NULL) {
                s += load(mask, i, sight.to, dtype);
            }
            s = first_lanes(s, sight.to - i, -INFINITY);
            store(exps, i - sight.from, SIZE_MAX, s, SMP_TP_F32);
            top = larger(top, s);
        }
        peak = lanes_largest(top);
        peak = peak == -INFINITY ? 0 : peak;
        for (size_t i = 0; i < sight.to - sight.from; i += LANES) {
            lanes e =
                exp_below_zero(load(exps, i, SIZE_MAX, SMP_TP_F32) - all_lanes(peak));

            store(exps, i, SIZE_MAX, e, SMP_TP_F32);
            total += e;
        }
        sum = lanes_sum(total);
        total = all_lanes(softmax_factor(sum));
        keep_seek(&keep, &call->dropout, r, sight.from);
        for (size_t i = sight.from; i < sight.to; i += LANES) {
            lanes p = load(exps, i - sight.from, SIZE_MAX, SMP_TP_F32) * total;

            store(probabilities, i, sight.to, p, dtype);
            if (out != NULL) {
                store(out, i, sight.to, dropped(p, keep_by, keep_next(&keep)), dtype);
            }
        }
        write_unseen(probabilities, &sight, n, dtype);
        if (out != NULL) {
            write_unseen(out, &sight, n, dtype);
        }
        next_mask_row(&place, &call->mask);
    }
}

INLINE void
softmax_backward_of(const smp_tp_softmax_backward *call, smp_tp_dtype dtype)
{
    size_t      n = call->keys;
    keep_stream keep = keep_of(&call->dropout);
    lanes       keep_by = all_lanes(keep.rule.scale);
    lanes       scale = all_lanes(call->scale);

    for (size_t r = 0; r < call->rows; r++) {
        const void *probabilities = row_of(call->probabilities, r, n, dtype);
        const void *grad = row_of(call->grad, r, n, dtype);
        void       *grad_scores = row_to(call->grad_scores, r, n, dtype);
        float      *kept = call->scratch;
        row_sight   sight = keys_seen(&call->sight, r, n);
        lanes       dot = all_lanes(0);

        keep_seek(&keep, &call->dropout, r, sight.from);
        for (size_t i = sight.from; i < sight.to; i += LANES) {
            lanes g = /* the gradient of the probability */
                dropped(load(grad, i, sight.to, dtype), keep_by, keep_next(&keep));

            store(kept, i - sight.from, SIZE_MAX, g, SMP_TP_F32);
            dot = product_sum(g, load(probabilities, i, sight.to, dtype), dot);
        }
        dot = all_lanes(lanes_sum(dot));
        for (size_t i = sight.from; i < sight.to; i += LANES) {
            lanes g = load(kept, i - sight.from, SIZE_MAX, SMP_TP_F32);
            lanes p = load(probabilities, i, sight.to, dtype);

            store(grad_scores, i, sight.to, softmax_gradient(p, g, dot, scale), dtype);
        }
        write_unseen(grad_scores, &sight, n, dtype);
    }
}

FOR_DTYPES(softmax, smp_tp_softmax, softmax_of)
FOR_DTYPES(softmax_backward, smp_tp_softmax_backward, softmax_backward_of)

#endif
