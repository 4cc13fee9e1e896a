/* smp._core.Comm: connecting ranks for collectives, and the news of finished work
 * items. */
#include "python/collectives/comm.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "common/fork.h"
#include "python/collectives/objects.h"
#include "python/collectives/work_item.h"
#include "python/process/comm_binding.h"
#include "python/process/signals.h"
#include "python/values/tensor.h"

/* Keeps the names of a list.  0, or -1 with an exception. */
static int
keep_names(smp_comm_object *self, PyObject *list)
{
    self->size = (int)PyList_GET_SIZE(list);
    self->names = calloc((size_t)self->size + 1, sizeof(*self->names));
    if (self->names == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int r = 0; r < self->size; r++) {
        self->names[r] = (int)PyLong_AsLong(PyList_GET_ITEM(list, r));
    }
    return PyErr_Occurred() != NULL ? -1 : 0;
}

/* Comm(rank, names, pool_bytes, transports, interface, job) */
static PyObject *
comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    smp_comm_config  config = {.spin_us = -1};
    smp_comm_object *self;
    PyObject        *list;
    Py_ssize_t       pool;
    const char      *job;
    smp_status       status;

    (void)kwargs;
    if (!PyArg_ParseTuple(args, "iO!nzzs", &config.rank, &PyList_Type, &list, &pool,
                          &config.transports, &config.interface, &job)) {
        return NULL;
    }
    config.pool_bytes = (size_t)pool;
    strncpy(config.job, job, sizeof(config.job) - 1);
    self = (smp_comm_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->generation = smp_fork_generation();
    self->rank = config.rank;
    if (keep_names(self, list) < 0) {
        goto err;
    }
    config.size = self->size;
    config.names = self->names;
    status = smp_comm_create(&config, &self->comm);
    if (status == SMP_OK) {
        status = smp_carrier_create(&self->carrier);
    }
    if (status == SMP_OK) {
        status = smp_mailbox_create(self->comm, &self->mailbox);
    }
    if (status != SMP_OK) {
        const char *doing = "preparing the collectives";

        (void)(status == SMP_ERR_NO_MEMORY
                   ? smp_python_no_room(doing, smp_comm_pool_bytes(&config))
                   : smp_comm_raise(status, doing, NULL));
        goto err;
    }
    return (PyObject *)self;

err:
    Py_DECREF(self);
    return NULL;
}

/* Gives everything up; the GIL is held. */
static void
close_comm(smp_comm_object *self)
{
    smp_comm    *comm = self->comm;
    smp_carrier *carrier = self->carrier;
    smp_mailbox *mailbox = self->mailbox;

    if (comm == NULL) {
        return;
    }
    self->comm = NULL;
    if (carrier != NULL) {
        smp_carrier_close(carrier);
    }
    /* A thread inside looks around every SMP_SIGNALS_NS, and finds it closed. */
    while (self->users > 0 && self->generation == smp_fork_generation()) {
        Py_BEGIN_ALLOW_THREADS;
        sched_yield();
        Py_END_ALLOW_THREADS;
    }
    self->carrier = NULL;
    self->mailbox = NULL;
    Py_BEGIN_ALLOW_THREADS;
    smp_carrier_destroy(carrier);
    smp_mailbox_destroy(mailbox);
    smp_comm_destroy(comm);
    Py_END_ALLOW_THREADS;
}

static void
comm_dealloc(PyObject *object)
{
    smp_comm_object *self = (smp_comm_object *)object;
    PyTypeObject    *type = Py_TYPE(object);

    close_comm(self);
    free(self->names);
    type->tp_free(object);
    Py_DECREF(type);
}

/* card() -> bytes: this rank's addresses for the others */
static PyObject *
comm_card(PyObject *object, PyObject *unused)
{
    smp_comm_object *self = (smp_comm_object *)object;
    const void      *card;
    size_t           bytes;

    (void)unused;
    if (smp_comm_check_open(self) < 0) {
        return NULL;
    }
    card = smp_comm_card(self->comm, &bytes);
    return PyBytes_FromStringAndSize(card, (Py_ssize_t)bytes);
}

/* connect(cards, timeout_ms) */
static PyObject *
comm_connect(PyObject *object, PyObject *args)
{
    smp_comm_object *self = (smp_comm_object *)object;
    PyObject        *cards;
    int              timeout_ms;
    int              failed = -1;
    const void     **at;
    size_t          *bytes;
    smp_status       status = SMP_ERR_NO_MEMORY;
    char             who[64];

    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &cards, &timeout_ms) ||
        smp_comm_check_open(self) < 0) {
        return NULL;
    }
    if (PyList_GET_SIZE(cards) != self->size) {
        return PyErr_Format(PyExc_ValueError, "smp: connect() needs %d cards",
                            self->size);
    }
    at = calloc((size_t)self->size, sizeof(*at));
    bytes = calloc((size_t)self->size, sizeof(*bytes));
    if (at != NULL && bytes != NULL) {
        status = SMP_OK;
        for (int r = 0; r < self->size && status == SMP_OK; r++) {
            char      *card;
            Py_ssize_t n;

            if (PyBytes_AsStringAndSize(PyList_GET_ITEM(cards, r), &card, &n) < 0) {
                status = SMP_ERR_INVALID;
            } else {
                at[r] = card;
                bytes[r] = (size_t)n;
            }
        }
    }
    if (status == SMP_OK) {
        smp_comm        *comm = self->comm;
        smp_signal_asker asker;
        smp_deadline     deadline;

        self->users++;
        deadline =
            smp_signals_begin(&asker, smp_clock_deadline(timeout_ms * SMP_NS_PER_MS));
        status = smp_comm_connect(comm, at, bytes, &deadline, &failed);
        smp_signals_end(&asker);
        self->users--;
    }
    free(at);
    free(bytes);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (status != SMP_OK) {
        PyOS_snprintf(who, sizeof(who), "connecting rank %d to rank %d",
                      smp_comm_object_name(self, self->rank),
                      smp_comm_object_name(self, failed));
        if (status == SMP_ERR_NO_MEMORY) {
            smp_comm_stats stats;

            smp_comm_counters(self->comm, &stats);
            return smp_python_no_room(who, (size_t)stats.pool_size);
        }
        return smp_comm_raise(status, who, NULL);
    }
    Py_RETURN_NONE;
}

/* transport(rank) -> "shm", "tcp", "mpi"; None for this rank itself */
static PyObject *
comm_transport(PyObject *object, PyObject *arg)
{
    smp_comm_object *self = (smp_comm_object *)object;
    long             rank = PyLong_AsLong(arg);

    if ((rank == -1 && PyErr_Occurred() != NULL) || smp_comm_check_open(self) < 0) {
        return NULL;
    }
    if (rank < 0 || rank >= self->size) {
        return PyErr_Format(PyExc_ValueError, "smp: no rank %ld", rank);
    }
    return Py_BuildValue("z", smp_comm_transport(self->comm, (int)rank));
}

/* peers() -> [(transport or None, messages sent, bytes sent), ...] by rank */
static PyObject *
comm_peers(PyObject *object, PyObject *unused)
{
    smp_comm_object *self = (smp_comm_object *)object;

    (void)unused;
    return smp_comm_check_open(self) < 0 ? NULL : smp_python_peers(self->comm);
}

/* pool() -> (bytes at most, most in use so far, blocks from it, blocks without room) */
static PyObject *
comm_pool(PyObject *object, PyObject *unused)
{
    smp_comm_object *self = (smp_comm_object *)object;
    smp_comm_stats   stats;

    (void)unused;
    if (smp_comm_check_open(self) < 0) {
        return NULL;
    }
    smp_comm_counters(self->comm, &stats);
    return Py_BuildValue("KKKK", stats.pool_size, stats.pool_high, stats.pool_blocks,
                         stats.pool_fallbacks);
}

static void
release_block(void *owner)
{
    smp_block_release(owner);
}

/* allocate(bytes) -> a uint8 tensor over pages given back before; over fresh ones when
 * the pool is full */
static PyObject *
comm_allocate(PyObject *object, PyObject *arg)
{
    smp_comm_object *self = (smp_comm_object *)object;
    size_t           bytes = PyLong_AsSize_t(arg);
    smp_tensor_meta  meta = {
         .dtype = {SMP_DL_UINT, 8, 1}, .device = {SMP_DL_CPU, 0}, .bytes = bytes};
    smp_block *block;
    smp_status status;

    if ((bytes == (size_t)-1 && PyErr_Occurred() != NULL) ||
        smp_comm_check_open(self) < 0) {
        return NULL;
    }
    status =
        smp_comm_block(self->comm, self->rank == 0 ? self->size - 1 : 0, bytes, &block);
    if (status != SMP_OK) {
        return smp_comm_raise(status, "allocating a tensor", NULL);
    }
    return smp_tensor_wrap_span(&meta, smp_block_data(block), release_block, block);
}

/* finished() -> the owner of the next finished work item; waits for one.  None: the
 * comm is closing, or closed. */
static PyObject *
comm_finished(PyObject *object, PyObject *unused)
{
    smp_comm_object *self = (smp_comm_object *)object;

    (void)unused;
    for (;;) {
        smp_carrier   *carrier = self->carrier;
        smp_work_item *item;
        smp_status     status;
        PyObject      *owner;

        if (self->comm == NULL) {
            Py_RETURN_NONE;
        }
        self->users++;
        Py_BEGIN_ALLOW_THREADS;
        status = smp_carrier_finished(carrier, &item);
        Py_END_ALLOW_THREADS;
        self->users--;
        if (status != SMP_OK) {
            Py_RETURN_NONE;
        }
        owner = smp_work_item_owner(item);
        if (owner != NULL) {
            return owner;
        }
    }
}

/* stop(): finished() gives the remaining ones, then None */
static PyObject *
comm_stop(PyObject *object, PyObject *unused)
{
    smp_comm_object *self = (smp_comm_object *)object;

    (void)unused;
    if (self->carrier != NULL) {
        smp_carrier_close(self->carrier);
    }
    Py_RETURN_NONE;
}

/* report_after(seconds): before the first group; 0: never */
static PyObject *
comm_report_after(PyObject *object, PyObject *arg)
{
    smp_comm_object *self = (smp_comm_object *)object;
    double           seconds = PyFloat_AsDouble(arg);

    if ((seconds == -1 && PyErr_Occurred() != NULL) || smp_comm_check_open(self) < 0) {
        return NULL;
    }
    smp_carrier_report_after(self->carrier, smp_comm_object_name(self, self->rank),
                             seconds > 0 && seconds < 1e9 ? (int64_t)(seconds * 1e9)
                                                          : 0);
    Py_RETURN_NONE;
}

/* waits() -> the waits of operations since a while: lines */
static PyObject *
comm_waits(PyObject *object, PyObject *unused)
{
    smp_comm_object *self = (smp_comm_object *)object;
    char             lines[2048] = "";

    (void)unused;
    if (self->carrier != NULL) {
        smp_carrier_describe(self->carrier, lines, sizeof(lines));
    }
    return PyUnicode_DecodeUTF8(lines, (Py_ssize_t)strlen(lines), "replace");
}

/* close(): leaves the other ranks; after stop(), and when all groups are closed */
static PyObject *
comm_close(PyObject *object, PyObject *unused)
{
    smp_comm_object *self = (smp_comm_object *)object;

    (void)unused;
    if (self->groups > 0) {
        return PyErr_Format(PyExc_RuntimeError, "smp: %zd groups are open",
                            self->groups);
    }
    close_comm(self);
    Py_RETURN_NONE;
}

static PyMethodDef comm_methods[] = {
    {"card", comm_card, METH_NOARGS, "How other ranks reach this one: bytes."},
    {"connect", comm_connect, METH_VARARGS,
     "connect(cards, timeout_ms)\n--\n\nTo all other ranks; collective."},
    {"transport", comm_transport, METH_O,
     "transport(rank)\n--\n\nThe name of the transport to that rank."},
    {"peers", comm_peers, METH_NOARGS,
     "peers()\n--\n\n"
     "By rank: the transport's name, messages and bytes sent; None for this rank."},
    {"pool", comm_pool, METH_NOARGS,
     "pool()\n--\n\n"
     "Bytes at most, the most in use so far, blocks from it, blocks that did not fit."},
    {"allocate", comm_allocate, METH_O,
     "allocate(bytes)\n--\n\nA uint8 tensor in this rank's pool, where there is room."},
    {"finished", comm_finished, METH_NOARGS,
     "Wait for the next work item that is over, and return its owner; None: closing."},
    {"report_after", comm_report_after, METH_O,
     "report_after(seconds)\n--\n\nOperations that wait so long for ranks say so on "
     "stderr; 0: none does."},
    {"waits", comm_waits, METH_NOARGS,
     "What operations have waited for, for a while now: lines."},
    {"stop", comm_stop, METH_NOARGS, "Let finished() come to its end."},
    {"close", comm_close, METH_NOARGS, "Leave the other ranks."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot comm_slots[] = {
    {Py_tp_new, __extension__(void *) comm_new},
    {Py_tp_dealloc, __extension__(void *) comm_dealloc},
    {Py_tp_methods, comm_methods},
    {Py_tp_doc,
     "Comm(rank, names, pool_bytes, transports, interface, job)\n--\n\n"
     "One rank's end of a set of ranks that do collectives; errors call rank r "
     "names[r]."},
    {0, NULL},
};

static PyType_Spec comm_spec = {
    .name = "smp._core.Comm",
    .basicsize = sizeof(smp_comm_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = comm_slots,
};

int
smp_comm_add(PyObject *module)
{
    smp_comm_type = (PyTypeObject *)PyType_FromSpec(&comm_spec);
    return smp_comm_type == NULL ? -1 : PyModule_AddType(module, smp_comm_type);
}
