/* Blocks of a GPU over the columns of a matrix, and sums of columns.
 *
 * Included by tp_kernels/gpu.cu.  A thread has eight columns, and rows by turns, so
 * sums of columns are its own.  Their order depends on the shape alone, so that bits
 * repeat on every GPU.
 */
#ifndef SMP_TP_KERNELS_GPU_COLUMNS_H
#define SMP_TP_KERNELS_GPU_COLUMNS_H

/* A thread's part of a matrix. */
typedef struct {
    size_t column; /* the first of its eight */
    size_t row;    /* its first one */
    size_t step;   /* to the next */
    size_t rows;   /* the end: 0 for a thread without a part */
} own_part;

INLINE own_part
part_of_thread(const smp_tp_gpu_plan &plan, size_t rows, size_t columns)
{
    const unsigned beside = threadIdx.x % plan.across;
    const unsigned below = threadIdx.x / plan.across;
    own_part       own;

    own.column = 8 * ((size_t)(blockIdx.x % plan.slabs) * plan.across + beside);
    own.row = (size_t)(blockIdx.x / plan.slabs) * plan.at_once + below;
    own.step = (size_t)plan.groups * plan.at_once;
    own.rows = below < plan.at_once && own.column < columns ? rows : 0;
    return own;
}

/* Writes a block's sums of its columns, kind `kind` of `kinds`, for column_sums().
 * Every thread of the block comes here. */
INLINE void
write_sums(const smp_tp_gpu_plan &plan, const own_part *own, float *to, size_t columns,
           unsigned kinds, unsigned kind, const float sums[8])
{
    __shared__ float room[8][SMP_TP_GPU_BLOCK];
    const size_t     apart = SMP_TP_SCRATCH_ROW(columns);
    const size_t     group = blockIdx.x / plan.slabs;

    for (int j = 0; j < 8; j++) {
        room[j][threadIdx.x] = sums[j];
    }
    __syncthreads();
    if (threadIdx.x < plan.across && own->column < columns) {
        to += (group * kinds + kind) * apart + own->column;
        for (int j = 0; j < 8; j++) {
            float sum = room[j][threadIdx.x];

            for (unsigned i = 1; i < plan.at_once; i++) {
                sum += room[j][threadIdx.x + i * plan.across];
            }
            to[j] = sum;
        }
    }
    __syncthreads();
}

/* Adds up the blocks' sums, in their order: a warp has each eighth one of 32 columns.
 */
KERNEL void
column_sums(const smp_tp_gpu_sums &call)
{
    enum { WIDTH = 32, TALL = SMP_TP_GPU_BLOCK / WIDTH };
    __shared__ float room[TALL][WIDTH];
    const size_t     slabs = (call.columns + WIDTH - 1) / WIDTH;
    const size_t     kind = blockIdx.x / slabs;
    const unsigned   beside = threadIdx.x % WIDTH;
    const unsigned   below = threadIdx.x / WIDTH;
    const size_t     column = blockIdx.x % slabs * WIDTH + beside;
    const size_t     apart = SMP_TP_SCRATCH_ROW(call.columns);
    float            sum = 0;

#pragma unroll 8
    for (size_t part = below; part < call.parts; part += TALL) {
        sum += call.first[(part * call.kinds + kind) * apart + column];
    }
    room[below][beside] = sum;
    __syncthreads();
    if (below != 0 || column >= call.columns) {
        return;
    }
    for (int i = 1; i < TALL; i++) {
        sum += room[i][beside];
    }
    switch (call.dtype) {
    case SMP_TP_F16:
        store_one<SMP_TP_F16>(call.out[kind], column, sum);
        break;
    case SMP_TP_BF16:
        store_one<SMP_TP_BF16>(call.out[kind], column, sum);
        break;
    case SMP_TP_F32:
    case SMP_TP_DTYPES:
        store_one<SMP_TP_F32>(call.out[kind], column, sum);
        break;
    }
}

#endif
