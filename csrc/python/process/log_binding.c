/* log and log_rank of smp._core. */
#include "python/process/log_binding.h"

#include "common/log.h"

/* log(text): one line of level info */
static PyObject *
log_text(PyObject *module, PyObject *arg)
{
    const char *text = PyUnicode_AsUTF8(arg);

    (void)module;
    if (text == NULL) {
        return NULL;
    }
    smp_log(SMP_LOG_INFO, "%s", text);
    Py_RETURN_NONE;
}

/* log_rank(rank) */
static PyObject *
log_rank(PyObject *module, PyObject *arg)
{
    long rank = PyLong_AsLong(arg);

    (void)module;
    if (rank == -1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    smp_log_rank((int)rank);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"log", log_text, METH_O,
     "log(text)\n--\n\nA line on stderr where SMP_LOG is info."},
    {"log_rank", log_rank, METH_O, "log_rank(rank)\n--\n\nWhose lines these are."},
    {NULL, NULL, 0, NULL},
};

int
smp_python_add_log(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
