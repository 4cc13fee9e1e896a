/* The owner's side of a remote call: running a module, and its backward, for others.
 */
#include "python/modules/serve.h"

#include "common/mix.h"
#include "python/modules/chain.h"
#include "python/modules/context.h"
#include "python/modules/failure.h"
#include "python/modules/gradients.h"
#include "python/modules/object_changes.h"
#include "python/modules/passing_gradients.h"
#include "python/modules/placeholders.h"
#include "python/modules/reach.h"
#include "python/modules/run_entry.h"
#include "python/modules/serve_chain.h"
#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_tensor.h"
#include "python/values/pack_value.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

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
pack_dirty(smp_pack *pack, const smp_unpack *unpack, const smp_context *context)
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

/* Runs the module and sends the response; false with an exception. */
static bool
serve_forward(smp_message *request, smp_task *task)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = *smp_message_envelope(request);
    int          source = request->source;
    smp_entry   *entry;
    smp_context *context = NULL;
    PyObject    *args = NULL;
    PyObject    *kwargs = NULL;
    PyObject    *state = NULL;
    PyObject    *value = NULL;
    bool         sent = false;
    bool         keeps = false; /* the context is the session's, too */
    bool         keeps_graph;
    smp_unpack   unpack = {0};
    smp_pack     pack;

    if (envelope.entry < 0 || (size_t)envelope.entry >= session->nentries) {
        (void)smp_malformed("entry %d of %zu", (int)envelope.entry, session->nentries);
        smp_message_free(request);
        return false;
    }
    entry = &session->entries[envelope.entry];
    smp_pack_init(&pack, session->comm, source, &unpack);
    pack.graph = (envelope.flags & SMP_FLAG_GRAPH) != 0;
    keeps_graph = pack.graph && !(envelope.flags & SMP_FLAG_FIRST);
    if (smp_unpack_init(&unpack, smp_the_session.comm, request, NULL, true, false) <
            0 ||
        smp_stream_seed(task, smp_mix(envelope.seed, 1)) < 0) {
        goto done;
    }
    if ((pack.graph && (context = smp_context_enter(&unpack, &envelope)) == NULL) ||
        (!keeps_graph &&
         (pack.graph
              ? smp_gradients_promise(envelope.microbatch, envelope.about,
                                      envelope.entry)
              : smp_gradients_suspect(envelope.microbatch, envelope.entry)) < 0)) {
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
        if (state == Py_None) {
            Py_CLEAR(state);
        }
    }
    task->foreseen = (envelope.flags & SMP_FLAG_CHAIN) != 0; /* it may run again */
    value = smp_run_entry(entry, envelope.flags, state, args, kwargs);
    task->foreseen = false;
    smp_chain_leave(task);
    /* In a chain of all tp_ranks the others go on until they hear of it. */
    if (value == NULL && !task->refused && !(envelope.flags & SMP_FLAG_PASSED) &&
        !((envelope.flags & SMP_FLAG_CHAIN) && entry->collective)) {
        sent = smp_session_answer_raised(task, source, envelope);
        goto done;
    }
    if (envelope.flags & SMP_FLAG_CHAIN) {
        if (context == NULL && (context = smp_context_new(&envelope)) == NULL) {
            goto done;
        }
        sent = smp_serve_chain(&unpack, value, context, &envelope, source, task);
        keeps = sent && !(envelope.flags & SMP_FLAG_RESET);
        goto done;
    }
    if (pack_dirty(&pack, &unpack, context) < 0 || smp_pack_value(&pack, value) < 0 ||
        smp_warn_of_hooks(&unpack, &pack, entry) < 0 ||
        smp_object_changes_pack(&pack, &unpack, entry) < 0 ||
        smp_session_warn_if_laden(pack.laden, entry) < 0 ||
        smp_placeholders_fetch(task->placeholders) < 0) {
        goto done;
    }
    if (context != NULL) {
        PyObject *outputs = PyList_New(0);
        int       failed = outputs == NULL || smp_pack_add_in_graph(&pack, outputs) < 0;

        context->count = task->count;
        failed =
            failed || (keeps_graph ? smp_context_keep(context, outputs, envelope.call)
                                   : smp_context_find_unreached(context, outputs)) < 0;
        Py_XDECREF(outputs);
        if (failed) {
            goto done;
        }
    }
    envelope.kind = SMP_MSG_RESPONSE;
    envelope.about = task->count;
    envelope.seed = context == NULL ? 0 : context->unreached;
    sent = smp_pack_send(&pack, &envelope) == 0;
    keeps = sent && keeps_graph;
done:
    if (keeps) {
        Py_XDECREF(context);
    } else {
        smp_context_drop(context);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(state);
    Py_XDECREF(value);
    smp_pack_fini(&pack);
    smp_unpack_fini(&unpack);
    return sent;
}

/* Runs the engine from the outputs with a gradient, in the modes of the thread at the
 * backward's beginning: *state (new), where there is one. */
static int
run_engine(smp_context *context, smp_task *task, smp_unpack *unpack,
           const smp_envelope *envelope, int source, PyObject **state,
           smp_pass_gradients *passed)
{
    Py_ssize_t noutputs = PyTuple_GET_SIZE(context->edges);
    PyObject  *roots = PyList_New(0);
    PyObject  *grads = PyList_New(0);
    PyObject  *result = NULL;
    PyObject  *none = PyTuple_New(0);
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
            failed = PyList_Append(roots, PyTuple_GET_ITEM(context->edges, i)) < 0 ||
                     PyList_Append(grads, gradient) < 0;
        }
        Py_XDECREF(gradient);
        if (gradient == NULL || failed) {
            goto done;
        }
    }
    if ((envelope->flags & SMP_FLAG_STATE) &&
        (*state = smp_unpack_value(unpack)) == NULL) {
        goto done;
    }
    if ((envelope->flags & SMP_FLAG_FETCH) &&
        ((passed->kept = smp_unpack_value(unpack)) == NULL ||
         smp_context_hold(context, envelope->about, passed->kept) < 0)) {
        goto done;
    }
    Py_CLEAR(context->held);
    if (context->several &&
        (smp_pass_read_gradients(passed, unpack, source, envelope->call) < 0 ||
         smp_pass_add_roots(passed, context, roots, grads) < 0)) {
        goto done;
    }
    if (PyList_GET_SIZE(roots) == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    context->running = true;
    Py_SETREF(roots, PyList_AsTuple(roots));
    Py_SETREF(grads, PyList_AsTuple(grads));
    Py_CLEAR(context->edges); /* the roots alone keep the graph */
    call = PyTuple_Pack(7, roots, grads, Py_False, Py_False, none, Py_True, Py_True);
    if (call == NULL) {
        goto done;
    }
    result =
        *state == NULL
            ? PyObject_CallObject(smp_torch.run_backward, call)
            : PyObject_CallFunctionObjArgs(smp_the_session.with_state, *state,
                                           smp_torch.run_backward, call, Py_None, NULL);
    if (result == NULL) {
        task->entry = context->entry_now;
    }
done:
    context->running = false;
    Py_XDECREF(roots);
    Py_XDECREF(grads);
    Py_XDECREF(none);
    Py_XDECREF(call);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The gradients at Enter, for each reached argument.  A chain's last calls come first:
 * their caller adds them up so, as those of single calls. */
static int
pack_gradients(smp_pack *pack, const smp_context *context)
{
    const size_t n = context->ninputs;
    uint32_t     count = 0;
    int          failed;

    for (size_t i = 0; i < n; i++) {
        count += smp_is_reached(context->unreached, i);
    }
    failed = smp_pack_u32(pack, count);
    for (size_t i = 0; i < n && failed == 0; i++) {
        const size_t input = context->entries == NULL ? i : n - 1 - i;

        if (smp_is_reached(context->unreached, input)) {
            failed = smp_pack_value(
                pack, context->gradients == NULL
                          ? Py_None
                          : PyList_GET_ITEM(context->gradients, (Py_ssize_t)input));
        }
    }
    return failed;
}

static bool
serve_backward(smp_message *request, smp_task *task)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = *smp_message_envelope(request);
    int          source = request->source;
    smp_context *context = smp_context_take(envelope.about);
    PyObject    *state = NULL;
    bool         sent = false;
    smp_unpack   unpack;
    smp_pack     pack;

    smp_pass_gradients passed = {0};

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
        run_engine(context, task, &unpack, &envelope, source, &state, &passed) < 0 ||
        smp_context_close(context) < 0) {
        goto done;
    }
    if (context->several) {
        sent = smp_pass_gradients_on(&passed, context, state, envelope) == 0;
        goto done;
    }
    if (pack_gradients(&pack, context) < 0) {
        goto done;
    }
    envelope.kind = SMP_MSG_RESPONSE;
    envelope.flags = smp_gradients_flags();
    sent = smp_pack_send(&pack, &envelope) == 0;
done:
    smp_context_drop(context);
    Py_XDECREF(state);
    smp_pass_gradients_fini(&passed);
    smp_pack_fini(&pack);
    smp_unpack_fini(&unpack);
    return sent;
}

void
smp_serve_request(smp_message *request, smp_task *task)
{
    const smp_envelope *envelope = smp_message_envelope(request);
    bool done = envelope->kind == SMP_MSG_BACKWARD   ? serve_backward(request, task)
                : (envelope->flags & SMP_FLAG_FETCH) ? smp_serve_fetch(request)
                                                     : serve_forward(request, task);

    if (!done) {
        smp_session_fail(task);
    }
}
