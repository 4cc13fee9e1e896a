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

PyObject *
smp_device_unpack(smp_comm *comm, int source, smp_block *block,
                  const smp_tensor_meta *meta)
{
    smp_device_port *port = smp_comm_device(comm);
    dl_device  device = {.type = meta->device.type, .id = smp_device_number(port)};
    PyObject  *row = NULL;
    dl_tensor  t;
    void      *stream;
    char       why[SMP_DRIVER_TEXT];
    smp_status status;

    if (device.id < 0 || !smp_device_is_drivers(device)) {
        (void)smp_malformed(
            "a tensor in a pool of a device that this rank does not have");
        goto err_release;
    }
    row = smp_device_allocate(device, meta->dtype,
                              (int64_t)(meta->bytes / smp_element_bytes(meta->dtype)),
                              "memory for a tensor that arrives");
    if (row == NULL || smp_torch.dlpack->borrow(row, &t) != 0 ||
        smp_device_stream(device, &stream) != 0) {
        goto err_release;
    }
    status = smp_device_get(port, source, block,
                            (uint64_t)(uintptr_t)t.data + t.byte_offset, stream, why);
    if (status != SMP_OK) {
        PyErr_Format(PyExc_RuntimeError,
                     "smp: a tensor in the device pool of %s cannot be read: "
                     "%s [%s]",
                     smp_rank_name(source), why, smp_status_name(status));
        Py_DECREF(row);
        return NULL;
    }
    return row;

err_release:
    smp_block_release(block);
    Py_XDECREF(row);
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
