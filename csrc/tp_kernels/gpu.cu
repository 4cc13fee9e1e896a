/* The kernels for GPUs.
 *
 * Built by nvcc where there is one, and launched by tp_kernels/gpu.c; the tests build
 * it with a C++ compiler, for threads taking turns (tests/core/stand_in_gpu.cpp).  The
 * mathematics of an element is the CPU's (formulas.h, keep.h), with vectors of one
 * lane; loops and sums are not.
 */
#define KERNEL static __device__
#define INLINE static __device__ __forceinline__

#include "tp_kernels/gpu_entries.h"

typedef float    lanes;
typedef uint64_t wides;

INLINE lanes
all_lanes(float value)
{
    return value;
}

INLINE lanes
product_sum(lanes a, lanes b, lanes c)
{
    return fmaf(a, b, c);
}

/* b where a is NaN. */
INLINE lanes
larger(lanes a, lanes b)
{
    return fmaxf(a, b);
}

INLINE lanes
chosen(lanes x, uint32_t bits)
{
    return (bits & 1) != 0 ? x : 0;
}

/* Within 2 ulp. */
INLINE lanes
exp_below_zero(lanes x)
{
    return expf(x);
}

INLINE wides
counters_from(uint64_t counter)
{
    return counter;
}

INLINE wides
wide_product(wides a, uint32_t b)
{
    return (uint64_t)(uint32_t)a * b;
}

#include "tp_kernels/formulas.h"

#include "tp_kernels/keep.h"

#include "tp_kernels/gpu_eights.h"

#include "tp_kernels/gpu_columns.h"
#include "tp_kernels/gpu_rows.h"

#include "tp_kernels/gpu_cross_entropy.h"
#include "tp_kernels/gpu_norm.h"
#include "tp_kernels/gpu_residual.h"
#include "tp_kernels/gpu_softmax.h"

/* A kernel is compiled for each dtype and form, since each has registers of its own;
 * SMP_TP_GPU_ENTRIES is the list of all. */
#define ENTRY(name, type, ...)                                                         \
    extern "C" __global__ void __launch_bounds__(SMP_TP_GPU_BLOCK)                     \
        smp_tp_gpu_##name(const __grid_constant__ type            call,                \
                          const __grid_constant__ smp_tp_gpu_plan plan)                \
    {                                                                                  \
        __VA_ARGS__;                                                                   \
    }
SMP_TP_GPU_ENTRIES(ENTRY)
