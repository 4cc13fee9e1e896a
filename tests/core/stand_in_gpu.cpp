/* Runs csrc/tp_kernels/gpu.cu on a CPU: the threads of a block are coroutines that take
 * turns, each until it waits for the others.
 *
 * Every other warp has its lanes run the other way round, and so have warps from one
 * barrier to the next.  A thread that reads what another one is still to write finds
 * the old value; shared memory begins as NaN.  A lane that waits for something else
 * than the others of its warp ends the process, and so does a warp that waits for
 * something else than the others of its block, or a vector at an address that is no
 * multiple of its size.
 *
 * C++, as CUDA is; of its library nothing is used.
 */
#include "stand_in_gpu.h"

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#    include <sanitizer/common_interface_defs.h>
#endif

#include "common/half.h"

/* Functions of CUDA that a build of the kernels happens not to call. */
#pragma GCC diagnostic ignored "-Wunused-function"

namespace
{

constexpr int    LANES_OF_WARP = 32;
constexpr int    MOST_THREADS = 1024;
constexpr size_t STACK = 64 << 10;

enum meeting { START, SHUFFLE, BLOCK_BARRIER, END };

struct dimensions {
    unsigned x;
};

struct thread {
    jmp_buf  at;
    meeting  waits;
    unsigned met;
    uint32_t given[2]; /* at even and at odd meetings */
};

struct block {
    thread                   threads[MOST_THREADS];
    char                    *stacks;
    jmp_buf                  home;
    ucontext_t               started_from;
    void                    *fake_stack; /* of the address sanitizer's, for home */
    const void              *home_stack;
    size_t                   home_size;
    unsigned                 turn; /* the running thread */
    unsigned                 intervals;
    const stand_in_function *function;
    const void *const       *parameters;
} now;

dimensions gridDim, blockDim, blockIdx;

/* What the address sanitizer wants to know before and after another stack is taken. */
void
leave(void **own, const void *stack, size_t size)
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(own, stack, size);
#else
    (void)own, (void)stack, (void)size;
#endif
}

void
arrive(void *own, const void **stack, size_t *size)
{
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(own, stack, size);
#else
    (void)own, (void)stack, (void)size;
#endif
}

/* Waits until all lanes of the warp do, or all threads of the block. */
void
meet(meeting kind)
{
    thread *own = &now.threads[now.turn];
    void   *fake_stack = nullptr;

    own->waits = kind;
    own->met++;
    if (_setjmp(own->at) == 0) {
        leave(kind == END ? nullptr : &fake_stack, now.home_stack, now.home_size);
        _longjmp(now.home, 1);
    }
    arrive(fake_stack, &now.home_stack, &now.home_size);
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
    thread        *own = &now.threads[now.turn];
    const unsigned parity = own->met % 2;

    own->given[parity] = smp_f32_bits(x);
    meet(SHUFFLE);
    return smp_f32_of_bits(now.threads[now.turn ^ (unsigned)apart].given[parity]);
}

void
__syncthreads(void)
{
    meet(BLOCK_BARRIER);
}

/* A vector, which the GPU has at multiples of its size only. */
struct alignas(16) uint4 {
    uint32_t x, y, z, w;

    uint4(uint32_t first, uint32_t second, uint32_t third, uint32_t fourth)
        : x(first), y(second), z(third), w(fourth)
    {
    }

    uint4(const uint4 &other) : x(other.x), y(other.y), z(other.z), w(other.w)
    {
        other.check();
    }

    uint4 &
    operator=(const uint4 &other)
    {
        check();
        memcpy((void *)&x, &other.x, sizeof(*this));
        return *this;
    }

    void
    check() const
    {
        volatile uintptr_t at = (uintptr_t)this;

        if (at % sizeof(*this) != 0) {
            fprintf(stderr, "a vector at an odd address: %p\n", (const void *)this);
            abort();
        }
    }
};

uint4
make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

struct __half {
    uint16_t bits;
};

struct __half2 {
    uint16_t first, second;
};

struct __nv_bfloat162 {
    uint16_t first, second;
};

__half
__ushort_as_half(unsigned short bits)
{
    return {bits};
}

float
__half2float(__half x)
{
    return smp_f16_to_f32(x.bits);
}

__half2
__floats2half2_rn(float first, float second)
{
    return {smp_f32_to_f16(first), smp_f32_to_f16(second)};
}

__nv_bfloat162
__floats2bfloat162_rn(float first, float second)
{
    return {smp_f32_to_bf16(first), smp_f32_to_bf16(second)};
}

dimensions
own_thread(void)
{
    return {now.turn};
}

} // namespace

#define threadIdx own_thread()
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))
#include "tp_kernels/gpu.cu"
#undef threadIdx

/* Of the linker's: the shared memory of all kernels. */
extern "C" {
extern char __start_shared_memory[] __attribute__((visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((visibility("hidden")));
}

namespace
{

template <typename Call, void (*kernel)(const Call, const smp_tp_gpu_plan)>
void
run(const void *const *parameters)
{
    Call            call;
    smp_tp_gpu_plan plan;

    memcpy(&call, parameters[0], sizeof(call));
    memcpy(&plan, parameters[1], sizeof(plan));
    kernel(call, plan);
}

#define FUNCTION(name, call, ...)                                                      \
    {"smp_tp_gpu_" #name,                                                              \
     {sizeof(call), sizeof(smp_tp_gpu_plan)},                                          \
     run<call, smp_tp_gpu_##name>},

const stand_in_function functions[] = {SMP_TP_GPU_ENTRIES(FUNCTION)};

void
thread_main(void)
{
    arrive(nullptr, &now.home_stack, &now.home_size);
    now.function->run(now.parameters);
    meet(END);
}

/* Gives a thread its turn, until its next meeting. */
void
go_on(unsigned number)
{
    thread *own = &now.threads[number];
    char   *stack = now.stacks + number * STACK;

    now.turn = number;
    if (_setjmp(now.home) == 0) {
        leave(&now.fake_stack, stack, STACK);
        if (own->waits == START) {
            ucontext_t at;

            getcontext(&at);
            at.uc_stack.ss_sp = stack;
            at.uc_stack.ss_size = STACK;
            at.uc_link = nullptr;
            makecontext(&at, thread_main, 0);
            swapcontext(&now.started_from, &at);
        }
        _longjmp(own->at, 1);
    }
    arrive(now.fake_stack, nullptr, nullptr);
}

/* Aborts unless both threads wait for the same thing. */
void
check_alike(unsigned one, unsigned other)
{
    const thread *a = &now.threads[one];
    const thread *b = &now.threads[other];

    if (a->waits != b->waits) {
        fprintf(stderr, "threads %u and %u wait for different things: %d and %d\n", one,
                other, a->waits, b->waits);
        abort();
    }
}

/* Until its lanes wait for the block's other warps, or have ended. */
void
run_warp(unsigned warp)
{
    const unsigned first = warp * LANES_OF_WARP;

    do {
        for (unsigned i = 0; i < LANES_OF_WARP; i++) {
            go_on(first + (warp % 2 != 0 ? LANES_OF_WARP - 1 - i : i));
        }
        for (unsigned i = 1; i < LANES_OF_WARP; i++) {
            check_alike(first, first + i);
        }
    } while (now.threads[first].waits == SHUFFLE);
}

void
run_block(unsigned threads)
{
    const unsigned warps = threads / LANES_OF_WARP;

    for (unsigned i = 0; i < threads; i++) {
        now.threads[i].waits = START;
        now.threads[i].met = 0;
    }
    memset(__start_shared_memory, 0xff,
           (size_t)(__stop_shared_memory - __start_shared_memory));
    do {
        const bool backwards = now.intervals++ % 2 != 0;

        for (unsigned i = 0; i < warps; i++) {
            run_warp(backwards ? warps - 1 - i : i);
        }
        for (unsigned i = 1; i < warps; i++) {
            check_alike(0, i * LANES_OF_WARP);
        }
    } while (now.threads[0].waits != END);
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
stand_in_run(const stand_in_function *function, const void *const *parameters,
             unsigned blocks, unsigned threads)
{
    if (now.stacks == nullptr) {
        now.stacks = (char *)malloc(MOST_THREADS * STACK);
    }
    now.function = function;
    now.parameters = parameters;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        run_block(threads);
    }
}
