#include "python/modules/passing_gradients.h"

#include "python/modules/gradients.h"
#include "python/modules/reach.h"
#include "python/modules/session.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_value.h"
#include "python/values/unpack_value.h"
#include "server/calls.h"

static int
pack_list(smp_pack *pack, PyObject *list)
{
    const Py_ssize_t n = PyList_GET_SIZE(list);
    int              failed = smp_pack_u32(pack, (uint32_t)n);

    for (Py_ssize_t i = 0; failed == 0 && i < n; i++) {
        failed = smp_pack_value(pack, PyList_GET_ITEM(list, i));
    }
    return failed;
}

/* A list (new) of so many empty lists. */
static PyObject *
make_lists(size_t n)
{
    PyObject *lists = PyList_New((Py_ssize_t)n);

    for (size_t i = 0; lists != NULL && i < n; i++) {
        PyObject *list = PyList_New(0);

        if (list == NULL) {
            Py_CLEAR(lists);
        } else {
            PyList_SET_ITEM(lists, (Py_ssize_t)i, list);
        }
    }
    return lists;
}

int
smp_pass_pack_gradients(smp_pack *pack, const smp_stretch *stretches, size_t nstretches,
                        PyObject *const *gradients)
{
    const size_t before = nstretches - 1;
    PyObject    *lists = make_lists(before);
    PyObject    *terms = make_lists(before + 1);
    PyObject    *passed;
    int          failed = lists == NULL || terms == NULL ? -1 : 0;

    for (size_t i = 0; i < before; i++) {
        for (size_t j = 0; failed == 0 && j < stretches[i].noutputs; j++) {
            failed = PyList_Append(PyList_GET_ITEM(lists, (Py_ssize_t)i), *gradients++);
        }
    }
    passed = failed == 0 ? Py_BuildValue("(iKOO[])", -1, 0ULL, lists, terms) : NULL;
    failed = smp_pack_new_value(pack, passed);
    Py_XDECREF(lists);
    Py_XDECREF(terms);
    return failed;
}

int
smp_pass_read_gradients(smp_pass_gradients *passed, smp_unpack *unpack, int source,
                        uint64_t call)
{
    PyObject          *value = smp_unpack_value(unpack);
    unsigned long long reply;

    if (value == NULL) {
        return -1;
    }
    if (!PyTuple_Check(value) ||
        !PyArg_ParseTuple(value, "iKO!O!O!", &passed->reply_to, &reply, &PyList_Type,
                          &passed->gradients, &PyList_Type, &passed->terms,
                          &PyList_Type, &passed->caller)) {
        PyErr_Clear();
        *passed = (smp_pass_gradients){.kept = passed->kept};
        Py_DECREF(value);
        return smp_malformed("a backward of several owners");
    }
    Py_INCREF(passed->gradients);
    Py_INCREF(passed->terms);
    Py_INCREF(passed->caller);
    Py_DECREF(value);
    passed->reply = reply;
    if (passed->reply_to < 0) {
        passed->reply_to = source;
        passed->reply = call;
    }
    return 0;
}

void
smp_pass_gradients_fini(smp_pass_gradients *passed)
{
    Py_XDECREF(passed->gradients);
    Py_XDECREF(passed->terms);
    Py_XDECREF(passed->caller);
    Py_XDECREF(passed->kept);
}

int
smp_pass_add_roots(const smp_pass_gradients *passed, const smp_context *context,
                   PyObject *roots, PyObject *grads)
{
    PyObject *terms;

    if (context->stretch >= PyList_GET_SIZE(passed->terms)) {
        return smp_malformed("a backward of other stretches");
    }
    terms = PyList_GET_ITEM(passed->terms, context->stretch);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(terms); i++) {
        unsigned  number;
        PyObject *gradient;

        if (!PyArg_ParseTuple(PyList_GET_ITEM(terms, i), "IO", &number, &gradient) ||
            number >= PyTuple_GET_SIZE(context->edges)) {
            PyErr_Clear();
            return smp_malformed("a gradient of no output");
        }
        if (PyList_Append(roots, PyTuple_GET_ITEM(context->edges, number)) < 0 ||
            PyList_Append(grads, gradient) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Adds the gradients of Enter's inputs to the sums of their origins, the last first. */
static int
add_terms(smp_pass_gradients *passed, const smp_context *context)
{
    int failed = 0;

    for (size_t i = context->ninputs; failed == 0 && i-- > 0;) {
        PyObject *origin = PyList_GET_ITEM(context->origins, (Py_ssize_t)i);
        PyObject *gradient = context->gradients == NULL
                                 ? Py_None
                                 : PyList_GET_ITEM(context->gradients, (Py_ssize_t)i);
        unsigned  stretch;
        unsigned  number;
        PyObject *term;

        if (!smp_is_reached(context->unreached, i)) {
            continue;
        }
        if (origin == Py_None) {
            failed = PyList_Append(passed->caller, gradient);
            continue;
        }
        if (gradient == Py_None) {
            continue;
        }
        if (!PyTuple_Check(origin) ||
            !PyArg_ParseTuple(origin, "II", &stretch, &number) ||
            stretch >= context->stretch) {
            PyErr_Clear();
            return smp_malformed("a gradient of no stretch");
        }
        term = Py_BuildValue("(IO)", number, gradient);
        failed = term == NULL
                     ? -1
                     : PyList_Append(PyList_GET_ITEM(passed->terms, stretch), term);
        Py_XDECREF(term);
    }
    return failed;
}

int
smp_pass_gradients_on(smp_pass_gradients *passed, const smp_context *context,
                      PyObject *state, smp_envelope envelope)
{
    const Py_ssize_t before = (Py_ssize_t)context->stretch - 1;
    smp_pack         pack;
    int              failed;

    if (PyList_GET_SIZE(passed->terms) != before + 2 ||
        PyList_GET_SIZE(passed->gradients) != before + 1 ||
        add_terms(passed, context) < 0) {
        return PyErr_Occurred() ? -1 : smp_malformed("a backward of other stretches");
    }
    envelope.flags = smp_gradients_flags();
    if (context->stretch == 0) {
        envelope.kind = SMP_MSG_RESPONSE;
        envelope.call = passed->reply;
        smp_pack_init(&pack, smp_the_session.comm, passed->reply_to, NULL);
        pack.graph = false;
        failed = pack_list(&pack, passed->caller);
    } else {
        envelope.flags |=
            (uint16_t)(SMP_FLAG_CHAIN | (state != NULL ? SMP_FLAG_STATE : 0) |
                       (passed->kept != NULL ? SMP_FLAG_FETCH : 0));
        envelope.entry = context->previous_entry;
        envelope.about = context->previous_call;
        envelope.number = smp_call_of_backward(context->previous_number);
        smp_pack_init(&pack, smp_the_session.comm, context->previous, NULL);
        pack.graph = false;
        failed = pack_list(&pack, PyList_GET_ITEM(passed->gradients, before));
        failed = failed == 0 && state != NULL ? smp_pack_value(&pack, state) : failed;
        failed = failed == 0 && passed->kept != NULL
                     ? smp_pack_value(&pack, passed->kept)
                     : failed;
        failed = failed == 0
                     ? smp_pack_new_value(
                           &pack,
                           Py_BuildValue("(iKNNO)", passed->reply_to,
                                         (unsigned long long)passed->reply,
                                         PyList_GetSlice(passed->gradients, 0, before),
                                         PyList_GetSlice(passed->terms, 0, before + 1),
                                         passed->caller))
                     : failed;
    }
    if (failed == 0 && context->stretch > 0) {
        smp_server_note(smp_the_session.server, SMP_EVENT_PASS, envelope.entry,
                        context->previous % smp_the_session.size);
    }
    failed = failed == 0 ? smp_pack_send(&pack, &envelope) : failed;
    smp_pack_fini(&pack);
    return failed;
}
