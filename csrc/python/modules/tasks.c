/* What the server calls: workers, tasks, notes, signals; and how a step fails. */
#include "python/modules/session.h"

#include <unistd.h>

#include "comm/neighbour.h"
#include "common/clock.h"
#include "common/mix.h"
#include "python/modules/gradients.h"
#include "python/process/heap.h"
#include "python/values/pack.h"
#include "python/values/rank_names.h"

/* What a shell reports for a program that Ctrl-C ended. */
#define EXIT_INTERRUPTED 130

/* Signals that come so soon after the first are one wish: a terminal and a launcher may
 * both pass on a Ctrl-C. */
#define ONE_WISH_NS (300 * SMP_NS_PER_MS)

_Thread_local smp_task *smp_this_task;

/* The worker's Python thread state while it does not hold the GIL. */
static _Thread_local PyThreadState *resting;

/* Whether prepare_thread() has gone well on this worker. */
static _Thread_local bool prepared;

/* --------------------------------------------------------- what the server calls */

static void
wake_python(void)
{
    PyEval_RestoreThread(resting);
}

static void
rest_python(void)
{
    smp_heap_give_scratch();
    resting = PyEval_SaveThread();
}

static void
op_worker_begin(void *ctx)
{
    (void)ctx;
    (void)PyGILState_Ensure();
    rest_python();
}

static void
op_worker_end(void *ctx)
{
    (void)ctx;
    wake_python();
    PyGILState_Release(PyGILState_UNLOCKED);
}

/* Before a task: what the worker's thread needs once.  0, or -1 with an exception; the
 * next task tries again. */
static int
prepare_thread(void)
{
    PyObject *done;

    if (prepared) {
        return 0;
    }
    /* An accelerator's device thread must never wait for a response: it would hold up
     * every other microbatch's backward.  [design.md, section 3] */
    done = PyObject_CallOneArg(smp_torch.set_multithreading, Py_False);
    if (done != NULL) {
        Py_SETREF(done, PyObject_CallNoArgs(smp_the_session.worker_begin));
    }
    prepared = done != NULL;
    Py_XDECREF(done);
    return prepared ? 0 : -1;
}

/* Enters a copy of the main thread's context variables. */
static PyObject *
enter_context(void)
{
    PyObject *context = PyContext_Copy(smp_the_session.context_vars);

    if (context != NULL && PyContext_Enter(context) < 0) {
        Py_CLEAR(context);
    }
    if (context == NULL) {
        PyErr_Clear();
    }
    return context;
}

static void
exit_context(PyObject *context)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;

    if (context == NULL) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (PyContext_Exit(context) < 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    Py_DECREF(context);
}

/* The task's thread uses the device and stream of the thread that called the step. */
static void
enter_device(void)
{
    PyObject *enter = smp_the_session.enter_device;
    PyObject *done;

    if (enter == NULL || enter == Py_None) {
        return;
    }
    done = PyObject_CallNoArgs(enter);
    if (done == NULL) {
        PyErr_WriteUnraisable(enter);
    }
    Py_XDECREF(done);
}

/* --------------------------------------------------------------- a step that fails */

static int
send_to_one(int rank, const smp_envelope *envelope, PyObject *value)
{
    smp_pack pack;
    int      failed;

    smp_pack_init(&pack, smp_the_session.comm, rank, NULL);
    pack.graph = false;
    failed = smp_pack_value(&pack, value) < 0 || smp_pack_send(&pack, envelope) < 0;
    smp_pack_fini(&pack);
    return failed ? -1 : 0;
}

int
smp_session_send_to_all(smp_msg_kind kind, PyObject *value)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = {.kind = (uint8_t)kind, .step = session->step};
    PyObject    *type = NULL; /* the first exception, kept while others are told */
    PyObject    *error = NULL;
    PyObject    *traceback = NULL;
    const bool   abort = kind == SMP_MSG_ABORT;
    const int    first = abort ? 0 : smp_session_rank_of_comm(0);
    const int    last = abort ? smp_comm_size(session->comm) : first + session->size;
    const int    own = smp_session_rank_of_comm(session->rank);

    for (int rank = first; rank < last; rank++) {
        if (rank == own || send_to_one(rank, &envelope, value) == 0) {
            continue;
        }
        if (!abort) {
            return -1;
        }
        if (type == NULL && !smp_comm_gone(session->comm, rank)) {
            PyErr_Fetch(&type, &error, &traceback);
        } else {
            PyErr_Clear(); /* who has gone needs no word any more */
        }
    }
    if (type != NULL) {
        PyErr_Restore(type, error, traceback);
        return -1;
    }
    return 0;
}

/* Takes the exception that is set: borrowed, as one object with its traceback.  The
 * caller frees the three. */
static void
take_exception(PyObject **type, PyObject **value, PyObject **traceback)
{
    PyErr_Fetch(type, value, traceback);
    PyErr_NormalizeException(type, value, traceback);
    if (*traceback != NULL) {
        (void)PyException_SetTraceback(*value, *traceback);
    }
}

/* What the other ranks need to raise the task's exception (new). */
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

/* Ends the step on every rank with the exception that is set.  hear: see what the other
 * ranks have said before. */
static void
fail_step(const smp_task *task, bool hear)
{
    smp_session *session = &smp_the_session;
    PyObject    *type;
    PyObject    *value;
    PyObject    *traceback;

    take_exception(&type, &value, &traceback);
    if (hear) {
        rest_python();
        smp_server_hear(session->server);
        wake_python();
    }
    if (smp_comm_lost(session->comm) >= 0 &&
        PyErr_GivenExceptionMatches(value, PyExc_ConnectionError)) {
        smp_server_fail(session->server); /* the step says who is gone */
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
    /* What failed here may follow from what failed on another rank, which has said so
     * and then left. */
    fail_step(task, true);
}

bool
smp_session_answer_raised(const smp_task *task, int source, smp_envelope envelope)
{
    smp_session *session = &smp_the_session;
    PyObject    *type;
    PyObject    *value;
    PyObject    *traceback;
    PyObject    *told;
    bool         sent;

    /* In a sequence others may wait for this rank in a collective of the module: its
     * caller, who runs what they do, too, would never hear of it. */
    if (session->in_sequence || !PyErr_ExceptionMatches(PyExc_Exception) ||
        (smp_comm_lost(session->comm) >= 0 &&
         PyErr_ExceptionMatches(PyExc_ConnectionError))) {
        return false;
    }
    take_exception(&type, &value, &traceback);
    envelope.kind = SMP_MSG_RESPONSE;
    envelope.flags |= SMP_FLAG_RAISED;
    envelope.about = task->count;
    told = describe(task, value);
    sent = told != NULL && send_to_one(source, &envelope, told) == 0;
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

/* ------------------------------------------------------------------------ the tasks */

static void
op_execute(void *ctx, smp_message *request)
{
    const smp_envelope *envelope = smp_message_envelope(request);
    smp_task            task = {.microbatch = envelope->microbatch,
                                .entry = envelope->entry,
                                .number = envelope->number,
                                .order = envelope->about,
                                .count = envelope->about,
                                .phase = (smp_phase)envelope->phase,
                                .backward_depth = (envelope->flags & SMP_FLAG_RECOMPUTE) != 0};
    PyObject           *context;

    (void)ctx;
    wake_python();
    smp_this_task = &task;
    context = enter_context();
    enter_device();
    if (prepare_thread() == 0) {
        smp_serve_request(request, &task);
    } else {
        smp_message_free(request);
        smp_session_fail(&task);
    }
    exit_context(context);
    smp_stream_leave(&task);
    smp_calls_fini(&task.calls);
    smp_this_task = NULL;
    rest_python();
}

void
smp_session_tell_others(const smp_envelope *envelope)
{
    smp_session *session = &smp_the_session;

    for (int rank = 0; rank < session->size; rank++) {
        if (rank != session->rank) {
            (void)smp_comm_send(session->comm, smp_session_rank_of_comm(rank), envelope,
                                sizeof(*envelope), NULL, 0);
        }
    }
}

static void
op_run_root(void *ctx, int32_t microbatch)
{
    smp_session *session = &smp_the_session;
    smp_task     task = {
            .microbatch = microbatch, .entry = -1, .number = smp_call_of_root(microbatch)};
    PyObject *context;
    PyObject *done = NULL;

    (void)ctx;
    wake_python();
    smp_this_task = &task;
    context = enter_context();
    enter_device();
    if (prepare_thread() == 0 &&
        smp_stream_seed(&task, smp_mix(session->step_seed, (uint64_t)microbatch)) ==
            0) {
        done = PyObject_CallFunction(session->run_root, "i", (int)microbatch);
    }
    if (done != NULL && smp_gradients_done(microbatch) < 0) {
        Py_CLEAR(done);
    }
    if (done == NULL) {
        smp_session_fail(&task);
    } else {
        smp_session_tell_others(&(smp_envelope){
            .kind = SMP_MSG_CLOSED, .microbatch = microbatch, .step = session->step});
    }
    Py_XDECREF(done);
    exit_context(context);
    smp_stream_leave(&task);
    smp_calls_fini(&task.calls);
    smp_this_task = NULL;
    rest_python();
}

/* pp_rank 0 ran another step than this rank.  False. */
static bool
raise_other_step(const smp_message *note)
{
    size_t    n = note->nbytes - sizeof(smp_envelope);
    PyObject *its = PyUnicode_DecodeUTF8(
        (const char *)note->bytes + sizeof(smp_envelope), (Py_ssize_t)n, "replace");

    if (its != NULL) {
        PyErr_Format(
            PyExc_RuntimeError,
            "smp: the ranks are in different steps: %s runs %U; %s runs %s.  All ranks "
            "run the same steps, in the same mode, and freeze "
            "the "
            "same parameters (of model.parameters(), not of local_parameters())",
            smp_rank_name(smp_session_rank_of_comm(0)), its, smp_session_own_name(),
            PyBytes_AS_STRING(smp_the_session.described));
        Py_DECREF(its);
    }
    return false;
}

static void
op_note(void *ctx, smp_message *note)
{
    smp_envelope envelope = *smp_message_envelope(note);
    smp_task     task = {.microbatch = envelope.microbatch,
                         .entry = envelope.kind == SMP_MSG_RELEASE ? envelope.entry : -1,
                         .phase = SMP_BACKWARD};
    bool         done = true;

    (void)ctx;
    wake_python();
    if (envelope.kind == SMP_MSG_SETTLE) {
        task.phase = SMP_FORWARD;
        done = raise_other_step(note);
    }
    smp_message_free(note);
    if (envelope.kind == SMP_MSG_RELEASE) {
        done = smp_serve_release(envelope.about);
    } else if (envelope.kind == SMP_MSG_CLOSED) {
        done = smp_gradients_done(envelope.microbatch) == 0;
    }
    if (!done) {
        fail_step(&task,
                  false); /* a message is being read: not another one inside it */
    }
    rest_python();
}

/* A Python signal handler that raised, kept for the end of the step. */
static PyObject *signal_type, *signal_value, *signal_traceback;
static int64_t   signal_ns; /* when it raised */

/* The second Ctrl-C, while the first waits for a worker to come to an end. */
static void
end_at_once(void)
{
    static const char said[] = "smp: interrupted twice; ends at once\n";

    (void)!write(STDERR_FILENO, said, sizeof(said) - 1);
    _exit(EXIT_INTERRUPTED);
}

static bool
op_check_signals(void *ctx)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    bool             go = PyErr_CheckSignals() == 0;

    (void)ctx;
    if (!go) {
        if (signal_type == NULL) {
            PyErr_Fetch(&signal_type, &signal_value, &signal_traceback);
            signal_ns = smp_clock_ns();
            smp_server_interrupt(smp_the_session.server);
        } else if (smp_clock_ns() > signal_ns + ONE_WISH_NS &&
                   PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) &&
                   PyErr_GivenExceptionMatches(signal_type, PyExc_KeyboardInterrupt)) {
            end_at_once();
        } else {
            PyErr_Clear(); /* the first is what the step raises */
        }
    }
    PyGILState_Release(gil);
    return go;
}

bool
smp_session_raise_signal(void)
{
    if (signal_type == NULL) {
        return false;
    }
    PyErr_Restore(signal_type, signal_value, signal_traceback);
    signal_type = signal_value = signal_traceback = NULL;
    return true;
}

const smp_server_ops smp_session_ops = {
    .worker_begin = op_worker_begin,
    .worker_end = op_worker_end,
    .execute = op_execute,
    .run_root = op_run_root,
    .note = op_note,
    .check_signals = op_check_signals,
};

smp_message *
smp_session_wait(uint64_t call, smp_wait_kind kind, int32_t entry)
{
    smp_task    *task = smp_this_task;
    smp_message *response;
    smp_status   status;

    smp_heap_give_scratch();
    Py_BEGIN_ALLOW_THREADS;
    status = smp_server_wait(smp_the_session.server, call, kind, entry,
                             smp_the_session.entries[entry].owner, &response);
    Py_END_ALLOW_THREADS;
    if (status != SMP_OK) {
        PyErr_SetNone(smp_the_session.aborted);
        return NULL;
    }
    if (smp_stream_enter(task) < 0) {
        smp_message_free(response);
        return NULL;
    }
    return response;
}
