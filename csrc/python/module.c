/* smp._core: the core as Python sees it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static int
module_exec(PyObject *module)
{
    return PyModule_AddStringConstant(module, "__doc__", "The C core of smp.");
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, __extension__(void *) module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "smp._core",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
