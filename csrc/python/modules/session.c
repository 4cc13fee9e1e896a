/* One rank's session: its life, and what Python tells it. */
#include "python/modules/session.h"

#include <stdlib.h>
#include <string.h>

#include "comm/device/port.h"
#include "comm/neighbour.h"
#include "common/clock.h"
#include "common/mix.h"
#include "python/modules/watch.h"
#include "python/process/comm_binding.h"
#include "python/process/signals.h"
#include "python/values/pack.h"
#include "python/values/rank_names.h"
#include "python/values/registry.h"
#include "python/values/unpack.h"

smp_session smp_the_session;

const char *
smp_entry_path(const smp_entry *entry)
{
    const char *path = PyUnicode_AsUTF8(entry->path);

    return path == NULL ? "?" : path;
}

const char *
smp_session_own_name(void)
{
    return smp_rank_name(smp_session_rank_of_comm(smp_the_session.rank));
}

PyObject *
smp_session_raise(smp_status status, const char *doing)
{
    smp_session *session = &smp_the_session;

    if (status == SMP_ERR_PEER_LOST) {
        const char *awaited =
            session->server == NULL ? "" : smp_server_awaited(session->server);

        PyErr_Format(
            PyExc_ConnectionError,
            "smp: %s: %s is gone (its process ended or was killed); on "
            "%s: %s [SMP_ERR_PEER_LOST]",
            doing, smp_rank_name(smp_comm_lost(session->comm)), smp_session_own_name(),
            awaited[0] == '\0' ? "no task waited, it served the others" : awaited);
    } else if (status == SMP_ERR_UNREACHABLE) {
        PyErr_Format(PyExc_ConnectionError,
                     "smp: %s: %s has left the job in order, and %s is in "
                     "step %u: all ranks must make the same number of steps "
                     "[SMP_ERR_UNREACHABLE]",
                     doing, smp_rank_name(smp_server_left(session->server)),
                     smp_session_own_name(), (unsigned)session->step);
    } else if (status == SMP_ERR_MISMATCH && session->server != NULL &&
               session->in_sequence) {
        PyErr_Format(PyExc_RuntimeError,
                     "smp: %s: the ranks of a DP_GROUP do not run the same, as "
                     "deterministic_server needs: %s.  A model that chooses modules by "
                     "its data must choose alike on them [SMP_ERR_MISMATCH]",
                     doing, smp_server_mismatch(session->server));
    } else if (status == SMP_ERR_MISMATCH && session->server != NULL) {
        PyErr_Format(
            PyExc_RuntimeError,
            "smp: %s: the ranks of a TP_GROUP do not make the same calls of "
            "distributed modules: %s.  A model that chooses modules by its data "
            "must choose alike on them [SMP_ERR_MISMATCH]",
            doing, smp_server_mismatch(session->server));
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

/* open(rank, size, pipelines, pool_bytes, device_pool_bytes, spin_us, transports,
 * interface, job, report_s, end_s, names, in_sequence=False) -> the address card.  rank
 * and size: of all pipelines, as pipeline * pp_size + pp_rank.  report_s and end_s are
 * the watchdog's limits, 0 for none.  names, a tuple of str by rank: what messages call
 * the ranks. */
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
    int             own;
    PyObject       *rank_names;

    (void)module;
    if (!PyArg_ParseTuple(args, "iiinnizzsddO!|p", &config.rank, &config.size,
                          &pipelines, &pool, &device_pool, &config.spin_us,
                          &config.transports, &config.interface, &job, &report_s,
                          &end_s, &PyTuple_Type, &rank_names, &in_sequence)) {
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
        PyErr_Format(PyExc_ConnectionError,
                     "smp: no transport reaches %s from %s "
                     "(comm_transports) [SMP_ERR_UNREACHABLE]",
                     smp_rank_name(failed), smp_session_own_name());
        return NULL;
    }
    if (status == SMP_ERR_NO_MEMORY) {
        smp_comm_stats stats;

        smp_comm_counters(session->comm, &stats);
        return smp_python_no_room("connecting the ranks", (size_t)stats.pool_size);
    }
    if (status != SMP_OK && failed >= 0) {
        PyErr_Format(PyExc_ConnectionError, "smp: connecting %s to %s: %s [%s]",
                     smp_session_own_name(), smp_rank_name(failed),
                     smp_status_text(status), smp_status_name(status));
        return NULL;
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

int
smp_session_warn_if_laden(PyObject *laden, const smp_entry *entry)
{
    PyObject *done;

    if (laden == NULL) {
        return 0;
    }
    done = PyObject_CallFunctionObjArgs(smp_the_session.warn_of_tensor, entry->path,
                                        laden, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
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
        {"serve_hooked", &session->serve_hooked},
        {"warn_of_tensor", &session->warn_of_tensor},
        {"warn_of_hook", &session->warn_of_hook},
        {"capture_state", &session->capture_state},
        {"capture_backward", &session->capture_backward},
        {"with_state", &session->with_state},
        {"worker_begin", &session->worker_begin},
        {"enter_device", &session->enter_device},
        {"device_generator", &session->device_generator},
        {"aborted", &session->aborted},
        {"dumps", &smp_registry.dumps},
        {"loads", &smp_registry.loads},
        {"dense", &smp_registry.dense},
        {"unsendable", &smp_registry.unsendable},
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
    for (int rank = 0; rank < smp_comm_size(smp_the_session.comm); rank++) {
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

/* peers() -> [(transport or None, messages sent, bytes sent), ...] by pp_rank */
static PyObject *
py_peers(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return smp_python_peers(smp_the_session.comm);
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
    return PyLong_FromUnsignedLongLong(smp_mix(a, b));
}

static PyMethodDef functions[] = {
    {"open", py_open, METH_VARARGS,
     "open(rank, size, pipelines, pool_bytes, device_pool_bytes, spin_us, transports, "
     "interface, job, report_s, end_s, names, in_sequence=False)"
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
