/* Workers, tasks, notes and signals in Python. */
#include "python/modules/server_ops.h"

#include <unistd.h>

#include "common/clock.h"
#include "common/mix.h"
#include "python/modules/chain.h"
#include "python/modules/context.h"
#include "python/modules/failure.h"
#include "python/modules/gradients.h"
#include "python/modules/placeholders.h"
#include "python/modules/serve.h"
#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/modules/task.h"
#include "python/modules/tell.h"
#include "python/values/rank_names.h"

/* A shell's exit status for a program ended by Ctrl-C. */
#define EXIT_INTERRUPTED 130

/* Signals so soon after the first are one wish: a terminal and a launcher may both pass
 * on a Ctrl-C. */
#define ONE_WISH_NS (300 * SMP_NS_PER_MS)

/* Whether prepare_thread() has gone well on this worker. */
static _Thread_local bool prepared;

/* ---------------------------------------------------------------------- the workers */

static void
op_worker_begin(void *ctx)
{
    (void)ctx;
    smp_python_begin();
}

static void
op_worker_end(void *ctx)
{
    (void)ctx;
    smp_python_end();
}

/* Before a task: the worker's thread is prepared once.  0, or -1 with an exception; the
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

/* The task's thread uses the device and stream of the step's caller. */
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
    smp_python_wake();
    smp_this_task = &task;
    context = enter_context();
    enter_device();
    if (prepare_thread() == 0) {
        smp_serve_request(request, &task);
    } else {
        smp_message_free(request);
        smp_session_fail(&task);
    }
    smp_chain_leave(&task);
    Py_CLEAR(task.placeholders);
    Py_CLEAR(task.again);
    Py_CLEAR(task.undo);
    exit_context(context);
    smp_stream_leave(&task);
    smp_calls_fini(&task.calls);
    smp_this_task = NULL;
    smp_python_rest();
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
    smp_python_wake();
    smp_this_task = &task;
    context = enter_context();
    enter_device();
    if (prepare_thread() == 0 &&
        smp_stream_seed(&task, smp_mix(session->step_seed, (uint64_t)microbatch)) ==
            0) {
        done = PyObject_CallFunction(session->run_root, "i", (int)microbatch);
    }
    smp_chain_leave(&task);
    if (done != NULL && (smp_placeholders_fetch(task.placeholders) < 0 ||
                         smp_gradients_done(microbatch) < 0)) {
        Py_CLEAR(done);
    }
    Py_CLEAR(task.again);
    if (done == NULL) {
        smp_session_fail(&task);
    } else {
        smp_session_tell_others(&(smp_envelope){
            .kind = SMP_MSG_CLOSED, .microbatch = microbatch, .step = session->step});
    }
    Py_XDECREF(done);
    smp_chain_leave(&task);
    Py_CLEAR(task.placeholders);
    exit_context(context);
    smp_stream_leave(&task);
    smp_calls_fini(&task.calls);
    smp_this_task = NULL;
    smp_python_rest();
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
    smp_python_wake();
    if (envelope.kind == SMP_MSG_SETTLE) {
        task.phase = SMP_FORWARD;
        done = raise_other_step(note);
    }
    smp_message_free(note);
    if (envelope.kind == SMP_MSG_RELEASE) {
        done = smp_context_release(envelope.about);
    } else if (envelope.kind == SMP_MSG_CLOSED) {
        done = smp_context_let_go(envelope.microbatch) == 0 &&
               smp_gradients_done(envelope.microbatch) == 0;
    }
    if (!done) {
        smp_session_fail_at_once(&task);
    }
    smp_python_rest();
}

/* A Python signal handler's exception, kept for the end of the step. */
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
            PyErr_Clear(); /* the step raises the first one */
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
