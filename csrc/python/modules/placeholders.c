/* Placeholders alive where their values would go. */
#include "python/modules/placeholders.h"

#include "python/values/torch_api.h"

int
smp_placeholders_fetch(PyObject *list)
{
    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *tensor = PyObject_CallNoArgs(PyList_GET_ITEM(list, i));
        PyObject *done = NULL;

        if (tensor != NULL && tensor != Py_None) {
            done = PyObject_CallMethodNoArgs(tensor, smp_names.fetched);
        } else if (tensor != NULL) {
            done = Py_NewRef(Py_None);
        }
        Py_XDECREF(tensor);
        Py_XDECREF(done);
        if (done == NULL) {
            return -1;
        }
    }
    return 0;
}
