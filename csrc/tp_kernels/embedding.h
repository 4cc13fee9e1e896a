/* Rows of a table split over ranks.
 *
 * Included by tp_kernels/bodies.h.
 */
#ifndef SMP_TP_KERNELS_EMBEDDING_H
#define SMP_TP_KERNELS_EMBEDDING_H

KERNEL void
gather(const smp_tp_gather *call)
{
    size_t n = call->columns;
    size_t bytes = n * smp_tp_dtype_bytes(call->dtype);

    for (size_t i = 0; i < call->count; i++) {
        int64_t at = call->ids[i] - call->start;
        void   *out = row_to(call->out, i, n, call->dtype);

        if (bytes == 0) {
            continue;
        }
        if (at >= 0 && at < (int64_t)call->rows) {
            memcpy(out, row_of(call->table, (size_t)at, n, call->dtype), bytes);
        } else {
            memset(out, 0, bytes);
        }
    }
}

/* The occurrences of each row become a list, in their order; a row is summed in float32
 * and written once. */
INLINE void
scatter_of(const smp_tp_scatter *call, smp_tp_dtype dtype)
{
    size_t   n = call->columns;
    int64_t *first = call->lists; /* of each row, or -1 */
    int64_t *next = call->lists + call->rows;

    for (size_t row = 0; row < call->rows; row++) {
        first[row] = -1;
    }
    for (size_t i = call->count; i-- > 0;) {
        int64_t at = call->ids[i] - call->start;

        if (at >= 0 && at < (int64_t)call->rows && call->ids[i] != call->padding) {
            next[i] = first[at];
            first[at] = (int64_t)i;
        }
    }
    for (size_t row = 0; row < call->rows; row++) {
        void *to = row_to(call->grad_table, row, n, dtype);

        for (size_t c = 0; c < n; c += LANES) {
            lanes sum = all_lanes(0);

            for (int64_t i = first[row]; i >= 0; i = next[i]) {
                sum += load(row_of(call->grad, (size_t)i, n, dtype), c, n, dtype);
            }
            store(to, c, n, sum, dtype);
        }
    }
}

FOR_DTYPES(scatter, smp_tp_scatter, scatter_of)

#endif
