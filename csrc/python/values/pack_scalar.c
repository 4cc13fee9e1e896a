/* Tags, numbers, bytes and text, into a message. */
#include "python/values/pack_scalar.h"

static int
put(smp_pack *pack, const void *bytes, size_t nbytes)
{
    return smp_buffer_put(&pack->values, bytes, nbytes);
}

int
smp_pack_tag(smp_pack *pack, smp_tag tag)
{
    uint8_t byte = (uint8_t)tag;

    return put(pack, &byte, 1);
}

int
smp_pack_u32(smp_pack *pack, uint32_t number)
{
    return put(pack, &number, sizeof(number));
}

int
smp_pack_number(smp_pack *pack, smp_tag tag, size_t number)
{
    if (number > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError,
                     "smp: a value with %zu elements cannot go to another rank, which "
                     "takes %u at most",
                     number, UINT32_MAX);
        return -1;
    }
    if (smp_pack_tag(pack, tag) < 0) {
        return -1;
    }
    return smp_pack_u32(pack, (uint32_t)number);
}

int
smp_pack_sized(smp_pack *pack, smp_tag tag, const void *bytes, size_t nbytes)
{
    if (smp_pack_number(pack, tag, nbytes) < 0) {
        return -1;
    }
    return put(pack, bytes, nbytes);
}

/* A tag, and its fixed number of bytes. */
static int
put_fixed(smp_pack *pack, smp_tag tag, const void *bytes, size_t nbytes)
{
    if (smp_pack_tag(pack, tag) < 0) {
        return -1;
    }
    return put(pack, bytes, nbytes);
}

int
smp_pack_int(smp_pack *pack, PyObject *value)
{
    int       overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);

    if (overflow != 0) {
        PyObject   *text = PyNumber_ToBase(value, 16); /* decimal has a limit */
        Py_ssize_t  size;
        const char *utf8 = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, &size);
        int         failed =
            utf8 == NULL ? -1 : smp_pack_sized(pack, TAG_BIG_INT, utf8, (size_t)size);

        Py_XDECREF(text);
        return failed;
    }
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    return put_fixed(pack, TAG_INT, &number, sizeof(number));
}

int
smp_pack_float(smp_pack *pack, PyObject *value)
{
    double number = PyFloat_AS_DOUBLE(value);

    return put_fixed(pack, TAG_FLOAT, &number, sizeof(number));
}

int
smp_pack_complex(smp_pack *pack, PyObject *value)
{
    Py_complex number = PyComplex_AsCComplex(value);

    return put_fixed(pack, TAG_COMPLEX, &number, sizeof(number));
}

int
smp_pack_bytes(smp_pack *pack, smp_tag tag, PyObject *bytes)
{
    return smp_pack_sized(pack, tag, PyBytes_AS_STRING(bytes),
                          (size_t)PyBytes_GET_SIZE(bytes));
}

int
smp_pack_text(smp_pack *pack, smp_tag tag, PyObject *text)
{
    PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    int       failed;

    if (bytes == NULL) {
        return -1;
    }
    failed = smp_pack_bytes(pack, tag, bytes);
    Py_DECREF(bytes);
    return failed;
}

int
smp_pack_str_of(smp_pack *pack, smp_tag tag, PyObject *value, Py_ssize_t skip)
{
    PyObject *text = PyObject_Str(value);
    PyObject *tail;
    int       failed;

    if (text == NULL) {
        return -1;
    }
    tail = PyUnicode_Substring(text, skip, PyUnicode_GET_LENGTH(text));
    Py_DECREF(text);
    if (tail == NULL) {
        return -1;
    }
    failed = smp_pack_text(pack, tag, tail);
    Py_DECREF(tail);
    return failed;
}
int
smp_pack_class_name(smp_pack *pack, PyTypeObject *type)
{
    PyObject *module = PyObject_GetAttr((PyObject *)type, smp_names.module);
    PyObject *name = PyObject_GetAttr((PyObject *)type, smp_names.qualname);
    int       failed = module == NULL || name == NULL || !PyUnicode_Check(module) ||
                 smp_pack_text(pack, TAG_STR, module) < 0 ||
                 smp_pack_text(pack, TAG_STR, name) < 0;

    Py_XDECREF(module);
    Py_XDECREF(name);
    return failed ? -1 : 0;
}
