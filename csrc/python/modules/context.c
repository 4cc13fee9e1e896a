/* Contexts, their Enter nodes, and the open forwards of this rank. */
#include "python/modules/context.h"

#include <stdlib.h>

#include "python/modules/gradients.h"
#include "python/modules/reach.h"
#include "python/modules/session.h"

static PyTypeObject *context_type;
static PyObject     *name_context;
static PyObject     *name_first;
static PyObject     *name_materialize;

static void
context_dealloc(PyObject *object)
{
    smp_context  *self = (smp_context *)object;
    PyTypeObject *type = Py_TYPE(object);

    Py_XDECREF(self->path);
    Py_XDECREF(self->inputs);
    Py_XDECREF(self->edges);
    Py_XDECREF(self->gradients);
    Py_XDECREF(self->node);
    Py_XDECREF(self->enters);
    Py_XDECREF(self->held);
    Py_XDECREF(self->origins);
    free(self->entries);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Takes the reference, and its graph: Enter's node leads back to the context, unseen by
 * the garbage collector. */
void
smp_context_drop(smp_context *context)
{
    if (context != NULL) {
        Py_CLEAR(context->edges);
        Py_CLEAR(context->node);
        Py_CLEAR(context->enters);
        Py_CLEAR(context->held);
        Py_DECREF(context);
    }
}

/* --------------------------------------------------------------------- the node */

/* Enter.forward(ctx, context, leaf) -> the request's tensors */
static PyObject *
enter_forward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    smp_context *self;
    PyObject    *first;
    int          failed;

    (void)unused;
    if (nargs != 3 || PyObject_SetAttr(args[0], name_context, args[1]) < 0 ||
        PyObject_SetAttr(args[0], name_materialize, Py_False) < 0) {
        return NULL;
    }
    self = (smp_context *)args[1];
    first = PyLong_FromSize_t(self->ninputs);
    failed = first == NULL ? -1 : PyObject_SetAttr(args[0], name_first, first);
    Py_XDECREF(first);
    return failed < 0 ? NULL : PyList_AsTuple(self->inputs);
}

/* The gradients of one Enter, in the list of all. */
static int
keep_gradients(smp_context *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject  *number = PyObject_GetAttr(args[0], name_first);
    Py_ssize_t first = number == NULL ? -1 : PyLong_AsSsize_t(number);

    Py_XDECREF(number);
    if (first < 0) {
        return -1;
    }
    if (self->gradients == NULL) {
        self->gradients = PyList_New((Py_ssize_t)self->ninputs);
        for (size_t i = 0; self->gradients != NULL && i < self->ninputs; i++) {
            PyList_SET_ITEM(self->gradients, (Py_ssize_t)i, Py_NewRef(Py_None));
        }
    }
    for (Py_ssize_t i = 1; self->gradients != NULL && i < nargs; i++) {
        if (PyList_SetItem(self->gradients, first + i - 1, Py_NewRef(args[i])) < 0) {
            return -1;
        }
    }
    return self->gradients == NULL ? -1 : 0;
}

/* Enter.backward(ctx, *gradients) -> None, None */
static PyObject *
enter_backward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    smp_context *self = (smp_context *)PyObject_GetAttr(args[0], name_context);
    int          failed;

    (void)unused;
    if (self == NULL) {
        return NULL;
    }
    if (!self->running) {
        PyErr_Format(
            PyExc_RuntimeError,
            "smp: module '%U' on pp_rank %d was called twice from another rank, and "
            "the "
            "second call used a tensor with grad that the first one kept in the "
            "module; "
            "return it and pass it as an argument, or put the module and its caller on "
            "one rank with smp.set_partition",
            self->path, smp_the_session.rank);
        Py_DECREF(self);
        return NULL;
    }
    failed = keep_gradients(self, args, nargs);
    Py_DECREF(self);
    return failed < 0 ? NULL : PyTuple_Pack(2, Py_None, Py_None);
}

/* ---------------------------------------------------------------------- forward */

smp_context *
smp_context_new(const smp_envelope *envelope)
{
    smp_context *self = (smp_context *)context_type->tp_alloc(context_type, 0);

    if (self != NULL) {
        self->entry = envelope->entry;
        self->entry_now = envelope->entry;
        self->path = Py_NewRef(smp_the_session.entries[envelope->entry].path);
        self->microbatch = envelope->microbatch;
        self->order = envelope->about;
        self->seed = envelope->seed;
    }
    return self;
}

PyObject *
smp_context_enter_again(smp_context *context, PyObject *inputs)
{
    const size_t first = context->ninputs;
    PyObject    *outputs;
    PyObject    *node;
    PyObject    *number = NULL;
    int          failed = -1;

    context->inputs = Py_NewRef(inputs);
    outputs = PyObject_Vectorcall(
        smp_the_session.enter_apply,
        (PyObject *const[]){(PyObject *)context, smp_the_session.leaf}, 2, NULL);
    Py_CLEAR(context->inputs);
    if (outputs == NULL) {
        return NULL;
    }
    context->ninputs += (size_t)PyList_GET_SIZE(inputs);
    node = PyObject_GetAttr(PyTuple_GET_ITEM(outputs, 0), smp_names.grad_fn);
    if (context->enters == NULL) {
        context->enters = PyDict_New();
    }
    if (node != NULL && context->enters != NULL) {
        number = PyLong_FromSize_t(first);
        failed = number == NULL ? -1 : PyDict_SetItem(context->enters, node, number);
    }
    if (context->node == NULL) {
        context->node = Py_XNewRef(node);
    }
    Py_XDECREF(number);
    Py_XDECREF(node);
    if (failed < 0) {
        Py_CLEAR(outputs);
    }
    return outputs;
}

smp_context *
smp_context_enter(smp_unpack *unpack, const smp_envelope *envelope)
{
    smp_context *self = smp_context_new(envelope);
    PyObject    *inputs = self == NULL ? NULL : smp_unpack_in_graph(unpack);
    PyObject    *outputs = NULL;

    if (inputs != NULL && PyList_GET_SIZE(inputs) > 0 &&
        (outputs = smp_context_enter_again(self, inputs)) != NULL) {
        smp_unpack_exchange(unpack, outputs);
    }
    if (inputs == NULL || (outputs == NULL && PyList_GET_SIZE(inputs) > 0)) {
        smp_context_drop(self);
        self = NULL;
    }
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    return self;
}

int
smp_context_find_unreached(smp_context *context, PyObject *outputs)
{
    if (PyList_GET_SIZE(outputs) == 0) {
        return 0;
    }
    return smp_reach(&PyList_GET_ITEM(outputs, 0), (size_t)PyList_GET_SIZE(outputs),
                     context->enters, context->ninputs, &context->unreached);
}

/* The gradient edges of the outputs (new). */
static PyObject *
edges_of(PyObject *outputs)
{
    PyObject *edges = PyTuple_New(PyList_GET_SIZE(outputs));

    for (Py_ssize_t i = 0; edges != NULL && i < PyList_GET_SIZE(outputs); i++) {
        PyObject *edge = PyObject_CallOneArg(smp_torch.get_gradient_edge,
                                             PyList_GET_ITEM(outputs, i));

        if (edge == NULL) {
            Py_CLEAR(edges);
            break;
        }
        PyTuple_SET_ITEM(edges, i, edge);
    }
    return edges;
}

/* Opens, or closes, the request in the ledger for each of its entries. */
static int
tell_ledger(const smp_context *context, int (*tell)(int32_t, uint64_t, int32_t))
{
    if (!context->in_ledger) {
        return 0;
    }
    if (context->entries == NULL) {
        return tell(context->microbatch, context->order, context->entry);
    }
    for (size_t i = 0; i < context->nentries; i++) {
        if (tell(context->microbatch, context->order, context->entries[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

int
smp_context_close(const smp_context *context)
{
    return tell_ledger(context, smp_gradients_close);
}

int
smp_context_keep(smp_context *context, PyObject *outputs, uint64_t call)
{
    PyObject *key;
    int       failed = 0;

    if (PyList_GET_SIZE(outputs) > 0 || context->held != NULL) {
        context->edges = edges_of(outputs);
        context->in_ledger = PyList_GET_SIZE(outputs) > 0;
        key = PyLong_FromUnsignedLongLong(call);
        failed = context->edges == NULL || key == NULL ||
                         smp_context_find_unreached(context, outputs) < 0 ||
                         PyDict_SetItem(smp_the_session.contexts, key,
                                        (PyObject *)context) < 0 ||
                         tell_ledger(context, smp_gradients_open) < 0
                     ? -1
                     : 0;
        Py_XDECREF(key);
    }
    Py_CLEAR(context->node); /* the edges keep the graph, until their backward */
    Py_CLEAR(context->enters);
    return failed;
}

static int
raise_gone(uint64_t call)
{
    PyErr_Clear();
    PyErr_Format(PyExc_RuntimeError,
                 "smp: a request asked for call %llu, whose graph is gone",
                 (unsigned long long)call);
    return -1;
}

smp_context *
smp_context_find(uint64_t call)
{
    PyObject *key = PyLong_FromUnsignedLongLong(call);
    PyObject *context =
        key == NULL ? NULL : PyDict_GetItem(smp_the_session.contexts, key);

    Py_XDECREF(key);
    if (context == NULL) {
        (void)raise_gone(call);
    }
    return (smp_context *)context;
}

smp_context *
smp_context_take(uint64_t call)
{
    smp_context *context = (smp_context *)Py_XNewRef(smp_context_find(call));
    PyObject    *key = context == NULL ? NULL : PyLong_FromUnsignedLongLong(call);

    if (key == NULL || PyDict_DelItem(smp_the_session.contexts, key) < 0) {
        Py_CLEAR(context);
    }
    Py_XDECREF(key);
    return context;
}

bool
smp_context_release(uint64_t call)
{
    smp_context *context = smp_context_take(call);
    bool         closed;

    if (context == NULL) { /* its step failed meanwhile */
        PyErr_Clear();
        return true;
    }
    closed = smp_context_close(context) == 0;
    smp_context_drop(context);
    return closed;
}

/* Copies a kept tensor, out of its graph, to the same place of another context. */
static int
hold(const smp_context *from, const smp_context *to, unsigned call, unsigned number)
{
    const unsigned at = call - from->first;
    PyObject      *tensor;

    if (call < from->first || (Py_ssize_t)at >= PyList_GET_SIZE(from->held)) {
        return 0;
    }
    tensor =
        PyList_GetItem(PyList_GET_ITEM(from->held, (Py_ssize_t)at), (Py_ssize_t)number);
    tensor =
        tensor == NULL ? NULL : PyObject_CallMethodNoArgs(tensor, smp_names.detach);
    return tensor == NULL ? -1
                          : PyList_SetItem(PyList_GET_ITEM(to->held, (Py_ssize_t)at),
                                           (Py_ssize_t)number, tensor);
}

int
smp_context_hold(const smp_context *context, uint64_t call, PyObject *places)
{
    const Py_ssize_t n = context->held == NULL ? 0 : PyList_GET_SIZE(context->held);
    smp_context     *kept = (smp_context *)context_type->tp_alloc(context_type, 0);
    PyObject        *key = PyLong_FromUnsignedLongLong(call);
    int              failed = kept == NULL || key == NULL;

    if (!failed && !PyList_Check(places)) {
        failed = smp_malformed("a list of outputs to keep that is none");
    }
    if (!failed) {
        kept->entry = context->entry;
        kept->path = Py_NewRef(context->path);
        kept->microbatch = context->microbatch;
        kept->first = context->first;
        kept->held = PyList_New(n);
        failed = kept->held == NULL;
    }
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        const Py_ssize_t length = PyList_GET_SIZE(PyList_GET_ITEM(context->held, i));
        PyObject        *list = PyList_New(length);

        failed = list == NULL;
        for (Py_ssize_t j = 0; !failed && j < length; j++) {
            PyList_SET_ITEM(list, j, Py_NewRef(Py_None));
        }
        PyList_SET_ITEM(kept->held, i, list);
    }
    for (Py_ssize_t i = 0; !failed && n > 0 && i < PyList_GET_SIZE(places); i++) {
        unsigned at;
        unsigned number;

        failed = !PyArg_ParseTuple(PyList_GET_ITEM(places, i), "II", &at, &number) ||
                 hold(context, kept, at, number) < 0;
    }
    failed = failed || PyDict_SetItem(smp_the_session.contexts, key, (PyObject *)kept);
    Py_XDECREF(key);
    Py_XDECREF(kept);
    return failed ? -1 : 0;
}

int
smp_context_let_go(int32_t microbatch)
{
    PyObject *items = PyDict_Items(smp_the_session.contexts);
    int       failed = items == NULL ? -1 : 0;

    for (Py_ssize_t i = 0; failed == 0 && i < PyList_GET_SIZE(items); i++) {
        PyObject          *key = PyTuple_GET_ITEM(PyList_GET_ITEM(items, i), 0);
        const smp_context *context =
            (smp_context *)PyTuple_GET_ITEM(PyList_GET_ITEM(items, i), 1);

        /* One of smp_context_hold() alone has no edges. */
        if (context->edges == NULL && context->microbatch == microbatch) {
            failed = PyDict_DelItem(smp_the_session.contexts, key);
        }
    }
    Py_XDECREF(items);
    return failed;
}

void
smp_context_forget(void)
{
    PyObject  *contexts = PyDict_Values(smp_the_session.contexts);
    Py_ssize_t n = contexts == NULL ? 0 : PyList_GET_SIZE(contexts);

    PyErr_Clear();
    PyDict_Clear(smp_the_session.contexts);
    for (Py_ssize_t i = 0; i < n; i++) {
        smp_context_drop((smp_context *)Py_NewRef(PyList_GET_ITEM(contexts, i)));
    }
    Py_XDECREF(contexts);
}

static PyObject *
kept_outputs(PyObject *module, PyObject *unused)
{
    PyObject  *lists = PyList_New(0);
    PyObject  *context;
    Py_ssize_t at = 0;

    (void)module;
    (void)unused;
    while (lists != NULL && smp_the_session.contexts != NULL &&
           PyDict_Next(smp_the_session.contexts, &at, NULL, &context)) {
        PyObject *held = ((smp_context *)context)->held;

        if (held != NULL && PyList_Append(lists, held) < 0) {
            Py_CLEAR(lists);
        }
    }
    return lists;
}

/* ------------------------------------------------------------------ registration */

static PyMethodDef functions[] = {
    {"kept_outputs", kept_outputs, METH_NOARGS,
     "kept_outputs() -> a list of lists of outputs for each chain with a backward to "
     "come"},
    {"enter_forward", __extension__(PyCFunction)(void (*)(void)) enter_forward,
     METH_FASTCALL, "Enter.forward(ctx, context, leaf) -> tensors"},
    {"enter_backward", __extension__(PyCFunction)(void (*)(void)) enter_backward,
     METH_FASTCALL, "Enter.backward(ctx, *gradients)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot context_slots[] = {
    {Py_tp_dealloc, __extension__(void *) context_dealloc},
    {0, NULL},
};

static PyType_Spec context_spec = {
    .name = "smp._core.Context",
    .basicsize = sizeof(smp_context),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = context_slots,
};

int
smp_context_add(PyObject *module)
{
    name_context = PyUnicode_InternFromString("context");
    name_first = PyUnicode_InternFromString("first");
    name_materialize = PyUnicode_InternFromString("materialize_grads");
    context_type = (PyTypeObject *)PyType_FromSpec(&context_spec);
    if (name_context == NULL || name_first == NULL || name_materialize == NULL ||
        context_type == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
