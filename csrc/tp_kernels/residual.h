/* Bias, dropout and residual.
 *
 * Included by tp_kernels/bodies.h.
 */
#ifndef SMP_TP_KERNELS_RESIDUAL_H
#define SMP_TP_KERNELS_RESIDUAL_H

/* Sums of columns: float32 sums of at most SUM_ROWS rows, added up. */
#define SUM_ROWS 128

typedef struct {
    float *part; /* NULL: not wanted */
    float *whole;
    size_t columns;
    size_t rows; /* in part */
} column_sums;

INLINE column_sums
sums_in(float *scratch, size_t columns)
{
    size_t      room = SMP_TP_SCRATCH_ROW(columns);
    column_sums sums = {.part = NULL};

    if (scratch != NULL) {
        for (size_t i = 0; i < 2 * room; i += LANES) {
            store(scratch, i, 2 * room, all_lanes(0), SMP_TP_F32);
        }
        sums.part = scratch;
        sums.whole = scratch + room;
        sums.columns = columns;
    }
    return sums;
}

INLINE void
sums_add(column_sums *sums, size_t i, lanes x)
{
    size_t room = SMP_TP_SCRATCH_ROW(sums->columns);

    store(sums->part, i, room, load(sums->part, i, room, SMP_TP_F32) + x, SMP_TP_F32);
}

INLINE void
sums_flush(column_sums *sums)
{
    size_t room = SMP_TP_SCRATCH_ROW(sums->columns);

    for (size_t i = 0; i < room; i += LANES) {
        lanes whole = load(sums->whole, i, room, SMP_TP_F32) +
                      load(sums->part, i, room, SMP_TP_F32);

        store(sums->whole, i, room, whole, SMP_TP_F32);
        store(sums->part, i, room, all_lanes(0), SMP_TP_F32);
    }
    sums->rows = 0;
}

INLINE void
sums_end_row(column_sums *sums)
{
    if (sums->part != NULL && ++sums->rows == SUM_ROWS) {
        sums_flush(sums);
    }
}

INLINE void
sums_write(column_sums *sums, void *out, smp_tp_dtype dtype)
{
    if (sums->part == NULL) {
        return;
    }
    sums_flush(sums);
    for (size_t i = 0; i < sums->columns; i += LANES) {
        store(out, i, sums->columns, load(sums->whole, i, sums->columns, SMP_TP_F32),
              dtype);
    }
}

INLINE void
residual_row(const void *x, const void *bias, const void *residual, void *out, size_t n,
             keep_stream *keep, lanes scale, smp_tp_dtype dtype)
{
    for (size_t i = 0; i < n; i += LANES) {
        lanes y = load(x, i, n, dtype);

        if (bias != NULL) {
            y += load(bias, i, n, dtype);
        }
        y = dropped(y, scale, keep_next(keep));
        if (residual != NULL) {
            y += load(residual, i, n, dtype);
        }
        store(out, i, n, y, dtype);
    }
}

INLINE void
residual_of(const smp_tp_residual *call, smp_tp_dtype dtype)
{
    size_t      n = call->columns;
    keep_stream keep = keep_of(&call->dropout);
    lanes       scale = all_lanes(keep.rule.scale);

    for (size_t r = 0; r < call->rows; r++) {
        keep_seek(&keep, &call->dropout, r, 0);
        residual_row(row_of(call->x, r, n, dtype), call->bias,
                     row_of(call->residual, r, n, dtype),
                     row_to(call->out, r, n, dtype), n, &keep, scale, dtype);
    }
}

INLINE void
residual_backward_of(const smp_tp_residual_backward *call, smp_tp_dtype dtype)
{
    size_t      n = call->columns;
    keep_stream keep = keep_of(&call->dropout);
    lanes       scale = all_lanes(keep.rule.scale);
    column_sums bias = sums_in(call->scratch, n);

    for (size_t r = 0; r < call->rows; r++) {
        const void *grad = row_of(call->grad, r, n, dtype);
        void       *grad_x = row_to(call->grad_x, r, n, dtype);

        keep_seek(&keep, &call->dropout, r, 0);
        for (size_t i = 0; i < n; i += LANES) {
            lanes g = dropped(load(grad, i, n, dtype), scale, keep_next(&keep));

            store(grad_x, i, n, g, dtype);
            if (bias.part != NULL) {
                sums_add(&bias, i, g);
            }
        }
        sums_end_row(&bias);
    }
    sums_write(&bias, call->grad_bias, dtype);
}

FOR_DTYPES(residual, smp_tp_residual, residual_of)
FOR_DTYPES(residual_backward, smp_tp_residual_backward, residual_backward_of)

#endif
