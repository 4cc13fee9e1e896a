/* Runs csrc/tp_kernels/gpu.cu on a CPU: the lanes of a warp are coroutines that take
 * turns, each until it waits for the others.
 *
 * Every other warp has its lanes run the other way round, so that a lane that reads
 * what another one is still to write finds the old value.  A lane that waits for
 * something else than the others ends the process.
 *
 * C++, as CUDA is; of its library nothing is used.
 */
#include "stand_in_gpu.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "common/half.h"

namespace
{

constexpr int    LANES_OF_WARP = 32;
constexpr size_t STACK = 64 << 10;

enum meeting { START, SHUFFLE, OR, BARRIER, END };

struct dimensions {
    unsigned x;
};

struct warp {
    ucontext_t home;
    ucontext_t at[LANES_OF_WARP];
    char      *stacks;
    meeting    waits[LANES_OF_WARP];
    unsigned   met[LANES_OF_WARP];
    uint32_t   given[2][LANES_OF_WARP]; /* at even and at odd meetings */
    int        lane;                    /* whose turn it is */
    unsigned   number;                  /* of the block's */
    void (*run)(const void *parameter);
    const void *parameter;
} now;

dimensions gridDim, blockDim, blockIdx;

/* Waits until all lanes do; what each gives. */
const uint32_t *
meet(meeting kind, uint32_t given)
{
    const int      lane = now.lane;
    const unsigned parity = now.met[lane]++ % 2;

    now.given[parity][lane] = given;
    now.waits[lane] = kind;
    swapcontext(&now.at[lane], &now.home);
    return now.given[parity];
}

dimensions
own_thread(void)
{
    return {now.number * LANES_OF_WARP + (unsigned)now.lane};
}

float
__uint_as_float(uint32_t bits)
{
    return smp_f32_of_bits(bits);
}

uint32_t
__float_as_uint(float x)
{
    return smp_f32_bits(x);
}

float
__shfl_xor_sync(unsigned, float x, int apart)
{
    return smp_f32_of_bits(
        meet(SHUFFLE, smp_f32_bits(x))[own_thread().x % LANES_OF_WARP ^ apart]);
}

uint32_t
__reduce_or_sync(unsigned, uint32_t x)
{
    const uint32_t *given = meet(OR, x);
    uint32_t        all = 0;

    for (int lane = 0; lane < LANES_OF_WARP; lane++) {
        all |= given[lane];
    }
    return all;
}

void
__syncwarp(void)
{
    (void)meet(BARRIER, 0);
}

struct __half {
    uint16_t bits;
};

struct __nv_bfloat16 {
    uint16_t bits;
};

float
__half2float(__half x)
{
    return smp_f16_to_f32(x.bits);
}

float
__bfloat162float(__nv_bfloat16 x)
{
    return smp_bf16_to_f32(x.bits);
}

__half
__float2half_rn(float x)
{
    return {smp_f32_to_f16(x)};
}

__nv_bfloat16
__float2bfloat16_rn(float x)
{
    return {smp_f32_to_bf16(x)};
}

} // namespace

#define threadIdx own_thread()
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#include "tp_kernels/gpu.cu"
#undef threadIdx

namespace
{

template <typename Call, void (*kernel)(const Call)>
void
run(const void *parameter)
{
    Call call;

    memcpy(&call, parameter, sizeof(call));
    kernel(call);
}

#define FUNCTION(kernel, call)                                                         \
    {                                                                                  \
        "smp_tp_gpu_" #kernel, sizeof(call), run<call, smp_tp_gpu_##kernel>            \
    }

const stand_in_function functions[] = {
    FUNCTION(softmax, smp_tp_softmax),
    FUNCTION(softmax_backward, smp_tp_softmax_backward),
    FUNCTION(residual, smp_tp_residual),
    FUNCTION(residual_backward, smp_tp_residual_backward),
    FUNCTION(norm, smp_tp_norm),
    FUNCTION(norm_backward, smp_tp_norm_backward),
    FUNCTION(cross_entropy, smp_tp_cross_entropy),
    FUNCTION(cross_entropy_backward, smp_tp_cross_entropy_backward),
    FUNCTION(gather, smp_tp_gather),
    FUNCTION(column_sums, smp_tp_gpu_sums),
};

void
lane_main(void)
{
    now.run(now.parameter);
    (void)meet(END, 0);
}

/* Each lane goes on to its next meeting.  False: all have ended. */
bool
go_on(bool backwards)
{
    for (int i = 0; i < LANES_OF_WARP; i++) {
        now.lane = backwards ? LANES_OF_WARP - 1 - i : i;
        swapcontext(&now.home, &now.at[now.lane]);
    }
    for (int lane = 1; lane < LANES_OF_WARP; lane++) {
        if (now.waits[lane] != now.waits[0] || now.met[lane] != now.met[0]) {
            fprintf(stderr, "lanes 0 and %d wait for different things: %d and %d\n",
                    lane, now.waits[0], now.waits[lane]);
            abort();
        }
    }
    return now.waits[0] != END;
}

void
run_warp(bool backwards)
{
    for (int lane = 0; lane < LANES_OF_WARP; lane++) {
        ucontext_t *at = &now.at[lane];

        getcontext(at);
        at->uc_stack.ss_sp = now.stacks + lane * STACK;
        at->uc_stack.ss_size = STACK;
        at->uc_link = nullptr;
        makecontext(at, lane_main, 0);
        now.waits[lane] = START;
        now.met[lane] = 0;
    }
    while (go_on(backwards)) {
    }
}

} // namespace

const stand_in_function *
stand_in_find(const char *name)
{
    for (const stand_in_function &function : functions) {
        if (strcmp(function.name, name) == 0) {
            return &function;
        }
    }
    return nullptr;
}

void
stand_in_run(const stand_in_function *function, const void *parameter, unsigned blocks,
             unsigned threads)
{
    if (now.stacks == nullptr) {
        now.stacks = (char *)malloc(LANES_OF_WARP * STACK);
    }
    now.run = function->run;
    now.parameter = parameter;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (now.number = 0; now.number < threads / LANES_OF_WARP; now.number++) {
            run_warp(now.number % 2 != 0);
        }
    }
}
