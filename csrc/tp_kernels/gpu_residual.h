/* Bias, dropout and residual on a GPU.
 *
 * Included by tp_kernels/gpu.cu.
 */
#ifndef SMP_TP_KERNELS_GPU_RESIDUAL_H
#define SMP_TP_KERNELS_GPU_RESIDUAL_H

template <smp_tp_dtype DTYPE, bool WHOLE>
KERNEL void
residual(const smp_tp_residual &call, const smp_tp_gpu_plan &plan)
{
    enum {
        AHEAD = DTYPE == SMP_TP_F32 ? 2 : 4
    }; /* rows read before the first is written */
    const size_t     n = call.columns;
    const own_part   own = part_of_thread(plan, call.rows, n);
    const keep_rule &keep = plan.keep;
    float            bias[8];

    widen<DTYPE>(bias, load_eight<DTYPE, WHOLE>(own.column < n ? call.bias : NULL,
                                                own.column, n));
    for (size_t row = own.row; row < own.rows; row += AHEAD * own.step) {
        eight<DTYPE> x[AHEAD];
        eight<DTYPE> residual[AHEAD];

#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const size_t r = row + i * own.step;

            if (r < own.rows) {
                x[i] = load_eight<DTYPE, WHOLE>(row_of(call.x, r, n, DTYPE), own.column,
                                                n);
                residual[i] = load_eight<DTYPE, WHOLE>(
                    row_of(call.residual, r, n, DTYPE), own.column, n);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const size_t r = row + i * own.step;

            if (r < own.rows) {
                const eight_halves halves =
                    halves_from(keep, index_of(keep, call.dropout, r, own.column));
                float y[8];
                float added[8];

                widen<DTYPE>(y, x[i]);
                widen<DTYPE>(added, residual[i]);
                for (int j = 0; j < 8; j++) {
                    y[j] += bias[j];
                }
                drop_eight(y, keep, halves);
                for (int j = 0; j < 8; j++) {
                    y[j] += added[j];
                }
                store_eight<DTYPE, WHOLE>(row_to(call.out, r, n, DTYPE), own.column, n,
                                          y);
            }
        }
    }
}

template <smp_tp_dtype DTYPE, bool WHOLE>
KERNEL void
residual_backward(const smp_tp_residual_backward &call, const smp_tp_gpu_plan &plan)
{
    enum { AHEAD = DTYPE == SMP_TP_F32 ? 2 : 4 };
    const size_t     n = call.columns;
    const own_part   own = part_of_thread(plan, call.rows, n);
    const keep_rule &keep = plan.keep;
    float            sums[8] = {0};

    for (size_t row = own.row; row < own.rows; row += AHEAD * own.step) {
        eight<DTYPE> grad[AHEAD];

#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const size_t r = row + i * own.step;

            if (r < own.rows) {
                grad[i] = load_eight<DTYPE, WHOLE>(row_of(call.grad, r, n, DTYPE),
                                                   own.column, n);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const size_t r = row + i * own.step;

            if (r < own.rows) {
                const eight_halves halves =
                    halves_from(keep, index_of(keep, call.dropout, r, own.column));
                float g[8];

                widen<DTYPE>(g, grad[i]);
                drop_eight(g, keep, halves);
                for (int j = 0; j < 8; j++) {
                    sums[j] += g[j];
                }
                store_eight<DTYPE, WHOLE>(row_to(call.grad_x, r, n, DTYPE), own.column,
                                          n, g);
            }
        }
    }
    if (call.grad_bias != NULL) {
        write_sums(plan, &own, call.scratch, n, 1, 0, sums);
    }
}

#endif
