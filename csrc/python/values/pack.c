/* A message's life: its parts are joined, and sent with their blocks. */
#include "python/values/pack.h"

#include <stdlib.h>
#include <string.h>

#include "python/values/error.h"
#include "python/values/rank_names.h"
#include "python/values/registry.h"
#include "python/values/wire.h"

int
smp_pack_wait_for_device(smp_pack *pack)
{
    PyObject *done;

    if (!pack->staged) {
        return 0;
    }
    done = PyObject_CallNoArgs(smp_registry.stage_wait);
    Py_XDECREF(done);
    pack->staged = false;
    return done == NULL ? -1 : 0;
}

int
smp_pack_raise_unsent(const smp_pack *pack, smp_status status)
{
    if (status == SMP_ERR_CLOSED) {
        (void)smp_error_raise(smp_error_of_peer, status, NULL,
                              "smp: %s has left the job in order, and this rank still "
                              "needs it: all ranks must make the same number of steps",
                              smp_rank_name(pack->dest));
    } else {
        (void)smp_error_raise(smp_error_of_peer, status, NULL, "smp: sending to %s: %s",
                              smp_rank_name(pack->dest), smp_status_text(status));
    }
    return -1;
}

void
smp_pack_init(smp_pack *pack, smp_comm *comm, int dest, const smp_unpack *request)
{
    *pack = (smp_pack){.comm = comm, .dest = dest, .request = request, .graph = true};
    smp_ptrmap_init(&pack->tensor_numbers);
    smp_ptrmap_init(&pack->object_numbers);
    smp_ptrmap_init(&pack->argument_tensors);
    smp_ptrmap_init(&pack->argument_objects);
}

void
smp_pack_fini(smp_pack *pack)
{
    if (pack->staged) { /* never sent: no reader may have the blocks before */
        PyObject *type;
        PyObject *value;
        PyObject *traceback;

        PyErr_Fetch(&type, &value, &traceback);
        if (smp_pack_wait_for_device(pack) < 0) {
            PyErr_WriteUnraisable(smp_registry.stage_wait);
        }
        PyErr_Restore(type, value, traceback);
    }
    for (size_t i = 0; i < pack->ntensors; i++) {
        Py_DECREF(pack->tensors[i]);
    }
    for (size_t i = 0; i < pack->nobjects; i++) {
        Py_DECREF(pack->objects[i]);
    }
    for (size_t i = 0; i < pack->nblocks; i++) {
        smp_block_release(pack->blocks[i]);
    }
    smp_ptrmap_fini(&pack->tensor_numbers);
    smp_ptrmap_fini(&pack->object_numbers);
    smp_ptrmap_fini(&pack->argument_tensors);
    smp_ptrmap_fini(&pack->argument_objects);
    free(pack->tensors);
    free(pack->in_graph);
    free(pack->objects);
    free(pack->blocks);
    free(pack->meta.at);
    free(pack->values.at);
    free(pack->data.at);
}

/* Writes everything behind `head` free bytes, into one buffer. */
static int
join(smp_pack *pack, size_t head, smp_buffer *out)
{
    smp_wire_sizes sizes = {
        .tensors = (uint32_t)pack->ntensors,
        .meta_bytes = (uint32_t)pack->meta.size,
        .value_bytes = (uint32_t)pack->values.size,
        .data_bytes = pack->data.size,
    };

    *out = (smp_buffer){0};
    if (pack->meta.size > UINT32_MAX || pack->values.size > UINT32_MAX) {
        PyErr_Format(
            PyExc_OverflowError,
            "smp: a value of %zu bytes beside its tensors cannot go to another "
            "rank; %u are the most",
            pack->values.size + pack->meta.size, UINT32_MAX);
        return -1;
    }
    if (smp_buffer_reserve(out, head + sizeof(sizes) + pack->meta.size +
                                    pack->values.size + pack->data.size) < 0) {
        return -1;
    }
    out->size = head;
    (void)smp_buffer_put(out, &sizes, sizeof(sizes));
    (void)smp_buffer_put(out, pack->meta.at, pack->meta.size);
    (void)smp_buffer_put(out, pack->values.at, pack->values.size);
    (void)smp_buffer_put(out, pack->data.at, pack->data.size);
    return 0;
}

int
smp_pack_send(smp_pack *pack, const smp_envelope *envelope)
{
    smp_buffer whole;
    smp_status status;
    size_t     nblocks = pack->nblocks;

    if (join(pack, sizeof(*envelope), &whole) < 0) {
        return -1;
    }
    if (smp_pack_wait_for_device(pack) < 0) {
        free(whole.at);
        return -1;
    }
    memcpy(whole.at, envelope, sizeof(*envelope));
    pack->nblocks = 0; /* the comm takes them, whatever it returns */
    status = smp_comm_send(pack->comm, pack->dest, whole.at, whole.size, pack->blocks,
                           nblocks);
    free(whole.at);
    return status == SMP_OK ? 0 : smp_pack_raise_unsent(pack, status);
}

PyObject *
smp_pack_as_bytes(smp_pack *pack)
{
    smp_buffer whole;
    PyObject  *bytes;

    if (join(pack, 0, &whole) < 0) {
        return NULL;
    }
    bytes = PyBytes_FromStringAndSize((const char *)whole.at, (Py_ssize_t)whole.size);
    free(whole.at);
    return bytes;
}

int
smp_pack_add_in_graph(const smp_pack *pack, PyObject *list)
{
    for (size_t i = 0; i < pack->ntensors; i++) {
        if (pack->in_graph[i] && PyList_Append(list, pack->tensors[i]) < 0) {
            return -1;
        }
    }
    return 0;
}
