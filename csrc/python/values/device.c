/* PyTorch's streams and memory for the device pool, by DLPack. */
#include "python/values/device.h"

#include "comm/device/pinned.h"
#include "comm/device/port.h"
#include "comm/messaging/neighbour.h"
#include "python/values/rank_names.h"
#include "python/values/unpack.h"

bool
smp_device_is_drivers(dl_device device)
{
    return device.type == SMP_DL_CUDA ||
           (device.type == SMP_DL_OTHER && smp_driver_is_stand_in());
}

int
smp_device_stream(dl_device device, void **stream)
{
    *stream = NULL;
    if (device.type != SMP_DL_CUDA) {
        return 0; /* the stand-in's is the null stream */
    }
    return smp_torch.dlpack->current_stream(device.type, device.id, stream);
}

int
smp_device_pack(smp_comm *comm, int dest, const dl_tensor *t, uint64_t bytes,
                smp_block **out)
{
    void *stream;

    *out = NULL;
    if (!smp_device_is_drivers(t->device)) {
        return 0;
    }
    if (smp_device_stream(t->device, &stream) != 0) {
        return -1;
    }
    *out = smp_device_put(smp_comm_device(comm), dest, t->device.id,
                          (uint64_t)(uintptr_t)t->data, (size_t)bytes, stream);
    return 0;
}

static void
set_error(void *what, const char *kind, const char *message)
{
    PyErr_Format(PyExc_RuntimeError, "smp: %s: %s: %s", (const char *)what, kind,
                 message);
}

PyObject *
smp_device_allocate(dl_device device, dl_dtype dtype, int64_t length, const char *what)
{
    int64_t     stride = 1;
    dl_tensor   wanted = {.device = device,
                          .ndim = 1,
                          .dtype = dtype,
                          .shape = &length,
                          .strides = &stride};
    dl_managed *managed = NULL;
    void       *tensor;

    if (smp_torch.dlpack->allocate(&wanted, &managed, (void *)what, set_error) != 0 ||
        smp_torch.dlpack->to_python(managed, &tensor) != 0) {
        if (!PyErr_Occurred()) {
            PyErr_NoMemory();
        }
        return NULL;
    }
    return tensor;
}

/* Offered memory is a reference to a tensor; this ends it, on any thread. */
static void
let_go(void *memory)
{
    PyGILState_STATE before = PyGILState_Ensure();

    Py_DECREF((PyObject *)memory);
    PyGILState_Release(before);
}

/* So many elements in a row, with *at, on the device's stream. */
static PyObject *
allocate_row(dl_device device, const smp_tensor_meta *meta, uint64_t *at,
             const char *what)
{
    size_t    length = meta->bytes / smp_element_bytes(meta->dtype);
    PyObject *row = smp_device_allocate(device, meta->dtype, (int64_t)length, what);
    dl_tensor t;

    if (row != NULL && smp_torch.dlpack->borrow(row, &t) != 0) {
        Py_CLEAR(row);
    }
    if (row != NULL) {
        *at = (uint64_t)(uintptr_t)t.data + t.byte_offset;
    }
    return row;
}

/* Whether a row was made in inference mode, as one made now would be, or not: 1, or 0;
 * -1 with an exception. */
static int
is_of_this_mode(PyObject *row)
{
    PyObject *now = PyObject_CallNoArgs(smp_torch.is_inference);
    PyObject *then =
        now == NULL ? NULL : PyObject_CallMethod(row, "is_inference", NULL);
    int same = then == NULL ? -1 : now == then; /* of True and False */

    Py_XDECREF(now);
    Py_XDECREF(then);
    return same;
}

/* The tensor that the sender's device has written, if it can be had as it is. */
static PyObject *
landed_row(const smp_device_port *port, const smp_block *block,
           const smp_tensor_meta *meta, const void *stream, uint64_t *at)
{
    void     *its_stream;
    PyObject *row = smp_device_landing(port, block, at, &its_stream);
    dl_tensor t;

    if (row == NULL || its_stream != stream) {
        return NULL; /* PyTorch would give its memory back on another stream */
    }
    if (is_of_this_mode(row) != 1 || smp_torch.dlpack->borrow(row, &t) != 0) {
        PyErr_Clear();
        return NULL;
    }
    return memcmp(&t.dtype, &meta->dtype, sizeof(t.dtype)) == 0 ? row : NULL;
}

/* Memory for the next tensor of this size; without it that one goes through the pool.
 */
static void
offer_next(smp_device_port *port, int source, dl_device device,
           const smp_tensor_meta *meta, void *stream)
{
    PyObject *row;
    uint64_t  at;

    if (!smp_device_wants_landing(port, source, (size_t)meta->bytes)) {
        return;
    }
    row = allocate_row(device, meta, &at, "memory for the next tensor");
    if (row == NULL) {
        PyErr_Clear();
        smp_device_pause_landings(port); /* the device is full */
    } else if (!smp_device_offer_landing(port, source, at, (size_t)meta->bytes, stream,
                                         row, let_go)) {
        Py_DECREF(row);
    }
}

PyObject *
smp_device_unpack(smp_comm *comm, int source, smp_block *block,
                  const smp_tensor_meta *meta)
{
    smp_device_port *port = smp_comm_device(comm);
    dl_device  device = {.type = meta->device.type, .id = smp_device_number(port)};
    PyObject  *row = NULL;
    PyObject  *landed = NULL;
    uint64_t   at;
    void      *stream;
    char       why[SMP_DRIVER_TEXT];
    smp_status status;

    if (device.id < 0 || !smp_device_is_drivers(device)) {
        (void)smp_malformed(
            "a tensor in a pool of a device that this rank does not have");
        goto err_release;
    }
    if (smp_device_stream(device, &stream) != 0) {
        goto err_release;
    }
    landed = landed_row(port, block, meta, stream, &at);
    if (landed == NULL) {
        row = allocate_row(device, meta, &at, "memory for a tensor that arrives");
        if (row == NULL) {
            goto err_release;
        }
    }
    status = smp_device_get(port, source, block, at, stream, why);
    if (status != SMP_OK) {
        PyErr_Format(PyExc_RuntimeError,
                     "smp: a tensor in the device pool of %s cannot be read: "
                     "%s [%s]",
                     smp_rank_name(source), why, smp_status_name(status));
        Py_XDECREF(row);
        return NULL;
    }
    offer_next(port, source, device, meta, stream);
    return landed != NULL ? landed : row;

err_release:
    smp_block_release(block);
    return NULL;
}

void
smp_device_pin(smp_comm *comm, const smp_block *block)
{
    smp_pinned_open(smp_comm_pinned(comm), block);
}

int
smp_device_seen(smp_comm *comm, int source, PyObject *tensor)
{
    dl_tensor t;

    if (smp_torch.dlpack->borrow(tensor, &t) != 0) {
        return -1;
    }
    if (smp_device_is_drivers(t.device)) {
        smp_pinned_use_device(smp_comm_pinned(comm), t.device.id);
        smp_device_meet(smp_comm_device(comm), source, t.device.id);
    }
    return 0;
}
