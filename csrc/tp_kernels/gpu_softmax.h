/* Masked softmax with dropout on a GPU.
 *
 * Included by tp_kernels/gpu.cu.
 */
#ifndef SMP_TP_KERNELS_GPU_SOFTMAX_H
#define SMP_TP_KERNELS_GPU_SOFTMAX_H

/* The mask's elements for a row of scores, or NULL. */
template <smp_tp_dtype DTYPE>
INLINE const void *
mask_of(const smp_tp_mask &mask, size_t row)
{
    size_t first = 0;

    for (int d = mask.dims - 1; d >= 0; d--) {
        first += row % mask.shape[d] * mask.strides[d];
        row /= mask.shape[d];
    }
    return row_of(mask.data, first, 1, DTYPE);
}

/* A row's sight, in few registers. */
typedef struct {
    unsigned from;
    unsigned to;
} eight_sight;

INLINE eight_sight
sight_of_row(const smp_tp_sight &see, size_t row, size_t keys)
{
    const row_sight sight = keys_seen(&see, row, keys);
    eight_sight     out = {.from = (unsigned)sight.from, .to = (unsigned)sight.to};

    return out;
}

/* Bit j: whether the row sees key i + j. */
INLINE uint32_t
eight_seen(const eight_sight &sight, unsigned i)
{
    uint32_t bits = 0xff;

    if (i >= sight.to || i + 8 <= sight.from) {
        return 0;
    }
    if (i + 8 > sight.to) {
        bits &= 0xffu >> (i + 8 - sight.to);
    }
    if (i < sight.from) {
        bits &= 0xffu << (sight.from - i);
    }
    return bits;
}

/* x, `rest` where a bit is 0. */
INLINE void
where_seen(float x[8], uint32_t bits, float rest)
{
    if (bits != 0xff) {
        for (int j = 0; j < 8; j++) {
            x[j] = (bits >> j & 1) != 0 ? x[j] : rest;
        }
    }
}

template <smp_tp_dtype DTYPE, bool BLOCK, int HELD, bool WHOLE>
KERNEL void
softmax(const smp_tp_softmax &call, const smp_tp_gpu_plan &plan)
{
    typedef team<BLOCK> team;
    const unsigned      n = (unsigned)call.keys;
    const keep_rule    &keep = plan.keep;

    for (size_t r = team::first_row(); r < call.rows; r = team::next_row(r)) {
        const eight_sight sight = sight_of_row(call.sight, r, n);
        const void       *row = row_of(call.scores, r, n, DTYPE);
        const void       *mask = mask_of<DTYPE>(call.mask, r);
        void             *probabilities = row_to(call.probabilities, r, n, DTYPE);
        void             *out = row_to(call.out, r, n, DTYPE);
        const uint64_t    index = index_of(keep, call.dropout, r, 0);
        eight<DTYPE>      given[HELD_ROOM(HELD)];
        eight<DTYPE>      added[HELD_ROOM(HELD)];
        float             x[HELD_ROOM(HELD)][8];
        float             peak = -INFINITY;
        float             sum = 0;

        const auto read = [&](int u, unsigned i) {
            if (eight_seen(sight, i) != 0) {
                given[u] = load_eight<DTYPE, WHOLE>(row, i, n);
                added[u] = load_eight<DTYPE, WHOLE>(mask, i, n);
            }
        };
        const auto score = [&](int u, unsigned i) {
            float mask[8];

            widen<DTYPE>(x[u], given[u]);
            widen<DTYPE>(mask, added[u]);
            for (int j = 0; j < 8; j++) {
                x[u][j] = product_sum(x[u][j], call.scale, mask[j]);
            }
            where_seen(x[u], eight_seen(sight, i), -INFINITY);
        };
        const auto exponentials = [&](int u) {
            for (int j = 0; j < 8; j++) {
                x[u][j] = exp_below_zero(x[u][j] - peak);
            }
        };

        if (HELD != 0) {
            own_eights<BLOCK, HELD>(n, read);
        }
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            if (HELD == 0) {
                read(u, i);
            }
            score(u, i);
            for (int j = 0; j < 8; j++) {
                peak = larger(peak, x[u][j]);
            }
        });
        peak = team::largest(peak);
        peak = peak == -INFINITY ? 0 : peak;
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            if (HELD == 0) {
                read(u, i);
                score(u, i);
            }
            exponentials(u);
            for (int j = 0; j < 8; j++) {
                sum += x[u][j];
            }
        });
        sum = softmax_factor(team::sum(sum));
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            const uint32_t seen = eight_seen(sight, i);

            if (HELD == 0) {
                read(u, i);
                score(u, i);
                exponentials(u);
            }
            for (int j = 0; j < 8; j++) {
                x[u][j] *= sum;
            }
            where_seen(x[u], seen, 0);
            store_eight<DTYPE, WHOLE>(probabilities, i, n, x[u]);
            if (out != NULL) {
                drop_eight(x[u], keep, halves_from(keep, index + i));
                store_eight<DTYPE, WHOLE>(out, i, n, x[u]);
            }
        });
    }
}

template <smp_tp_dtype DTYPE, bool BLOCK, int HELD, bool WHOLE>
KERNEL void
softmax_backward(const smp_tp_softmax_backward &call, const smp_tp_gpu_plan &plan)
{
    typedef team<BLOCK> team;
    const unsigned      n = (unsigned)call.keys;
    const keep_rule    &keep = plan.keep;

    for (size_t r = team::first_row(); r < call.rows; r = team::next_row(r)) {
        const eight_sight sight = sight_of_row(call.sight, r, n);
        const void       *probabilities = row_of(call.probabilities, r, n, DTYPE);
        const void       *grad = row_of(call.grad, r, n, DTYPE);
        void             *grad_scores = row_to(call.grad_scores, r, n, DTYPE);
        const uint64_t    index = index_of(keep, call.dropout, r, 0);
        eight<DTYPE>      of_row[HELD_ROOM(HELD)];
        eight<DTYPE>      of_grad[HELD_ROOM(HELD)];
        float             g[HELD_ROOM(HELD)][8]; /* the gradients of probabilities */
        float             dot = 0;

        const auto read = [&](int u, unsigned i) {
            if (eight_seen(sight, i) != 0) {
                of_row[u] = load_eight<DTYPE, WHOLE>(probabilities, i, n);
                of_grad[u] = load_eight<DTYPE, WHOLE>(grad, i, n);
            }
        };
        const auto both = [&](int u, unsigned i) {
            widen<DTYPE>(g[u], of_grad[u]);
            drop_eight(g[u], keep, halves_from(keep, index + i));
        };

        if (HELD != 0) {
            own_eights<BLOCK, HELD>(n, read);
        }
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            const uint32_t seen = eight_seen(sight, i);
            float          p[8];

            if (HELD == 0) {
                read(u, i);
            }
            both(u, i);
            widen<DTYPE>(p, of_row[u]);
            where_seen(p, seen, 0);
            where_seen(g[u], seen, 0);
            for (int j = 0; j < 8; j++) {
                dot = product_sum(g[u][j], p[j], dot);
            }
        });
        dot = team::sum(dot);
        own_eights<BLOCK, HELD>(n, [&](int u, unsigned i) {
            float p[8];

            if (HELD == 0) {
                read(u, i);
                both(u, i);
            }
            widen<DTYPE>(p, of_row[u]);
            for (int j = 0; j < 8; j++) {
                g[u][j] = softmax_gradient(p[j], g[u][j], dot, call.scale);
            }
            where_seen(g[u], eight_seen(sight, i), 0);
            store_eight<DTYPE, WHOLE>(grad_scores, i, n, g[u]);
        });
    }
}

#endif
