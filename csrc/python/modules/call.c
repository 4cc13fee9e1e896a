/* A request goes out, and its response becomes values and changed arguments.
 *
 * An argument changed in place by the owner gets its new values by Change(argument, y).
 */
#include "python/modules/call.h"

#include <stdlib.h>

#include "comm/messaging/comm.h"
#include "python/modules/chain.h"
#include "python/modules/foreseen.h"
#include "python/modules/hooks.h"
#include "python/modules/nodes.h"
#include "python/modules/object_changes.h"
#include "python/modules/reach.h"
#include "python/modules/serve_chain.h"
#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/modules/task.h"
#include "python/modules/wait.h"
#include "python/values/pack_value.h"
#include "python/values/rank_names.h"
#include "python/values/registry.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

#define CHECKPOINT (SMP_FLAG_FIRST | SMP_FLAG_AGAIN)

static bool
any_requires_grad(const smp_pack *pack)
{
    for (size_t i = 0; i < pack->ntensors; i++) {
        if (pack->in_graph[i]) {
            return true;
        }
    }
    return false;
}

/* argument.copy_(data) without autograd: the callee changed it under no_grad. */
static PyObject *
write_back(PyObject *argument, PyObject *data, bool grad_is_on)
{
    PyObject *done;

    if (grad_is_on && smp_torch_set_grad(false) < 0) {
        return NULL;
    }
    done = PyObject_CallMethodOneArg(argument, smp_names.copy_, data);
    if (grad_is_on && smp_torch_set_grad(true) < 0) {
        Py_CLEAR(done);
    }
    return done;
}

/* The call's number, its arguments, and the sent values. */
typedef struct {
    int32_t         entry;
    PyObject       *args;   /* borrowed */
    PyObject       *kwargs; /* borrowed; or NULL */
    const smp_pack *pack;   /* borrowed */
} sent_call;

/* An error if another tensor of the call shares memory with one changed by the
 * callee. */
static int
refuse_shared(const sent_call *sent, PyObject *changed)
{
    const smp_pack *pack = sent->pack;
    PyObject       *tensors;
    PyObject       *done;

    if (pack->ntensors == 1) {
        return 0;
    }
    tensors = PyList_New((Py_ssize_t)pack->ntensors);
    if (tensors == NULL) {
        return -1;
    }
    for (size_t i = 0; i < pack->ntensors; i++) {
        PyList_SET_ITEM(tensors, (Py_ssize_t)i, Py_NewRef(pack->tensors[i]));
    }
    done = PyObject_CallFunction(
        smp_the_session.refuse_changed, "sOOOO",
        smp_entry_path(&smp_the_session.entries[sent->entry]), sent->args,
        sent->kwargs == NULL ? Py_None : sent->kwargs, changed, tensors);
    Py_DECREF(tensors);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Reads the arguments changed in place by the callee: pairs of argument number and
 * tensor.  Those that autograd must know are the response's first; the others are
 * written back at once: *written.  Returns a list of the first kind's arguments (new).
 */
static PyObject *
read_dirty(smp_unpack *unpack, const sent_call *sent, bool *written)
{
    const smp_pack *pack = sent->pack;
    PyObject       *dirty = PyList_New(0);
    uint32_t        count;

    if (dirty == NULL || smp_unpack_u32(unpack, &count) < 0) {
        goto fail;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t  argument;
        PyObject *data;
        PyObject *done;

        if (smp_unpack_u32(unpack, &argument) < 0 ||
            (data = smp_unpack_value(unpack)) == NULL) {
            goto fail;
        }
        Py_DECREF(data); /* unpack has it too */
        if (argument >= pack->ntensors || i >= unpack->ntensors ||
            data != unpack->tensors[i]) {
            (void)smp_malformed("a changed argument that is none");
            goto fail;
        }
        if (refuse_shared(sent, pack->tensors[argument]) < 0) {
            goto fail;
        }
        if (unpack->requires_grad[i]) {
            if (PyList_Append(dirty, pack->tensors[argument]) < 0) {
                goto fail;
            }
            continue;
        }
        done = write_back(pack->tensors[argument], data, pack->graph);
        if (done == NULL) {
            goto fail;
        }
        Py_DECREF(done);
        *written = true;
    }
    return dirty;
fail:
    Py_XDECREF(dirty);
    return NULL;
}

/* Runs Send and Recv; their outputs take the place of the tensors with
 * requires_grad. */
static int
apply_nodes(smp_call_object *call, const smp_pack *pack, uint64_t unreached,
            smp_unpack *unpack)
{
    PyObject *inputs;
    PyObject *outputs;

    call->outputs = smp_unpack_in_graph(unpack);
    if (call->outputs == NULL) {
        return -1;
    }
    if (PyList_GET_SIZE(call->outputs) == 0) {
        return 0;
    }
    inputs = PyList_New(0);
    outputs = inputs == NULL || smp_pack_add_in_graph(pack, inputs) < 0
                  ? NULL
                  : smp_nodes_apply(call, inputs, unreached, false);
    Py_XDECREF(inputs);
    if (outputs == NULL) {
        return -1;
    }
    smp_unpack_exchange(unpack, outputs);
    Py_DECREF(outputs);
    return 0;
}

/* Gives the arguments changed by the callee their new values; from then on they, the
 * caller's own objects, stand for the response's first tensors. */
static int
apply_dirty(PyObject *dirty, smp_unpack *unpack)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dirty); i++) {
        PyObject *args[] = {PyList_GET_ITEM(dirty, i), unpack->tensors[i]};
        PyObject *changed =
            PyObject_Vectorcall(smp_the_session.change_apply, args, 2, NULL);

        if (changed == NULL) {
            return -1;
        }
        Py_SETREF(unpack->tensors[i], changed);
    }
    return 0;
}

/* Makes the caller's values of a response.  Takes the response. */
static PyObject *
finish(smp_call_object *call, bool in_graph, const smp_call_site *site,
       const sent_call *sent, smp_message *response)
{
    const smp_pack *pack = sent->pack;
    smp_arguments   arguments = smp_pack_arguments(pack);
    uint64_t        unreached = smp_message_envelope(response)->seed;
    smp_unpack      unpack;
    PyObject       *dirty = NULL;
    PyObject       *value = NULL;
    bool            written = false;

    if (smp_unpack_init(&unpack, smp_the_session.comm, response, &arguments, false,
                        false) < 0 ||
        (dirty = read_dirty(&unpack, sent, &written)) == NULL ||
        (in_graph && (apply_nodes(call, pack, unreached, &unpack) < 0 ||
                      apply_dirty(dirty, &unpack) < 0))) {
        goto done;
    }
    value = smp_unpack_value(&unpack);
    if (value != NULL &&
        (smp_object_changes_apply(&unpack, pack) < 0 ||
         (PyList_GET_SIZE(dirty) == 0 && !written &&
          smp_links_returned(smp_this_task, site, pack, &unpack) < 0))) {
        Py_CLEAR(value);
    }
done:
    Py_XDECREF(dirty);
    smp_unpack_fini(&unpack);
    return value;
}

static int
pack_request(smp_pack *pack, PyObject *args, PyObject *kwargs, PyObject *state,
             const smp_entry *entry)
{
    if (smp_pack_value(pack, args) == 0 &&
        smp_pack_value(pack, kwargs == NULL ? Py_None : kwargs) == 0 &&
        (state == NULL || smp_pack_value(pack, state) == 0)) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_ConnectionError)) { /* not the argument's fault */
        PyObject *type;
        PyObject *value;
        PyObject *traceback;

        PyErr_Fetch(&type, &value, &traceback);
        PyErr_Format(type == NULL ? PyExc_TypeError : type,
                     "smp: an argument of module '%s' cannot go to %s: %S",
                     smp_entry_path(entry),
                     smp_rank_name(smp_session_rank_of_comm(entry->owner)),
                     value == NULL ? Py_None : value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    }
    return -1;
}

/* The module's own value, from the captured state's `after`.  Takes value; NULL with an
 * exception. */
static PyObject *
settle(PyObject *captured, PyObject *value)
{
    PyObject *after = captured == Py_None ? Py_None : PyTuple_GET_ITEM(captured, 1);
    PyObject *own;

    if (value == NULL || after == Py_None) {
        return value;
    }
    own = PyObject_CallOneArg(after, value);
    Py_DECREF(value);
    return own;
}

/* The exception of the called module becomes its caller's.  Takes the response.
 */
static void
raise_from_there(smp_message *response)
{
    smp_unpack unpack;
    PyObject  *told = NULL;
    PyObject  *error = NULL;

    if (smp_unpack_init(&unpack, smp_the_session.comm, response, NULL, false, false) ==
        0) {
        told = smp_unpack_value(&unpack);
    }
    smp_unpack_fini(&unpack);
    if (told != NULL) {
        error = PyObject_CallOneArg(smp_the_session.raised_there, told);
    }
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    }
    Py_XDECREF(error);
    Py_XDECREF(told);
}

/* The versions of a request's tensors (owned); NULL with an exception. */
static long *
note_versions(const smp_pack *pack)
{
    long *versions = calloc(pack->ntensors + 1, sizeof(*versions));

    if (versions == NULL) {
        PyErr_NoMemory();
    }
    for (size_t i = 0; versions != NULL && i < pack->ntensors; i++) {
        versions[i] = smp_history_version(pack->tensors[i]);
    }
    return versions;
}

/* An exception if a tensor of the request has changed since: the call is to be sent
 * again, and other tasks have run.  versions: NULL: of a call that has no chain. */
static int
check_versions(const smp_pack *pack, const long *versions, const smp_entry *entry)
{
    for (size_t i = 0; versions != NULL && i < pack->ntensors; i++) {
        if (smp_history_version(pack->tensors[i]) != versions[i]) {
            return smp_chain_refuse_changed(entry);
        }
    }
    return 0;
}

/* Sends the call and makes its value of the response; with the calls foreseen by the
 * plan.  foresees: makes the plan.  *undone: the owner has undone these: nothing has
 * happened.
 */
static PyObject *
make_call(smp_call_site *site, smp_chain_plan *plan, bool foresees, bool *undone)
{
    smp_session     *session = &smp_the_session;
    smp_task        *task = smp_this_task;
    smp_entry       *entry = &session->entries[site->entry];
    const sent_call  sent = {site->entry, site->args, site->kwargs, NULL};
    PyObject        *value = NULL;
    smp_call_object *call = NULL;
    smp_message     *response;
    smp_envelope     envelope;
    smp_pack         pack;
    long            *versions = NULL;

    *undone = false;
    smp_pack_init(&pack, session->comm, smp_session_rank_of_comm(entry->owner), NULL);
    pack.graph = site->grad;
    /* The arguments travel as they are now: foreseeing may let other tasks run. */
    if (pack_request(&pack, site->args, site->kwargs, site->state, entry) < 0 ||
        (foresees && site->chains && (versions = note_versions(&pack)) == NULL) ||
        smp_session_warn_if_laden(pack.laden, entry) < 0 ||
        (foresees && smp_chain_foresee(task, site, plan) < 0) ||
        smp_links_called(task, site, &pack) < 0 || smp_call_draw(site) < 0) {
        goto done;
    }
    call = smp_call_new();
    if (call == NULL) {
        goto done;
    }
    call->opened = session->opened;
    call->step = session->step;
    call->entry = site->entry;
    call->owner = entry->owner;
    call->path = Py_NewRef(entry->path);
    call->microbatch = task->microbatch;
    call->number =
        smp_call_of(task->number, (uint64_t)site->entry, site->before, task->phase);
    call->call = smp_server_next_call(session->server);
    envelope = (smp_envelope){
        .kind = SMP_MSG_FORWARD,
        .phase = (uint8_t)task->phase,
        .flags = (uint16_t)(site->flags | (site->grad ? SMP_FLAG_GRAD : 0) |
                            (site->state != NULL ? SMP_FLAG_STATE : 0) |
                            (plan->n > 0 ? SMP_FLAG_CHAIN : 0)),
        .microbatch = task->microbatch,
        .step = session->step,
        .entry = site->entry,
        .call = call->call,
        .about = ++task->count,
        .seed = site->seed,
        .number = call->number,
    };
    if (site->grad &&
        (entry->trains || any_requires_grad(&pack) || smp_chain_trains(plan))) {
        envelope.flags |= SMP_FLAG_GRAPH;
    }
    if (!(envelope.flags & SMP_FLAG_GRAPH)) {
        envelope.flags &= (uint16_t)~CHECKPOINT;
    }
    call->checkpoint = envelope.flags & CHECKPOINT;
    if (task->backward_depth > 0) {
        envelope.flags |= SMP_FLAG_RECOMPUTE;
    }
    if (plan->n > 0) {
        smp_server_note(session->server, SMP_EVENT_CHAIN, site->entry,
                        (int32_t)plan->n + 1);
    }
    if ((plan->n > 0 && (smp_chain_part(call, task, plan) < 0 ||
                         smp_chain_pack(&pack, task, plan, call) < 0)) ||
        smp_pack_send(&pack, &envelope) < 0) {
        goto done;
    }
    response = smp_session_wait(call->call, SMP_WAIT_OUTPUTS, site->entry);
    if (response == NULL) {
        goto done;
    }
    if (plan->n == 0 && smp_message_envelope(response)->about != task->count) {
        entry->nests = true;
        site->chains = false;
    }
    task->count = smp_message_envelope(response)->about;
    if (smp_message_envelope(response)->flags & SMP_FLAG_RAISED) {
        raise_from_there(response);
    } else if (smp_message_envelope(response)->flags & SMP_FLAG_RESET) {
        *undone = smp_chain_undone(site, plan, call, response) == 0 &&
                  check_versions(&pack, versions, entry) == 0;
    } else if (plan->n > 0) {
        value = smp_chain_begin(task, site, plan, call, &pack, response);
    } else {
        value =
            finish(call, (envelope.flags & SMP_FLAG_GRAPH) != 0, site,
                   &(sent_call){sent.entry, sent.args, sent.kwargs, &pack}, response);
    }
done:
    free(versions);
    smp_pack_fini(&pack);
    Py_XDECREF(call);
    return value;
}

/* Whether the call is inside a torch.utils.checkpoint without re-entrance, which gets
 * the tensors that Recv saves: sets the flag.  0, or -1 with an exception. */
static int
find_checkpoint(uint16_t *flags)
{
    PyObject *hooks = PyObject_CallOneArg(smp_torch.saved_hooks, Py_True);
    PyObject *found;
    long      which;

    if (hooks == NULL || hooks == Py_None) {
        Py_XDECREF(hooks);
        return hooks == NULL ? -1 : 0;
    }
    found = PyObject_CallOneArg(smp_the_session.checkpoint_of, hooks);
    Py_DECREF(hooks);
    which = found == NULL ? -1 : PyLong_AsLong(found);
    Py_XDECREF(found);
    if (which > 0) {
        *flags |= which == 1 ? SMP_FLAG_FIRST : SMP_FLAG_AGAIN;
    }
    return which < 0 ? -1 : 0;
}

/* Whether the call may be a chain's: with no other hooks than those after a call. */
static bool
may_chain(const smp_entry *entry, uint16_t flags, PyObject *captured)
{
    return entry->chains && !entry->nests && (flags & ~SMP_FLAG_INPUTS) == 0 &&
           smp_this_task->backward_depth == 0 && !smp_the_session.in_sequence &&
           (captured == Py_None || PyTuple_GET_ITEM(captured, 2) == Py_True);
}

/* Grad mode, and the thread's others that travel, as one number. */
static uint32_t
modes_of(const smp_call_site *site)
{
    PyObject *modes = site->state == NULL ? Py_None : PyTuple_GET_ITEM(site->state, 0);
    Py_hash_t h = modes == Py_None ? 0 : PyObject_Hash(modes);

    if (h == -1) {
        PyErr_Clear();
    }
    return (uint32_t)h << 1 | site->grad;
}

static PyObject *
call_entry(int32_t number, PyObject *args, PyObject *kwargs, uint16_t flags)
{
    smp_session   *session = &smp_the_session;
    smp_task      *task = smp_this_task;
    smp_call_site  site = {.entry = number, .args = args, .kwargs = kwargs};
    PyObject      *captured; /* the state, with the function to call after */
    PyObject      *value = NULL;
    smp_chain_plan plan = {.n = 0};
    bool           undone = true;
    int            grad = smp_torch_grad_enabled();

    if (task->foreseen && session->pipelines > 1 &&
        session->entries[number].collective &&
        !session->entries[task->entry].collective) {
        return smp_serve_chain_refuse(task); /* the other tp_ranks know of no chain */
    }
    if (grad < 0 || (grad != 0 && find_checkpoint(&flags) < 0) ||
        (captured = PyObject_CallOneArg(session->capture_state,
                                        session->entries[number].path)) == NULL) {
        return NULL;
    }
    site.grad = grad != 0;
    site.state = captured == Py_None ? NULL : PyTuple_GET_ITEM(captured, 0);
    site.modes = modes_of(&site);
    site.flags = flags;
    site.chains = may_chain(&session->entries[number], flags, captured);
    if (smp_calls_count(&task->calls, (uint64_t)number, &site.before) != SMP_OK) {
        PyErr_NoMemory();
        goto done;
    }
    switch (smp_chain_replay(task, &site, &value)) {
    case 1:
        value = settle(captured, value);
        goto done;
    case 0:
        break;
    default:
        goto done;
    }
    for (bool foresees = true; undone; foresees = false) {
        value = make_call(&site, &plan, foresees, &undone);
        smp_chain_let_go(&plan);
    }
    value = settle(captured, value);
done:
    Py_DECREF(captured);
    return value;
}

/* The number of the module's entry, or -1 with an exception. */
static int32_t
entry_of(PyObject *module)
{
    smp_session *session = &smp_the_session;
    int64_t      number = smp_registry_find(session->entry_numbers, module);

    if (number < 0) {
        PyErr_Format(PyExc_RuntimeError,
                     "smp: a %s that belongs to another rank was called after its "
                     "DistributedModel was gone",
                     Py_TYPE(module)->tp_name);
        return -1;
    }
    if (smp_this_task == NULL) {
        PyErr_Format(
            PyExc_RuntimeError,
            session->in_step
                ? "smp: module '%s' runs on pp_rank %d and was called by a thread of "
                  "the script; put it and its caller on one rank with "
                  "smp.set_partition"
                : "smp: module '%s' runs on pp_rank %d and can only be called inside a "
                  "function with @smp.step",
            smp_entry_path(&session->entries[number]), session->entries[number].owner);
        return -1;
    }
    return (int32_t)number;
}

static PyObject *
call_remote(PyObject *module, PyObject *args, PyObject *kwargs, uint16_t flags)
{
    int32_t number = entry_of(module);

    return number < 0 ? NULL : call_entry(number, args, kwargs, flags);
}

/* __call__ of another rank's module: (module, *args, **kwargs). */
static PyObject *
module_call(PyObject *unused, PyObject *args, PyObject *kwargs)
{
    PyObject *module;
    PyObject *rest;
    PyObject *value;

    (void)unused;
    if (PyTuple_GET_SIZE(args) < 1) {
        PyErr_SetString(PyExc_TypeError, "smp: __call__ needs its module");
        return NULL;
    }
    module = PyTuple_GET_ITEM(args, 0);
    rest = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
    if (rest == NULL) {
        return NULL;
    }
    if (smp_has_hooks(module)) {
        value = PyObject_CallFunctionObjArgs(smp_the_session.call_hooked, module, rest,
                                             kwargs == NULL ? Py_None : kwargs, NULL);
    } else {
        value = call_remote(module, rest, kwargs, 0);
    }
    Py_DECREF(rest);
    return value;
}

/* call_remote(module, args, kwargs or None, bare, inputs): the call without the
 * caller's hooks; bare: without the owner's too; inputs, and both: see serve_hooked. */
static PyObject *
py_call_remote(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    uint16_t flags = 0;

    (void)unused;
    if (nargs != 5 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError,
                        "call_remote(module, args, kwargs, bare, inputs)");
        return NULL;
    }
    if (args[3] == Py_True) {
        flags |= SMP_FLAG_BARE;
    }
    if (args[4] == Py_True) {
        flags |= SMP_FLAG_INPUTS;
    }
    return call_remote(args[0], args[1], args[2] == Py_None ? NULL : args[2], flags);
}

/* call_entry(number, args): calls a run of nn.Sequential children. */
static PyObject *
py_call_entry(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    long number;

    (void)unused;
    if (nargs != 2 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "call_entry(number, args)");
        return NULL;
    }
    number = PyLong_AsLong(args[0]);
    if (number < 0 || (size_t)number >= smp_the_session.nentries ||
        smp_this_task == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError,
                            "smp: modules of another rank can only be called inside a "
                            "function with @smp.step");
        }
        return NULL;
    }
    return call_entry((int32_t)number, args[1], NULL, 0);
}

/* requests() -> the number of the microbatch's requests so far; None outside of tasks
 */
static PyObject *
py_requests(PyObject *unused, PyObject *none)
{
    (void)unused;
    (void)none;
    if (smp_this_task == NULL) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLongLong(smp_this_task->count);
}

/* set_requests(number): the next request is the one after this. */
static PyObject *
py_set_requests(PyObject *unused, PyObject *number)
{
    uint64_t count = PyLong_AsUnsignedLongLong(number);

    (void)unused;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (smp_this_task != NULL) {
        smp_this_task->count = count;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"requests", py_requests, METH_NOARGS,
     "requests() -> number of the microbatch's requests so far; None outside of tasks"},
    {"set_requests", py_set_requests, METH_O,
     "set_requests(number): the next request is the one after this"},
    {"call_remote", __extension__(PyCFunction)(void (*)(void)) py_call_remote,
     METH_FASTCALL,
     "call_remote(module, args, kwargs, bare, inputs): a remote call without hooks"},
    {"call_entry", __extension__(PyCFunction)(void (*)(void)) py_call_entry,
     METH_FASTCALL, "call_entry(number, args): a remote call by entry number"},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef module_call_def = {
    "__call__", __extension__(PyCFunction)(void (*)(void)) module_call,
    METH_VARARGS | METH_KEYWORDS, "Runs the module on the rank that owns it."};

int
smp_call_add(PyObject *module)
{
    PyObject *function;
    PyObject *method;
    int       failed;

    if (PyModule_AddFunctions(module, functions) < 0) {
        return -1;
    }
    /* A function of C, bound like a method, for the classes of remote modules. */
    function = PyCFunction_New(&module_call_def, NULL);
    method = function == NULL ? NULL : PyInstanceMethod_New(function);
    failed = method == NULL || PyModule_AddObjectRef(module, "module_call", method) < 0;
    Py_XDECREF(function);
    Py_XDECREF(method);
    return failed ? -1 : 0;
}
