/* A team of threads for each row of a matrix: a warp, or a block.
 *
 * Included by tp_kernels/gpu.cu.
 */
#ifndef SMP_TP_KERNELS_GPU_ROWS_H
#define SMP_TP_KERNELS_GPU_ROWS_H

#define WARP 32
#define WARPS (SMP_TP_GPU_BLOCK / WARP)
#define EVERYONE 0xffffffffu

/* The whole block's, of one number a warp. */
template <typename Join>
INLINE float
joined_in_block(float x, Join join)
{
    __shared__ float of_warps[WARPS];

    __syncthreads(); /* the last call's have been read */
    if (threadIdx.x % WARP == 0) {
        of_warps[threadIdx.x / WARP] = x;
    }
    __syncthreads();
    x = of_warps[0];
    for (int warp = 1; warp < WARPS; warp++) {
        x = join(x, of_warps[warp]);
    }
    return x;
}

template <bool BLOCK> struct team {
    static constexpr unsigned THREADS = BLOCK ? SMP_TP_GPU_BLOCK : WARP;

    /* The running thread's. */
    INLINE unsigned
    number(void)
    {
        return threadIdx.x % THREADS;
    }

    INLINE size_t
    first_row(void)
    {
        return (size_t)blockIdx.x * (SMP_TP_GPU_BLOCK / THREADS) +
               threadIdx.x / THREADS;
    }

    INLINE size_t
    next_row(size_t row)
    {
        return row + (size_t)gridDim.x * (SMP_TP_GPU_BLOCK / THREADS);
    }

    /* All threads', the same bits for each. */
    template <typename Join>
    INLINE float
    joined(float x, Join join)
    {
        for (int apart = WARP / 2; apart > 0; apart /= 2) {
            x = join(x, __shfl_xor_sync(EVERYONE, x, apart));
        }
        return BLOCK ? joined_in_block(x, join) : x;
    }

    INLINE float
    sum(float x)
    {
        return joined(x, [](float a, float b) { return a + b; });
    }

    INLINE float
    largest(float x)
    {
        return joined(x, [](float a, float b) { return larger(a, b); });
    }
};

/* Eights of a row that a thread of its team holds in registers; with 0 it reads them
 * again for each pass. */
#define HELD_ROOM(held) ((held) == 0 ? 1 : (held))

/* body(u, i) for the thread's eights: the one in place u begins at element i. */
template <bool BLOCK, int HELD, typename Body>
INLINE void
own_eights(unsigned n, Body body)
{
    constexpr unsigned STEP = 8 * team<BLOCK>::THREADS;
    const unsigned     first = 8 * team<BLOCK>::number();

    if constexpr (HELD == 0) {
        for (unsigned i = first; i < n; i += STEP) {
            body(0, i);
        }
    } else {
#pragma unroll
        for (int u = 0; u < HELD; u++) {
            if (first + u * STEP < n) {
                body(u, first + u * STEP);
            }
        }
    }
}

#endif
