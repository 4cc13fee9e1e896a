/* The owner's side of a remote call: running a module, and its backward, for others.
 *
 *     x... = Enter(leaf)     the request's tensors, as non-leaf, non-view tensors
 *     y    = module(x...)
 *
 * A Context keeps y and Enter's gradients from the forward request to the backward
 * request (or to the release).
 */
#include "python/modules/serve.h"

#include "common/mix.h"
#include "python/modules/failure.h"
#include "python/modules/gradients.h"
#include "python/modules/hooks.h"
#include "python/modules/reach.h"
#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_tensor.h"
#include "python/values/pack_value.h"
#include "python/values/snapshot.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

typedef struct {
    PyObject  ob_base;
    int32_t   entry;
    PyObject *path; /* owned; the graph may outlive its entry */
    int32_t   microbatch;
    uint64_t  order;
    PyObject *inputs;    /* while Enter is built: list of the request's tensors */
    PyObject *outputs;   /* tuple: the outputs with requires_grad */
    PyObject *gradients; /* tuple: gradients at Enter; NULL: none */
    size_t    ninputs;   /* tensors of the request with requires_grad */
    uint64_t  unreached; /* of them: reach.h */
    PyObject *node;      /* Enter's, while the forward runs */
    uint64_t  count;     /* requests of the microbatch when the forward ended */
    uint64_t  seed;      /* the request's */
    bool      running;   /* inside its own backward */
} context_object;

static PyTypeObject *context_type;
static PyObject     *name_context;
static PyObject     *name_materialize;

static void
context_dealloc(PyObject *object)
{
    context_object *self = (context_object *)object;
    PyTypeObject   *type = Py_TYPE(object);

    Py_XDECREF(self->path);
    Py_XDECREF(self->inputs);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->gradients);
    Py_XDECREF(self->node);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Takes the reference, and its graph: Enter's node leads back to the context, unseen by
 * the garbage collector. */
static void
drop_context(context_object *context)
{
    if (context != NULL) {
        Py_CLEAR(context->outputs);
        Py_CLEAR(context->node);
        Py_DECREF(context);
    }
}

/* --------------------------------------------------------------------- the node */

/* Enter.forward(ctx, context, leaf) -> the request's tensors */
static PyObject *
enter_forward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    (void)unused;
    if (nargs != 3 || PyObject_SetAttr(args[0], name_context, args[1]) < 0 ||
        PyObject_SetAttr(args[0], name_materialize, Py_False) < 0) {
        return NULL;
    }
    return PyList_AsTuple(((context_object *)args[1])->inputs);
}

/* Enter.backward(ctx, *gradients) -> None, None */
static PyObject *
enter_backward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    context_object *self = (context_object *)PyObject_GetAttr(args[0], name_context);
    PyObject       *gradients;

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
    gradients = PyTuple_New(nargs - 1);
    for (Py_ssize_t i = 1; gradients != NULL && i < nargs; i++) {
        PyTuple_SET_ITEM(gradients, i - 1, Py_NewRef(args[i]));
    }
    Py_XSETREF(self->gradients, gradients);
    Py_DECREF(self);
    return gradients == NULL ? NULL : PyTuple_Pack(2, Py_None, Py_None);
}

/* ---------------------------------------------------------------------- forward */

/* Replaces the tensors with requires_grad by outputs of an Enter node. */
static context_object *
enter_graph(smp_unpack *unpack, const smp_envelope *envelope)
{
    context_object *self = (context_object *)context_type->tp_alloc(context_type, 0);
    PyObject       *outputs;

    if (self == NULL) {
        return NULL;
    }
    self->entry = envelope->entry;
    self->path = Py_NewRef(smp_the_session.entries[envelope->entry].path);
    self->microbatch = envelope->microbatch;
    self->order = envelope->about;
    self->seed = envelope->seed;
    self->inputs = smp_unpack_in_graph(unpack);
    if (self->inputs == NULL) {
        goto err;
    }
    self->ninputs = (size_t)PyList_GET_SIZE(self->inputs);
    if (self->ninputs == 0) {
        Py_CLEAR(self->inputs);
        return self;
    }
    outputs = PyObject_Vectorcall(
        smp_the_session.enter_apply,
        (PyObject *const[]){(PyObject *)self, smp_the_session.leaf}, 2, NULL);
    Py_CLEAR(self->inputs);
    if (outputs == NULL) {
        goto err;
    }
    smp_unpack_exchange(unpack, outputs);
    self->node = PyObject_GetAttr(PyTuple_GET_ITEM(outputs, 0), smp_names.grad_fn);
    Py_DECREF(outputs);
    if (self->node == NULL) {
        goto err;
    }
    return self;

err:
    drop_context(self);
    return NULL;
}

/* Calls the entry, with the caller's thread state where it differs from a worker's. */
static PyObject *
run_entry(const smp_entry *entry, uint16_t flags, PyObject *state, PyObject *args,
          PyObject *kwargs)
{
    PyObject *value;

    if (!(flags & SMP_FLAG_GRAD) && smp_torch_set_grad(false) < 0) {
        return NULL;
    }
    if ((flags & (SMP_FLAG_BARE | SMP_FLAG_INPUTS)) || smp_has_hooks(entry->module)) {
        PyObject *hooked =
            PyTuple_Pack(5, entry->module, args, kwargs == NULL ? Py_None : kwargs,
                         flags & SMP_FLAG_BARE ? Py_True : Py_False,
                         flags & SMP_FLAG_INPUTS ? Py_True : Py_False);

        value = hooked == NULL ? NULL
                : state == NULL
                    ? PyObject_Call(smp_the_session.serve_hooked, hooked, NULL)
                    : PyObject_CallFunctionObjArgs(smp_the_session.with_state, state,
                                                   smp_the_session.serve_hooked, hooked,
                                                   Py_None, NULL);
        Py_XDECREF(hooked);
    } else if (state != NULL) {
        value = PyObject_CallFunctionObjArgs(smp_the_session.with_state, state,
                                             entry->callable, args,
                                             kwargs == NULL ? Py_None : kwargs, NULL);
    } else {
        value = PyObject_Call(entry->callable, args, kwargs);
    }
    if (!(flags & SMP_FLAG_GRAD)) {
        PyObject *type;
        PyObject *error;
        PyObject *traceback;

        PyErr_Fetch(&type, &error, &traceback); /* the module's exception comes first */
        if (smp_torch_set_grad(true) < 0) {
            Py_CLEAR(value);
        }
        if (type != NULL) {
            PyErr_Restore(type, error, traceback);
        }
    }
    return value;
}

/* Whether the tensor was changed in place; *in_graph: autograd must know (a change
 * under no_grad leaves its node as before).  -1 with an exception. */
static int
is_changed(PyObject *tensor, PyObject *enter_node, bool *in_graph)
{
    int       changed = smp_attr_true(tensor, smp_names._version);
    PyObject *node;

    *in_graph = false;
    if (changed <= 0) {
        return changed;
    }
    node = PyObject_GetAttr(tensor, smp_names.grad_fn);
    if (node == NULL) {
        return -1;
    }
    *in_graph = node != Py_None && node != enter_node;
    Py_DECREF(node);
    return 1;
}

/* Appends the request's tensors changed in place, with their new data; changes for
 * autograd come first. */
static int
pack_dirty(smp_pack *pack, const smp_unpack *unpack, const context_object *context)
{
    PyObject *enter_node = context == NULL ? NULL : context->node;
    uint32_t  count = 0;
    bool      in_graph;

    for (size_t i = 0; i < unpack->ntensors; i++) {
        int changed = is_changed(unpack->tensors[i], enter_node, &in_graph);

        if (changed < 0) {
            return -1;
        }
        count += (uint32_t)changed;
    }
    if (smp_pack_u32(pack, count) < 0) {
        return -1;
    }
    for (int graph = 1; count > 0 && graph >= 0; graph--) {
        for (size_t i = 0; i < unpack->ntensors; i++) {
            bool keep = pack->graph;
            int  failed;

            if (is_changed(unpack->tensors[i], enter_node, &in_graph) != 1 ||
                in_graph != (graph == 1)) {
                continue;
            }
            pack->graph = keep && in_graph;
            failed = smp_pack_u32(pack, (uint32_t)i) < 0 ||
                     smp_pack_new_tensor(pack, unpack->tensors[i]) < 0;
            pack->graph = keep;
            if (failed) {
                return -1;
            }
        }
    }
    return 0;
}

/* Appends the new contents of the request's objects changed in place. */
static int
pack_changes(smp_pack *pack, const smp_unpack *unpack, const smp_entry *entry)
{
    uint32_t count = 0;

    for (size_t i = 0; i < unpack->nobjects; i++) {
        int changed = smp_snapshot_differs(unpack->snapshots[i], unpack->objects[i]);

        if (changed < 0) {
            return -1;
        }
        if (changed == 1 && smp_snapshot_is_pickle(unpack->snapshots[i])) {
            PyErr_Format(
                PyExc_TypeError,
                "smp: module '%s' on pp_rank %d changed an argument of type %s in "
                "place; "
                "the change (a cache in it is one) cannot go back to its caller on "
                "another "
                "rank: return the object, or use a list, dict, set or an object "
                "without "
                "__slots__",
                smp_entry_path(entry), entry->owner,
                Py_TYPE(unpack->objects[i])->tp_name);
            return -1;
        }
        count += (uint32_t)changed;
    }
    if (smp_pack_u32(pack, count) < 0) {
        return -1;
    }
    for (size_t i = 0; count > 0 && i < unpack->nobjects; i++) {
        if (smp_snapshot_differs(unpack->snapshots[i], unpack->objects[i]) == 1 &&
            (smp_pack_u32(pack, (uint32_t)i) < 0 ||
             smp_pack_contents(pack, unpack->objects[i]) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* Whether code has called register_hook on the tensor; -1 with an exception. */
static int
is_hooked(PyObject *tensor)
{
    PyObject *hooks = PyObject_GetAttr(tensor, smp_names._backward_hooks);

    if (hooks == NULL) {
        return -1;
    }
    Py_DECREF(hooks);
    return hooks != Py_None;
}

/* Warns once of a module's hook on a tensor of its caller: an argument, or an
 * output. */
static int
warn_of_hooks(const smp_unpack *unpack, const smp_pack *pack, const smp_entry *entry)
{
    int       got = 0;
    int       returned = 0;
    PyObject *done;

    for (size_t i = 0; i < unpack->ntensors && got == 0; i++) {
        got = unpack->requires_grad[i] ? is_hooked(unpack->tensors[i]) : 0;
    }
    for (size_t i = 0; i < pack->ntensors && got == 0 && returned == 0; i++) {
        returned = pack->in_graph[i] ? is_hooked(pack->tensors[i]) : 0;
    }
    if (got == 0 && returned == 0) {
        return 0;
    }
    if (got < 0 || returned < 0) {
        return -1;
    }
    done = PyObject_CallFunctionObjArgs(smp_the_session.warn_of_hook, entry->path,
                                        returned ? Py_True : Py_False, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Finds the arguments unreached by the outputs. */
static int
find_unreached(context_object *context)
{
    return smp_reach(&PyTuple_GET_ITEM(context->outputs, 0),
                     (size_t)PyTuple_GET_SIZE(context->outputs), context->node,
                     context->ninputs, &context->unreached);
}

/* Keeps the outputs with requires_grad until the backward request. */
static int
keep_context(context_object *context, const smp_pack *pack, uint64_t call)
{
    PyObject *outputs = PyList_New(0);
    PyObject *key;
    int       failed = 0;

    if (outputs == NULL) {
        return -1;
    }
    for (size_t i = 0; i < pack->ntensors && failed == 0; i++) {
        if (pack->in_graph[i] && PyList_Append(outputs, pack->tensors[i]) < 0) {
            failed = -1;
        }
    }
    if (failed == 0 && PyList_GET_SIZE(outputs) > 0) {
        context->outputs = PyList_AsTuple(outputs);
        key = PyLong_FromUnsignedLongLong(call);
        failed = context->outputs == NULL || key == NULL ||
                         find_unreached(context) < 0 ||
                         PyDict_SetItem(smp_the_session.contexts, key,
                                        (PyObject *)context) < 0 ||
                         smp_gradients_open(context->microbatch, context->order,
                                            context->entry) < 0
                     ? -1
                     : 0;
        Py_XDECREF(key);
    }
    Py_CLEAR(context->node); /* the outputs keep the graph, until their backward */
    Py_DECREF(outputs);
    return failed;
}

/* Runs the module and sends the response; false with an exception. */
static bool
serve_forward(smp_message *request, smp_task *task)
{
    smp_session    *session = &smp_the_session;
    smp_envelope    envelope = *smp_message_envelope(request);
    int             source = request->source;
    smp_entry      *entry;
    context_object *context = NULL;
    PyObject       *args = NULL;
    PyObject       *kwargs = NULL;
    PyObject       *state = NULL;
    PyObject       *value = NULL;
    bool            sent = false;
    smp_unpack      unpack = {0};
    smp_pack        pack;

    if (envelope.entry < 0 || (size_t)envelope.entry >= session->nentries) {
        (void)smp_malformed("entry %d of %zu", (int)envelope.entry, session->nentries);
        smp_message_free(request);
        return false;
    }
    entry = &session->entries[envelope.entry];
    smp_pack_init(&pack, session->comm, source, &unpack);
    pack.graph = (envelope.flags & SMP_FLAG_GRAPH) != 0;
    if (smp_unpack_init(&unpack, smp_the_session.comm, request, NULL, true, false) <
            0 ||
        smp_stream_seed(task, smp_mix(envelope.seed, 1)) < 0) {
        goto done;
    }
    if (pack.graph ? (context = enter_graph(&unpack, &envelope)) == NULL
                   : smp_gradients_suspect(envelope.microbatch, envelope.entry) < 0) {
        goto done;
    }
    args = smp_unpack_value(&unpack);
    kwargs = args == NULL ? NULL : smp_unpack_value(&unpack);
    if (kwargs == NULL || !PyTuple_Check(args)) {
        goto done;
    }
    if (kwargs == Py_None) {
        Py_CLEAR(kwargs);
    }
    if (envelope.flags & SMP_FLAG_STATE) {
        state = smp_unpack_value(&unpack);
        if (state == NULL) {
            goto done;
        }
    }
    value = run_entry(entry, envelope.flags, state, args, kwargs);
    if (value == NULL) {
        sent = smp_session_answer_raised(task, source, envelope);
        goto done;
    }
    if (pack_dirty(&pack, &unpack, context) < 0 || smp_pack_value(&pack, value) < 0 ||
        warn_of_hooks(&unpack, &pack, entry) < 0 ||
        pack_changes(&pack, &unpack, entry) < 0 ||
        smp_session_warn_if_laden(pack.laden, entry) < 0) {
        goto done;
    }
    if (context != NULL) {
        context->count = task->count;
        if (keep_context(context, &pack, envelope.call) < 0) {
            goto done;
        }
    }
    envelope.kind = SMP_MSG_RESPONSE;
    envelope.about = task->count;
    envelope.seed = context == NULL ? 0 : context->unreached;
    sent = smp_pack_send(&pack, &envelope) == 0;
done:
    if (sent && value != NULL) {
        Py_XDECREF(context);
    } else {
        drop_context(context);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(state);
    Py_XDECREF(value);
    smp_pack_fini(&pack);
    smp_unpack_fini(&unpack);
    return sent;
}

/* --------------------------------------------------------------------- backward */

/* Removes and returns the context of a forward; NULL with an exception. */
static context_object *
take_context(uint64_t call)
{
    PyObject       *key = PyLong_FromUnsignedLongLong(call);
    context_object *context;

    if (key == NULL) {
        return NULL;
    }
    context =
        (context_object *)Py_XNewRef(PyDict_GetItem(smp_the_session.contexts, key));
    if (context == NULL || PyDict_DelItem(smp_the_session.contexts, key) < 0) {
        Py_CLEAR(context);
        PyErr_Clear();
        PyErr_Format(PyExc_RuntimeError,
                     "smp: a backward asked for call %llu, whose graph is gone",
                     (unsigned long long)call);
    }
    Py_DECREF(key);
    return context;
}

/* Runs the engine from the outputs with a gradient, in the modes of the thread at the
 * backward's beginning. */
static int
run_engine(context_object *context, smp_unpack *unpack, uint16_t flags)
{
    Py_ssize_t noutputs = PyTuple_GET_SIZE(context->outputs);
    PyObject  *roots = PyList_New(0);
    PyObject  *grads = PyList_New(0);
    PyObject  *result = NULL;
    PyObject  *none = PyTuple_New(0);
    PyObject  *state = NULL;
    PyObject  *call = NULL;
    uint32_t   count;

    if (roots == NULL || grads == NULL || none == NULL ||
        smp_unpack_u32(unpack, &count) < 0) {
        goto done;
    }
    if ((Py_ssize_t)count != noutputs) {
        (void)smp_malformed("%u gradients for %zd outputs", (unsigned)count, noutputs);
        goto done;
    }
    for (Py_ssize_t i = 0; i < noutputs; i++) {
        PyObject *gradient = smp_unpack_value(unpack);
        int       failed = 0;

        if (gradient != NULL && gradient != Py_None) {
            failed = PyList_Append(roots, PyTuple_GET_ITEM(context->outputs, i)) < 0 ||
                     PyList_Append(grads, gradient) < 0;
        }
        Py_XDECREF(gradient);
        if (gradient == NULL || failed) {
            goto done;
        }
    }
    if ((flags & SMP_FLAG_STATE) && (state = smp_unpack_value(unpack)) == NULL) {
        goto done;
    }
    if (PyList_GET_SIZE(roots) == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    context->running = true;
    Py_SETREF(roots, PyList_AsTuple(roots));
    Py_SETREF(grads, PyList_AsTuple(grads));
    Py_CLEAR(context->outputs); /* the roots alone keep the graph */
    call = PyTuple_Pack(7, roots, grads, Py_False, Py_False, none, Py_True, Py_True);
    if (call == NULL) {
        goto done;
    }
    result = state == NULL ? PyObject_CallObject(smp_torch.run_backward, call)
                           : PyObject_CallFunctionObjArgs(smp_the_session.with_state,
                                                          state, smp_torch.run_backward,
                                                          call, Py_None, NULL);
done:
    context->running = false;
    Py_XDECREF(roots);
    Py_XDECREF(grads);
    Py_XDECREF(none);
    Py_XDECREF(state);
    Py_XDECREF(call);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The gradients at Enter, for each reached argument. */
static int
pack_gradients(smp_pack *pack, const context_object *context)
{
    uint32_t count = 0;
    int      failed;

    for (size_t i = 0; i < context->ninputs; i++) {
        count += smp_is_reached(context->unreached, i);
    }
    failed = smp_pack_u32(pack, count);
    for (size_t i = 0; i < context->ninputs && failed == 0; i++) {
        if (smp_is_reached(context->unreached, i)) {
            failed =
                smp_pack_value(pack, context->gradients == NULL
                                         ? Py_None
                                         : PyTuple_GET_ITEM(context->gradients, i));
        }
    }
    return failed;
}

static bool
serve_backward(smp_message *request, smp_task *task)
{
    smp_session    *session = &smp_the_session;
    smp_envelope    envelope = *smp_message_envelope(request);
    int             source = request->source;
    context_object *context = take_context(envelope.about);
    bool            sent = false;
    smp_unpack      unpack;
    smp_pack        pack;

    if (context == NULL) {
        smp_message_free(request);
        return false;
    }
    smp_gradients_note(envelope.flags);
    task->order = context->order;
    task->count = context->count;
    task->entry = context->entry;
    task->backwards = (int32_t)envelope.seed;
    task->backward_depth = 1;
    smp_pack_init(&pack, session->comm, source, NULL);
    pack.graph = false;
    if (smp_unpack_init(&unpack, smp_the_session.comm, request, NULL, false, false) <
            0 ||
        smp_stream_seed(task, smp_mix(context->seed, 2)) < 0 ||
        smp_gradients_backward(envelope.microbatch, task->backwards) < 0 ||
        run_engine(context, &unpack, envelope.flags) < 0 ||
        smp_gradients_close(context->microbatch, context->order, context->entry) < 0 ||
        pack_gradients(&pack, context) < 0) {
        goto done;
    }
    envelope.kind = SMP_MSG_RESPONSE;
    envelope.flags = smp_gradients_flags();
    sent = smp_pack_send(&pack, &envelope) == 0;
done:
    drop_context(context);
    smp_pack_fini(&pack);
    smp_unpack_fini(&unpack);
    return sent;
}

void
smp_serve_request(smp_message *request, smp_task *task)
{
    bool done = smp_message_envelope(request)->kind == SMP_MSG_FORWARD
                    ? serve_forward(request, task)
                    : serve_backward(request, task);

    if (!done) {
        smp_session_fail(task);
    }
}

bool
smp_serve_release(uint64_t call)
{
    context_object *context = take_context(call);
    bool            closed;

    if (context == NULL) { /* its step failed meanwhile */
        PyErr_Clear();
        return true;
    }
    closed =
        smp_gradients_close(context->microbatch, context->order, context->entry) == 0;
    drop_context(context);
    return closed;
}

void
smp_serve_forget(void)
{
    PyObject  *contexts = PyDict_Values(smp_the_session.contexts);
    Py_ssize_t n = contexts == NULL ? 0 : PyList_GET_SIZE(contexts);

    PyErr_Clear();
    PyDict_Clear(smp_the_session.contexts);
    for (Py_ssize_t i = 0; i < n; i++) {
        drop_context((context_object *)Py_NewRef(PyList_GET_ITEM(contexts, i)));
    }
    Py_XDECREF(contexts);
}

/* ------------------------------------------------------------------ registration */

static PyMethodDef serve_functions[] = {
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
    .basicsize = sizeof(context_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = context_slots,
};

int
smp_serve_add(PyObject *module)
{
    name_context = PyUnicode_InternFromString("context");
    name_materialize = PyUnicode_InternFromString("materialize_grads");
    context_type = (PyTypeObject *)PyType_FromSpec(&context_spec);
    if (name_context == NULL || name_materialize == NULL || context_type == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, serve_functions);
}
