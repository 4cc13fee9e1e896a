/* Steps: from begin to end, their backwards, and the gates on the way. */
#include "python/modules/step.h"

#include <stdlib.h>

#include "comm/device/port.h"
#include "comm/messaging/neighbour.h"
#include "python/modules/chain.h"
#include "python/modules/context.h"
#include "python/modules/gradients.h"
#include "python/modules/server_ops.h"
#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/modules/task.h"
#include "python/modules/tell.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

/* [(microbatch, phase), ...] into turns; NULL with an exception. */
static smp_turn *
read_turns(PyObject *list, Py_ssize_t *count)
{
    smp_turn *turns;

    *count = PyList_GET_SIZE(list);
    turns = malloc(((size_t)*count + 1) * sizeof(*turns));
    if (turns == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        int microbatch;
        int phase;

        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "ii", &microbatch, &phase)) {
            free(turns);
            return NULL;
        }
        turns[i] = (smp_turn){.microbatch = microbatch, .phase = (smp_phase)phase};
    }
    return turns;
}

/* The value of an end or abort message. */
static PyObject *
read_end(smp_message *end)
{
    smp_unpack unpack;
    PyObject  *value = NULL;

    if (smp_unpack_init(&unpack, smp_the_session.comm, end, NULL, false, true) == 0) {
        value = smp_unpack_value(&unpack);
    }
    smp_unpack_fini(&unpack);
    return value;
}

/* Bits of an entry's byte: as in smp/modules/remote_modules.py. */
enum { ENTRY_TRAINS = 1, ENTRY_CHAINS = 2, ENTRY_COLLECTIVE = 4 };

/* step(kind, microbatches, active, turns, entry_flags, run_root, seed, backwards,
 * described)
 * -> (ok, value)
 *
 * kind: 0 simple, 1 interleaved, 2 turns; -1 on ranks other than 0: they serve.  ok:
 * value was sent by pp_rank 0 at the end (None on rank 0); not ok: value describes the
 * failure.  entry_flags: bytes, by entry.  described: bytes, alike on all ranks. */
static PyObject *
py_step(PyObject *module, PyObject *args)
{
    smp_session       *session = &smp_the_session;
    smp_schedule      *schedule = NULL;
    smp_turn          *turns = NULL;
    Py_ssize_t         nturns = 0;
    smp_message       *end;
    smp_status         status = SMP_OK;
    PyObject          *list;
    PyObject          *run_root;
    PyObject          *described;
    PyObject          *value;
    Py_buffer          flags;
    int                kind;
    int                microbatches;
    int                active;
    int                backwards;
    unsigned long long seed;

    (void)module;
    if (!PyArg_ParseTuple(args, "iiiO!y*OKiS", &kind, &microbatches, &active,
                          &PyList_Type, &list, &flags, &run_root, &seed, &backwards,
                          &described)) {
        return NULL;
    }
    for (size_t i = 0; i < session->nentries && i < (size_t)flags.len; i++) {
        const char its = ((const char *)flags.buf)[i];

        session->entries[i].trains = (its & ENTRY_TRAINS) != 0;
        session->entries[i].chains = (its & ENTRY_CHAINS) != 0;
        session->entries[i].collective = (its & ENTRY_COLLECTIVE) != 0;
    }
    PyBuffer_Release(&flags);
    if (session->in_step) {
        PyErr_SetString(PyExc_RuntimeError,
                        "smp: a function with @smp.step was called inside another");
        return NULL;
    }
    if (kind >= 0) {
        turns = read_turns(list, &nturns);
        if (turns == NULL) {
            return NULL;
        }
        status = smp_schedule_create((smp_schedule_kind)kind, microbatches, active,
                                     turns, (int32_t)nturns, &schedule);
        free(turns);
        if (status != SMP_OK) {
            return smp_session_raise(status, "reading the schedule");
        }
    }
    if (session->turns != NULL) {
        status = smp_turns_begin(session->turns, microbatches);
        if (status != SMP_OK) {
            smp_schedule_destroy(schedule);
            return smp_session_raise(status, "beginning a step");
        }
    }
    Py_XSETREF(session->run_root, Py_NewRef(run_root));
    Py_XSETREF(session->described, Py_NewRef(described));
    smp_server_describe(session->server, PyBytes_AS_STRING(described),
                        (size_t)PyBytes_GET_SIZE(described));
    Py_XSETREF(session->context_vars, PyContext_CopyCurrent());
    Py_CLEAR(session->error);
    if (smp_session_raise_signal()) { /* late in a step, before its failure */
        PyErr_Clear();
    }
    session->step_seed = seed;
    session->backwards = kind == SMP_SCHEDULE_INTERLEAVED ? backwards : 1;
    session->step++;
    session->ended_well = false;
    session->in_step = true;
    smp_device_begin_step(smp_comm_device(session->comm));
    Py_BEGIN_ALLOW_THREADS;
    status = smp_server_step(session->server, session->step, schedule, &end);
    Py_END_ALLOW_THREADS;
    session->in_step = false;
    smp_device_end_step(smp_comm_device(session->comm));
    Py_CLEAR(session->run_root);
    smp_context_forget();
    session->ended_well = status == SMP_OK && kind < 0;
    if (status == SMP_ERR_INTERRUPTED && smp_session_raise_signal()) {
        smp_message_free(end);
        return NULL;
    }
    if (status == SMP_ERR_CLOSED && session->error != NULL) {
        smp_message_free(end);
        value = Py_BuildValue("(OO)", Py_False, session->error);
        Py_CLEAR(session->error);
        return value;
    }
    if (status != SMP_OK && !(status == SMP_ERR_CLOSED && end != NULL)) {
        smp_message_free(end);
        return smp_session_raise(status, "running a step");
    }
    value = end == NULL ? Py_NewRef(Py_None) : read_end(end);
    if (value == NULL) {
        return NULL;
    }
    return Py_BuildValue("(ON)", status == SMP_OK ? Py_True : Py_False, value);
}

/* send_end(value): the other ranks' steps return it. */
static PyObject *
py_send_end(PyObject *module, PyObject *value)
{
    (void)module;
    if (smp_session_send_to_all(SMP_MSG_STEP_END, value) < 0) {
        return NULL;
    }
    smp_server_end_replay(smp_the_session.server);
    smp_the_session.ended_well = true;
    Py_RETURN_NONE;
}

/* ended_well(): whether the last begun step is over, and well, on every rank. */
static PyObject *
py_ended_well(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(smp_the_session.ended_well);
}

/* raise_signal(): raises a signal handler's exception from the last step's end. */
static PyObject *
py_raise_signal(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return smp_session_raise_signal() ? NULL : Py_NewRef(Py_None);
}

static void
leave_out_next(void)
{
    smp_the_session.step++;
    smp_server_leave_out(smp_the_session.server, smp_the_session.step);
}

/* send_abort(value): the other ranks' steps fail with it: the one under way, or after
 * its good end the next, then left out by this rank. */
static PyObject *
py_send_abort(PyObject *module, PyObject *value)
{
    (void)module;
    if (smp_the_session.ended_well) {
        leave_out_next();
    }
    if (smp_session_send_to_all(SMP_MSG_ABORT, value) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* skip_step(value): the next step fails on every rank, with value. */
static PyObject *
py_skip_step(PyObject *module, PyObject *value)
{
    smp_the_session.ended_well = false;
    leave_out_next();
    return py_send_abort(module, value);
}

/* check_schedule(microbatches, turns): ValueError when they cannot be followed. */
static PyObject *
py_check_schedule(PyObject *module, PyObject *args)
{
    smp_schedule *schedule;
    smp_turn     *turns;
    smp_status    status;
    PyObject     *list;
    Py_ssize_t    nturns;
    int           microbatches;

    (void)module;
    if (!PyArg_ParseTuple(args, "iO!", &microbatches, &PyList_Type, &list) ||
        (turns = read_turns(list, &nturns)) == NULL) {
        return NULL;
    }
    status = smp_schedule_create(SMP_SCHEDULE_LISTED, microbatches, microbatches, turns,
                                 (int32_t)nturns, &schedule);
    free(turns);
    if (status == SMP_ERR_INVALID) {
        return PyErr_Format(PyExc_ValueError,
                            "smp: the schedule must hold (i, 'forward') and then (i, "
                            "'backward') once for each of the %d microbatches, from 0",
                            microbatches);
    }
    if (status != SMP_OK) {
        return smp_session_raise(status, "reading the schedule");
    }
    smp_schedule_destroy(schedule);
    Py_RETURN_NONE;
}

/* begin_backward(): the step function reached model.backward; waits for its turn.
 * -> the microbatch */
static PyObject *
py_begin_backward(PyObject *module, PyObject *unused)
{
    smp_task  *task = smp_this_task;
    smp_status status = SMP_OK;

    (void)module;
    (void)unused;
    if (task == NULL || task->entry >= 0) {
        PyErr_SetString(
            PyExc_RuntimeError,
            task == NULL
                ? "smp: model.backward() can only be called inside a function "
                  "with @smp.step"
                : "smp: model.backward() was called inside a module's forward; "
                  "call it in the step function");
        return NULL;
    }
    if (task->backward_depth != 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "smp: model.backward() was called inside a backward");
        return NULL;
    }
    smp_chain_leave(task);
    if (task->backwards + 1 == smp_the_session.backwards) {
        smp_server_forward_done(smp_the_session.server, task->microbatch);
        if (smp_the_session.turns != NULL) {
            smp_session_tell_others(&(smp_envelope){.kind = SMP_MSG_FORWARD_DONE,
                                                    .microbatch = task->microbatch,
                                                    .step = smp_the_session.step});
        }
    }
    if (task->phase == SMP_FORWARD) {
        Py_BEGIN_ALLOW_THREADS;
        status = smp_server_backward_point(smp_the_session.server, task->microbatch);
        Py_END_ALLOW_THREADS;
        if (status != SMP_OK) {
            PyErr_SetNone(smp_the_session.aborted);
            return NULL;
        }
        task->phase = SMP_BACKWARD;
        if (smp_stream_enter(task) < 0) {
            return NULL;
        }
    }
    task->backward_depth = 1;
    if (smp_gradients_open(task->microbatch, 0, -1) < 0 ||
        smp_gradients_backward(task->microbatch, task->backwards) < 0) {
        return NULL;
    }
    return PyLong_FromLong(task->microbatch);
}

static PyObject *
py_end_backward(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (smp_this_task != NULL) {
        smp_this_task->backward_depth = 0;
        smp_this_task->backwards++;
        if (smp_gradients_close(smp_this_task->microbatch, 0, -1) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* set_gates(expected): int32 buffer, by gate, how often a microbatch passes it; None:
 * no gates in this job.  Alike on all ranks. */
static PyObject *
py_set_gates(PyObject *module, PyObject *expected)
{
    smp_session *session = &smp_the_session;
    smp_turns   *turns = NULL;

    (void)module;
    if (expected != Py_None) {
        Py_buffer  view;
        smp_status status;

        if (PyObject_GetBuffer(expected, &view, PyBUF_SIMPLE) < 0) {
            return NULL;
        }
        status = smp_turns_create((int32_t)(view.len / 4), view.buf, &turns);
        PyBuffer_Release(&view);
        if (status != SMP_OK) {
            return smp_session_raise(status, "preparing the gates");
        }
    }
    smp_server_set_turns(session->server, turns);
    smp_turns_destroy(session->turns);
    session->turns = turns;
    Py_RETURN_NONE;
}

/* await_turn(gate): the microbatch of this thread's task is at the gate.  -> whether it
 * must say when it left. */
static PyObject *
py_await_turn(PyObject *module, PyObject *gate)
{
    smp_task  *task = smp_this_task;
    smp_status status;
    int32_t    number;

    (void)module;
    if (task == NULL || task->backward_depth > 0 || smp_the_session.turns == NULL) {
        Py_RETURN_FALSE;
    }
    number = (int32_t)PyLong_AsLong(gate);
    if (number < 0) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    }
    Py_BEGIN_ALLOW_THREADS;
    status = smp_server_await_turn(smp_the_session.server, number, task->microbatch);
    Py_END_ALLOW_THREADS;
    if (status != SMP_OK) {
        PyErr_SetNone(smp_the_session.aborted);
        return NULL;
    }
    if (smp_stream_enter(task) < 0) {
        return NULL;
    }
    Py_RETURN_TRUE;
}

/* in_backward() -> whether this thread's task runs a backward, or for one */
static PyObject *
py_in_backward(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(smp_this_task != NULL && smp_this_task->backward_depth > 0);
}

static PyObject *
py_left(PyObject *module, PyObject *gate)
{
    (void)module;
    if (smp_this_task != NULL && smp_the_session.turns != NULL) {
        smp_turns_left(smp_the_session.turns, (int32_t)PyLong_AsLong(gate),
                       smp_this_task->microbatch);
    }
    Py_RETURN_NONE;
}

/* current() -> the microbatch of this thread's task, or None */
static PyObject *
py_current(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (smp_this_task == NULL) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLong(smp_this_task->microbatch);
}

/* task_number() -> the number of this thread's task (server/calls.h), or None */
static PyObject *
py_task_number(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return smp_this_task == NULL ? Py_NewRef(Py_None)
                                 : PyLong_FromUnsignedLongLong(smp_this_task->number);
}

static PyMethodDef functions[] = {
    {"step", py_step, METH_VARARGS,
     "step(kind, microbatches, active, turns, entry_flags, run_root, seed, backwards, "
     "described)"},
    {"send_end", py_send_end, METH_O, "send_end(value)"},
    {"send_abort", py_send_abort, METH_O, "send_abort(value)"},
    {"ended_well", py_ended_well, METH_NOARGS, "-> bool"},
    {"raise_signal", py_raise_signal, METH_NOARGS, "Raises a late signal's exception."},
    {"skip_step", py_skip_step, METH_O, "skip_step(value)"},
    {"check_schedule", py_check_schedule, METH_VARARGS,
     "check_schedule(microbatches, turns)"},
    {"begin_backward", py_begin_backward, METH_NOARGS, "-> the microbatch"},
    {"end_backward", py_end_backward, METH_NOARGS, "The backward is over."},
    {"set_gates", py_set_gates, METH_O, "set_gates(expected or None)"},
    {"await_turn", py_await_turn, METH_O, "await_turn(gate) -> bool"},
    {"in_backward", py_in_backward, METH_NOARGS, "in_backward() -> bool"},
    {"left", py_left, METH_O, "left(gate)"},
    {"current", py_current, METH_NOARGS, "-> the microbatch, or None"},
    {"task_number", py_task_number, METH_NOARGS, "-> int or None"},
    {NULL, NULL, 0, NULL},
};

int
smp_step_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
