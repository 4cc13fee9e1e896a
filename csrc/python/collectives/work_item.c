/* smp._core.WorkItem, from its making to the end of its device's work. */
#include "python/collectives/work_item.h"

#include <stdlib.h>

#include "common/clock.h"
#include "python/process/signals.h"
#include "python/values/device.h"
#include "python/values/error.h"

static PyTypeObject *item_type;

/* The exchange of the group's devices; NULL: none. */
static smp_exchange *
exchange_of(const smp_group_object *group)
{
    const char *why;

    return group->group == NULL ? NULL : smp_group_exchange(group->group, &why);
}

/* -1, with an exception. */
static int
raise_driver(const smp_group_object *group, const char *why)
{
    PyErr_Format(smp_error_of_group, "smp: group '%s': all-gather on a device: %s",
                 group->name, why);
    return -1;
}

/* Has the work item begin where the thread's stream is now.  0, or -1 with an
 * exception. */
static int
mark_begin(smp_work_item_object *self, smp_exchange *exchange)
{
    dl_device device = self->gathers.device;
    char      why[SMP_DRIVER_TEXT];

    if (device.id != smp_exchange_device(exchange)) {
        PyErr_Format(
            PyExc_ValueError,
            "smp: group '%s': all-gathers of this rank have been of device %d, "
            "this one is of device %d; SMP_COMM_DEVICE_GATHER_BYTES=0 leaves "
            "them to NCCL",
            self->group->name, smp_exchange_device(exchange), (int)device.id);
        return -1;
    }
    if (smp_device_stream(device, &self->stream) != 0) {
        return -1;
    }
    self->mark = smp_exchange_mark(exchange, why);
    if (self->mark == NULL ||
        !smp_exchange_begin(exchange, self->mark, self->stream, why)) {
        return raise_driver(self->group, why);
    }
    smp_gathers_mark(&self->gathers, self->mark);
    return 0;
}

/* Has the thread's stream wait for a finished work item.  0, or -1 with an exception.
 */
static int
join_item(smp_work_item_object *self)
{
    smp_exchange *exchange = exchange_of(self->group);
    char          why[SMP_DRIVER_TEXT];
    void         *stream;

    if (self->mark == NULL) {
        return 0;
    }
    if (exchange == NULL) {
        if (!self->group->closing && !self->group->stuck) {
            return 0; /* the group's end has waited */
        }
        return raise_driver(self->group, "the group ended before its copies did");
    }
    if (smp_device_stream(self->gathers.device, &stream) != 0) {
        return -1;
    }
    if (!smp_exchange_join(exchange, self->mark, stream, why)) {
        return raise_driver(self->group, why);
    }
    self->joined = self->joined || stream == self->stream;
    return 0;
}

/* The work item goes; tensors in use by its device stay. */
static void
let_tensors_go(smp_work_item_object *self)
{
    smp_group_object *group = self->group;
    smp_exchange     *exchange = exchange_of(group);

    if (self->mark == NULL) {
        return;
    }
    if (exchange == NULL) {
        if (self->issued && group->closing) {
            smp_hold(&group->held, NULL, self->mark, self->ins, self->outs);
            self->ins = self->outs = NULL;
        } else if (self->issued && group->stuck) {
            self->ins = self->outs = NULL; /* for as long as the process lives */
        }
    } else if (self->joined || !self->issued) {
        smp_exchange_put_mark(exchange, self->mark);
    } else {
        smp_hold(&group->held, exchange, self->mark, self->ins, self->outs);
        self->ins = self->outs = NULL;
    }
}

smp_work_item_object *
smp_work_item_make(smp_group_object *group, PyObject *const *args, Py_ssize_t nargs)
{
    smp_callee            callee = {group->name, group->size, group->member};
    smp_work_item_object *self;

    if (smp_group_check_open(group) < 0) {
        return NULL;
    }
    self = (smp_work_item_object *)item_type->tp_alloc(item_type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->group = (smp_group_object *)Py_NewRef(group);
    if (smp_tensor_calls_init(&self->host, &callee, args, nargs, &self->ins,
                              &self->outs) < 0 ||
        smp_group_check_open(group) < 0) { /* again: torch was asked in between */
        Py_DECREF(self);
        return NULL;
    }
    self->item.calls = self->host.calls;
    self->item.ncalls = self->host.n;
    return self;
}

smp_work_item_object *
smp_work_item_make_gather(smp_group_object *group, PyObject *ins, PyObject *outs,
                          double timeout_s, smp_device_offer *offer)
{
    smp_exchange         *exchange = exchange_of(group);
    smp_work_item_object *self;

    if (smp_group_check_open(group) < 0) {
        return NULL;
    }
    if (exchange != NULL) {
        smp_held_sweep(&group->held, exchange);
    } else if (offer == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "smp: the devices have not met");
        return NULL;
    }
    self = (smp_work_item_object *)item_type->tp_alloc(item_type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->group = (smp_group_object *)Py_NewRef(group);
    self->ins = PySequence_Tuple(ins);
    self->outs = self->ins == NULL ? NULL : PySequence_Tuple(outs);
    if (self->outs == NULL) {
        goto err;
    }
    if (smp_gathers_init(&self->gathers, self->ins, self->outs, group->size,
                         group->member, group->name) < 0 ||
        smp_group_check_open(group) < 0) { /* again: Python ran in between */
        goto err;
    }
    exchange = exchange_of(group);
    if (offer == NULL && mark_begin(self, exchange) < 0) {
        goto err;
    }
    self->item.calls = self->gathers.calls;
    self->item.ncalls = offer == NULL ? (size_t)self->gathers.n : 1;
    for (Py_ssize_t i = 0; i < self->gathers.n; i++) {
        self->gathers.calls[i].hints.timeout_ns =
            timeout_s > 1e9 ? -1 : (int64_t)(timeout_s * 1e9);
    }
    if (offer != NULL) {
        offer->number = self->gathers.device.id;
        self->gathers.calls[0].gather = NULL;
        self->gathers.calls[0].offer = offer;
    }
    if (smp_group_check_open(group) < 0) { /* again: torch was asked in between */
        goto err;
    }
    return self;

err:
    Py_DECREF(self);
    return NULL;
}

void
smp_work_item_begin(smp_work_item_object *self)
{
    self->issued = true;
    smp_work_item_issue(&self->item, self->group->queue, false);
}

int
smp_work_item_wait_until(smp_work_item_object *self, int64_t until_ns)
{
    smp_comm_object *comm = self->group->comm;

    for (;;) {
        int64_t look_ns = smp_clock_ns() + SMP_SIGNALS_NS;
        bool    over;

        look_ns = look_ns < until_ns ? look_ns : until_ns;
        comm->users++;
        Py_BEGIN_ALLOW_THREADS;
        over = smp_work_item_wait(&self->item, look_ns);
        Py_END_ALLOW_THREADS;
        comm->users--;
        if (over) {
            return 1;
        }
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        if (until_ns <= look_ns) {
            return 0;
        }
    }
}

int
smp_work_item_raise(const smp_work_item_object *self)
{
    const smp_work_item *item = &self->item;

    if (item->status == SMP_OK) {
        return 0;
    }
    if (item->status == SMP_ERR_INVALID && item->error != NULL) {
        PyErr_Format(PyExc_ValueError, "smp: %s [%s]", item->error,
                     smp_status_name(item->status));
    } else if (item->error == NULL) {
        char what[96];

        PyOS_snprintf(what, sizeof(what), "group '%s'", self->group->name);
        (void)smp_comm_raise(item->status, what, NULL);
    } else {
        const smp_error_keys keys = {{item->keys[0], item->keys[1]}};

        (void)smp_error_raise(smp_error_of_group, item->status, &keys, "smp: %s%s",
                              item->error,
                              item->status == SMP_ERR_TIMED_OUT
                                  ? "; a longer timeout can be given to the group"
                                  : "");
    }
    return -1;
}

void
smp_work_item_abandon(smp_work_item_object *self)
{
    Py_INCREF(self); /* the queue's reference */
    smp_work_item_leave(&self->item);
}

int
smp_work_item_run(smp_work_item_object *item)
{
    int over;

    smp_work_item_begin(item);
    over = smp_work_item_wait_until(item, SMP_NEVER);
    if (over < 0) {
        /* Interrupted: the others may still read the tensors.  If it is over, the
         * signal's handler may have left the group and these ranks. */
        if (!smp_work_item_is_over(&item->item)) {
            smp_work_item_abandon(item);
        }
    } else if (smp_work_item_raise(item) < 0 || join_item(item) < 0) {
        over = -1;
    }
    Py_DECREF(item);
    return over < 0 ? -1 : 0;
}

PyObject *
smp_work_item_owner(smp_work_item *item)
{
    smp_work_item_object *self =
        (smp_work_item_object *)(void *)((char *)item -
                                         offsetof(smp_work_item_object, item));
    PyObject *owner = self->owner;

    self->owner = NULL;
    Py_DECREF(self);
    return owner;
}

static void
item_dealloc(PyObject *object)
{
    smp_work_item_object *self = (smp_work_item_object *)object;
    PyTypeObject         *type = Py_TYPE(object);

    let_tensors_go(self);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->ins);
    Py_XDECREF(self->outs);
    smp_work_item_fini(&self->item);
    smp_tensor_calls_fini(&self->host);
    smp_gathers_fini(&self->gathers);
    Py_XDECREF(self->group);
    type->tp_free(object);
    Py_DECREF(type);
}

/* issue(owner): the comm's finished() returns the owner when it is over */
static PyObject *
item_issue(PyObject *object, PyObject *owner)
{
    smp_work_item_object *self = (smp_work_item_object *)object;

    if (self->issued || self->group->group == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "smp: issued already, or the group is gone");
        return NULL;
    }
    self->owner = Py_NewRef(owner);
    self->issued = true;
    Py_INCREF(self); /* the queue's reference */
    smp_work_item_issue(&self->item, self->group->queue, true);
    Py_RETURN_NONE;
}

/* wait(timeout_s) -> whether it is over; 0: no limit */
static PyObject *
item_wait(PyObject *object, PyObject *timeout)
{
    int64_t until_ns = smp_python_deadline(timeout);
    int     over = until_ns < 0
                       ? -1
                       : smp_work_item_wait_until((smp_work_item_object *)object, until_ns);

    return over < 0 ? NULL : PyBool_FromLong(over);
}

/* describe() -> its wait, in words; None: it is over, or unknown */
static PyObject *
item_describe(PyObject *object, PyObject *unused)
{
    smp_work_item_object *self = (smp_work_item_object *)object;
    smp_comm_object      *comm = self->group->comm;
    char                  text[SMP_GROUP_TEXT];
    bool                  known;

    (void)unused;
    comm->users++;
    Py_BEGIN_ALLOW_THREADS;
    known = smp_work_item_describe(&self->item, text, sizeof(text));
    Py_END_ALLOW_THREADS;
    comm->users--;
    return Py_BuildValue("z", known ? text : NULL);
}

static PyObject *
item_is_over(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(
        smp_work_item_is_over(&((smp_work_item_object *)object)->item));
}

/* check(): raises its error; it is over */
static PyObject *
item_check(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (smp_work_item_raise((smp_work_item_object *)object) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* join(): the thread's stream waits for the device; the work item is over */
static PyObject *
item_join(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (join_item((smp_work_item_object *)object) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* is_done() -> whether it is over, and the device has done it */
static PyObject *
item_is_done(PyObject *object, PyObject *unused)
{
    smp_work_item_object *self = (smp_work_item_object *)object;
    smp_exchange         *exchange = exchange_of(self->group);
    bool                  done = smp_work_item_is_over(&self->item);

    (void)unused;
    if (done && self->mark != NULL && exchange != NULL && self->item.status == SMP_OK) {
        done = smp_exchange_is_over(exchange, self->mark);
    }
    return PyBool_FromLong(done);
}

static PyMethodDef item_methods[] = {
    {"issue", item_issue, METH_O,
     "issue(owner)\n--\n\nBegin; finished() gives the owner when it is over."},
    {"wait", item_wait, METH_O,
     "wait(timeout_s)\n--\n\nWhether it is over by then; 0: no limit."},
    {"describe", item_describe, METH_NOARGS,
     "What it waits for, in words; None if it is over."},
    {"is_over", item_is_over, METH_NOARGS, "Whether it is over."},
    {"check", item_check, METH_NOARGS, "Raise what went wrong; it is over."},
    {"join", item_join, METH_NOARGS,
     "Have the current stream wait for the device; the work item is over."},
    {"is_done", item_is_done, METH_NOARGS,
     "Whether it is over, and the device has done it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot item_slots[] = {
    {Py_tp_dealloc, __extension__(void *) item_dealloc},
    {Py_tp_methods, item_methods},
    {Py_tp_doc, "Calls of a group that are over together."},
    {0, NULL},
};

static PyType_Spec item_spec = {
    .name = "smp._core.WorkItem",
    .basicsize = sizeof(smp_work_item_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = item_slots,
};

int
smp_work_item_add(PyObject *module)
{
    item_type = (PyTypeObject *)PyType_FromSpec(&item_spec);
    return item_type == NULL ? -1 : PyModule_AddType(module, item_type);
}
