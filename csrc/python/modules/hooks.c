/* PyTorch's own dicts of hooks. */
#include "python/modules/hooks.h"

bool
smp_has_hooks(PyObject *module)
{
    static PyObject *names[4];
    PyObject        *dict;
    bool             has = false;

    if (module == NULL || module == Py_None) {
        return false;
    }
    if (names[0] == NULL) {
        names[0] = PyUnicode_InternFromString("_forward_hooks");
        names[1] = PyUnicode_InternFromString("_forward_pre_hooks");
        names[2] = PyUnicode_InternFromString("_backward_hooks");
        names[3] = PyUnicode_InternFromString("_backward_pre_hooks");
    }
    dict = PyObject_GetAttr(module, smp_names.dict);
    for (int i = 0; dict != NULL && i < 4; i++) {
        PyObject *hooks = PyDict_GetItem(dict, names[i]);

        has =
            has || (hooks != NULL && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) > 0);
    }
    Py_XDECREF(dict);
    return has;
}
