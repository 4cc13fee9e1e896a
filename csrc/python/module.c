/* smp._core: the core as Python sees it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/collectives/comm.h"
#include "python/collectives/group.h"
#include "python/collectives/mail.h"
#include "python/modules/call.h"
#include "python/modules/chain.h"
#include "python/modules/context.h"
#include "python/modules/fetch.h"
#include "python/modules/grad_flags.h"
#include "python/modules/gradients.h"
#include "python/modules/lineup.h"
#include "python/modules/nodes.h"
#include "python/modules/serve_chain.h"
#include "python/modules/session_binding.h"
#include "python/modules/step.h"
#include "python/modules/timeline_binding.h"
#include "python/modules/watch.h"
#include "python/partition_binding.h"
#include "python/process/comm_binding.h"
#include "python/process/heap.h"
#include "python/process/log_binding.h"
#include "python/tp_kernels_binding.h"
#include "python/values/codec_binding.h"
#include "python/values/error.h"
#include "python/values/torch_api.h"

#ifdef __clang__
#    define COMPILER __VERSION__
#else
#    define COMPILER "gcc " __VERSION__
#endif

#ifndef SMP_FLAGS /* setup.py says them */
#    define SMP_FLAGS "flags unknown"
#endif

static int
module_exec(PyObject *module)
{
    if (smp_torch_load() < 0 || smp_error_add(module) < 0 ||
        smp_session_binding_add(module) < 0 || smp_codec_add(module) < 0 ||
        smp_nodes_add(module) < 0 || smp_step_add(module) < 0 ||
        smp_timeline_binding_add(module) < 0 || smp_call_add(module) < 0 ||
        smp_context_add(module) < 0 || smp_chain_add(module) < 0 ||
        smp_fetch_add(module) < 0 || smp_grad_flags_add(module) < 0 ||
        smp_serve_chain_add(module) < 0 || smp_gradients_add_functions(module) < 0 ||
        smp_python_add_comm(module) < 0 || smp_comm_add(module) < 0 ||
        smp_group_add(module) < 0 || smp_mail_add(module) < 0 ||
        smp_python_add_partition(module) < 0 || smp_watch_add_functions(module) < 0 ||
        smp_heap_add_functions(module) < 0 || smp_python_add_log(module) < 0 ||
        smp_python_add_tp_kernels(module) < 0 || smp_lineup_add(module) < 0) {
        return -1;
    }
    if (PyModule_AddStringConstant(module, "compiler", COMPILER) < 0 ||
        PyModule_AddStringConstant(module, "flags", SMP_FLAGS) < 0) {
        return -1;
    }
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
