/* Exceptions into words for other ranks. */
#include "python/modules/failure.h"

#include "comm/messaging/neighbour.h"
#include "python/modules/session.h"
#include "python/modules/tell.h"

/* Takes the set exception: borrowed, as one object with its traceback.  The caller
 * frees the three. */
static void
take_exception(PyObject **type, PyObject **value, PyObject **traceback)
{
    PyErr_Fetch(type, value, traceback);
    PyErr_NormalizeException(type, value, traceback);
    if (*traceback != NULL) {
        (void)PyException_SetTraceback(*value, *traceback);
    }
}

/* The description for other ranks to raise the task's exception (new). */
static PyObject *
describe(const smp_task *task, PyObject *error)
{
    const smp_session *session = &smp_the_session;
    PyObject          *path = Py_None;

    if (task->entry >= 0 && (size_t)task->entry < session->nentries) {
        path = session->entries[task->entry].path;
    }
    return PyObject_CallFunction(session->describe_error, "OOii",
                                 error == NULL ? Py_None : error, path,
                                 task->microbatch, (int)task->phase);
}

/* Ends the step on every rank with the set exception.  hear: first read the other
 * ranks' messages. */
static void
fail_step(const smp_task *task, bool hear)
{
    smp_session *session = &smp_the_session;
    PyObject    *type;
    PyObject    *value;
    PyObject    *traceback;

    take_exception(&type, &value, &traceback);
    if (hear) {
        smp_python_rest();
        smp_server_hear(session->server, 0);
        smp_python_wake();
    }
    if (smp_comm_lost(session->comm) >= 0 &&
        PyErr_GivenExceptionMatches(value, PyExc_ConnectionError)) {
        smp_server_fail(session->server); /* the step names the lost rank */
    }
    if (!smp_server_failed(session->server)) {
        Py_XSETREF(session->error, describe(task, value));
        if (session->error == NULL ||
            smp_session_send_to_all(SMP_MSG_ABORT, session->error) < 0) {
            PyErr_WriteUnraisable(session->describe_error);
        }
        smp_server_fail(session->server);
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

void
smp_session_fail(smp_task *task)
{
    /* This failure may follow from another rank's, announced before that rank left. */
    fail_step(task, true);
}

void
smp_session_fail_at_once(const smp_task *task)
{
    fail_step(task, false);
}

bool
smp_session_may_answer(void)
{
    /* In a sequence others may wait for this rank in a collective of the module: the
     * caller, with the same runs, would never hear of it. */
    return !smp_the_session.in_sequence && PyErr_ExceptionMatches(PyExc_Exception) &&
           (smp_comm_lost(smp_the_session.comm) < 0 ||
            !PyErr_ExceptionMatches(PyExc_ConnectionError));
}

bool
smp_session_answer_raised(const smp_task *task, int source, smp_envelope envelope)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyObject *told;
    bool      sent;

    if (!smp_session_may_answer()) {
        return false;
    }
    take_exception(&type, &value, &traceback);
    envelope.kind = SMP_MSG_RESPONSE;
    envelope.flags |= SMP_FLAG_RAISED;
    envelope.about = task->count;
    told = describe(task, value);
    sent = told != NULL && smp_session_send_to_one(source, &envelope, told) == 0;
    Py_XDECREF(told);
    if (sent) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    } else {
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    return sent;
}
