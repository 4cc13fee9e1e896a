/* Tensors into pointers, and kernels on the host or a GPU. */
#include "python/tp_kernels_call.h"

#include <stdlib.h>

#include "python/values/device.h"

smp_tp_seen
smp_tp_statistics_of(const smp_tp_seen *see)
{
    return (smp_tp_seen){.failed = see->failed,
                         .known = true,
                         .dtype = SMP_TP_F32,
                         .placed = see->placed,
                         .device = see->device};
}

/* 0, or -1 with an exception: it is elsewhere than the others, or no row. */
static int
see_placed(smp_tp_seen *see, PyObject *tensor, const char *name, smp_row *row)
{
    dl_device device;

    if (smp_see_tensor_anywhere(tensor, row, &device) < 0) {
        return -1;
    }
    if (!see->placed) {
        see->placed = true;
        see->device = device;
    }
    if (device.type != see->device.type || device.id != see->device.id) {
        PyErr_Format(PyExc_ValueError, "%s: on another device than the other tensors",
                     name);
        return -1;
    }
    if (device.type != SMP_DL_CPU && !smp_device_is_drivers(device)) {
        PyErr_Format(PyExc_BufferError, "%s: neither in host memory nor on a GPU",
                     name);
        return -1;
    }
    return 0;
}

void *
smp_tp_numbers(smp_tp_seen *see, PyObject *tensor, const char *name, smp_dtype want,
               size_t count)
{
    smp_row row;

    if (see->failed) {
        return NULL;
    }
    if (see_placed(see, tensor, name, &row) < 0) {
        see->failed = true;
        return NULL;
    }
    if (row.dtype != want || row.per != 1 || row.count != count) {
        PyErr_Format(PyExc_ValueError, "%s: %zu elements of %s, got %zu of %s", name,
                     count, smp_dtype_name(want), row.count, smp_dtype_name(row.dtype));
        see->failed = true;
        return NULL;
    }
    return row.data;
}

void *
smp_tp_floats(smp_tp_seen *see, PyObject *tensor, const char *name, size_t count)
{
    static const smp_dtype dtypes[SMP_TP_DTYPES] = {
        [SMP_TP_F32] = SMP_F32, [SMP_TP_F16] = SMP_F16, [SMP_TP_BF16] = SMP_BF16};
    smp_row row;

    if (see->failed) {
        return NULL;
    }
    if (!see->known) {
        if (see_placed(see, tensor, name, &row) < 0) {
            see->failed = true;
            return NULL;
        }
        while (see->dtype < SMP_TP_DTYPES && dtypes[see->dtype] != row.dtype) {
            see->dtype++;
        }
        if (see->dtype == SMP_TP_DTYPES) {
            PyErr_Format(PyExc_TypeError, "%s: float32, float16 or bfloat16, got %s",
                         name, smp_dtype_name(row.dtype));
            see->failed = true;
            return NULL;
        }
        see->known = true;
    }
    return smp_tp_numbers(see, tensor, name, dtypes[see->dtype], count);
}

void *
smp_tp_floats_or_none(smp_tp_seen *see, PyObject *tensor, const char *name,
                      size_t count)
{
    return tensor == Py_None ? NULL : smp_tp_floats(see, tensor, name, count);
}

static void
allocate_on_device(smp_tp_seen *see, smp_tp_scratch *out, size_t bytes)
{
    dl_tensor made;

    out->tensor = smp_device_allocate(see->device, (dl_dtype){SMP_DL_FLOAT, 32, 1},
                                      (int64_t)(bytes / sizeof(float) + 1),
                                      "scratch of a kernel");
    if (out->tensor == NULL) {
        see->failed = true;
        return;
    }
    see->failed = smp_torch.dlpack->borrow(out->tensor, &made) != 0;
    out->floats = (float *)(void *)((char *)made.data + made.byte_offset);
}

smp_tp_scratch
smp_tp_scratch_of(smp_tp_seen *see, smp_tp_gpu_kernel kernel, size_t rows,
                  size_t columns, size_t host_rows)
{
    smp_tp_scratch out = {.floats = NULL};

    if (see->failed) {
        return out;
    }
    if (see->device.type != SMP_DL_CPU) {
        const size_t bytes = smp_tp_gpu_scratch(kernel, rows, columns);

        if (bytes > 0) {
            allocate_on_device(see, &out, bytes);
        }
        return out;
    }
    out.floats =
        malloc((host_rows * SMP_TP_SCRATCH_ROW(columns) + 1) * sizeof(*out.floats));
    if (out.floats == NULL) {
        PyErr_NoMemory();
        see->failed = true;
    }
    return out;
}

static void
give_back(smp_tp_scratch *given)
{
    if (given->tensor == NULL) {
        free(given->floats);
    }
    Py_CLEAR(given->tensor);
}

/* Threads: without the GIL. */
static void
run_on_host(smp_tp_gpu_kernel kernel, const void *call)
{
    const smp_tp_kernels *kernels = smp_tp_kernels_best();

    switch (kernel) {
    case SMP_TP_GPU_SOFTMAX:
        kernels->softmax(call);
        break;
    case SMP_TP_GPU_SOFTMAX_BACKWARD:
        kernels->softmax_backward(call);
        break;
    case SMP_TP_GPU_RESIDUAL:
        kernels->residual(call);
        break;
    case SMP_TP_GPU_RESIDUAL_BACKWARD:
        kernels->residual_backward(call);
        break;
    case SMP_TP_GPU_NORM:
        kernels->norm(call);
        break;
    case SMP_TP_GPU_NORM_BACKWARD:
        kernels->norm_backward(call);
        break;
    case SMP_TP_GPU_CROSS_ENTROPY_BACKWARD:
        kernels->cross_entropy_backward(call);
        break;
    case SMP_TP_GPU_CROSS_ENTROPY: /* has a result: tp_cross_entropy() */
    case SMP_TP_GPU_KERNELS:
        break;
    }
}

/* On the calling thread's current stream.  False with an exception. */
static bool
run_on_gpu(const smp_tp_seen *see, smp_tp_gpu_kernel kernel, const void *call)
{
    char  why[SMP_TP_GPU_TEXT];
    void *stream;
    bool  ok;

    if (smp_device_stream(see->device, &stream) != 0) {
        return false;
    }
    Py_BEGIN_ALLOW_THREADS;
    ok = smp_tp_gpu_launch(see->device.id, stream, kernel, call, why);
    Py_END_ALLOW_THREADS;
    if (!ok) {
        PyErr_Format(PyExc_RuntimeError, "smp: a kernel on GPU %d: %s",
                     (int)see->device.id, why);
    }
    return ok;
}

PyObject *
smp_tp_run(const smp_tp_seen *see, smp_tp_gpu_kernel kernel, const void *call,
           smp_tp_scratch *given)
{
    bool ok = true;

    if (see->device.type != SMP_DL_CPU) {
        ok = run_on_gpu(see, kernel, call);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        run_on_host(kernel, call);
        Py_END_ALLOW_THREADS;
    }
    if (given != NULL) {
        give_back(given);
    }
    return ok ? Py_NewRef(Py_None) : NULL;
}
