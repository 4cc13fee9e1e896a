/* Masked softmax with dropout.
 *
 * Included by tp_kernels/bodies.h.
 */
#ifndef SMP_TP_KERNELS_SOFTMAX_H
#define SMP_TP_KERNELS_SOFTMAX_H

/* Keys seen by a row, and its mask. */
typedef struct {
    size_t from;
    size_t to;
    size_t mask; /* element of the mask for key 0 */
    size_t at[SMP_TP_MASK_DIMS];
} row_sight;

INLINE void
see_keys(row_sight *sight, const smp_tp_sight *see, size_t row, size_t keys)
{
    int64_t last;

    sight->from = 0;
    sight->to = keys;
    if (!see->causal) {
        return;
    }
    last = see->first_query + (int64_t)(row % see->queries);
    if (last + 1 < (int64_t)keys) {
        sight->to = last < 0 ? 0 : (size_t)last + 1;
    }
    if (see->window > 0 && last >= (int64_t)see->window) {
        sight->from = (size_t)last + 1 - see->window;
        sight->from = sight->from < sight->to ? sight->from : sight->to;
    }
}

INLINE void
seek_mask_row(row_sight *sight, const smp_tp_mask *mask, size_t row)
{
    sight->mask = 0;
    for (int d = mask->dims - 1; d >= 0; d--) {
        sight->mask += row % mask->shape[d] * mask->strides[d];
        row /= mask->shape[d];
    }
}

INLINE void
next_mask_row(row_sight *sight, const smp_tp_mask *mask)
{
    for (int d = mask->dims - 1; d >= 0; d--) {
        if (++sight->at[d] < mask->shape[d]) {
            sight->mask += mask->strides[d];
            return;
        }
        sight->at[d] = 0;
        sight->mask -= (mask->shape[d] - 1) * mask->strides[d];
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
    lanes       keep_by = all_lanes(keep_scale(&call->dropout));
    lanes       scale = all_lanes(call->scale);
    row_sight   sight = {.mask = 0};

    for (size_t r = FIRST_ROW; r < call->rows; r += ROW_STEP) {
        const void *scores = row_of(call->scores, r, n, dtype);
        const void *mask;
        void       *probabilities = row_to(call->probabilities, r, n, dtype);
        void       *out = row_to(call->out, r, n, dtype);
        float      *exps = own_scratch(call->scratch, SMP_TP_SCRATCH_ROW(n));
        lanes       top = all_lanes(-INFINITY);
        lanes       total = all_lanes(0);
        float       peak;
        float       sum;

        if (ROW_STEP != 1) {
            seek_mask_row(&sight, &call->mask, r);
        }
        mask = row_of(call->mask.data, sight.mask, 1, dtype);
        see_keys(&sight, &call->sight, r, n);
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
        total = all_lanes(sum == 0 ? 0 : 1 / sum);
        keep_seek(&keep, &call->dropout, r, sight.from);
        for (size_t i = sight.from; i < sight.to; i += LANES) {
            lanes p = load(exps, i - sight.from, SIZE_MAX, SMP_TP_F32) * total;

            store(probabilities, i, sight.to, p, dtype);
            if (out != NULL) {
                store(out, i, sight.to, chosen(p * keep_by, keep_next(&keep)), dtype);
            }
        }
        write_unseen(probabilities, &sight, n, dtype);
        if (out != NULL) {
            write_unseen(out, &sight, n, dtype);
        }
        if (ROW_STEP == 1) {
            next_mask_row(&sight, &call->mask);
        }
    }
}

INLINE void
softmax_backward_of(const smp_tp_softmax_backward *call, smp_tp_dtype dtype)
{
    size_t      n = call->keys;
    keep_stream keep = keep_of(&call->dropout);
    lanes       keep_by = all_lanes(keep_scale(&call->dropout));
    lanes       scale = all_lanes(call->scale);
    row_sight   sight;

    for (size_t r = FIRST_ROW; r < call->rows; r += ROW_STEP) {
        const void *probabilities = row_of(call->probabilities, r, n, dtype);
        const void *grad = row_of(call->grad, r, n, dtype);
        void       *grad_scores = row_to(call->grad_scores, r, n, dtype);
        float      *kept = own_scratch(call->scratch, SMP_TP_SCRATCH_ROW(n));
        lanes       dot = all_lanes(0);

        see_keys(&sight, &call->sight, r, n);
        keep_seek(&keep, &call->dropout, r, sight.from);
        for (size_t i = sight.from; i < sight.to; i += LANES) {
            lanes g = /* the gradient of the probability */
                chosen(load(grad, i, sight.to, dtype) * keep_by, keep_next(&keep));

            store(kept, i - sight.from, SIZE_MAX, g, SMP_TP_F32);
            dot = product_sum(g, load(probabilities, i, sight.to, dtype), dot);
        }
        dot = all_lanes(lanes_sum(dot));
        for (size_t i = sight.from; i < sight.to; i += LANES) {
            lanes g = load(kept, i - sight.from, SIZE_MAX, SMP_TP_F32) - dot;
            lanes p = load(probabilities, i, sight.to, dtype);

            store(grad_scores, i, sight.to, p * g * scale, dtype);
        }
        write_unseen(grad_scores, &sight, n, dtype);
    }
}

FOR_DTYPES(softmax, smp_tp_softmax, softmax_of)
FOR_DTYPES(softmax_backward, smp_tp_softmax_backward, softmax_backward_of)

#endif
