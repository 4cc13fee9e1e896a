/* Bytes, numbers and text, out of a message. */
#include "python/values/unpack_scalar.h"

#include <string.h>

const void *
smp_unpack_raw(smp_unpack *unpack, size_t nbytes)
{
    const void *at = unpack->values;

    if ((size_t)(unpack->values_end - unpack->values) < nbytes) {
        (void)smp_malformed("it ends too early");
        return NULL;
    }
    unpack->values += nbytes;
    return at;
}

/* Copies the next bytes. */
static int
copy_raw(smp_unpack *unpack, void *to, size_t nbytes)
{
    const void *at = smp_unpack_raw(unpack, nbytes);

    if (at == NULL) {
        return -1;
    }
    memcpy(to, at, nbytes);
    return 0;
}

int
smp_unpack_u32(smp_unpack *unpack, uint32_t *number)
{
    return copy_raw(unpack, number, sizeof(*number));
}

int
smp_unpack_count(smp_unpack *unpack, uint32_t *count)
{
    if (smp_unpack_u32(unpack, count) < 0) {
        return -1;
    }
    if (*count > (size_t)(unpack->values_end - unpack->values)) {
        return smp_malformed("a count larger than the message");
    }
    return 0;
}

const char *
smp_unpack_sized(smp_unpack *unpack, uint32_t *size)
{
    return smp_unpack_u32(unpack, size) < 0 ? NULL : smp_unpack_raw(unpack, *size);
}

PyObject *
smp_unpack_int(smp_unpack *unpack)
{
    long long number;

    return copy_raw(unpack, &number, sizeof(number)) < 0 ? NULL
                                                         : PyLong_FromLongLong(number);
}

PyObject *
smp_unpack_big_int(smp_unpack *unpack)
{
    PyObject *text = smp_unpack_text(unpack);
    PyObject *number = text == NULL ? NULL : PyLong_FromUnicodeObject(text, 16);

    Py_XDECREF(text);
    return number;
}

PyObject *
smp_unpack_float(smp_unpack *unpack)
{
    double number;

    return copy_raw(unpack, &number, sizeof(number)) < 0 ? NULL
                                                         : PyFloat_FromDouble(number);
}

PyObject *
smp_unpack_complex(smp_unpack *unpack)
{
    Py_complex number;

    return copy_raw(unpack, &number, sizeof(number)) < 0
               ? NULL
               : PyComplex_FromCComplex(number);
}

PyObject *
smp_unpack_text(smp_unpack *unpack)
{
    uint32_t    size;
    const char *text = smp_unpack_sized(unpack, &size);

    return text == NULL ? NULL : PyUnicode_DecodeUTF8(text, size, "surrogatepass");
}

PyObject *
smp_unpack_bytes(smp_unpack *unpack)
{
    uint32_t    size;
    const char *bytes = smp_unpack_sized(unpack, &size);

    return bytes == NULL ? NULL : PyBytes_FromStringAndSize(bytes, size);
}

PyObject *
smp_unpack_dtype(smp_unpack *unpack)
{
    PyObject *name = smp_unpack_text(unpack);
    PyObject *dtype = name == NULL ? NULL : PyObject_GetAttr(smp_torch.torch, name);

    Py_XDECREF(name);
    if (dtype != NULL && Py_TYPE(dtype) != smp_torch.dtype) {
        (void)smp_malformed("a dtype that is none");
        Py_CLEAR(dtype);
    }
    return dtype;
}
