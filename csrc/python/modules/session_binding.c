/* The session's life, and its values from Python. */
#include "python/modules/session_binding.h"

#include <stdlib.h>
#include <string.h>

#include "comm/device/pinned.h"
#include "comm/device/port.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"
#include "common/mix.h"
#include "python/modules/links.h"
#include "python/modules/server_ops.h"
#include "python/modules/session.h"
#include "python/modules/watch.h"
#include "python/process/comm_binding.h"
#include "python/process/signals.h"
#include "python/values/error.h"
#include "python/values/rank_names.h"
#include "python/values/registry.h"

/* open(rank, size, pipelines, pool_bytes, device_pool_bytes, spin_us, transports,
 * interface, job, report_s, end_s, names, in_sequence=False, recording_steps=0) -> the
 * address card.  rank and size: of all pipelines, as pipeline * pp_size + pp_rank.
 * report_s and end_s are the watchdog's limits, 0 for none.  recording_steps: 0 for no
 * static mode.  names, a tuple of str: the ranks' names in messages, by rank. */
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
    int             pipelines;
    int             in_sequence = false;
    int             recording_steps = 0;
    int             own;
    PyObject       *rank_names;

    (void)module;
    if (!PyArg_ParseTuple(args, "iiinnizzsddO!|pi", &config.rank, &config.size,
                          &pipelines, &pool, &device_pool, &config.spin_us,
                          &config.transports, &config.interface, &job, &report_s,
                          &end_s, &PyTuple_Type, &rank_names, &in_sequence,
                          &recording_steps)) {
        return NULL;
    }
    if (session->comm != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "smp: the session is open already");
        return NULL;
    }
    if (!smp_rank_names_keep(rank_names, config.size)) {
        return NULL;
    }
    Py_XSETREF(session->contexts, PyDict_New());
    if (session->contexts == NULL) {
        return NULL;
    }
    session->size = config.size / pipelines;
    session->rank = config.rank % session->size;
    session->pipeline = config.rank / session->size;
    session->pipelines = pipelines;
    session->in_sequence = in_sequence != 0;
    config.pool_bytes = (size_t)pool;
    config.device_pool_bytes = (size_t)device_pool;
    strncpy(config.job, job, sizeof(config.job) - 1);
    status = smp_comm_create(&config, &session->comm);
    if (status == SMP_ERR_NO_MEMORY) {
        return smp_python_no_room("preparing the communication",
                                  smp_comm_pool_bytes(&config));
    }
    if (status != SMP_OK) {
        return smp_session_raise(status, "preparing the communication");
    }
    status = smp_server_create(session->comm,
                               &(smp_server_place){.rank = config.rank,
                                                   .pipelines = pipelines,
                                                   .in_sequence = session->in_sequence,
                                                   .recording_steps = recording_steps,
                                                   .names = smp_rank_names()},
                               config.spin_us < 0 ? 0 : config.spin_us,
                               &smp_session_ops, session, &session->server);
    if (status != SMP_OK) {
        smp_comm_destroy(session->comm);
        session->comm = NULL;
        return smp_session_raise(status, "preparing the module server");
    }
    smp_registry.rank = session->rank;
    own = smp_session_rank_of_comm(session->rank);
    status = smp_watch_start(smp_server_board(session->server), own,
                             smp_session_own_name(), report_s, end_s);
    if (status != SMP_OK) {
        smp_server_destroy(session->server);
        smp_comm_destroy(session->comm);
        session->server = NULL;
        session->comm = NULL;
        return smp_session_raise(status, "starting the watchdog");
    }
    session->opened++;
    session->step = 0;
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
    int              size = session->size * session->pipelines;
    smp_status       status = SMP_ERR_NO_MEMORY;
    const void     **at;
    size_t          *sizes;
    smp_signal_asker asker;
    smp_deadline     deadline;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &cards, &timeout_ms)) {
        return NULL;
    }
    if (session->comm == NULL || PyList_GET_SIZE(cards) != size) {
        PyErr_Format(PyExc_ValueError, "smp: connect() needs the cards of %d ranks",
                     size);
        return NULL;
    }
    at = calloc((size_t)size, sizeof(*at));
    sizes = calloc((size_t)size, sizeof(*sizes));
    if (at != NULL && sizes != NULL) {
        for (int i = 0; i < size; i++) {
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
        deadline =
            smp_signals_begin(&asker, smp_clock_deadline(timeout_ms * SMP_NS_PER_MS));
        status = smp_comm_connect(session->comm, at, sizes, &deadline, &failed);
        smp_signals_end(&asker);
    }
    free(at);
    free(sizes);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (status == SMP_ERR_UNREACHABLE) {
        return smp_error_raise(smp_error_of_peer, status, NULL,
                               "smp: no transport reaches %s from %s (comm_transports)",
                               smp_rank_name(failed), smp_session_own_name());
    }
    if (status == SMP_ERR_NO_MEMORY) {
        smp_comm_stats stats;

        smp_comm_counters(session->comm, &stats);
        return smp_python_no_room("connecting the ranks", (size_t)stats.pool_size);
    }
    if (status != SMP_OK && failed >= 0) {
        return smp_error_raise(smp_error_of_peer, status, NULL,
                               "smp: connecting %s to %s: %s", smp_session_own_name(),
                               smp_rank_name(failed), smp_status_text(status));
    }
    if (status != SMP_OK) {
        return smp_session_raise(status, "connecting the ranks");
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
        {"raised_there", &session->raised_there},
        {"refuse_changed", &session->refuse_changed},
        {"call_hooked", &session->call_hooked},
        {"serve", &session->serve},
        {"serve_hooked", &session->serve_hooked},
        {"warn_of_tensor", &session->warn_of_tensor},
        {"warn_of_hook", &session->warn_of_hook},
        {"capture_state", &session->capture_state},
        {"capture_backward", &session->capture_backward},
        {"with_state", &session->with_state},
        {"run_first", &session->run_first},
        {"checkpoint_of", &session->checkpoint_of},
        {"worker_begin", &session->worker_begin},
        {"enter_device", &session->enter_device},
        {"device_generator", &session->device_generator},
        {"aborted", &session->aborted},
        {"dumps", &smp_registry.dumps},
        {"loads", &smp_registry.loads},
        {"dense", &smp_registry.dense},
        {"split_tensor", &smp_registry.split_tensor},
        {"whole", &smp_registry.whole},
        {"unsendable", &smp_registry.unsendable},
        {"placeholder", &smp_registry.placeholder},
        {"hollow", &smp_registry.hollow},
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
    smp_links_forget();
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
        if (owner_module != Py_None &&
            smp_registry_add(session->entry_numbers, owner_module, i) < 0) {
            return NULL;
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
        return smp_session_raise(status, "naming the modules");
    }
    Py_RETURN_NONE;
}

/* Replaces *slot by a dict from address to position in `list`. */
static int
number_by_address(PyObject **slot, PyObject *list)
{
    PyObject *numbers = PyDict_New();

    for (Py_ssize_t i = 0; numbers != NULL && i < PyList_GET_SIZE(list); i++) {
        if (smp_registry_add(numbers, PyList_GET_ITEM(list, i), i) < 0) {
            Py_CLEAR(numbers);
        }
    }
    Py_XSETREF(*slot, numbers);
    return numbers == NULL ? -1 : 0;
}

/* set_names(modules, parameters, owners, paths): the objects sent by number. */
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

/* signal_fd() -> the descriptor for signal.set_wakeup_fd during steps */
static PyObject *
py_signal_fd(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLong(smp_server_signal_fd(smp_the_session.server));
}

/* forward_signals(fd): the descriptor for the bytes of signal_fd(); -1: none */
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
    smp_pinned_use pinned;
    int            left = 0;

    (void)module;
    (void)unused;
    if (smp_the_session.comm == NULL) {
        return PyDict_New();
    }
    for (int rank = 0; rank < smp_comm_size(smp_the_session.comm); rank++) {
        left += smp_comm_left(smp_the_session.comm, rank);
    }
    smp_comm_counters(smp_the_session.comm, &stats);
    smp_device_measure(smp_comm_device(smp_the_session.comm), &device);
    smp_pinned_measure(smp_comm_pinned(smp_the_session.comm), &pinned);
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:i,s:i,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:s,s:K,"
        "s:s}",
        "messages", stats.messages, "bytes", stats.bytes, "pool_blocks",
        stats.pool_blocks, "pool_fallbacks", stats.pool_fallbacks, "pool_in_use",
        stats.pool_in_use, "pool_high", stats.pool_high, "pool_made", stats.pool_made,
        "pool_size", stats.pool_size, "left", left, "lost",
        smp_comm_lost(smp_the_session.comm), "device_tensors", device.tensors,
        "device_bytes", device.bytes, "device_landed", device.landed,
        "device_fallbacks", device.fallbacks, "device_in_use", device.in_use,
        "device_high", device.high, "device_size", device.size, "device_why",
        device.why, "pinned_bytes", pinned.bytes, "pinned_why", pinned.why);
}

/* peers() -> [(transport or None, messages sent, bytes sent), ...] by pp_rank */
static PyObject *
py_peers(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return smp_python_peers(smp_the_session.comm);
}
/* mix(a, b) -> int: the derivation of seeds. */
static PyObject *
py_mix(PyObject *module, PyObject *args)
{
    unsigned long long a;
    unsigned long long b;

    (void)module;
    if (!PyArg_ParseTuple(args, "KK", &a, &b)) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(smp_mix(a, b));
}

static PyMethodDef functions[] = {
    {"open", py_open, METH_VARARGS,
     "open(rank, size, pipelines, pool_bytes, device_pool_bytes, spin_us, transports, "
     "interface, job, report_s, end_s, names, in_sequence=False, recording_steps=0)"
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
    {"expect_in_pool", py_expect_in_pool, METH_O,
     "expect_in_pool(bytes): so much of the own pool will be in use at a time"},
    {"counters", py_counters, METH_NOARGS, "-> dict of the comm's statistics"},
    {"peers", py_peers, METH_NOARGS,
     "peers()\n--\n\n"
     "By pp_rank: the transport's name, messages and bytes sent; None for this rank."},
    {"mix", py_mix, METH_VARARGS, "mix(a, b) -> int"},
    {NULL, NULL, 0, NULL},
};

int
smp_session_binding_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
