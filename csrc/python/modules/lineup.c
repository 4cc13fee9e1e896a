/* A task waits for a collective's turn, and for its end. */
#include "python/modules/lineup.h"

#include <stdatomic.h>

#include "comm/messaging/comm.h"
#include "python/modules/serve_chain.h"
#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/modules/task.h"
#include "python/process/heap.h"

typedef struct {
    PyObject     ob_base;
    smp_key      key;
    uint64_t     before; /* collectives of this rank before it */
    _Atomic bool over;
} collective_object;

static PyTypeObject *collective_type;

/* The module's number for smp_calls, apart from the entries'.  [FNV-1a] */
static uint64_t
number_of(const char *path)
{
    uint64_t h = 0xCBF29CE484222325u;

    for (; *path != '\0'; path++) {
        h = (h ^ (uint8_t)*path) * 0x100000001B3u;
    }
    return h | (uint64_t)1 << 63;
}

/* distributed_call(path) -> (number, microbatch, phase, count of the module's calls by
 * this task), or None outside a step, or without a server */
static PyObject *
py_distributed_call(PyObject *module, PyObject *text)
{
    smp_task   *task = smp_this_task;
    const char *path = PyUnicode_AsUTF8(text);
    uint64_t    called;
    uint32_t    before;

    (void)module;
    if (path == NULL) {
        return NULL;
    }
    if (task == NULL) {
        if (!smp_the_session.in_step) {
            Py_RETURN_NONE;
        }
        return PyErr_Format(
            PyExc_RuntimeError,
            "smp: distributed module '%s' was called by a thread of the "
            "script during a step; call it in the step function",
            path);
    }
    if (task->foreseen && smp_the_session.pipelines > 1 &&
        !smp_the_session.entries[task->entry].collective) {
        return smp_serve_chain_refuse(task); /* the other tp_ranks know of no chain */
    }
    called = number_of(path);
    if (smp_calls_count(&task->calls, called, &before) != SMP_OK) {
        return PyErr_NoMemory();
    }
    return Py_BuildValue(
        "(KiiI)",
        (unsigned long long)smp_call_of(task->number, called, before, task->phase),
        (int)task->microbatch, (int)task->phase, (unsigned)before);
}

static PyObject *
raise_status(smp_status status)
{
    if (status == SMP_ERR_CLOSED) {
        PyErr_SetNone(smp_the_session.aborted);
        return NULL;
    }
    return smp_session_raise(status, "ordering a collective");
}

/* line_up(number, microbatch, phase, call, collective, path) -> Collective, when it is
 * this rank's next */
static PyObject *
py_line_up(PyObject *module, PyObject *args)
{
    smp_task          *task = smp_this_task;
    collective_object *self;
    unsigned long long number;
    int                microbatch;
    int                phase;
    unsigned           time;
    unsigned           which;
    const char        *path;
    smp_status         status;

    (void)module;
    if (!PyArg_ParseTuple(args, "KiiIIs", &number, &microbatch, &phase, &time, &which,
                          &path)) {
        return NULL;
    }
    if (task == NULL) {
        return PyErr_Format(PyExc_RuntimeError,
                            "smp: a collective of distributed module '%s', which was "
                            "called in a step, runs outside it; use model.backward in "
                            "the step",
                            path);
    }
    self = (collective_object *)collective_type->tp_alloc(collective_type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->key = smp_key_of(path);
    self->key.call = number;
    self->key.microbatch = microbatch;
    self->key.phase = phase;
    self->key.time = time;
    self->key.number = which;
    smp_heap_give_scratch();
    Py_BEGIN_ALLOW_THREADS;
    status = smp_server_line_up(smp_the_session.server, &self->key);
    Py_END_ALLOW_THREADS;
    if (status != SMP_OK) {
        Py_DECREF(self);
        return raise_status(status);
    }
    if (smp_stream_enter(task) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->before = smp_server_issued_so_far(smp_the_session.server);
    return (PyObject *)self;
}

/* issued(): it has been, since line_up() returned. */
static PyObject *
collective_issued(PyObject *object, PyObject *unused)
{
    const smp_status status =
        smp_server_issued(smp_the_session.server, &((collective_object *)object)->key);

    (void)unused;
    if (status != SMP_OK) {
        return raise_status(status);
    }
    Py_RETURN_NONE;
}

/* wait(): until it is over, with the baton given away. */
static PyObject *
collective_wait(PyObject *object, PyObject *unused)
{
    collective_object *self = (collective_object *)object;
    smp_status         status;

    (void)unused;
    smp_heap_give_scratch();
    Py_BEGIN_ALLOW_THREADS;
    status = smp_server_await_collective(smp_the_session.server, &self->key,
                                         self->before, &self->over);
    Py_END_ALLOW_THREADS;
    if (status != SMP_OK) {
        return raise_status(status);
    }
    if (smp_stream_enter(smp_this_task) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* collective(future or nothing): it is over.  Any thread, at any time. */
static PyObject *
collective_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    atomic_store(&((collective_object *)object)->over, true);
    if (smp_the_session.comm != NULL) {
        smp_comm_wake(smp_the_session.comm);
    }
    Py_RETURN_NONE;
}

static void
collective_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    type->tp_free(object);
    Py_DECREF(type);
}

/* collectives_ended(timeout_s) -> (this rank's number of issued collectives in the
 * failed step, the fewest, the most of a rank of the same pp_rank); None: not known
 * yet */
static PyObject *
py_collectives_ended(PyObject *module, PyObject *timeout)
{
    smp_server  *server = smp_the_session.server;
    const double timeout_s = PyFloat_AsDouble(timeout);
    uint64_t     least;
    uint64_t     most;
    bool         known;

    (void)module;
    if (timeout_s == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    known =
        smp_server_collectives_ended(server, (int64_t)(timeout_s * 1e9), &least, &most);
    Py_END_ALLOW_THREADS;
    if (!known) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(KKK)", (unsigned long long)smp_server_issued_so_far(server),
                         (unsigned long long)least, (unsigned long long)most);
}

/* ended_in_order() -> (whether this rank had done its part of the last step before its
 * failure, the same of all of this pp_rank).  The second as far as collectives_ended()
 * knows. */
static PyObject *
py_ended_in_order(PyObject *module, PyObject *unused)
{
    const smp_server *server = smp_the_session.server;

    (void)module;
    (void)unused;
    return Py_BuildValue("(NN)", PyBool_FromLong(smp_server_ended_in_order(server)),
                         PyBool_FromLong(smp_server_all_ended_in_order(server)));
}

/* hear_failure(timeout_s): of the step, after a collective failed because a rank called
 * another operation.  In a sequence that rank may have heard of the failure before
 * (smp/tensor_parallel/backward/sequence.py); in other steps the call does not wait. */
static PyObject *
py_hear_failure(PyObject *module, PyObject *timeout)
{
    const double timeout_s = PyFloat_AsDouble(timeout);

    (void)module;
    if (timeout_s == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (smp_this_task != NULL && smp_the_session.in_sequence) {
        smp_python_rest();
        smp_server_hear(smp_the_session.server, (int64_t)(timeout_s * 1e9));
        smp_python_wake();
    }
    Py_RETURN_NONE;
}

static PyMethodDef collective_methods[] = {
    {"issued", collective_issued, METH_NOARGS,
     "issued()\n--\n\nIt has been, since line_up() returned."},
    {"wait", collective_wait, METH_NOARGS,
     "wait()\n--\n\nUntil it is over, while other tasks run."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot collective_slots[] = {
    {Py_tp_dealloc, __extension__(void *) collective_dealloc},
    {Py_tp_call, __extension__(void *) collective_call},
    {Py_tp_methods, collective_methods},
    {Py_tp_doc, "A collective of a module whose turn it is; called when it is over."},
    {0, NULL},
};

static PyType_Spec collective_spec = {
    .name = "smp._core.Collective",
    .basicsize = sizeof(collective_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = collective_slots,
};

static PyMethodDef functions[] = {
    {"distributed_call", py_distributed_call, METH_O,
     "distributed_call(path) -> (number, microbatch, phase, call) or None"},
    {"line_up", py_line_up, METH_VARARGS,
     "line_up(number, microbatch, phase, call, collective, path) -> Collective"},
    {"collectives_ended", py_collectives_ended, METH_O,
     "collectives_ended(timeout_s) -> (own, fewest, most) or None"},
    {"hear_failure", py_hear_failure, METH_O,
     "hear_failure(timeout_s)\n--\n\nOf the step, in which ranks called other "
     "operations."},
    {"ended_in_order", py_ended_in_order, METH_NOARGS,
     "ended_in_order() -> (this rank, all of its pp_rank)"},
    {NULL, NULL, 0, NULL},
};

int
smp_lineup_add(PyObject *module)
{
    collective_type = (PyTypeObject *)PyType_FromSpec(&collective_spec);
    if (collective_type == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
