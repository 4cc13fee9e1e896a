/* Values of placeholders, from their owner. */
#include "python/modules/placeholders.h"

#include "python/modules/nodes.h"
#include "python/modules/session.h"
#include "python/modules/task.h"
#include "python/modules/wait.h"
#include "python/values/pack_value.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

int
smp_placeholders_fetch(PyObject *list)
{
    PyObject *live = NULL;
    PyObject *done = NULL;

    if (list == NULL || PyList_GET_SIZE(list) == 0) {
        return 0;
    }
    live = PyList_New(0);
    for (Py_ssize_t i = 0; live != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *tensor = PyObject_CallNoArgs(PyList_GET_ITEM(list, i));
        int       failed =
            tensor == NULL || (tensor != Py_None && PyList_Append(live, tensor) < 0);

        Py_XDECREF(tensor);
        if (failed) {
            Py_CLEAR(live);
        }
    }
    if (live != NULL) {
        done = PyList_GET_SIZE(live) == 0
                   ? Py_NewRef(Py_None)
                   : PyObject_CallMethodOneArg(PyList_GET_ITEM(live, 0),
                                               smp_names.fetch_all, live);
    }
    Py_XDECREF(live);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Asks the owner for outputs of the call's chain. */
static smp_message *
ask_for(const smp_call_object *call, PyObject *places)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = {.kind = SMP_MSG_FORWARD,
                             .phase = (uint8_t)smp_this_task->phase,
                             .flags = SMP_FLAG_FETCH,
                             .microbatch = call->microbatch,
                             .step = session->step,
                             .entry = call->entry,
                             .call = smp_server_next_call(session->server),
                             .about = call->call};
    smp_pack     pack;
    int          failed;

    smp_pack_init(&pack, session->comm, smp_session_rank_of_comm(call->owner), NULL);
    failed = smp_pack_value(&pack, places) < 0 || smp_pack_send(&pack, &envelope) < 0;
    smp_pack_fini(&pack);
    return failed ? NULL
                  : smp_session_wait(envelope.call, SMP_WAIT_OUTPUTS, call->entry);
}

/* fetch_outputs(call, places) -> list of values of outputs of a chain. */
static PyObject *
py_fetch_outputs(PyObject *unused, PyObject *args)
{
    smp_call_object *call;
    PyObject        *places;
    smp_message     *response;
    smp_unpack       unpack;
    PyObject        *values = NULL;

    (void)unused;
    if (!PyArg_ParseTuple(args, "OO!", &call, &PyList_Type, &places)) {
        return NULL;
    }
    if (smp_this_task == NULL || !call->open || !smp_call_is_of_this_step(call)) {
        PyErr_Format(
            PyExc_RuntimeError,
            "smp: an output of module '%U' on pp_rank %d is read for the first "
            "time by a thread of the script, or after its step; read it in the "
            "function with @smp.step",
            call->path, call->owner);
        return NULL;
    }
    response = ask_for(call, places);
    if (response == NULL) {
        return NULL;
    }
    if (smp_unpack_init(&unpack, smp_the_session.comm, response, NULL, false, false) ==
        0) {
        values = smp_unpack_value(&unpack);
    }
    smp_unpack_fini(&unpack);
    return values;
}

static PyMethodDef functions[] = {
    {"fetch_outputs", py_fetch_outputs, METH_VARARGS,
     "fetch_outputs(call, [(number of the call, number of its tensor)...]) -> tensors"},
    {NULL, NULL, 0, NULL},
};

int
smp_placeholders_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
