/* Values into bytes without a comm, and back. */
#include "python/values/codec_binding.h"

#include "python/values/pack_value.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

/* pack(value) -> bytes, and back: the codec by itself, for tests and small exchanges.
 */
static PyObject *
py_pack(PyObject *module, PyObject *value)
{
    smp_pack  pack;
    PyObject *bytes = NULL;

    (void)module;
    smp_pack_init(&pack, NULL, -1, NULL);
    if (smp_pack_value(&pack, value) == 0) {
        bytes = smp_pack_as_bytes(&pack);
    }
    smp_pack_fini(&pack);
    return bytes;
}

static PyObject *
py_unpack(PyObject *module, PyObject *bytes)
{
    smp_unpack unpack;
    PyObject  *value = NULL;
    Py_buffer  view;

    (void)module;
    if (PyObject_GetBuffer(bytes, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    if (smp_unpack_init_bytes(&unpack, view.buf, (size_t)view.len) == 0) {
        value = smp_unpack_value(&unpack);
    }
    smp_unpack_fini(&unpack);
    PyBuffer_Release(&view);
    return value;
}
static PyMethodDef functions[] = {
    {"pack", py_pack, METH_O, "pack(value) -> bytes"},
    {"unpack", py_unpack, METH_O, "unpack(bytes) -> value"},
    {NULL, NULL, 0, NULL},
};

int
smp_codec_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
