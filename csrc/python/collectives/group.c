/* smp._core.Group: members meet, do collectives and part. */
#include "python/collectives/group.h"

#include <stdlib.h>
#include <string.h>

#include "comm/collective/checks/agreement.h"
#include "python/collectives/work_item.h"
#include "python/process/signals.h"
#include "python/values/error.h"

/* Meets the other members; the GIL is held. */
static smp_status
meet(smp_group_object *self, const int *ranks, int64_t timeout_ns, char *why)
{
    smp_signal_asker asker;
    smp_deadline     deadline;
    smp_group_config config = {.ranks = ranks,
                               .size = self->size,
                               .id = self->id,
                               .name = self->name,
                               .timeout_ns = timeout_ns,
                               .why = why};
    smp_comm_object *object = self->comm;
    smp_comm        *comm = object->comm;
    smp_carrier     *carrier = object->carrier;
    smp_status       status;
    int              failed;

    object->users++;
    deadline = smp_signals_begin(&asker, SMP_NEVER); /* the group's time counts */
    config.gives_up = deadline.gives_up;
    config.gives_up_arg = deadline.arg;
    status = smp_group_create(comm, &config, &self->group, &failed);
    if (status == SMP_OK) {
        status = smp_queue_create(carrier, self->group, &self->queue);
    }
    smp_signals_end(&asker);
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

/* The group could not be made: `why`, if not empty, and the remedy. */
static void
raise_failure(const smp_group_object *self, smp_status status, const char *why)
{
    char what[96];

    PyOS_snprintf(what, sizeof(what), "group '%s'", self->name);
    if (why[0] == '\0' || status == SMP_ERR_NO_MEMORY || status == SMP_ERR_INVALID) {
        (void)smp_comm_raise(status, what, NULL);
    } else {
        (void)smp_error_raise(smp_error_of_group, status, NULL, "smp: %s%s", why,
                              status == SMP_ERR_TIMED_OUT
                                  ? "; a longer timeout can be given to the group"
                              : status == SMP_ERR_LIMIT
                                  ? ": give those back that are not used any more, by "
                                    "torch.distributed.destroy_process_group(group)"
                                  : "");
    }
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
    smp_group_object  *self;
    int               *ranks;
    smp_status         status = SMP_ERR_NO_MEMORY;
    char               why[SMP_GROUP_TEXT] = "";

    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!Ksd", smp_comm_type, &comm, &PyList_Type, &list,
                          &id, &name, &timeout_s)) {
        return NULL;
    }
    if (smp_comm_check_open(comm) < 0) {
        return NULL;
    }
    if (PyList_GET_SIZE(list) > SMP_GROUP_MEMBERS) {
        return PyErr_Format(PyExc_ValueError,
                            "smp: group '%s' has %zd ranks; %d are the most", name,
                            PyList_GET_SIZE(list), SMP_GROUP_MEMBERS);
    }
    self = (smp_group_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->comm = (smp_comm_object *)Py_NewRef(comm);
    strncpy(self->name, name, sizeof(self->name) - 1);
    self->id = id;
    self->size = (int)PyList_GET_SIZE(list);
    ranks = calloc((size_t)self->size + 1, sizeof(*ranks));
    for (int m = 0; ranks != NULL && m < self->size; m++) {
        ranks[m] = (int)PyLong_AsLong(PyList_GET_ITEM(list, m));
    }
    if (ranks != NULL && PyErr_Occurred() == NULL) {
        status =
            meet(self, ranks, timeout_s > 1e9 ? -1 : (int64_t)(timeout_s * 1e9), why);
    }
    free(ranks);
    if (PyErr_Occurred() != NULL || smp_comm_check_open(comm) < 0) {
        goto err;
    }
    if (status != SMP_OK) {
        raise_failure(self, status, why);
        goto err;
    }
    self->member = smp_group_member(self->group);
    comm->groups++;
    return (PyObject *)self;

err:
    Py_DECREF(self);
    return NULL;
}

/* Ends the work items under way; the GIL is held. */
static void
close_group(smp_group_object *self)
{
    smp_group *group = self->group;
    smp_queue *queue = self->queue;
    bool       rests;

    if (group == NULL) {
        return;
    }
    self->closing = true; /* devices may still use work items' tensors */
    self->group = NULL;
    self->queue = NULL;
    self->comm->groups--;
    self->comm->users++;
    Py_BEGIN_ALLOW_THREADS;
    smp_queue_destroy(queue);
    rests = smp_group_rest(group);
    smp_group_destroy(group);
    Py_END_ALLOW_THREADS;
    self->comm->users--;
    self->stuck = !rests;
    self->closing = false;
    Py_CLEAR(self->meeting);
    smp_held_clear(&self->held, rests);
}

static void
group_dealloc(PyObject *object)
{
    smp_group_object *self = (smp_group_object *)object;
    PyTypeObject     *type = Py_TYPE(object);

    close_group(self);
    Py_XDECREF(self->comm);
    type->tp_free(object);
    Py_DECREF(type);
}

/* work_item(operation, ins, outs, reduction, root, factor, counts, out_counts,
 * timeout_s, sparse=0, assumed=0, in_rows=0, out_rows=0, key=0) -> a work item for a
 * call with each of the tensors; those with a default are as in smp_call */
static PyObject *
group_work_item(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    return (PyObject *)smp_work_item_make((smp_group_object *)object, args, nargs);
}

/* run(as work_item): issues it and waits until it is over */
static PyObject *
group_run(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    smp_work_item_object *item =
        smp_work_item_make((smp_group_object *)object, args, nargs);

    if (item == NULL || smp_work_item_run(item) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* gather(ins, outs, timeout_s, waits, key=0) -> a work item, or, after its end, None */
static PyObject *
group_gather(PyObject *object, PyObject *args)
{
    PyObject             *ins;
    PyObject             *outs;
    double                timeout_s;
    int                   waits;
    unsigned              key = 0;
    smp_work_item_object *item;

    if (!PyArg_ParseTuple(args, "OOdp|I", &ins, &outs, &timeout_s, &waits, &key)) {
        return NULL;
    }
    item = smp_work_item_make_gather((smp_group_object *)object, ins, outs, timeout_s,
                                     NULL);
    for (Py_ssize_t i = 0; item != NULL && i < item->gathers.n; i++) {
        item->gathers.calls[i].hints.key = key;
    }
    if (item == NULL || !waits) {
        return (PyObject *)item;
    }
    if (smp_work_item_run(item) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Waits for the group's meeting.  0, or -1 with an exception. */
static int
end_of_meeting(smp_group_object *self, smp_work_item_object *item)
{
    if (smp_work_item_wait_until(item, SMP_NEVER) < 0) {
        if (!smp_work_item_is_over(&item->item) && !self->left) {
            self->left = true;
            smp_work_item_abandon(item);
        }
        return -1;
    }
    if (self->meeting == (PyObject *)item) {
        Py_CLEAR(self->meeting);
    }
    return smp_work_item_raise(item);
}

/* meet_devices(ins, outs, timeout_s, bytes) -> why not, or "" */
static PyObject *
group_meet_devices(PyObject *object, PyObject *args)
{
    smp_group_object *self = (smp_group_object *)object;
    PyObject         *ins;
    PyObject         *outs;
    double            timeout_s;
    Py_ssize_t        bytes;
    const char       *why = "";

    if (!PyArg_ParseTuple(args, "OOdn", &ins, &outs, &timeout_s, &bytes)) {
        return NULL;
    }
    if (self->group != NULL && smp_group_exchange(self->group, &why) == NULL &&
        why[0] == '\0' && self->meeting == NULL) {
        smp_work_item_object *item =
            smp_work_item_make_gather(self, ins, outs, timeout_s, &self->offer);

        if (item == NULL) {
            return NULL;
        }
        self->offer.bytes = (size_t)bytes;
        self->meeting = (PyObject *)item;
        self->left = false;
        smp_work_item_begin(item);
    }
    /* A signal may interrupt this wait; another call goes on with the same meeting.
     */
    if (self->meeting != NULL) {
        smp_work_item_object *item = (smp_work_item_object *)Py_NewRef(self->meeting);
        int                   over = end_of_meeting(self, item);

        Py_DECREF(item);
        if (over < 0) {
            return NULL;
        }
    }
    if (smp_group_check_open(self) < 0) {
        return NULL;
    }
    (void)smp_group_exchange(self->group, &why);
    return PyUnicode_DecodeUTF8(why, (Py_ssize_t)strlen(why), "replace");
}

/* sequence() -> the number of begun operations */
static PyObject *
group_sequence(PyObject *object, PyObject *unused)
{
    smp_group_object *self = (smp_group_object *)object;

    (void)unused;
    return PyLong_FromUnsignedLongLong(
        self->group == NULL ? 0 : smp_group_sequence(self->group));
}

/* issued() -> the number of issued work items, begun or not; once closed: 0 */
static PyObject *
group_issued(PyObject *object, PyObject *unused)
{
    smp_group_object *self = (smp_group_object *)object;

    (void)unused;
    return PyLong_FromUnsignedLongLong(
        self->queue == NULL ? 0 : smp_queue_issued(self->queue));
}

/* rename(name): its name in errors, before its first operation */
static PyObject *
group_rename(PyObject *object, PyObject *name)
{
    smp_group_object *self = (smp_group_object *)object;
    const char       *text = PyUnicode_AsUTF8(name);

    if (text == NULL) {
        return NULL;
    }
    if (self->group != NULL && smp_queue_issued(self->queue) == 0) {
        memset(self->name, 0, sizeof(self->name));
        strncpy(self->name, text, sizeof(self->name) - 1);
        smp_group_rename(self->group, text);
    }
    Py_RETURN_NONE;
}

/* is_on_one_host() -> whether; once closed: no */
static PyObject *
group_is_on_one_host(PyObject *object, PyObject *unused)
{
    const smp_group_object *self = (smp_group_object *)object;

    (void)unused;
    return PyBool_FromLong(self->group != NULL &&
                           smp_group_is_on_one_host(self->group));
}

/* use() -> (operations, bytes, messages to other hosts, bytes to other hosts, whether
 * members read each other's memory, operations between devices, their bytes, why
 * there are none); zeros once closed */
static PyObject *
group_use(PyObject *object, PyObject *unused)
{
    smp_group_object *self = (smp_group_object *)object;
    smp_group_use     use = {0};
    bool              reads = false;
    const char       *why = "";

    (void)unused;
    if (self->group != NULL) {
        (void)smp_group_exchange(self->group, &why);
        smp_group_count(self->group, &use);
        reads = smp_group_reads_memory(self->group);
    }
    return Py_BuildValue(
        "KKKKNKKKs", (unsigned long long)use.operations, (unsigned long long)use.bytes,
        (unsigned long long)use.parcels,
        (unsigned long long)use.tensor_bytes + (unsigned long long)use.other_bytes,
        PyBool_FromLong(reads), (unsigned long long)use.device_operations,
        (unsigned long long)use.device_bytes, (unsigned long long)use.device_reads,
        why);
}

/* close(): work items under way are over, with an error */
static PyObject *
group_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    close_group((smp_group_object *)object);
    Py_RETURN_NONE;
}

static PyMethodDef group_methods[] = {
    {"work_item", (PyCFunction)(void (*)(void))group_work_item, METH_FASTCALL,
     "work_item(operation, ins, outs, reduction, root, factor, counts, out_counts, "
     "timeout_s, sparse=0, assumed=0, in_rows=0, out_rows=0, key=0)\n--\n\n"
     "A work item of one call for each of the tensors, to be issued."},
    {"run", (PyCFunction)(void (*)(void))group_run, METH_FASTCALL,
     "run(operation, ins, outs, reduction, root, factor, counts, out_counts, "
     "timeout_s, sparse=0, assumed=0, in_rows=0, out_rows=0, key=0)\n--\n\n"
     "Make such a work item and wait until it is over."},
    {"gather", group_gather, METH_VARARGS,
     "gather(ins, outs, timeout_s, waits, key=0)\n--\n\n"
     "A work item of one all-gather between devices for each of the tensors, to be "
     "issued; "
     "with `waits`, do it."},
    {"meet_devices", group_meet_devices, METH_VARARGS,
     "meet_devices(ins, outs, timeout_s, bytes)\n--\n\n"
     "Before the first gather(), of these tensors: prepare all members' devices.  Why "
     "not, or ''."},
    {"rename", group_rename, METH_O,
     "rename(name)\n--\n\n"
     "What errors call it from now on; without effect after its first operation."},
    {"is_on_one_host", group_is_on_one_host, METH_NOARGS,
     "Whether all members share memory."},
    {"sequence", group_sequence, METH_NOARGS, "How many operations have begun."},
    {"issued", group_issued, METH_NOARGS,
     "How many work items were issued, whether they have begun or wait behind others."},
    {"use", group_use, METH_NOARGS,
     "-> operations, their bytes, messages and bytes to other hosts, whether members "
     "read each other's memory, operations between devices, their bytes, why there are "
     "none."},
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
    .basicsize = sizeof(smp_group_object),
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
    int failed;

    smp_group_type = (PyTypeObject *)PyType_FromSpec(&group_spec);
    failed = smp_group_type == NULL || PyModule_AddType(module, smp_group_type) < 0 ||
             smp_work_item_add(module) < 0 ||
             add_numbers(module, "operations", operation_name, SMP_OPERATIONS) < 0 ||
             add_numbers(module, "reductions", reduction_name, SMP_REDUCTIONS) < 0 ||
             PyModule_AddStringConstant(module, "WITH_KEY", SMP_WITH_KEY) < 0;
    return failed ? -1 : 0;
}
