/* One rank's session: its life, its steps, and how they fail. */
#include "python/session.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/clock.h"
#include "comm/device/port.h"
#include "python/gradients.h"
#include "python/heap.h"
#include "python/pack.h"
#include "python/registry.h"
#include "python/signals.h"
#include "python/unpack.h"
#include "python/watch.h"

/* What a shell reports for a program that Ctrl-C ended. */
#define EXIT_INTERRUPTED 130

/* Signals that come so soon after the first are one wish: a terminal and a launcher may
 * both pass on a Ctrl-C. */
#define ONE_WISH_NS (300 * SMP_NS_PER_MS)

smp_session             smp_the_session;
_Thread_local smp_task *smp_this_task;

const char *
smp_entry_path(const smp_entry *entry)
{
    const char *path = PyUnicode_AsUTF8(entry->path);

    return path == NULL ? "?" : path;
}

/* The worker's Python thread state while it does not hold the GIL. */
static _Thread_local PyThreadState *resting;

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
    PyObject *done;

    (void)ctx;
    (void)PyGILState_Ensure();
    /* An accelerator's device thread must never wait for a response: it would hold up
     * every other microbatch's backward.  [design.md, section 3] */
    done = PyObject_CallOneArg(smp_torch.set_multithreading, Py_False);
    Py_XDECREF(done);
    if (done != NULL) {
        done = PyObject_CallNoArgs(smp_the_session.worker_begin);
        Py_XDECREF(done);
    }
    if (done == NULL) {
        PyErr_WriteUnraisable(smp_the_session.worker_begin);
    }
    rest_python();
}

static void
op_worker_end(void *ctx)
{
    (void)ctx;
    wake_python();
    PyGILState_Release(PyGILState_UNLOCKED);
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

/* Sends `value` to every other rank that is there.  0, or -1 with an exception. */
static int
send_to_all(smp_msg_kind kind, PyObject *value)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = {.kind = (uint8_t)kind, .step = session->step};

    for (int rank = 0; rank < session->size; rank++) {
        smp_pack pack;
        int      failed;

        if (rank == session->rank) {
            continue;
        }
        smp_pack_init(&pack, session->comm, rank, NULL);
        pack.graph = false;
        failed =
            smp_pack_value(&pack, value) < 0 || smp_pack_send(&pack, &envelope) < 0;
        smp_pack_fini(&pack);
        if (failed && kind == SMP_MSG_ABORT &&
            PyErr_ExceptionMatches(PyExc_ConnectionError)) {
            PyErr_Clear(); /* it has gone, and needs no word any more */
        } else if (failed) {
            return -1;
        }
    }
    return 0;
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
    PyObject    *path = Py_None;

    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        (void)PyException_SetTraceback(value, traceback);
    }
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
        if (task->entry >= 0 && (size_t)task->entry < session->nentries) {
            path = session->entries[task->entry].path;
        }
        Py_XSETREF(session->error,
                   PyObject_CallFunction(session->describe_error, "OOii",
                                         value == NULL ? Py_None : value, path,
                                         task->microbatch, (int)task->phase));
        if (session->error == NULL || send_to_all(SMP_MSG_ABORT, session->error) < 0) {
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

/* ------------------------------------------------------------------------ the tasks */

static void
op_execute(void *ctx, smp_message *request)
{
    const smp_envelope *envelope = smp_message_envelope(request);
    smp_task            task = {.microbatch = envelope->microbatch,
                                .entry = envelope->entry,
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
    smp_serve_request(request, &task);
    exit_context(context);
    smp_stream_leave(&task);
    smp_this_task = NULL;
    rest_python();
}

static void
tell_others(const smp_envelope *envelope)
{
    smp_session *session = &smp_the_session;

    for (int rank = 0; rank < session->size; rank++) {
        if (rank != session->rank) {
            (void)smp_comm_send(session->comm, rank, envelope, sizeof(*envelope), NULL,
                                0);
        }
    }
}

static void
op_run_root(void *ctx, int32_t microbatch)
{
    smp_session *session = &smp_the_session;
    smp_task     task = {.microbatch = microbatch, .entry = -1};
    PyObject    *context;
    PyObject    *done = NULL;

    (void)ctx;
    wake_python();
    smp_this_task = &task;
    context = enter_context();
    enter_device();
    if (smp_stream_seed(
            &task, smp_stream_mix(session->step_seed, (uint64_t)microbatch)) == 0) {
        done = PyObject_CallFunction(session->run_root, "i", (int)microbatch);
    }
    if (done != NULL && smp_gradients_done(microbatch) < 0) {
        Py_CLEAR(done);
    }
    if (done == NULL) {
        smp_session_fail(&task);
    } else {
        tell_others(&(smp_envelope){
            .kind = SMP_MSG_CLOSED, .microbatch = microbatch, .step = session->step});
    }
    Py_XDECREF(done);
    exit_context(context);
    smp_stream_leave(&task);
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
            "smp: the ranks are in different steps: pp_rank 0 runs %U; pp_rank "
            "%d runs %s.  All ranks run the same steps, in the same mode, and freeze "
            "the "
            "same parameters (of model.parameters(), not of local_parameters())",
            its, smp_the_session.rank, PyBytes_AS_STRING(smp_the_session.described));
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

static const smp_server_ops server_ops = {
    .worker_begin = op_worker_begin,
    .worker_end = op_worker_end,
    .execute = op_execute,
    .run_root = op_run_root,
    .note = op_note,
    .check_signals = op_check_signals,
};

/* --------------------------------------------------------------------- signals */

/* signal_fd() -> the descriptor for signal.set_wakeup_fd during steps */
static PyObject *
py_signal_fd(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLong(smp_server_signal_fd(smp_the_session.server));
}

/* forward_signals(fd): where what comes to signal_fd() goes on to; -1: nowhere */
static PyObject *
py_forward_signals(PyObject *module, PyObject *fd)
{
    long to = PyLong_AsLong(fd);

    (void)module;
    if (to == -1 && PyErr_Occurred()) {
        return NULL;
    }
    smp_server_forward_signals(smp_the_session.server, (int)to);
    Py_RETURN_NONE;
}

/* --------------------------------------------------------------------- failures */

static PyObject *
raise_status(smp_status status, const char *doing)
{
    smp_session *session = &smp_the_session;

    if (status == SMP_ERR_PEER_LOST) {
        const char *awaited =
            session->server == NULL ? "" : smp_server_awaited(session->server);

        PyErr_Format(
            PyExc_ConnectionError,
            "smp: %s: pp_rank %d is gone (its process ended or was killed); on "
            "pp_rank %d: %s [SMP_ERR_PEER_LOST]",
            doing, smp_comm_lost(session->comm), session->rank,
            awaited[0] == '\0' ? "no task waited, it served the others" : awaited);
    } else if (status == SMP_ERR_UNREACHABLE) {
        PyErr_Format(
            PyExc_ConnectionError,
            "smp: %s: pp_rank %d has left the job in order, and pp_rank %d is in "
            "step %u: all ranks must make the same number of steps "
            "[SMP_ERR_UNREACHABLE]",
            doing, smp_server_left(session->server), session->rank,
            (unsigned)session->step);
    } else if (status == SMP_ERR_DEADLOCK) {
        char waits[8192];

        (void)smp_server_write_deadlock(session->server, waits, sizeof(waits));
        PyErr_Format(
            PyExc_RuntimeError,
            "smp: %s: a deadlock: no rank has anything to run, and no message is "
            "under way [SMP_ERR_DEADLOCK]\n%s",
            doing, waits);
    } else {
        PyErr_Format(status == SMP_ERR_NO_MEMORY   ? PyExc_MemoryError
                     : status == SMP_ERR_TIMED_OUT ? PyExc_TimeoutError
                     : status == SMP_ERR_INVALID   ? PyExc_ValueError
                                                   : PyExc_RuntimeError,
                     "smp: %s: %s [%s]", doing, smp_status_text(status),
                     smp_status_name(status));
    }
    return NULL;
}

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

/* --------------------------------------------------------------------- lifecycle */

/* open(rank, size, pool_bytes, device_pool_bytes, spin_us, transports, interface, job,
 * report_s, end_s) ->
 * the address card.  The last two are the watchdog's limits, 0 for none. */
static PyObject *
py_open(PyObject *module, PyObject *args)
{
    smp_session    *session = &smp_the_session;
    smp_comm_config config = {0};
    Py_ssize_t      pool;
    Py_ssize_t      device_pool;
    const char     *job;
    smp_status      status;
    size_t          bytes;
    const void     *card;
    double          report_s;
    double          end_s;

    (void)module;
    if (!PyArg_ParseTuple(args, "iinnizzsdd", &config.rank, &config.size, &pool,
                          &device_pool, &config.spin_us, &config.transports,
                          &config.interface, &job, &report_s, &end_s)) {
        return NULL;
    }
    if (session->comm != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "smp: the session is open already");
        return NULL;
    }
    config.pool_bytes = (size_t)pool;
    config.device_pool_bytes = (size_t)device_pool;
    strncpy(config.job, job, sizeof(config.job) - 1);
    status = smp_comm_create(&config, &session->comm);
    if (status != SMP_OK) {
        return raise_status(status, "preparing the communication");
    }
    status = smp_server_create(session->comm, config.rank,
                               config.spin_us < 0 ? 0 : config.spin_us, &server_ops,
                               session, &session->server);
    if (status != SMP_OK) {
        smp_comm_destroy(session->comm);
        session->comm = NULL;
        return raise_status(status, "preparing the module server");
    }
    session->rank = config.rank;
    smp_registry.rank = config.rank;
    session->size = config.size;
    status = smp_watch_start(report_s, end_s);
    if (status != SMP_OK) {
        smp_server_destroy(session->server);
        smp_comm_destroy(session->comm);
        session->server = NULL;
        session->comm = NULL;
        return raise_status(status, "starting the watchdog");
    }
    session->step = 0;
    session->contexts = PyDict_New();
    card = smp_comm_card(session->comm, &bytes);
    return PyBytes_FromStringAndSize(card, (Py_ssize_t)bytes);
}

/* connect(cards, timeout_ms) */
static PyObject *
py_connect(PyObject *module, PyObject *args)
{
    smp_session     *session = &smp_the_session;
    PyObject        *cards;
    int              timeout_ms;
    int              failed = -1;
    smp_status       status = SMP_ERR_NO_MEMORY;
    const void     **at;
    size_t          *sizes;
    smp_signal_asker asker;
    smp_patience     patience;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &cards, &timeout_ms)) {
        return NULL;
    }
    if (session->comm == NULL || PyList_GET_SIZE(cards) != session->size) {
        PyErr_Format(PyExc_ValueError, "smp: connect() needs the cards of %d ranks",
                     session->size);
        return NULL;
    }
    at = calloc((size_t)session->size, sizeof(*at));
    sizes = calloc((size_t)session->size, sizeof(*sizes));
    if (at != NULL && sizes != NULL) {
        for (int i = 0; i < session->size; i++) {
            PyObject *card = PyList_GET_ITEM(cards, i);

            if (!PyBytes_Check(card)) {
                free(at);
                free(sizes);
                PyErr_SetString(PyExc_TypeError, "smp: cards are bytes");
                return NULL;
            }
            at[i] = PyBytes_AS_STRING(card);
            sizes[i] = (size_t)PyBytes_GET_SIZE(card);
        }
        patience =
            smp_signals_begin(&asker, smp_clock_deadline(timeout_ms * SMP_NS_PER_MS));
        status = smp_comm_connect(session->comm, at, sizes, &patience, &failed);
        smp_signals_end(&asker);
    }
    free(at);
    free(sizes);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (status == SMP_ERR_UNREACHABLE) {
        PyErr_Format(PyExc_ConnectionError,
                     "smp: no transport reaches pp_rank %d from pp_rank %d "
                     "(comm_transports) [SMP_ERR_UNREACHABLE]",
                     failed, session->rank);
        return NULL;
    }
    if (status != SMP_OK && failed >= 0) {
        PyErr_Format(PyExc_ConnectionError,
                     "smp: connecting pp_rank %d to pp_rank %d: %s [%s]", session->rank,
                     failed, smp_status_text(status), smp_status_name(status));
        return NULL;
    }
    if (status != SMP_OK) {
        return raise_status(status, "connecting the ranks");
    }
    Py_RETURN_NONE;
}

static void
forget_entries(smp_session *session)
{
    for (size_t i = 0; i < session->nentries; i++) {
        Py_XDECREF(session->entries[i].callable);
        Py_XDECREF(session->entries[i].module);
        Py_XDECREF(session->entries[i].path);
    }
    free(session->entries);
    session->entries = NULL;
    session->nentries = 0;
    Py_CLEAR(session->entry_numbers);
}

/* close(): joins the workers and leaves the other ranks. */
static PyObject *
py_close(PyObject *module, PyObject *unused)
{
    smp_session *session = &smp_the_session;

    (void)module;
    (void)unused;
    if (session->comm == NULL) {
        Py_RETURN_NONE;
    }
    Py_CLEAR(session->contexts);
    Py_CLEAR(session->error);
    Py_CLEAR(session->run_root);
    forget_entries(session);
    Py_BEGIN_ALLOW_THREADS;
    smp_watch_stop();
    smp_server_destroy(session->server);
    smp_comm_destroy(session->comm);
    Py_END_ALLOW_THREADS;
    smp_turns_destroy(session->turns);
    session->turns = NULL;
    session->server = NULL;
    session->comm = NULL;
    Py_RETURN_NONE;
}

/* configure(name=object, ...): Python's side of the session and the codec. */
static PyObject *
py_configure(PyObject *module, PyObject *args, PyObject *kwargs)
{
    smp_session *session = &smp_the_session;
    const struct {
        const char *name;
        PyObject  **slot;
    } slots[] = {
        {"send_apply", &session->send_apply},
        {"recv_apply", &session->recv_apply},
        {"change_apply", &session->change_apply},
        {"enter_apply", &session->enter_apply},
        {"leaf", &session->leaf},
        {"seed_tensor", &session->seed_tensor},
        {"describe_error", &session->describe_error},
        {"refuse_changed", &session->refuse_changed},
        {"call_hooked", &session->call_hooked},
        {"serve_hooked", &session->serve_hooked},
        {"capture_state", &session->capture_state},
        {"with_state", &session->with_state},
        {"worker_begin", &session->worker_begin},
        {"enter_device", &session->enter_device},
        {"device_generator", &session->device_generator},
        {"aborted", &session->aborted},
        {"dumps", &smp_registry.dumps},
        {"loads", &smp_registry.loads},
        {"dense", &smp_registry.dense},
        {"stage_out", &smp_registry.stage_out},
        {"stage_wait", &smp_registry.stage_wait},
        {"stage_in", &smp_registry.stage_in},
        {"stage_placed", &smp_registry.stage_placed},
    };
    PyObject  *key;
    PyObject  *value;
    Py_ssize_t at = 0;

    (void)module;
    if (PyTuple_GET_SIZE(args) != 0 || kwargs == NULL) {
        PyErr_SetString(PyExc_TypeError, "configure(name=object, ...)");
        return NULL;
    }
    while (PyDict_Next(kwargs, &at, &key, &value)) {
        bool found = false;

        for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++) {
            if (PyUnicode_CompareWithASCIIString(key, slots[i].name) == 0) {
                Py_XSETREF(*slots[i].slot, Py_NewRef(value));
                found = true;
            }
        }
        if (!found) {
            return PyErr_Format(PyExc_TypeError, "configure() has no '%U'", key);
        }
    }
    if (session->seed_tensor != NULL) {
        dl_tensor t;

        if (smp_torch.dlpack->borrow(session->seed_tensor, &t) != 0) {
            return NULL;
        }
        session->seed = t.data;
    }
    Py_RETURN_NONE;
}

/* set_entries([(callable, module or None, path, owner), ...]) */
static PyObject *
py_set_entries(PyObject *module, PyObject *list)
{
    smp_session *session = &smp_the_session;
    const char **paths;
    Py_ssize_t   n;
    smp_status   status;

    (void)module;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "set_entries() takes a list");
        return NULL;
    }
    forget_entries(session);
    n = PyList_GET_SIZE(list);
    session->entries = calloc((size_t)n + 1, sizeof(*session->entries));
    session->entry_numbers = PyDict_New();
    if (session->entries == NULL || session->entry_numbers == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        smp_entry *entry = &session->entries[i];
        PyObject  *callable;
        PyObject  *owner_module;
        PyObject  *path;
        int        owner;

        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "OOUi", &callable,
                              &owner_module, &path, &owner)) {
            return NULL;
        }
        entry->callable = Py_NewRef(callable);
        entry->module = Py_NewRef(owner_module);
        entry->path = Py_NewRef(path);
        entry->owner = owner;
        session->nentries = (size_t)i + 1;
        if (owner_module != Py_None) {
            PyObject *key = PyLong_FromVoidPtr(owner_module);
            PyObject *number = PyLong_FromSsize_t(i);
            int       failed = key == NULL || number == NULL ||
                         PyDict_SetItem(session->entry_numbers, key, number) < 0;

            Py_XDECREF(key);
            Py_XDECREF(number);
            if (failed) {
                return NULL;
            }
        }
    }
    paths = calloc((size_t)n + 1, sizeof(*paths));
    if (paths == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        paths[i] = smp_entry_path(&session->entries[i]);
    }
    status = smp_board_name(smp_server_board(session->server), paths, (size_t)n);
    free(paths);
    if (status != SMP_OK) {
        return raise_status(status, "naming the modules");
    }
    Py_RETURN_NONE;
}

/* Replaces *slot by a dict from address to position in `list`. */
static int
number_by_address(PyObject **slot, PyObject *list)
{
    PyObject *numbers = PyDict_New();

    for (Py_ssize_t i = 0; numbers != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *key = PyLong_FromVoidPtr(PyList_GET_ITEM(list, i));
        PyObject *number = PyLong_FromSsize_t(i);

        if (key == NULL || number == NULL || PyDict_SetItem(numbers, key, number) < 0) {
            Py_CLEAR(numbers);
        }
        Py_XDECREF(key);
        Py_XDECREF(number);
    }
    Py_XSETREF(*slot, numbers);
    return numbers == NULL ? -1 : 0;
}

/* set_names(modules, parameters, owners, paths): what the codec sends by number. */
static PyObject *
py_set_names(PyObject *module, PyObject *args)
{
    PyObject *modules;
    PyObject *parameters;
    PyObject *owners;
    PyObject *paths;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyList_Type, &modules, &PyList_Type,
                          &parameters, &PyList_Type, &owners, &PyList_Type, &paths)) {
        return NULL;
    }
    Py_XSETREF(smp_registry.modules, Py_NewRef(modules));
    Py_XSETREF(smp_registry.parameters, Py_NewRef(parameters));
    Py_XSETREF(smp_registry.parameter_owners, Py_NewRef(owners));
    Py_XSETREF(smp_registry.parameter_names, Py_NewRef(paths));
    if (number_by_address(&smp_registry.module_numbers, modules) < 0 ||
        number_by_address(&smp_registry.parameter_numbers, parameters) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------- steps */

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

/* The value that an end or abort message carries. */
static PyObject *
read_end(smp_message *end)
{
    smp_unpack unpack;
    PyObject  *value = NULL;

    if (smp_unpack_init(&unpack, end, NULL, false, true) == 0) {
        value = smp_unpack_value(&unpack);
    }
    smp_unpack_fini(&unpack);
    return value;
}

/* step(kind, microbatches, active, turns, trains, run_root, seed, backwards, described)
 * -> (ok, value)
 *
 * kind: 0 simple, 1 interleaved, 2 turns; -1 on ranks other than 0, which serve.  ok:
 * value is what pp_rank 0 sent at the end (None on rank 0); not ok: value describes
 * what failed.  trains: bytes, by entry.  described: bytes, alike on all ranks. */
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
    Py_buffer          trains;
    int                kind;
    int                microbatches;
    int                active;
    int                backwards;
    unsigned long long seed;

    (void)module;
    if (!PyArg_ParseTuple(args, "iiiO!y*OKiS", &kind, &microbatches, &active,
                          &PyList_Type, &list, &trains, &run_root, &seed, &backwards,
                          &described)) {
        return NULL;
    }
    for (size_t i = 0; i < session->nentries && i < (size_t)trains.len; i++) {
        session->entries[i].trains = ((const char *)trains.buf)[i] != 0;
    }
    PyBuffer_Release(&trains);
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
            return raise_status(status, "reading the schedule");
        }
    }
    if (session->turns != NULL) {
        status = smp_turns_begin(session->turns, microbatches);
        if (status != SMP_OK) {
            smp_schedule_destroy(schedule);
            return raise_status(status, "beginning a step");
        }
    }
    Py_XSETREF(session->run_root, Py_NewRef(run_root));
    Py_XSETREF(session->described, Py_NewRef(described));
    smp_server_describe(session->server, PyBytes_AS_STRING(described),
                        (size_t)PyBytes_GET_SIZE(described));
    Py_XSETREF(session->context_vars, PyContext_CopyCurrent());
    Py_CLEAR(session->error);
    session->step_seed = seed;
    session->backwards = kind == SMP_SCHEDULE_INTERLEAVED ? backwards : 1;
    session->step++;
    session->in_step = true;
    Py_BEGIN_ALLOW_THREADS;
    status = smp_server_step(session->server, session->step, schedule, &end);
    Py_END_ALLOW_THREADS;
    session->in_step = false;
    smp_device_sweep(smp_comm_device(session->comm));
    Py_CLEAR(session->run_root);
    smp_serve_forget();
    if (status == SMP_ERR_INTERRUPTED && signal_type != NULL) {
        smp_message_free(end);
        PyErr_Restore(signal_type, signal_value, signal_traceback);
        signal_type = signal_value = signal_traceback = NULL;
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
        return raise_status(status, "running a step");
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
    if (send_to_all(SMP_MSG_STEP_END, value) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* send_abort(value): the other ranks' steps fail with it. */
static PyObject *
py_send_abort(PyObject *module, PyObject *value)
{
    (void)module;
    if (send_to_all(SMP_MSG_ABORT, value) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* skip_step(value): the step that is about to begin fails on every rank, with value. */
static PyObject *
py_skip_step(PyObject *module, PyObject *value)
{
    smp_the_session.step++;
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
        return raise_status(status, "reading the schedule");
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
    if (task->backwards + 1 == smp_the_session.backwards) {
        smp_server_forward_done(smp_the_session.server, task->microbatch);
        if (smp_the_session.turns != NULL) {
            tell_others(&(smp_envelope){.kind = SMP_MSG_FORWARD_DONE,
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
            return raise_status(status, "preparing the gates");
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

/* current() -> (microbatch, entry) of this thread's task, or None */
static PyObject *
py_current(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (smp_this_task == NULL) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(ii)", smp_this_task->microbatch, smp_this_task->entry);
}

/* expect_in_pool(bytes): so much of the own pool will be in use at a time. */
static PyObject *
py_expect_in_pool(PyObject *module, PyObject *bytes)
{
    unsigned long long expected = PyLong_AsUnsignedLongLong(bytes);

    (void)module;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (smp_the_session.comm != NULL) {
        smp_comm_expect(smp_the_session.comm, expected);
    }
    Py_RETURN_NONE;
}

/* counters() -> dict of the comm's statistics */
static PyObject *
py_counters(PyObject *module, PyObject *unused)
{
    smp_comm_stats stats;
    smp_device_use device;
    int            left = 0;

    (void)module;
    (void)unused;
    if (smp_the_session.comm == NULL) {
        return PyDict_New();
    }
    for (int rank = 0; rank < smp_the_session.size; rank++) {
        left += smp_comm_left(smp_the_session.comm, rank);
    }
    smp_comm_counters(smp_the_session.comm, &stats);
    smp_device_measure(smp_comm_device(smp_the_session.comm), &device);
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:i,s:i,s:K,s:K,s:K,s:K,s:K,s:K,s:s}",
        "messages", stats.messages, "bytes", stats.bytes, "pool_blocks",
        stats.pool_blocks, "pool_fallbacks", stats.pool_fallbacks, "pool_in_use",
        stats.pool_in_use, "pool_high", stats.pool_high, "pool_made", stats.pool_made,
        "pool_size", stats.pool_size, "left", left, "lost",
        smp_comm_lost(smp_the_session.comm), "device_tensors", device.tensors,
        "device_bytes", device.bytes, "device_fallbacks", device.fallbacks,
        "device_in_use", device.in_use, "device_high", device.high, "device_size",
        device.size, "device_why", device.why);
}

/* timeline() -> [(time_ns, worker, kind, phase, microbatch, entry), ...] of the last
 * step, oldest first */
static PyObject *
py_timeline(PyObject *module, PyObject *unused)
{
    const smp_timeline *timeline;
    PyObject           *events = PyList_New(0);
    uint64_t            first;

    (void)module;
    (void)unused;
    if (events == NULL || smp_the_session.server == NULL) {
        return events;
    }
    timeline = smp_server_timeline(smp_the_session.server);
    first = timeline->count > SMP_TIMELINE_EVENTS
                ? timeline->count - SMP_TIMELINE_EVENTS
                : 0;
    for (uint64_t i = first; i < timeline->count; i++) {
        const smp_event *e = &timeline->events[i % SMP_TIMELINE_EVENTS];
        PyObject        *event =
            Py_BuildValue("(Kiiiii)", e->time_ns, (int)e->worker, (int)e->kind,
                          (int)e->phase, (int)e->microbatch, (int)e->entry);
        int failed = event == NULL || PyList_Append(events, event) < 0;

        Py_XDECREF(event);
        if (failed) {
            Py_DECREF(events);
            return NULL;
        }
    }
    return events;
}

/* pack(value) -> bytes, and back: the codec by itself, for tests and small exchanges.
 */
static PyObject *
py_pack(PyObject *module, PyObject *value)
{
    smp_pack  pack;
    PyObject *bytes = NULL;

    (void)module;
    smp_pack_init(&pack, NULL, -1, NULL);
    if (smp_pack_value(&pack, value) == 0) {
        bytes = smp_pack_bytes(&pack);
    }
    smp_pack_fini(&pack);
    return bytes;
}

static PyObject *
py_unpack(PyObject *module, PyObject *bytes)
{
    smp_unpack unpack;
    PyObject  *value = NULL;
    Py_buffer  view;

    (void)module;
    if (PyObject_GetBuffer(bytes, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    if (smp_unpack_init_bytes(&unpack, view.buf, (size_t)view.len) == 0) {
        value = smp_unpack_value(&unpack);
    }
    smp_unpack_fini(&unpack);
    PyBuffer_Release(&view);
    return value;
}

/* mix(a, b) -> int: how seeds are derived. */
static PyObject *
py_mix(PyObject *module, PyObject *args)
{
    unsigned long long a;
    unsigned long long b;

    (void)module;
    if (!PyArg_ParseTuple(args, "KK", &a, &b)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(smp_stream_mix(a, b));
}

static PyMethodDef functions[] = {
    {"open", py_open, METH_VARARGS,
     "open(rank, size, pool_bytes, device_pool_bytes, spin_us, transports, interface, "
     "job, report_s, "
     "end_s)"
     " -> card"},
    {"signal_fd", py_signal_fd, METH_NOARGS, "-> for signal.set_wakeup_fd"},
    {"forward_signals", py_forward_signals, METH_O, "forward_signals(fd)"},
    {"connect", py_connect, METH_VARARGS, "connect(cards, timeout_ms)"},
    {"close", py_close, METH_NOARGS, "Joins the workers and leaves the other ranks."},
    {"configure", __extension__(PyCFunction)(void (*)(void)) py_configure,
     METH_VARARGS | METH_KEYWORDS, "configure(name=object, ...)"},
    {"set_entries", py_set_entries, METH_O,
     "set_entries([(callable, module or None, path, owner), ...])"},
    {"set_names", py_set_names, METH_VARARGS,
     "set_names(modules, parameters, owners, paths)"},
    {"step", py_step, METH_VARARGS,
     "step(kind, microbatches, active, turns, trains, run_root, seed, backwards, "
     "described)"},
    {"send_end", py_send_end, METH_O, "send_end(value)"},
    {"send_abort", py_send_abort, METH_O, "send_abort(value)"},
    {"skip_step", py_skip_step, METH_O, "skip_step(value)"},
    {"check_schedule", py_check_schedule, METH_VARARGS,
     "check_schedule(microbatches, turns)"},
    {"begin_backward", py_begin_backward, METH_NOARGS, "-> the microbatch"},
    {"end_backward", py_end_backward, METH_NOARGS, "The backward is over."},
    {"set_gates", py_set_gates, METH_O, "set_gates(expected or None)"},
    {"await_turn", py_await_turn, METH_O, "await_turn(gate) -> bool"},
    {"left", py_left, METH_O, "left(gate)"},
    {"current", py_current, METH_NOARGS, "-> (microbatch, entry) or None"},
    {"expect_in_pool", py_expect_in_pool, METH_O,
     "expect_in_pool(bytes): so much of the own pool will be in use at a time"},
    {"counters", py_counters, METH_NOARGS, "-> dict of the comm's statistics"},
    {"timeline", py_timeline, METH_NOARGS,
     "-> [(time_ns, worker, kind, phase, microbatch, entry), ...]"},
    {"pack", py_pack, METH_O, "pack(value) -> bytes"},
    {"unpack", py_unpack, METH_O, "unpack(bytes) -> value"},
    {"mix", py_mix, METH_VARARGS, "mix(a, b) -> int"},
    {NULL, NULL, 0, NULL},
};

int
smp_session_add_functions(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
