/* Bias, dropout and residual, then layer norm.
 *
 * Included by tp_kernels/bodies.h.
 */
#ifndef SMP_TP_KERNELS_NORM_H
#define SMP_TP_KERNELS_NORM_H

INLINE void
norm_of(const smp_tp_norm *call, smp_tp_dtype dtype)
{
    size_t      n = call->columns;
    keep_stream keep = keep_of(&call->dropout);
    lanes       scale = all_lanes(keep.rule.scale);

    for (size_t r = 0; r < call->rows; r++) {
        void *sum = row_to(call->sum, r, n, dtype);
        void *out = row_to(call->out, r, n, dtype);
        lanes total = all_lanes(0);
        lanes squares = all_lanes(0);
        lanes mean;
        lanes rstd;

        keep_seek(&keep, &call->dropout, r, 0);
        residual_row(row_of(call->x, r, n, dtype), call->bias,
                     row_of(call->residual, r, n, dtype), sum, n, &keep, scale, dtype);
        /* The sum as written, since backward reads that. */
        for (size_t i = 0; i < n; i += LANES) {
            total += load(sum, i, n, dtype);
        }
        call->mean[r] = lanes_sum(total) / (float)n;
        mean = all_lanes(call->mean[r]);
        for (size_t i = 0; i < n; i += LANES) {
            lanes off = first_lanes(load(sum, i, n, dtype) - mean, n - i, 0);

            squares = product_sum(off, off, squares);
        }
        call->rstd[r] = 1 / sqrtf(lanes_sum(squares) / (float)n + call->eps);
        rstd = all_lanes(call->rstd[r]);
        for (size_t i = 0; i < n; i += LANES) {
            lanes y = normal(load(sum, i, n, dtype), mean, rstd);

            if (call->weight != NULL) {
                y *= load(call->weight, i, n, dtype);
            }
            if (call->shift != NULL) {
                y += load(call->shift, i, n, dtype);
            }
            store(out, i, n, y, dtype);
        }
    }
}

INLINE void
norm_backward_of(const smp_tp_norm_backward *call, smp_tp_dtype dtype)
{
    size_t      n = call->columns;
    keep_stream keep = keep_of(&call->dropout);
    lanes       scale = all_lanes(keep.rule.scale);
    size_t      room = 2 * SMP_TP_SCRATCH_ROW(n);
    column_sums bias = sums_in(call->scratch, n);
    column_sums weight = sums_in(call->scratch + room, n);
    column_sums shift = sums_in(call->scratch + 2 * room, n);

    for (size_t r = 0; r < call->rows; r++) {
        const void *grad_out = row_of(call->grad_out, r, n, dtype);
        const void *grad_sum = row_of(call->grad_sum, r, n, dtype);
        const void *sum = row_of(call->sum, r, n, dtype);
        void       *grad_residual = row_to(call->grad_residual, r, n, dtype);
        void       *grad_x = row_to(call->grad_x, r, n, dtype);
        lanes       mean = all_lanes(call->mean[r]);
        lanes       rstd = all_lanes(call->rstd[r]);
        lanes       along_one = all_lanes(0);
        lanes       along_y = all_lanes(0);

        for (size_t i = 0; i < n; i += LANES) {
            lanes g = load(grad_out, i, n, dtype);
            lanes y = normal(load(sum, i, n, dtype), mean, rstd);

            sums_add(&weight, i, g * y);
            sums_add(&shift, i, g);
            if (call->weight != NULL) {
                g *= load(call->weight, i, n, dtype);
            }
            along_one += g;
            along_y = product_sum(g, y, along_y);
        }
        along_one = all_lanes(lanes_sum(along_one) / (float)n);
        along_y = all_lanes(lanes_sum(along_y) / (float)n);
        keep_seek(&keep, &call->dropout, r, 0);
        for (size_t i = 0; i < n; i += LANES) {
            lanes g = load(grad_out, i, n, dtype);
            lanes y = normal(load(sum, i, n, dtype), mean, rstd);

            if (call->weight != NULL) {
                g *= load(call->weight, i, n, dtype);
            }
            g = normal_gradient(g, y, along_one, along_y, rstd);
            if (grad_sum != NULL) {
                g += load(grad_sum, i, n, dtype);
            }
            store(grad_residual, i, n, g, dtype);
            g = dropped(g, scale, keep_next(&keep));
            if (grad_x != NULL) {
                store(grad_x, i, n, g, dtype);
            }
            sums_add(&bias, i, g);
        }
        sums_end_row(&bias);
        sums_end_row(&weight);
        sums_end_row(&shift);
    }
    sums_write(&bias, call->grad_bias, dtype);
    sums_write(&weight, call->grad_weight, dtype);
    sums_write(&shift, call->grad_shift, dtype);
}

FOR_DTYPES(norm, smp_tp_norm, norm_of)
FOR_DTYPES(norm_backward, smp_tp_norm_backward, norm_backward_of)

#endif
