/* Bias, dropout and residual, then layer norm, on a GPU.
 *
 * Included by tp_kernels/gpu.cu.  Backward has two kernels, then column_sums(): the
 * first takes the means along each row, the second has the columns.
 */
#ifndef SMP_TP_KERNELS_GPU_NORM_H
#define SMP_TP_KERNELS_GPU_NORM_H

template <smp_tp_dtype DTYPE, bool BLOCK, int HELD, bool WHOLE>
KERNEL void
norm(const smp_tp_norm &call, const smp_tp_gpu_plan &plan)
{
    typedef team<BLOCK> team;
    const unsigned      n = (unsigned)call.columns;
    const keep_rule    &keep = plan.keep;

    for (size_t r = team::first_row(); r < call.rows; r = team::next_row(r)) {
        const void    *x = row_of(call.x, r, n, DTYPE);
        const void    *residual = row_of(call.residual, r, n, DTYPE);
        void          *sum = row_to(call.sum, r, n, DTYPE);
        void          *out = row_to(call.out, r, n, DTYPE);
        const uint64_t index = index_of(keep, call.dropout, r, 0);
        eight<DTYPE>   given[HELD_ROOM(HELD)];
        eight<DTYPE>   added[HELD_ROOM(HELD)];
        float          y[HELD_ROOM(HELD)][8]; /* the sum */
        float          mean = 0;
        float          rstd = 0;

        const auto read = [&](int u, unsigned i) {
            given[u] = load_eight<DTYPE, WHOLE>(x, i, n);
            added[u] = load_eight<DTYPE, WHOLE>(residual, i, n);
        };
        const auto read_sum = [&](int u, unsigned i) {
            widen<DTYPE>(y[u], load_eight<DTYPE, WHOLE>(sum, i, n));
        };

        if (HELD != 0) {
            own_eights<BLOCK, HELD>(n, read);
        }
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            const eight_halves halves = halves_from(keep, index + i);
            float              bias[8];
            float              more[8];

            if (HELD == 0) {
                read(u, i);
            }
            widen<DTYPE>(y[u], given[u]);
            widen<DTYPE>(more, added[u]);
            widen<DTYPE>(bias, load_eight<DTYPE, WHOLE>(call.bias, i, n));
            for (int j = 0; j < 8; j++) {
                y[u][j] += bias[j];
            }
            drop_eight(y[u], keep, halves);
            for (int j = 0; j < 8; j++) {
                y[u][j] += more[j];
            }
            store_eight<DTYPE, WHOLE>(sum, i, n, y[u]);
            /* The sum as written, since backward reads that. */
            widen<DTYPE>(y[u], narrow<DTYPE>(y[u]));
            for (int j = 0; j < 8; j++) {
                mean += WHOLE || i + j < n ? y[u][j] : 0;
            }
        });
        mean = team::sum(mean) / (float)n;
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            if (HELD == 0) {
                read_sum(u, i);
            }
            for (int j = 0; j < 8; j++) {
                const float off = WHOLE || i + j < n ? y[u][j] - mean : 0;

                rstd = product_sum(off, off, rstd);
            }
        });
        rstd = 1 / sqrtf(team::sum(rstd) / (float)n + call.eps);
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            float weight[8];
            float shift[8];

            if (HELD == 0) {
                read_sum(u, i);
            }
            widen<DTYPE>(weight, load_eight<DTYPE, WHOLE>(call.weight, i, n));
            widen<DTYPE>(shift, load_eight<DTYPE, WHOLE>(call.shift, i, n));
            for (int j = 0; j < 8; j++) {
                y[u][j] = product_sum(normal(y[u][j], mean, rstd),
                                      call.weight == NULL ? 1 : weight[j], shift[j]);
            }
            store_eight<DTYPE, WHOLE>(out, i, n, y[u]);
        });
        if (team::number() == 0) {
            call.mean[r] = mean;
            call.rstd[r] = rstd;
        }
    }
}

/* The means along each row, in front of the columns' sums. */
INLINE float *
along_one_of(const smp_tp_norm_backward &call)
{
    return call.scratch;
}

INLINE float *
along_y_of(const smp_tp_norm_backward &call)
{
    return call.scratch + call.rows;
}

template <smp_tp_dtype DTYPE, bool BLOCK, int HELD, bool WHOLE>
KERNEL void
norm_means(const smp_tp_norm_backward &call, const smp_tp_gpu_plan &)
{
    typedef team<BLOCK> team;
    const unsigned      n = (unsigned)call.columns;

    for (size_t r = team::first_row(); r < call.rows; r = team::next_row(r)) {
        const void  *grad_out = row_of(call.grad_out, r, n, DTYPE);
        const void  *sum = row_of(call.sum, r, n, DTYPE);
        const float  mean = call.mean[r];
        const float  rstd = call.rstd[r];
        eight<DTYPE> of_out[HELD_ROOM(HELD)];
        eight<DTYPE> of_sum[HELD_ROOM(HELD)];
        float        along_one = 0;
        float        along_y = 0;

        const auto read = [&](int u, unsigned i) {
            of_out[u] = load_eight<DTYPE, WHOLE>(grad_out, i, n);
            of_sum[u] = load_eight<DTYPE, WHOLE>(sum, i, n);
        };

        if (HELD != 0) {
            own_eights<BLOCK, HELD>(n, read);
        }
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            float g[8];
            float x[8];
            float weight[8];

            if (HELD == 0) {
                read(u, i);
            }
            widen<DTYPE>(g, of_out[u]);
            widen<DTYPE>(x, of_sum[u]);
            widen<DTYPE>(weight, load_eight<DTYPE, WHOLE>(call.weight, i, n));
            for (int j = 0; j < 8; j++) { /* g is 0 behind the row */
                g[j] *= call.weight == NULL ? 1 : weight[j];
                along_one += g[j];
                along_y = product_sum(g[j], normal(x[j], mean, rstd), along_y);
            }
        });
        along_one = team::sum(along_one) / (float)n;
        along_y = team::sum(along_y) / (float)n;
        if (team::number() == 0) {
            along_one_of(call)[r] = along_one;
            along_y_of(call)[r] = along_y;
        }
    }
}

template <smp_tp_dtype DTYPE, bool WHOLE>
KERNEL void
norm_backward(const smp_tp_norm_backward &call, const smp_tp_gpu_plan &plan)
{
    enum { AHEAD = DTYPE == SMP_TP_F32 ? 1 : 2 };
    const size_t       n = call.columns;
    const own_part     own = part_of_thread(plan, call.rows, n);
    const keep_rule   &keep = plan.keep;
    const eight<DTYPE> weight =
        load_eight<DTYPE, WHOLE>(own.column < n ? call.weight : NULL, own.column, n);
    float  of_bias[8] = {0};
    float  of_weight[8] = {0};
    float  of_shift[8] = {0};
    float *sums = call.scratch + SMP_TP_SCRATCH_ROW(2 * call.rows);

    for (size_t row = own.row; row < own.rows; row += AHEAD * own.step) {
        eight<DTYPE> grad_out[AHEAD];
        eight<DTYPE> grad_sum[AHEAD];
        eight<DTYPE> sum[AHEAD];

#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const size_t r = row + i * own.step;

            if (r < own.rows) {
                grad_out[i] = load_eight<DTYPE, WHOLE>(
                    row_of(call.grad_out, r, n, DTYPE), own.column, n);
                grad_sum[i] = load_eight<DTYPE, WHOLE>(
                    row_of(call.grad_sum, r, n, DTYPE), own.column, n);
                sum[i] = load_eight<DTYPE, WHOLE>(row_of(call.sum, r, n, DTYPE),
                                                  own.column, n);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const size_t r = row + i * own.step;

            if (r < own.rows) {
                const eight_halves halves =
                    halves_from(keep, index_of(keep, call.dropout, r, own.column));
                const float mean = call.mean[r];
                const float rstd = call.rstd[r];
                const float along_one = along_one_of(call)[r];
                const float along_y = along_y_of(call)[r];
                float       g[8];
                float       x[8];
                float       more[8];
                float       by[8];

                widen<DTYPE>(g, grad_out[i]);
                widen<DTYPE>(x, sum[i]);
                widen<DTYPE>(more, grad_sum[i]);
                widen<DTYPE>(by, weight);
                for (int j = 0; j < 8; j++) {
                    const float y = normal(x[j], mean, rstd);

                    of_weight[j] = product_sum(g[j], y, of_weight[j]);
                    of_shift[j] += g[j];
                    g[j] *= call.weight == NULL ? 1 : by[j];
                    g[j] = normal_gradient(g[j], y, along_one, along_y, rstd) + more[j];
                }
                store_eight<DTYPE, WHOLE>(row_to(call.grad_residual, r, n, DTYPE),
                                          own.column, n, g);
                drop_eight(g, keep, halves);
                for (int j = 0; j < 8; j++) {
                    of_bias[j] += g[j];
                }
                if (call.grad_x != NULL) {
                    store_eight<DTYPE, WHOLE>(row_to(call.grad_x, r, n, DTYPE),
                                              own.column, n, g);
                }
            }
        }
    }
    write_sums(plan, &own, sums, n, 3, 0, of_bias);
    write_sums(plan, &own, sums, n, 3, 1, of_weight);
    write_sums(plan, &own, sums, n, 3, 2, of_shift);
}

#endif
