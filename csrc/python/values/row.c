/* Dtypes, and the test for a row. */
#include "python/values/row.h"

#include "python/values/tensor.h"

/* Another dtype travels as bytes, and a complex as two reals: the kind tells it apart
 * from those. */
static void
see_dtype(dl_dtype dtype, smp_row *out)
{
    static const struct {
        smp_dtype dtype;
        uint8_t   code;
        uint8_t   bits;
        uint8_t   per;
    } known[] = {
        {SMP_F32, SMP_DL_FLOAT, 32, 1},
        {SMP_BF16, SMP_DL_BFLOAT, 16, 1},
        {SMP_F16, SMP_DL_FLOAT, 16, 1},
        {SMP_F64, SMP_DL_FLOAT, 64, 1},
        {SMP_I64, SMP_DL_INT, 64, 1},
        {SMP_I32, SMP_DL_INT, 32, 1},
        {SMP_U8, SMP_DL_UINT, 8, 1},
        {SMP_I8, SMP_DL_INT, 8, 1},
        {SMP_BOOL, SMP_DL_BOOL, 8, 1},
        {SMP_F16, SMP_DL_COMPLEX, 32, 2},
        {SMP_F32, SMP_DL_COMPLEX, 64, 2},
        {SMP_F64, SMP_DL_COMPLEX, 128, 2},
        {SMP_F8_E4M3FN, SMP_DL_FLOAT8_E4M3FN, 8, 1},
        {SMP_F8_E5M2, SMP_DL_FLOAT8_E5M2, 8, 1},
    };

    smp_kind kind = smp_kind_of(dtype.code, dtype.bits, dtype.lanes);

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i].code == dtype.code && known[i].bits == dtype.bits &&
            dtype.lanes == 1) {
            out->dtype = known[i].dtype;
            out->per = known[i].per;
            out->kind = out->per == 1 ? 0 : kind;
            out->sums = true;
            out->all = known[i].per == 1;
            return;
        }
    }
    out->dtype = SMP_U8;
    out->kind = kind;
    out->per = smp_kind_bytes(kind, SMP_U8);
    out->sums = out->all = false;
}

static bool
is_dense(const dl_tensor *t)
{
    int64_t stride = 1;

    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0) {
            return true; /* whatever the strides of the axes behind this one */
        }
    }
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && t->strides[i] != stride) {
            return false;
        }
        stride *= t->shape[i];
    }
    return true;
}

/* The place for a tensor; in words, too. */
typedef enum { IN_HOST_MEMORY, ON_A_DEVICE, ANYWHERE } whereabouts;

static const char *const places[] = {" in host memory", " on a device", ""};

static int
see_tensor(PyObject *tensor, smp_row *out, whereabouts where, dl_device *device)
{
    dl_tensor t;
    PyObject *held;
    bool      same;
    size_t    count = 1;

    if (!smp_is_tensor(tensor)) {
        PyErr_Format(PyExc_TypeError, "smp: a tensor is wanted, not %s",
                     Py_TYPE(tensor)->tp_name);
        return -1;
    }
    if (smp_tensor_borrow(tensor, &t, &held) < 0) {
        return -1;
    }
    same = held == tensor; /* else a copy, because the tensor has a conjugate bit */
    Py_DECREF(held);
    if ((t.device.type == SMP_DL_CPU ? where == ON_A_DEVICE
                                     : where == IN_HOST_MEMORY) ||
        !same || !is_dense(&t)) {
        PyErr_Format(PyExc_BufferError, "smp: not a dense tensor%s", places[where]);
        return -1;
    }
    *device = t.device;
    for (int i = 0; i < t.ndim; i++) {
        count *= (size_t)t.shape[i];
    }
    if (t.data == NULL && count != 0) {
        PyErr_Format(PyExc_BufferError, "smp: a %s has no memory of its own",
                     Py_TYPE(tensor)->tp_name);
        return -1;
    }
    see_dtype(t.dtype, out);
    out->data = t.data;
    out->count = count * out->per;
    return 0;
}

int
smp_see_tensor(PyObject *tensor, smp_row *out)
{
    dl_device device;

    return see_tensor(tensor, out, IN_HOST_MEMORY, &device);
}

int
smp_see_device_tensor(PyObject *tensor, smp_row *out, dl_device *device)
{
    return see_tensor(tensor, out, ON_A_DEVICE, device);
}

int
smp_see_tensor_anywhere(PyObject *tensor, smp_row *out, dl_device *device)
{
    return see_tensor(tensor, out, ANYWHERE, device);
}
