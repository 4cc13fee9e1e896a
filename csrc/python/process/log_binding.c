/* log, log_rank and take_warning of smp._core. */
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

/* take_warning() -> the kept text, or None */
static PyObject *
take_warning(PyObject *module, PyObject *unused)
{
    char text[SMP_WARNING_BYTES];

    (void)module;
    (void)unused;
    if (!smp_warning_take(text)) {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyMethodDef functions[] = {
    {"log", log_text, METH_O,
     "log(text)\n--\n\nA line on stderr where SMP_LOG is info."},
    {"log_rank", log_rank, METH_O, "log_rank(rank)\n--\n\nWhose lines these are."},
    {"take_warning", take_warning, METH_NOARGS,
     "take_warning()\n--\n\nWhat the core has to warn the script of, once; or None."},
    {NULL, NULL, 0, NULL},
};

int
smp_python_add_log(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
