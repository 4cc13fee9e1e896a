/* smp._mpi: the MPI transport, in a shared object of its own so that the core needs no
 * MPI.  Its `transport` is a capsule for _core.register_transport(). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm/transport/mpi/mpi.h"
#include "common/status.h"

static int
module_exec(PyObject *module)
{
    smp_status status = smp_mpi_usable();
    PyObject  *capsule;
    int        result;

    if (status == SMP_ERR_CLOSED) {
        PyErr_SetString(PyExc_ImportError,
                        "smp._mpi: MPI is not running in this process: "
                        "import mpi4py.MPI first");
        return -1;
    }
    if (status != SMP_OK) {
        PyErr_SetString(PyExc_ImportError,
                        "smp._mpi: MPI was initialized for one thread only: the MPI "
                        "transport needs MPI_THREAD_SERIALIZED, better "
                        "MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level)");
        return -1;
    }
    capsule =
        PyCapsule_New((void *)(uintptr_t)&smp_transport_mpi, "smp.transport", NULL);
    if (capsule == NULL) {
        return -1;
    }
    result = PyModule_AddObjectRef(module, "transport", capsule);
    Py_DECREF(capsule);
    return result;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, __extension__(void *) module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, .m_name = "smp._mpi",    .m_doc = "The MPI transport.",
    .m_size = 0,           .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__mpi(void)
{
    return PyModuleDef_Init(&module_def);
}
