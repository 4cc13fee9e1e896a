/* Posted receives with references to their messages' tensors. */
#include "python/collectives/mail.h"

#include <stdbool.h>
#include <string.h>

#include "common/clock.h"
#include "python/collectives/objects.h"
#include "python/process/signals.h"
#include "python/values/row.h"

typedef struct {
    PyObject           ob_base;
    smp_group_object  *group;  /* owned, like the tensor */
    PyObject          *tensor; /* NULL: it is not posted */
    smp_posted_receive receive;
    bool               over;
} receipt_object;

static PyTypeObject *receipt_type;

/* The arguments of send() and receive(). */
enum { GROUP, RANK, TAG, TENSOR, ARGUMENTS };

typedef struct {
    smp_group_object *group; /* borrowed, like the data */
    int               rank;
    smp_address       address;
    void             *data;
} mail_arguments;

/* 0, or -1 with an exception: the comm is closed, or the tensor cannot travel. */
static int
read_arguments(PyObject *const *args, Py_ssize_t nargs, mail_arguments *out)
{
    smp_row row;

    if (nargs != ARGUMENTS || !PyObject_TypeCheck(args[GROUP], smp_group_type)) {
        PyErr_SetString(PyExc_TypeError, "group, rank, tag and tensor are wanted");
        return -1;
    }
    out->group = (smp_group_object *)args[GROUP];
    out->rank = (int)PyLong_AsLong(args[RANK]);
    out->address.tag = PyLong_AsLongLong(args[TAG]);
    if (PyErr_Occurred() != NULL || smp_see_tensor(args[TENSOR], &row) < 0 ||
        smp_comm_check_open(out->group->comm) < 0) {
        return -1;
    }
    out->address.group = out->group->id;
    out->address.dtype = row.dtype;
    out->address.kind = row.kind;
    out->address.count = row.count;
    out->data = row.data;
    return 0;
}

/* The end of a rank with an exchange under way, in words. */
static void
describe_end(const smp_comm_object *comm, int rank, smp_status status, char *out,
             size_t bytes)
{
    PyOS_snprintf(out, bytes, "rank %d %s", smp_comm_object_name(comm, rank),
                  status == SMP_ERR_CLOSED      ? "has left"
                  : status == SMP_ERR_PEER_LOST ? "is lost"
                                                : "sent what cannot be read");
}

/* send(group, rank, tag, tensor) */
static PyObject *
py_send(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    mail_arguments   l = {0};
    smp_comm_object *comm;
    smp_mailbox     *mailbox;
    smp_status       status;
    char             what[128];
    char             why[64];

    (void)module;
    if (read_arguments(args, nargs, &l) < 0) {
        return NULL;
    }
    comm = l.group->comm;
    mailbox = comm->mailbox;
    comm->users++;
    Py_BEGIN_ALLOW_THREADS;
    status = smp_mailbox_send(mailbox, l.rank, &l.address, l.data);
    Py_END_ALLOW_THREADS;
    comm->users--;
    if (status == SMP_OK) {
        Py_RETURN_NONE;
    }
    PyOS_snprintf(what, sizeof(what), "group '%s': send (tag %lld) to rank %d",
                  l.group->name, (long long)l.address.tag,
                  smp_comm_object_name(comm, l.rank));
    describe_end(comm, l.rank, status, why, sizeof(why));
    return smp_comm_raise(
        status, what,
        status == SMP_ERR_CLOSED || status == SMP_ERR_PEER_LOST ? why : NULL);
}

/* receive(group, rank or -1, tag, tensor) -> a Receipt */
static PyObject *
py_receive(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    mail_arguments  l = {0};
    receipt_object *self;

    (void)module;
    if (read_arguments(args, nargs, &l) < 0) {
        return NULL;
    }
    self = (receipt_object *)receipt_type->tp_alloc(receipt_type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->group = (smp_group_object *)Py_NewRef(l.group);
    self->tensor = Py_NewRef(args[TENSOR]);
    self->receive.want = l.address;
    self->receive.source = l.rank;
    self->receive.out = l.data;
    smp_receive_post(l.group->comm->mailbox, &self->receive);
    return (PyObject *)self;
}

static void
receipt_dealloc(PyObject *object)
{
    receipt_object *self = (receipt_object *)object;
    PyTypeObject   *type = Py_TYPE(object);

    if (self->tensor != NULL && self->group->comm->mailbox != NULL) {
        (void)smp_receive_cancel(self->group->comm->mailbox, &self->receive);
    }
    Py_XDECREF(self->tensor);
    Py_XDECREF(self->group);
    type->tp_free(object);
    Py_DECREF(type);
}

/* 1: it is over; 0: until_ns has come; -1 with an exception. */
static int
wait_until(receipt_object *self, int64_t until_ns)
{
    smp_comm_object *comm = self->group->comm;

    while (!self->over) {
        int64_t      look_ns = smp_clock_ns() + SMP_SIGNALS_NS;
        smp_mailbox *mailbox = comm->mailbox;

        if (smp_comm_check_open(comm) < 0) {
            return -1;
        }
        comm->users++;
        Py_BEGIN_ALLOW_THREADS;
        self->over = smp_receive_wait(mailbox, &self->receive,
                                      look_ns < until_ns ? look_ns : until_ns);
        Py_END_ALLOW_THREADS;
        comm->users--;
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
        if (until_ns <= look_ns) {
            break;
        }
    }
    return self->over;
}

/* wait(timeout_s) -> whether it is over; 0: no limit */
static PyObject *
receipt_wait(PyObject *object, PyObject *timeout)
{
    int64_t until_ns = smp_python_deadline(timeout);
    int     over = until_ns < 0 ? -1 : wait_until((receipt_object *)object, until_ns);

    return over < 0 ? NULL : PyBool_FromLong(over);
}

static PyObject *
receipt_is_over(PyObject *object, PyObject *unused)
{
    int over = wait_until((receipt_object *)object, 0);

    (void)unused;
    return over < 0 ? NULL : PyBool_FromLong(over);
}

/* withdraw() -> whether it is over after all; else nothing goes into the tensor any
 * more, and a message is for the next matching receive */
static PyObject *
receipt_withdraw(PyObject *object, PyObject *unused)
{
    receipt_object *self = (receipt_object *)object;
    int             over = wait_until(self, 0);

    (void)unused;
    if (over == 0 && smp_comm_check_open(self->group->comm) < 0) {
        return NULL; /* a signal handler has left the ranks */
    }
    if (over == 0) { /* but for another thread's look, meanwhile */
        self->over = smp_receive_cancel(self->group->comm->mailbox, &self->receive);
        over = self->over;
    }
    return over < 0 ? NULL : PyBool_FromLong(over);
}

/* "4 int16": a tensor as its owner sees it. */
static void
describe(const smp_address *address, char *out, size_t bytes)
{
    char name[32];

    smp_kind_name(address->kind, address->dtype, name, sizeof(name));
    PyOS_snprintf(out, bytes, "%llu %s",
                  (unsigned long long)smp_kind_count(address->kind, address->dtype,
                                                     address->count),
                  name);
}

/* "group '2': receive (tag 0) from rank 3" */
static void
name_receipt(const receipt_object *self, char *out, size_t bytes)
{
    const smp_posted_receive *receive = &self->receive;
    char                      from[32] = "any rank";

    if (receive->source != SMP_ANY_SOURCE) {
        PyOS_snprintf(from, sizeof(from), "rank %d",
                      smp_comm_object_name(self->group->comm, receive->source));
    }
    PyOS_snprintf(out, bytes, "group '%s': receive (tag %lld) from %s",
                  self->group->name, (long long)receive->want.tag, from);
}

/* describe() -> the receive, in words */
static PyObject *
receipt_describe(PyObject *object, PyObject *unused)
{
    receipt_object *self = (receipt_object *)object;
    char            what[160];

    (void)unused;
    name_receipt(self, what, sizeof(what));
    return PyUnicode_DecodeUTF8(what, (Py_ssize_t)strlen(what), "replace");
}

/* check(): raises its error; it is over */
static PyObject *
receipt_check(PyObject *object, PyObject *unused)
{
    receipt_object           *self = (receipt_object *)object;
    const smp_comm_object    *comm = self->group->comm;
    const smp_posted_receive *receive = &self->receive;
    char                      what[160];
    char                      why[160];

    (void)unused;
    if (receive->status == SMP_OK) {
        Py_RETURN_NONE;
    }
    name_receipt(self, what, sizeof(what));
    if (receive->from == SMP_ANY_SOURCE) {
        return smp_comm_raise(receive->status, what,
                              receive->status == SMP_ERR_CLOSED ? "all ranks have left"
                                                                : NULL);
    }
    if (receive->status == SMP_ERR_MISMATCH) {
        char sent[48];
        char wanted[48];

        describe(&receive->got, sent, sizeof(sent));
        describe(&receive->want, wanted, sizeof(wanted));
        PyOS_snprintf(why, sizeof(why), "rank %d sent %s, rank %d wants %s",
                      smp_comm_object_name(comm, receive->from), sent,
                      smp_comm_object_name(comm, comm->rank), wanted);
    } else {
        describe_end(comm, receive->from, receive->status, why, sizeof(why));
    }
    return smp_comm_raise(receive->status, what, why);
}

/* source() -> the sending rank; it is over */
static PyObject *
receipt_source(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(((receipt_object *)object)->receive.from);
}

static PyMethodDef receipt_methods[] = {
    {"wait", receipt_wait, METH_O,
     "wait(timeout_s)\n--\n\nWhether it is over by then; 0: no limit."},
    {"is_over", receipt_is_over, METH_NOARGS, "Whether it is over."},
    {"withdraw", receipt_withdraw, METH_NOARGS,
     "Whether it is over after all; else nothing comes any more."},
    {"describe", receipt_describe, METH_NOARGS,
     "The group, the tag and the rank that it is from, in words."},
    {"check", receipt_check, METH_NOARGS, "Raise what went wrong; it is over."},
    {"source", receipt_source, METH_NOARGS, "The rank that sent it; it is over."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot receipt_slots[] = {
    {Py_tp_dealloc, __extension__(void *) receipt_dealloc},
    {Py_tp_methods, receipt_methods},
    {Py_tp_doc, "A tensor on its way."},
    {0, NULL},
};

static PyType_Spec receipt_spec = {
    .name = "smp._core.Receipt",
    .basicsize = sizeof(receipt_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = receipt_slots,
};

static PyMethodDef functions[] = {
    {"send", (PyCFunction)(void (*)(void))py_send, METH_FASTCALL,
     "send(group, rank, tag, tensor)\n--\n\n"
     "Send a copy of the tensor; does not wait for the receiver."},
    {"receive", (PyCFunction)(void (*)(void))py_receive, METH_FASTCALL,
     "receive(group, rank, tag, tensor)\n--\n\n"
     "A Receipt of the next tensor from that rank, or from any: -1."},
    {NULL, NULL, 0, NULL},
};

int
smp_mail_add(PyObject *module)
{
    receipt_type = (PyTypeObject *)PyType_FromSpec(&receipt_spec);
    return receipt_type == NULL || PyModule_AddType(module, receipt_type) < 0 ||
                   PyModule_AddIntConstant(module, "ANY_SOURCE", SMP_ANY_SOURCE) < 0
               ? -1
               : PyModule_AddFunctions(module, functions);
}
