/* Cross-entropy of logits on a GPU.
 *
 * Included by tp_kernels/gpu.cu.  Vocabularies are odd, so a row's eights begin where
 * memory has a multiple of 16 bytes; the elements before and behind are its edges.
 */
#ifndef SMP_TP_KERNELS_GPU_CROSS_ENTROPY_H
#define SMP_TP_KERNELS_GPU_CROSS_ENTROPY_H

#define AHEAD 4 /* eights of a thread read before the first is used */

/* A row's eights and edges. */
typedef struct {
    size_t head;  /* elements before the eights */
    size_t end;   /* of the eights */
    size_t edges; /* elements before and behind, in all */
} own_span;

/* A row in two places has no eights where these differ in their offset from 16 bytes.
 */
template <smp_tp_dtype DTYPE>
INLINE own_span
span_of(const void *one, const void *other, size_t n)
{
    const size_t bytes = bytes_of<DTYPE>();
    const size_t off = (size_t)(uintptr_t)one % 16;
    own_span     span = {.head = off == 0 ? 0 : (16 - off) / bytes};

    if (span.head > n || (size_t)(uintptr_t)other % 16 != off) {
        span.head = n;
    }
    span.end = span.head + (n - span.head) / 8 * 8;
    span.edges = span.head + (n - span.end);
    return span;
}

/* Element number `edge` of the edges. */
INLINE size_t
edge_at(const own_span *span, size_t edge)
{
    return edge < span->head ? edge : edge - span->head + span->end;
}

/* The statistics of some of a row's elements. */
typedef struct {
    float top;
    float sum; /* of exp(x - top) */
    float all;
} entropy_part;

template <int COUNT>
INLINE void
entropy_add(entropy_part *part, const float *x, bool all)
{
    float top = part->top;
    float base;
    float sum = 0;

    for (int j = 0; j < COUNT; j++) {
        top = larger(top, x[j]);
    }
    if (top > part->top) {
        part->sum *= exp_below_zero(part->top - top);
        part->top = top;
    }
    base = top == -INFINITY ? 0 : top;
    for (int j = 0; j < COUNT; j++) {
        sum += exp_below_zero(x[j] - base);
    }
    part->sum += sum;
    if (all) {
        sum = 0;
        for (int j = 0; j < COUNT; j++) {
            sum += x[j];
        }
        part->all += sum;
    }
}

/* Targets are the caller's to check. */
template <smp_tp_dtype DTYPE, bool BLOCK>
KERNEL void
cross_entropy(const smp_tp_cross_entropy &call)
{
    typedef team<BLOCK> team;
    constexpr unsigned  STEP = 8 * team::THREADS;
    const size_t        n = call.columns;

    for (size_t r = team::first_row(); r < call.rows; r = team::next_row(r)) {
        const void    *logits = row_of(call.logits, r, n, DTYPE);
        const own_span span = span_of<DTYPE>(logits, logits, n);
        entropy_part   own = {.top = -INFINITY, .sum = 0, .all = 0};
        float          top;
        float          base;

        for (size_t from = span.head + 8 * team::number(); from < span.end;
             from += AHEAD * STEP) {
            eight<DTYPE> given[AHEAD];

#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (from + u * STEP < span.end) {
                    given[u] = load_eight<DTYPE, true>(logits, from + u * STEP, n);
                }
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (from + u * STEP < span.end) {
                    float x[8];

                    widen<DTYPE>(x, given[u]);
                    entropy_add<8>(&own, x, call.all != NULL);
                }
            }
        }
        for (size_t edge = team::number(); edge < span.edges; edge += team::THREADS) {
            const float x = load_one<DTYPE>(logits, edge_at(&span, edge));

            entropy_add<1>(&own, &x, call.all != NULL);
        }
        top = team::largest(own.top);
        base = top == -INFINITY ? 0 : top;
        own.sum = team::sum(own.sum * exp_below_zero(own.top - base));
        if (call.all != NULL) {
            own.all = team::sum(own.all);
        }
        if (team::number() == 0) {
            const int64_t target = call.targets[r] - call.start;

            call.top[r] = top;
            call.sum[r] = own.sum;
            if (call.all != NULL) {
                call.all[r] = own.all;
            }
            call.target[r] = target >= 0 && target < (int64_t)n
                                 ? load_one<DTYPE>(logits, (size_t)target)
                                 : 0;
        }
    }
}

/* The gradients of COUNT elements from element i on, in their place. */
template <int COUNT>
INLINE void
entropy_gradients(float *x, size_t i, const entropy_row *of, float top, int64_t target)
{
    const uint64_t at = (uint64_t)target - i; /* huge where it is elsewhere */
    const bool     here = at < (uint64_t)COUNT;
    float          at_target = 0;

    for (int j = 0; j < COUNT; j++) {
        x[j] = exp_below_zero(x[j] - top);
    }
    if (here) {
        for (int j = 0; j < COUNT; j++) {
            at_target = (unsigned)at == (unsigned)j ? x[j] : at_target;
        }
        at_target = entropy_gradient_at_target(of, at_target);
    }
    for (int j = 0; j < COUNT; j++) {
        x[j] = entropy_gradient(of, x[j]);
    }
    if (here) {
        for (int j = 0; j < COUNT; j++) {
            x[j] = (unsigned)at == (unsigned)j ? at_target : x[j];
        }
    }
}

template <smp_tp_dtype DTYPE, bool BLOCK>
KERNEL void
cross_entropy_backward(const smp_tp_cross_entropy_backward &call)
{
    typedef team<BLOCK> team;
    constexpr unsigned  STEP = 8 * team::THREADS;
    const size_t        n = call.columns;

    for (size_t r = team::first_row(); r < call.rows; r = team::next_row(r)) {
        const void       *logits = row_of(call.logits, r, n, DTYPE);
        void             *grad = row_to(call.grad, r, n, DTYPE);
        const own_span    span = span_of<DTYPE>(logits, grad, n);
        const entropy_row of = entropy_row_of(&call, r);
        const float       top = call.top[r];
        const int64_t     target = call.targets[r] - call.start;
        const bool none = of.factor == 0; /* also where the logits are infinite */

        for (size_t from = span.head + 8 * team::number(); from < span.end;
             from += AHEAD * STEP) {
            eight<DTYPE> given[AHEAD];

#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (from + u * STEP < span.end) {
                    given[u] = load_eight<DTYPE, true>(logits, from + u * STEP, n);
                }
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (from + u * STEP < span.end) {
                    float x[8] = {0};

                    if (!none) {
                        widen<DTYPE>(x, given[u]);
                        entropy_gradients<8>(x, from + u * STEP, &of, top, target);
                    }
                    store_eight<DTYPE, true>(grad, from + u * STEP, n, x);
                }
            }
        }
        for (size_t edge = team::number(); edge < span.edges; edge += team::THREADS) {
            const size_t i = edge_at(&span, edge);
            float        x = 0;

            if (!none) {
                x = load_one<DTYPE>(logits, i);
                entropy_gradients<1>(&x, i, &of, top, target);
            }
            store_one<DTYPE>(grad, i, x);
        }
    }
}

#undef AHEAD

#endif
