/* Letterboxes that keep the tensor into which a message goes. */
#include "python/collective_mail.h"

#include <stdbool.h>

#include "comm/clock.h"
#include "python/collective_comm.h"
#include "python/collective_tensor.h"

typedef struct {
    PyObject         ob_base;
    smp_comm_object *comm;   /* owned, like the tensor */
    PyObject        *tensor; /* NULL: it is not put up */
    smp_letterbox    box;
    bool             over;
} receipt_object;

static PyTypeObject *receipt_type;

/* 0, or -1 with an exception: the comm is closed, or the tensor cannot be sent. */
static int
read_address(smp_comm_object *comm, PyObject *tensor, smp_address *out, void **data)
{
    smp_row row;

    if (smp_see_tensor(tensor, &row) < 0 || smp_comm_check_open(comm) < 0) {
        return -1;
    }
    out->dtype = row.dtype;
    out->count = row.count;
    *data = row.data;
    return 0;
}

/* send(comm, rank, group, tag, tensor) */
static PyObject *
py_send(PyObject *module, PyObject *args)
{
    smp_comm_object   *comm;
    PyObject          *tensor;
    unsigned long long group;
    long long          tag;
    int                rank;
    smp_address        address = {0};
    void              *data;
    smp_mailbox       *mailbox;
    smp_status         status;
    char               what[64];

    (void)module;
    if (!PyArg_ParseTuple(args, "O!iKLO", smp_comm_type, &comm, &rank, &group, &tag,
                          &tensor) ||
        read_address(comm, tensor, &address, &data) < 0) {
        return NULL;
    }
    address.group = group;
    address.tag = tag;
    mailbox = comm->mailbox;
    comm->users++;
    Py_BEGIN_ALLOW_THREADS;
    status = smp_mailbox_send(mailbox, rank, &address, data);
    Py_END_ALLOW_THREADS;
    comm->users--;
    if (status != SMP_OK) {
        PyOS_snprintf(what, sizeof(what), "send from rank %d to rank %d", comm->rank,
                      rank);
        return smp_comm_raise(comm, status, what, NULL);
    }
    Py_RETURN_NONE;
}

/* Receipt(comm, rank or -1, group, tag, tensor) */
static PyObject *
receipt_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    smp_comm_object   *comm;
    PyObject          *tensor;
    unsigned long long group;
    long long          tag;
    int                source;
    smp_letterbox      box = {0};
    receipt_object    *self;

    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!iKLO", smp_comm_type, &comm, &source, &group, &tag,
                          &tensor) ||
        read_address(comm, tensor, &box.want, &box.out) < 0) {
        return NULL;
    }
    box.want.group = group;
    box.want.tag = tag;
    box.source = source;
    self = (receipt_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->comm = (smp_comm_object *)Py_NewRef(comm);
    self->tensor = Py_NewRef(tensor);
    self->box = box;
    smp_letterbox_put_up(comm->mailbox, &self->box);
    return (PyObject *)self;
}

static void
receipt_dealloc(PyObject *object)
{
    receipt_object *self = (receipt_object *)object;
    PyTypeObject   *type = Py_TYPE(object);

    if (self->tensor != NULL && self->comm->mailbox != NULL) {
        smp_letterbox_take_down(self->comm->mailbox, &self->box);
    }
    Py_XDECREF(self->tensor);
    Py_XDECREF(self->comm);
    type->tp_free(object);
    Py_DECREF(type);
}

/* 1: it is over; 0: until_ns has come; -1 with an exception. */
static int
wait_until(receipt_object *self, int64_t until_ns)
{
    while (!self->over) {
        int64_t      look_ns = smp_clock_ns() + SMP_SIGNALS_NS;
        smp_mailbox *mailbox = self->comm->mailbox;

        if (smp_comm_check_open(self->comm) < 0) {
            return -1;
        }
        self->comm->users++;
        Py_BEGIN_ALLOW_THREADS;
        self->over = smp_letterbox_wait(mailbox, &self->box,
                                        look_ns < until_ns ? look_ns : until_ns);
        Py_END_ALLOW_THREADS;
        self->comm->users--;
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

/* check(): raises what went wrong; it is over */
static PyObject *
receipt_check(PyObject *object, PyObject *unused)
{
    receipt_object      *self = (receipt_object *)object;
    const smp_letterbox *box = &self->box;
    char                 what[64];
    char                 why[160];

    (void)unused;
    if (box->status == SMP_OK) {
        Py_RETURN_NONE;
    }
    PyOS_snprintf(what, sizeof(what), "receive (tag %lld) on rank %d",
                  (long long)box->want.tag, self->comm->rank);
    if (box->from == SMP_ANY_SOURCE) {
        return smp_comm_raise(self->comm, box->status, what,
                              box->status == SMP_ERR_CLOSED ? "all ranks have left"
                                                            : NULL);
    }
    PyOS_snprintf(why, sizeof(why), "rank %d %s", box->from,
                  box->status == SMP_ERR_CLOSED      ? "has left"
                  : box->status == SMP_ERR_PEER_LOST ? "is lost"
                                                     : "sent what cannot be read");
    if (box->status == SMP_ERR_MISMATCH) {
        PyOS_snprintf(why, sizeof(why), "rank %d sent %zu %s, rank %d wants %zu %s",
                      box->from, box->got.count, smp_dtype_name(box->got.dtype),
                      self->comm->rank, box->want.count,
                      smp_dtype_name(box->want.dtype));
    }
    return smp_comm_raise(self->comm, box->status, what, why);
}

/* source() -> the rank that sent it; it is over */
static PyObject *
receipt_source(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(((receipt_object *)object)->box.from);
}

static PyMethodDef receipt_methods[] = {
    {"wait", receipt_wait, METH_O,
     "wait(timeout_s)\n--\n\nWhether it is over by then; 0: no limit."},
    {"is_over", receipt_is_over, METH_NOARGS, "Whether it is over."},
    {"check", receipt_check, METH_NOARGS, "Raise what went wrong; it is over."},
    {"source", receipt_source, METH_NOARGS, "The rank that sent it; it is over."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot receipt_slots[] = {
    {Py_tp_new, __extension__(void *) receipt_new},
    {Py_tp_dealloc, __extension__(void *) receipt_dealloc},
    {Py_tp_methods, receipt_methods},
    {Py_tp_doc, "Receipt(comm, rank, group, tag, tensor)\n--\n\n"
                "A tensor on its way from a rank; -1: from any."},
    {0, NULL},
};

static PyType_Spec receipt_spec = {
    .name = "smp._core.Receipt",
    .basicsize = sizeof(receipt_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = receipt_slots,
};

static PyMethodDef functions[] = {
    {"send", py_send, METH_VARARGS,
     "send(comm, rank, group, tag, tensor)\n--\n\n"
     "Send a copy of the tensor; does not wait for the receiver."},
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
