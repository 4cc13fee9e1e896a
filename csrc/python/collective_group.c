/* smp._core.Group and .Order: torch's tensors become calls of a group.
 *
 * What an operation needs of sizes and dtypes is checked here, because the core writes
 * where it is told to; whether the other members call the same is checked there.
 */
#include "python/collective_group.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "comm/clock.h"
#include "python/collective_comm.h"
#include "python/collective_tensor.h"

typedef struct {
    PyObject         ob_base;
    smp_comm_object *comm;  /* owned */
    smp_group       *group; /* owned; NULL once closed */
    smp_queue       *queue; /* owned */
    int              size;
    int              member;
    char             name[64];
} group_object;

typedef struct {
    PyObject      ob_base;
    group_object *group; /* owned, like all below */
    PyObject     *ins;   /* tuple of tensors, or None; kept until the order is over */
    PyObject     *outs;
    PyObject     *owner;  /* who hears that it is over, or NULL */
    size_t       *counts; /* [2 * size], or NULL */
    smp_call     *calls;  /* `one`, or allocated */
    smp_call      one;
    smp_order     order;
    bool          issued;
} order_object;

static PyTypeObject *order_type;

/* -------------------------------------------------------------------------- orders */

static size_t
sum(const size_t *counts, int n)
{
    size_t total = 0;

    for (int i = 0; i < n; i++) {
        total += counts[i];
    }
    return total;
}

/* Whether `whole` has the parts of all members, of which `part` is this one's. */
static bool
makes_up(const group_object *group, const size_t *counts, size_t whole, size_t part)
{
    if (counts != NULL) {
        return whole == sum(counts, group->size) && part == counts[group->member];
    }
    return whole == part * (size_t)group->size;
}

/* Whether the sizes of in and out go together; sets the call's count. */
static bool
sizes_fit(const group_object *group, smp_call *call, size_t in, size_t out)
{
    bool is_root = group->member == call->root;

    call->count = in;
    switch (call->operation) {
    case SMP_REDUCE_SCATTER:
        call->count = out;
        return makes_up(group, call->counts, in, out);
    case SMP_ALL_GATHER:
        return makes_up(group, call->counts, out, in);
    case SMP_GATHER:
        return !is_root || makes_up(group, NULL, out, in);
    case SMP_SCATTER:
        call->count = out;
        return !is_root || makes_up(group, NULL, in, out);
    case SMP_ALL_TO_ALL:
        if (call->counts != NULL) {
            return in == sum(call->counts, group->size) &&
                   out == sum(call->out_counts, group->size);
        }
        call->count = in / (size_t)group->size;
        return in == out && in % (size_t)group->size == 0;
    default:
        return in == out;
    }
}

static bool
reduces(smp_operation operation)
{
    return operation == SMP_ALL_REDUCE || operation == SMP_REDUCE ||
           operation == SMP_REDUCE_SCATTER;
}

static bool
may_reduce(const smp_row *r, smp_reduction reduction)
{
    bool adds =
        reduction == SMP_SUM || reduction == SMP_AVG || reduction == SMP_PREMUL_SUM;

    return (r->all || (r->sums && adds)) && smp_reduction_defined(reduction, r->dtype);
}

/* Has the call use the order's counts, which are of the tensor's elements. */
static void
scale_counts(order_object *self, smp_call *call, size_t per)
{
    int n = self->group->size;

    for (int i = 0; i < 2 * n; i++) {
        self->counts[i] *= per;
    }
    call->counts = self->counts;
    call->out_counts = call->operation == SMP_ALL_TO_ALL ? self->counts + n : NULL;
}

/* Where a tensor has no place in an operation it is NULL; in place, both are the same.
 * 0, or -1 with an exception. */
static int
fill_call(order_object *self, smp_call *call, PyObject *in, PyObject *out)
{
    group_object *group = self->group;
    smp_row       from;
    smp_row       to;

    if (call->operation == SMP_BARRIER) {
        return 0;
    }
    if (smp_see_tensor(in != NULL ? in : out, &from) < 0) {
        return -1;
    }
    to = from;
    if (in != NULL && out != NULL && in != out && smp_see_tensor(out, &to) < 0) {
        return -1;
    }
    if (from.dtype != to.dtype || from.per != to.per) {
        PyErr_Format(PyExc_TypeError,
                     "smp: group '%s': %s: the input and the output have other dtypes",
                     group->name, smp_operation_name(call->operation));
        return -1;
    }
    if (reduces(call->operation) && !may_reduce(&from, call->reduction)) {
        PyObject *dtype = PyObject_GetAttrString(in != NULL ? in : out, "dtype");

        PyErr_Format(PyExc_TypeError, "smp: group '%s': %s (%s) of %S is not defined",
                     group->name, smp_operation_name(call->operation),
                     smp_reduction_name(call->reduction), dtype);
        Py_XDECREF(dtype);
        return -1;
    }
    if (self->counts != NULL) {
        scale_counts(self, call, from.per);
    }
    if (!sizes_fit(group, call, from.count, to.count)) {
        PyErr_Format(
            PyExc_ValueError,
            "smp: group '%s' of %d ranks: %s: an input of %zu and an output of "
            "%zu elements do not go together",
            group->name, group->size, smp_operation_name(call->operation),
            from.count / from.per, to.count / from.per);
        return -1;
    }
    call->dtype = from.dtype;
    call->in = from.data;
    call->out = to.data;
    return 0;
}

/* Tensor i of a tuple or None: borrowed. */
static PyObject *
item(PyObject *tensors, Py_ssize_t i)
{
    return tensors != NULL && i < PyTuple_GET_SIZE(tensors)
               ? PyTuple_GET_ITEM(tensors, i)
               : NULL;
}

/* A tuple of the sequence's items; NULL for None.  0, or -1 with an exception. */
static int
keep_tensors(PyObject *sequence, PyObject **out)
{
    *out = sequence == Py_None ? NULL : PySequence_Tuple(sequence);
    return *out == NULL && sequence != Py_None ? -1 : 0;
}

/* Of a list of ints: counts[0 .. size).  0, or -1 with an exception. */
static int
read_counts(PyObject *list, int size, size_t *counts)
{
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != size) {
        PyErr_Format(PyExc_ValueError, "smp: %d counts are wanted, one for each rank",
                     size);
        return -1;
    }
    for (int i = 0; i < size; i++) {
        counts[i] = PyLong_AsSize_t(PyList_GET_ITEM(list, i));
    }
    return PyErr_Occurred() != NULL ? -1 : 0;
}

/* The arguments of Group.order() and .run(); see there. */
enum { OPERATION, INS, OUTS, REDUCTION, ROOT, FACTOR, COUNTS, OUT_COUNTS, TIMEOUT };
enum { ARGUMENTS = TIMEOUT + 1 };

static int
read_arguments(order_object *self, PyObject *const *args, smp_call *call)
{
    double timeout_s = PyFloat_AsDouble(args[TIMEOUT]);

    call->operation = (smp_operation)PyLong_AsLong(args[OPERATION]);
    call->reduction = (smp_reduction)PyLong_AsLong(args[REDUCTION]);
    call->root = (int)PyLong_AsLong(args[ROOT]);
    call->factor = PyFloat_AsDouble(args[FACTOR]);
    call->timeout_ns = timeout_s > 1e9 ? -1 : (int64_t)(timeout_s * 1e9);
    if (PyErr_Occurred() != NULL || keep_tensors(args[INS], &self->ins) < 0 ||
        keep_tensors(args[OUTS], &self->outs) < 0) {
        return -1;
    }
    if (args[COUNTS] != Py_None) {
        int n = self->group->size;

        self->counts = calloc(2 * (size_t)n, sizeof(*self->counts));
        if (self->counts == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        if (read_counts(args[COUNTS], n, self->counts) < 0 ||
            (args[OUT_COUNTS] != Py_None &&
             read_counts(args[OUT_COUNTS], n, self->counts + n) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* 0, or -1 with an exception. */
static int
check_open(const group_object *group)
{
    if (group->group == NULL) {
        PyErr_Format(group->comm->error, "smp: group '%s' was destroyed", group->name);
        return -1;
    }
    return 0;
}

/* A new order, not yet issued; NULL with an exception. */
static order_object *
make_order(group_object *group, PyObject *const *args, Py_ssize_t nargs)
{
    order_object *self;
    Py_ssize_t    ins;
    Py_ssize_t    outs;
    size_t        n;

    if (check_open(group) < 0) {
        return NULL;
    }
    if (nargs != ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "%d arguments are wanted", ARGUMENTS);
        return NULL;
    }
    self = (order_object *)order_type->tp_alloc(order_type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->group = (group_object *)Py_NewRef(group);
    if (read_arguments(self, args, &self->one) < 0) {
        goto err;
    }
    ins = self->ins == NULL ? 0 : PyTuple_GET_SIZE(self->ins);
    outs = self->outs == NULL ? 0 : PyTuple_GET_SIZE(self->outs);
    n = (size_t)(ins > outs ? ins : outs);
    n += self->one.operation == SMP_BARRIER;
    self->calls = n == 1 ? &self->one : calloc(n + 1, sizeof(*self->calls));
    if (self->calls == NULL) {
        PyErr_NoMemory();
        goto err;
    }
    self->order.calls = self->calls;
    self->order.ncalls = n;
    for (size_t i = 0; i < n; i++) {
        self->calls[i] = self->one;
        if (fill_call(self, &self->calls[i], item(self->ins, (Py_ssize_t)i),
                      item(self->outs, (Py_ssize_t)i)) < 0) {
            goto err;
        }
    }
    if (check_open(group) < 0) { /* again: torch was asked in between */
        goto err;
    }
    return self;

err:
    Py_DECREF(self);
    return NULL;
}

static void
issue(order_object *self, bool announced)
{
    self->issued = true;
    if (announced) {
        Py_INCREF(self); /* the queue's reference */
    }
    smp_order_issue(&self->order, self->group->queue, announced);
}

/* 1: it is over; 0: until_ns has come; -1 with a signal handler's exception. */
static int
wait_until(order_object *self, int64_t until_ns)
{
    smp_comm_object *comm = self->group->comm;

    for (;;) {
        int64_t look_ns = smp_clock_ns() + SMP_SIGNALS_NS;
        bool    over;

        comm->users++;
        Py_BEGIN_ALLOW_THREADS;
        over = smp_order_wait(&self->order, look_ns < until_ns ? look_ns : until_ns);
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

/* Of an order that is over: 0, or -1 with its error. */
static int
raise_error(const order_object *self)
{
    const smp_order *order = &self->order;

    if (order->status == SMP_OK) {
        return 0;
    }
    if (order->error == NULL) {
        char what[96];

        PyOS_snprintf(what, sizeof(what), "group '%s'", self->group->name);
        (void)smp_comm_raise(self->group->comm, order->status, what, NULL);
    } else {
        PyErr_Format(order->status == SMP_ERR_INVALID ? PyExc_ValueError
                                                      : self->group->comm->error,
                     "smp: %s%s [%s]", order->error,
                     order->status == SMP_ERR_TIMED_OUT
                         ? "; a longer timeout can be given to the group"
                         : "",
                     smp_status_name(order->status));
    }
    return -1;
}

PyObject *
smp_order_owner(smp_order *order)
{
    order_object *self =
        (order_object *)(void *)((char *)order - offsetof(order_object, order));
    PyObject *owner = self->owner;

    self->owner = NULL;
    Py_DECREF(self);
    return owner;
}

static void
order_dealloc(PyObject *object)
{
    order_object *self = (order_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    Py_XDECREF(self->owner);
    Py_XDECREF(self->ins);
    Py_XDECREF(self->outs);
    smp_order_fini(&self->order);
    if (self->calls != &self->one) {
        free(self->calls);
    }
    free(self->counts);
    Py_XDECREF(self->group);
    type->tp_free(object);
    Py_DECREF(type);
}

/* issue(owner): the comm's finished() returns the owner when it is over */
static PyObject *
order_issue(PyObject *object, PyObject *owner)
{
    order_object *self = (order_object *)object;

    if (self->issued || self->group->group == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "smp: issued already, or the group is gone");
        return NULL;
    }
    self->owner = Py_NewRef(owner);
    issue(self, true);
    Py_RETURN_NONE;
}

/* wait(timeout_s) -> whether it is over; 0: no limit */
static PyObject *
order_wait(PyObject *object, PyObject *timeout)
{
    int64_t until_ns = smp_python_deadline(timeout);
    int     over = until_ns < 0 ? -1 : wait_until((order_object *)object, until_ns);

    return over < 0 ? NULL : PyBool_FromLong(over);
}

static PyObject *
order_is_over(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(smp_order_is_over(&((order_object *)object)->order));
}

/* check(): raises what went wrong; it is over */
static PyObject *
order_check(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (raise_error((order_object *)object) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef order_methods[] = {
    {"issue", order_issue, METH_O,
     "issue(owner)\n--\n\nBegin; finished() gives the owner when it is over."},
    {"wait", order_wait, METH_O,
     "wait(timeout_s)\n--\n\nWhether it is over by then; 0: no limit."},
    {"is_over", order_is_over, METH_NOARGS, "Whether it is over."},
    {"check", order_check, METH_NOARGS, "Raise what went wrong; it is over."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot order_slots[] = {
    {Py_tp_dealloc, __extension__(void *) order_dealloc},
    {Py_tp_methods, order_methods},
    {Py_tp_doc, "Calls of a group that are over together."},
    {0, NULL},
};

static PyType_Spec order_spec = {
    .name = "smp._core.Order",
    .basicsize = sizeof(order_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = order_slots,
};

/* -------------------------------------------------------------------------- groups */

/* Whether a signal's handler has raised, asked without the GIL by whoever waits. */
typedef struct {
    PyThreadState *thread;
    int64_t        next_ns;
} signal_asker;

static bool
has_raised(void *arg)
{
    signal_asker *asker = arg;
    bool          raised;

    if (smp_clock_ns() < asker->next_ns) {
        return false;
    }
    PyEval_RestoreThread(asker->thread);
    raised = PyErr_CheckSignals() < 0;
    asker->thread = PyEval_SaveThread();
    asker->next_ns = smp_clock_ns() + SMP_SIGNALS_NS;
    return raised;
}

/* Meets the other members; the GIL is held. */
static smp_status
meet(group_object *self, const int *ranks, uint64_t id, int64_t timeout_ns, int *failed)
{
    signal_asker     asker = {.next_ns = smp_clock_ns() + SMP_SIGNALS_NS};
    smp_group_config config = {.ranks = ranks,
                               .size = self->size,
                               .id = id,
                               .name = self->name,
                               .timeout_ns = timeout_ns,
                               .gives_up = has_raised,
                               .gives_up_arg = &asker};
    smp_comm_object *object = self->comm;
    smp_comm        *comm = object->comm;
    smp_carrier     *carrier = object->carrier;
    smp_status       status;

    object->users++;
    asker.thread = PyEval_SaveThread();
    status = smp_group_create(comm, &config, &self->group, failed);
    if (status == SMP_OK) {
        status = smp_queue_create(carrier, self->group, &self->queue);
    }
    PyEval_RestoreThread(asker.thread);
    if (status == SMP_OK && object->comm == NULL) {
        status = SMP_ERR_CLOSED; /* meanwhile, by another thread */
    }
    if (status != SMP_OK) {
        smp_queue_destroy(self->queue);
        smp_group_destroy(self->group);
        self->queue = NULL;
        self->group = NULL;
    }
    object->users--;
    return status;
}

/* Group(comm, ranks, id, name, timeout_s) */
static PyObject *
group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    smp_comm_object   *comm;
    PyObject          *list;
    unsigned long long id;
    const char        *name;
    double             timeout_s;
    group_object      *self;
    int               *ranks;
    int                failed = -1;
    smp_status         status = SMP_ERR_NO_MEMORY;
    char               what[128];

    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!Ksd", smp_comm_type, &comm, &PyList_Type, &list,
                          &id, &name, &timeout_s)) {
        return NULL;
    }
    if (smp_comm_check_open(comm) < 0) {
        return NULL;
    }
    self = (group_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->comm = (smp_comm_object *)Py_NewRef(comm);
    strncpy(self->name, name, sizeof(self->name) - 1);
    self->size = (int)PyList_GET_SIZE(list);
    ranks = calloc((size_t)self->size + 1, sizeof(*ranks));
    for (int m = 0; ranks != NULL && m < self->size; m++) {
        ranks[m] = (int)PyLong_AsLong(PyList_GET_ITEM(list, m));
    }
    if (ranks != NULL && PyErr_Occurred() == NULL) {
        status = meet(self, ranks, id,
                      timeout_s > 1e9 ? -1 : (int64_t)(timeout_s * 1e9), &failed);
    }
    free(ranks);
    if (PyErr_Occurred() != NULL || smp_comm_check_open(comm) < 0) {
        goto err;
    }
    if (status != SMP_OK) {
        PyOS_snprintf(what, sizeof(what), "group '%s': meeting rank %d", self->name,
                      failed);
        (void)smp_comm_raise(comm, status, what, NULL);
        goto err;
    }
    self->member = smp_group_member(self->group);
    comm->groups++;
    return (PyObject *)self;

err:
    Py_DECREF(self);
    return NULL;
}

/* Ends what is under way; the GIL is held. */
static void
close_group(group_object *self)
{
    smp_group *group = self->group;
    smp_queue *queue = self->queue;

    if (group == NULL) {
        return;
    }
    self->group = NULL;
    self->queue = NULL;
    self->comm->groups--;
    self->comm->users++;
    Py_BEGIN_ALLOW_THREADS;
    smp_queue_destroy(queue);
    smp_group_destroy(group);
    Py_END_ALLOW_THREADS;
    self->comm->users--;
}

static void
group_dealloc(PyObject *object)
{
    group_object *self = (group_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    close_group(self);
    Py_XDECREF(self->comm);
    type->tp_free(object);
    Py_DECREF(type);
}

/* order(operation, ins, outs, reduction, root, factor, counts, out_counts, timeout_s)
 * -> an order for a call with each of the tensors */
static PyObject *
group_order(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    return (PyObject *)make_order((group_object *)object, args, nargs);
}

/* run(as order): issues it and waits until it is over */
static PyObject *
group_run(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    order_object *order = make_order((group_object *)object, args, nargs);
    int           over;

    if (order == NULL) {
        return NULL;
    }
    issue(order, false);
    over = wait_until(order, SMP_NEVER);
    if (over < 0) {
        /* Interrupted: the others may still read the tensors.  If it is over, the
         * signal's handler may have left the group and these ranks. */
        if (!smp_order_is_over(&order->order)) {
            Py_INCREF(order);
            smp_order_leave(&order->order);
        }
    } else if (raise_error(order) < 0) {
        over = -1;
    }
    Py_DECREF(order);
    if (over < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* sequence() -> how many operations have begun */
static PyObject *
group_sequence(PyObject *object, PyObject *unused)
{
    group_object *self = (group_object *)object;

    (void)unused;
    return PyLong_FromUnsignedLongLong(
        self->group == NULL ? 0 : smp_group_sequence(self->group));
}

/* use() -> (operations, bytes, messages to other hosts, bytes to other hosts, whether
 * members read each other's memory); zeros once closed */
static PyObject *
group_use(PyObject *object, PyObject *unused)
{
    group_object *self = (group_object *)object;
    smp_group_use use = {0};
    bool          reads = false;

    (void)unused;
    if (self->group != NULL) {
        smp_group_count(self->group, &use);
        reads = smp_group_reads_memory(self->group);
    }
    return Py_BuildValue("KKKKN", (unsigned long long)use.operations,
                         (unsigned long long)use.bytes, (unsigned long long)use.parcels,
                         (unsigned long long)use.tensor_bytes +
                             (unsigned long long)use.other_bytes,
                         PyBool_FromLong(reads));
}

/* close(): what is under way is over, with an error */
static PyObject *
group_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    close_group((group_object *)object);
    Py_RETURN_NONE;
}

static PyMethodDef group_methods[] = {
    {"order", (PyCFunction)(void (*)(void))group_order, METH_FASTCALL,
     "order(operation, ins, outs, reduction, root, factor, counts, out_counts, "
     "timeout_s)\n--\n\n"
     "An Order of one call for each of the tensors, to be issued."},
    {"run", (PyCFunction)(void (*)(void))group_run, METH_FASTCALL,
     "run(operation, ins, outs, reduction, root, factor, counts, out_counts, "
     "timeout_s)\n--\n\n"
     "Make such an order and wait until it is over."},
    {"sequence", group_sequence, METH_NOARGS, "How many operations have begun."},
    {"use", group_use, METH_NOARGS,
     "-> operations, their bytes, messages and bytes to other hosts, whether members "
     "read each other's memory."},
    {"close", group_close, METH_NOARGS, "Leave the group."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_new, __extension__(void *) group_new},
    {Py_tp_dealloc, __extension__(void *) group_dealloc},
    {Py_tp_methods, group_methods},
    {Py_tp_doc, "Group(comm, ranks, id, name, timeout_s)\n--\n\n"
                "Ranks that do collectives together; meets the others."},
    {0, NULL},
};

static PyType_Spec group_spec = {
    .name = "smp._core.Group",
    .basicsize = sizeof(group_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = group_slots,
};

/* ------------------------------------------------------------------------ the module
 */

/* name[0 .. n) -> i, as a dict of the module. */
static int
add_numbers(PyObject *module, const char *attribute, const char *(*name)(int), int n)
{
    PyObject *dict = PyDict_New();
    int       failed = dict == NULL;

    for (int i = 0; i < n && !failed; i++) {
        PyObject *number = PyLong_FromLong(i);

        failed = number == NULL || PyDict_SetItemString(dict, name(i), number) < 0;
        Py_XDECREF(number);
    }
    failed = failed || PyModule_AddObjectRef(module, attribute, dict) < 0;
    Py_XDECREF(dict);
    return failed ? -1 : 0;
}

static const char *
operation_name(int operation)
{
    return smp_operation_name((smp_operation)operation);
}

static const char *
reduction_name(int reduction)
{
    return smp_reduction_name((smp_reduction)reduction);
}

int
smp_group_add(PyObject *module)
{
    PyObject *group_type = PyType_FromSpec(&group_spec);
    int       failed;

    order_type = (PyTypeObject *)PyType_FromSpec(&order_spec);
    failed = group_type == NULL || order_type == NULL ||
             PyModule_AddType(module, (PyTypeObject *)group_type) < 0 ||
             PyModule_AddType(module, order_type) < 0 ||
             add_numbers(module, "operations", operation_name, SMP_OPERATIONS) < 0 ||
             add_numbers(module, "reductions", reduction_name, SMP_REDUCTIONS) < 0;
    Py_XDECREF(group_type);
    return failed ? -1 : 0;
}
