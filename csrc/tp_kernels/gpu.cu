/* The kernels for GPUs: a row is a warp's, a vector one float of each of its lanes.
 *
 * Built by nvcc where there is one, and launched by tp_kernels/gpu.c; the tests build
 * it with a C++ compiler, for lanes taking turns (tests/core/warp.h).  Warps take rows
 * by turns, so that the sums of columns have one order on every GPU.
 */
#include "tp_kernels/gpu.h"

#define LANES 32
#define WIDES 8 /* each quarter of a warp makes the halves of the same 64 elements */
#define KERNEL static __device__
#define INLINE static __device__ __forceinline__
#define EVERYONE 0xffffffffu

typedef float    lanes;
typedef uint64_t wides;

#define FIRST_ROW own_warp()
#define ROW_STEP warps()
#define own_scratch(scratch, floats) ((scratch) + own_warp() * (floats))
#define lanes_meet() __syncwarp()

INLINE unsigned
own_lane(void)
{
    return threadIdx.x % LANES;
}

INLINE size_t
own_warp(void)
{
    return ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
}

INLINE size_t
warps(void)
{
    return (size_t)gridDim.x * blockDim.x / LANES;
}

INLINE lanes
all_lanes(float value)
{
    return value;
}

INLINE lanes
load(const void *from, size_t i, size_t end, smp_tp_dtype dtype)
{
    const size_t at = i + own_lane();

    if (at >= end) {
        return 0;
    }
    if (dtype == SMP_TP_F16) {
        return __half2float(((const __half *)from)[at]);
    }
    if (dtype == SMP_TP_BF16) {
        return __bfloat162float(((const __nv_bfloat16 *)from)[at]);
    }
    return ((const float *)from)[at];
}

INLINE void
store(void *to, size_t i, size_t end, lanes x, smp_tp_dtype dtype)
{
    const size_t at = i + own_lane();

    if (at >= end) {
        return;
    }
    if (dtype == SMP_TP_F16) {
        ((__half *)to)[at] = __float2half_rn(x);
    } else if (dtype == SMP_TP_BF16) {
        ((__nv_bfloat16 *)to)[at] = __float2bfloat16_rn(x);
    } else {
        ((float *)to)[at] = x;
    }
}

INLINE lanes
product_sum(lanes a, lanes b, lanes c)
{
    return fmaf(a, b, c);
}

INLINE lanes
larger(lanes a, lanes b)
{
    return a > b ? a : b;
}

INLINE lanes
chosen(lanes x, uint32_t bits)
{
    return (bits >> own_lane() & 1) != 0 ? x : 0;
}

INLINE lanes
first_lanes(lanes x, size_t count, float rest)
{
    return own_lane() < count ? x : rest;
}

INLINE lanes
zero_where_below(lanes y, lanes x, float limit)
{
    return x < limit ? 0 : y;
}

INLINE lanes
times_power_of_two(lanes y, lanes n)
{
    return y * __uint_as_float((__float_as_uint(n) << 23) + 0x3f800000u);
}

INLINE float
lanes_sum(lanes x)
{
    for (int apart = LANES / 2; apart > 0; apart /= 2) {
        x += __shfl_xor_sync(EVERYONE, x, apart);
    }
    return x;
}

INLINE float
lanes_largest(lanes x)
{
    for (int apart = LANES / 2; apart > 0; apart /= 2) {
        x = larger(x, __shfl_xor_sync(EVERYONE, x, apart));
    }
    return x;
}

INLINE wides
counters_from(uint64_t counter)
{
    return counter + own_lane() % WIDES;
}

INLINE wides
wide_product(wides a, uint32_t b)
{
    return (uint64_t)(uint32_t)a * b;
}

/* Each lane has eight of the bits. */
INLINE uint64_t
halves_kept(const wides c[4], uint16_t threshold)
{
    const unsigned lane = own_lane() % WIDES;
    uint32_t       own = 0;
    uint64_t       low;
    uint64_t       high;

    for (unsigned i = 0; i < 8; i++) {
        own |= (uint32_t)((uint16_t)(c[i / 2] >> i % 2 * 16) >= threshold) << i;
    }
    own <<= lane % 4 * 8;
    low = __reduce_or_sync(EVERYONE, lane < 4 ? own : 0);
    high = __reduce_or_sync(EVERYONE, lane < 4 ? 0 : own);
    return high << 32 | low;
}

#include "tp_kernels/bodies.h"

#define GLOBAL extern "C" __global__ void __launch_bounds__(SMP_TP_GPU_BLOCK)

GLOBAL
smp_tp_gpu_softmax(const __grid_constant__ smp_tp_softmax call)
{
    softmax(&call);
}

GLOBAL
smp_tp_gpu_softmax_backward(const __grid_constant__ smp_tp_softmax_backward call)
{
    softmax_backward(&call);
}

GLOBAL
smp_tp_gpu_residual(const __grid_constant__ smp_tp_residual call)
{
    residual(&call);
}

GLOBAL
smp_tp_gpu_residual_backward(const __grid_constant__ smp_tp_residual_backward call)
{
    residual_backward(&call);
}

GLOBAL
smp_tp_gpu_norm(const __grid_constant__ smp_tp_norm call)
{
    norm(&call);
}

GLOBAL
smp_tp_gpu_norm_backward(const __grid_constant__ smp_tp_norm_backward call)
{
    norm_backward(&call);
}

/* Targets are the caller's to check. */
GLOBAL
smp_tp_gpu_cross_entropy(const __grid_constant__ smp_tp_cross_entropy call)
{
    switch (call.dtype) {
    case SMP_TP_F16:
        (void)cross_entropy_of(&call, SMP_TP_F16);
        break;
    case SMP_TP_BF16:
        (void)cross_entropy_of(&call, SMP_TP_BF16);
        break;
    case SMP_TP_F32:
    case SMP_TP_DTYPES:
        (void)cross_entropy_of(&call, SMP_TP_F32);
        break;
    }
}

GLOBAL
smp_tp_gpu_cross_entropy_backward(
    const __grid_constant__ smp_tp_cross_entropy_backward call)
{
    cross_entropy_backward(&call);
}

/* Copies bits: no number is rounded. */
GLOBAL
smp_tp_gpu_gather(const __grid_constant__ smp_tp_gather call)
{
    for (size_t i = own_warp(); i < call.count; i += warps()) {
        const int64_t at = call.ids[i] - call.start;
        const bool    here = at >= 0 && at < (int64_t)call.rows;

        for (size_t c = own_lane(); c < call.columns; c += LANES) {
            const size_t from = (here ? (size_t)at : 0) * call.columns + c;
            const size_t to = i * call.columns + c;

            if (call.dtype == SMP_TP_F32) {
                ((uint32_t *)call.out)[to] =
                    here ? ((const uint32_t *)call.table)[from] : 0;
            } else {
                ((uint16_t *)call.out)[to] =
                    here ? ((const uint16_t *)call.table)[from] : 0;
            }
        }
    }
}

/* Adds up the warps' sums of columns, in their order: a thread has a column. */
GLOBAL
smp_tp_gpu_column_sums(const __grid_constant__ smp_tp_gpu_sums call)
{
    const size_t column = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float        sum = 0;

    if (column >= call.columns) {
        return;
    }
    for (size_t warp = 0; warp < call.parts; warp++) {
        sum += call.first[warp * call.apart + column];
    }
    if (call.dtype == SMP_TP_F16) {
        ((__half *)call.out)[column] = __float2half_rn(sum);
    } else if (call.dtype == SMP_TP_BF16) {
        ((__nv_bfloat16 *)call.out)[column] = __float2bfloat16_rn(sum);
    } else {
        ((float *)call.out)[column] = sum;
    }
}
