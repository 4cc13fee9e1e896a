/* Outputs of a chain, from their owners. */
#include "python/modules/fetch.h"

#include "python/modules/nodes.h"
#include "python/modules/session.h"
#include "python/modules/task.h"
#include "python/modules/wait.h"
#include "python/values/pack_value.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

/* Asks an owner for outputs of its calls of the chain. */
static smp_message *
ask_for(const smp_call_object *call, int owner, uint64_t about, PyObject *places)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = {.kind = SMP_MSG_FORWARD,
                             .phase = (uint8_t)smp_this_task->phase,
                             .flags = SMP_FLAG_FETCH,
                             .microbatch = call->microbatch,
                             .step = session->step,
                             .entry = call->entry,
                             .call = smp_server_next_call(session->server),
                             .about = about};
    smp_pack     pack;
    int          failed;

    smp_pack_init(&pack, session->comm, smp_session_rank_of_comm(owner), NULL);
    smp_server_note(session->server, SMP_EVENT_FETCH, call->entry,
                    (int32_t)PyList_GET_SIZE(places));
    failed = smp_pack_value(&pack, places) < 0 || smp_pack_send(&pack, &envelope) < 0;
    smp_pack_fini(&pack);
    return failed ? NULL
                  : smp_session_wait(envelope.call, SMP_WAIT_OUTPUTS, call->entry);
}

/* Fetches the values at the places of one owner's calls, those before `end`, into their
 * places of the list. */
static int
fetch_from(const smp_call_object *call, const smp_stretch *stretch, size_t end,
           PyObject *places, PyObject *values)
{
    PyObject    *here = PyList_New(0);
    PyObject    *numbers = PyList_New(0);
    PyObject    *fetched = NULL;
    smp_message *response = NULL;
    smp_unpack   unpack;
    int          failed = here == NULL || numbers == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; failed == 0 && i < PyList_GET_SIZE(places); i++) {
        Py_ssize_t at;
        Py_ssize_t number;
        PyObject  *place = NULL;
        PyObject  *index = NULL;

        if (!PyArg_ParseTuple(PyList_GET_ITEM(places, i), "nn", &at, &number)) {
            failed = -1;
        } else if ((size_t)at >= stretch->first && (size_t)at < end) {
            place = Py_BuildValue("(nn)", at - (Py_ssize_t)stretch->first, number);
            index = PyLong_FromSsize_t(i);
            failed = place == NULL || index == NULL || PyList_Append(here, place) < 0 ||
                             PyList_Append(numbers, index) < 0
                         ? -1
                         : 0;
        }
        Py_XDECREF(place);
        Py_XDECREF(index);
    }
    if (failed == 0 && PyList_GET_SIZE(here) > 0) {
        response = ask_for(call, stretch->owner, stretch->call, here);
        failed = response == NULL ? -1 : 0;
    }
    if (response != NULL) {
        if (smp_unpack_init(&unpack, smp_the_session.comm, response, NULL, false,
                            false) == 0) {
            fetched = smp_unpack_value(&unpack);
        }
        smp_unpack_fini(&unpack);
        failed = fetched == NULL ? -1 : 0;
    }
    if (fetched != NULL && (!PyList_Check(fetched) ||
                            PyList_GET_SIZE(fetched) != PyList_GET_SIZE(numbers))) {
        Py_CLEAR(fetched);
        failed = smp_malformed("values of other outputs");
    }
    for (Py_ssize_t i = 0; fetched != NULL && i < PyList_GET_SIZE(numbers); i++) {
        PyList_SET_ITEM(values, PyLong_AsSsize_t(PyList_GET_ITEM(numbers, i)),
                        Py_NewRef(PyList_GET_ITEM(fetched, i)));
    }
    Py_XDECREF(here);
    Py_XDECREF(numbers);
    Py_XDECREF(fetched);
    return failed;
}

/* fetch_outputs(call, places) -> list of values of outputs of a chain. */
static PyObject *
py_fetch_outputs(PyObject *unused, PyObject *args)
{
    smp_call_object *call;
    PyObject        *places;
    PyObject        *values;
    smp_stretch      only;

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
    values = PyList_New(PyList_GET_SIZE(places));
    only = (smp_stretch){.owner = call->owner, .call = call->call};
    if (values != NULL && call->nstretches == 0 &&
        fetch_from(call, &only, SIZE_MAX, places, values) < 0) {
        Py_CLEAR(values);
    }
    for (size_t i = 0; values != NULL && i < call->nstretches; i++) {
        const size_t end =
            i + 1 < call->nstretches ? call->stretches[i + 1].first : SIZE_MAX;

        if (fetch_from(call, &call->stretches[i], end, places, values) < 0) {
            Py_CLEAR(values);
        }
    }
    return values;
}

static PyMethodDef functions[] = {
    {"fetch_outputs", py_fetch_outputs, METH_VARARGS,
     "fetch_outputs(call, [(number of the call, number of its tensor)...]) -> tensors"},
    {NULL, NULL, 0, NULL},
};

int
smp_fetch_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
