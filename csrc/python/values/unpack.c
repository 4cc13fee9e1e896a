/* The end of an unpack. */
#include "python/values/unpack.h"

#include <stdarg.h>
#include <stdlib.h>

void
smp_unpack_fini(smp_unpack *unpack)
{
    for (size_t i = 0; i < unpack->ntensors; i++) {
        Py_XDECREF(unpack->tensors[i]);
    }
    for (size_t i = 0; i < unpack->nobjects; i++) {
        Py_XDECREF(unpack->objects[i]);
        Py_XDECREF(unpack->snapshots[i]);
    }
    free(unpack->tensors);
    free(unpack->requires_grad);
    free(unpack->objects);
    free(unpack->snapshots);
    smp_message_free(unpack->message);
}
int
smp_malformed(const char *format, ...)
{
    va_list   rest;
    PyObject *why;

    va_start(rest, format);
    why = PyUnicode_FromFormatV(format, rest);
    va_end(rest);
    if (why != NULL) {
        PyErr_Format(PyExc_ValueError, "smp: malformed message: %U", why);
        Py_DECREF(why);
    }
    return -1;
}
