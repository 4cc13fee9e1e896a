/* Calls of a chain, one after another, in one graph. */
#include "python/modules/serve_chain.h"

#include <stdlib.h>
#include <string.h>

#include "common/mix.h"
#include "python/modules/chain.h"
#include "python/modules/failure.h"
#include "python/modules/gradients.h"
#include "python/modules/object_changes.h"
#include "python/modules/passing.h"
#include "python/modules/placeholders.h"
#include "python/modules/run_entry.h"
#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/modules/wait.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_value.h"
#include "python/values/tensor.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

static PyObject *name_register_prehook;

static int
note_versions(smp_served_call *call)
{
    const smp_unpack *unpack = call->unpack;

    call->versions = malloc((unpack->ntensors + 1) * sizeof(*call->versions));
    if (call->versions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < unpack->ntensors; i++) {
        call->versions[i] = smp_tensor_version(unpack->tensors[i]);
        if (call->versions[i] < 0) {
            return -1;
        }
    }
    return 0;
}

/* An exception if the call has changed a tensor among its arguments: the change is its
 * caller's to know before the next call. */
static int
check_unchanged(const smp_served_call *call)
{
    const smp_unpack *unpack = call->unpack;

    for (size_t i = 0; i < unpack->ntensors; i++) {
        const long now = smp_tensor_version(unpack->tensors[i]);
        const long before = call->versions == NULL ? 0 : call->versions[i];

        if (now < 0) {
            return -1;
        }
        if (now != before) {
            PyErr_SetString(PyExc_RuntimeError,
                            "smp: a call of a chain changed an argument");
            return -1;
        }
    }
    return 0;
}

/* Finds a call's tensors among those of earlier ones. */
static int
find_tensors(smp_served_call *calls, size_t at, const smp_written_call *written)
{
    const size_t           n = written->head.nsources;
    const smp_served_call *former = &calls[at - 1];
    smp_served_call       *call = &calls[at];

    call->from = malloc((n + 1) * sizeof(*call->from));
    if (call->from == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        const smp_chain_source source = smp_written_source(written, i);
        const smp_served_call *earlier;
        size_t                 number;
        size_t                 back;

        number = smp_chain_number(source);
        back = smp_chain_back(source);
        earlier = back == SMP_CHAIN_OF_REQUEST ? calls
                  : back < at                  ? former - back
                                               : NULL;
        if (earlier == NULL ||
            number >= (smp_chain_is_output(source) ? former->pack.ntensors
                                                   : earlier->unpack->ntensors)) {
            return smp_malformed("a chain's tensor from nowhere");
        }
        call->from[i] = smp_chain_is_output(source)
                            ? (smp_argument){former->pack.tensors[number], false, 0}
                            : smp_served_argument(earlier, number);
    }
    return 0;
}

/* hook((context, former entry), gradients): the backward comes to the former call. */
static PyObject *
note_former(PyObject *self, PyObject *unused)
{
    smp_context *context = (smp_context *)PyTuple_GET_ITEM(self, 0);

    (void)unused;
    context->entry_now = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(self, 1));
    Py_RETURN_NONE;
}

static PyMethodDef note_former_def = {"note_former", note_former, METH_O, NULL};

/* An exception of the backward names its own module: the node of a call's argument runs
 * after the call's own.  hook: NULL at first (new). */
static int
watch_backward(smp_context *context, int32_t former, PyObject *argument,
               PyObject **hook)
{
    PyObject *node = PyObject_GetAttr(argument, smp_names.grad_fn);
    PyObject *done = NULL;

    if (node == NULL) {
        return -1;
    }
    if (node != Py_None && *hook == NULL) {
        PyObject *self = Py_BuildValue("(Oi)", context, (int)former);

        *hook = self == NULL ? NULL : PyCFunction_New(&note_former_def, self);
        Py_XDECREF(self);
    }
    if (node == Py_None) {
        done = Py_NewRef(Py_None);
    } else if (*hook != NULL) {
        done = PyObject_CallMethodOneArg(node, name_register_prehook, *hook);
    }
    Py_DECREF(node);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Gives each call tensors of its own in the graph, as single requests do: autograd adds
 * up a call's gradients before those of others, also of the caller. */
static int
enter(smp_context *context, int32_t former, const smp_served_call *call,
      PyObject **tensors, uint32_t n)
{
    PyObject  *inputs = PyList_New(0);
    PyObject  *outputs = NULL;
    PyObject  *hook = NULL;
    Py_ssize_t at = 0;
    int        failed = inputs == NULL ? -1 : 0;

    for (uint32_t i = 0; i < n && failed == 0; i++) {
        PyObject *tensor = call->from[i].tensor;
        int       grad = smp_attr_true(tensor, smp_names.requires_grad);

        tensors[i] = grad < 0 ? NULL
                     : !grad  ? Py_NewRef(tensor)
                     : call->from[i].request
                         ? PyObject_CallMethodNoArgs(tensor, smp_names.detach)
                         : PyObject_CallMethodOneArg(tensor, smp_names.view_as, tensor);
        failed = tensors[i] == NULL ? -1 : 0;
        if (failed == 0 && grad) {
            failed = call->from[i].request
                         ? PyList_Append(inputs, tensors[i])
                         : watch_backward(context, former, tensors[i], &hook);
        }
    }
    if (failed == 0 && PyList_GET_SIZE(inputs) > 0) {
        outputs = smp_context_enter_again(context, inputs);
        failed = outputs == NULL ? -1 : 0;
    }
    for (uint32_t i = 0; outputs != NULL && i < n; i++) {
        if (at < PyList_GET_SIZE(inputs) && tensors[i] == PyList_GET_ITEM(inputs, at)) {
            Py_SETREF(tensors[i], Py_NewRef(PyTuple_GET_ITEM(outputs, at)));
            at++;
        }
    }
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    Py_XDECREF(hook);
    return failed;
}

/* Reads the call number `at`: its arguments are tensors of earlier ones. */
static int
read_call(smp_unpack *from, smp_context *context, smp_served_call *calls, size_t at,
          smp_chain_head *head)
{
    smp_served_call *call = &calls[at];
    const int32_t    former = head->entry;
    smp_written_call written;
    PyObject       **tensors;
    int              failed;

    if (smp_served_read(from, &written) < 0 || find_tensors(calls, at, &written) < 0) {
        return -1;
    }
    *head = written.head;
    tensors = calloc(head->nsources + 1, sizeof(PyObject *));
    if (tensors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    call->unpack = &call->own;
    failed = enter(context, former, call, tensors, head->nsources) < 0 ||
             smp_unpack_init_given(&call->own, written.values, written.nvalues, tensors,
                                   head->nsources) < 0 ||
             note_versions(call) < 0;
    for (uint32_t i = 0; i < head->nsources; i++) {
        Py_XDECREF(tensors[i]);
    }
    free(tensors);
    return failed ? -1 : 0;
}

static void
raise_refused(void)
{
    PyErr_SetString(PyExc_RuntimeError,
                    "smp: a call of a chain has effects, and may be in vain");
}

/* The value of a call, or NULL with an exception: a module may have gone on behind one.
 * Takes the value. */
static PyObject *
unless_refused(const smp_task *task, PyObject *value)
{
    if (value != NULL && task->refused) {
        Py_CLEAR(value);
        raise_refused();
    }
    return value;
}

/* The call's value (new), with its own random numbers and its own calls. */
static PyObject *
run_call(const smp_served_chain *chain, const smp_chain_head *head, smp_unpack *unpack,
         smp_task *task)
{
    PyObject *args = smp_unpack_value(unpack);
    PyObject *kwargs = args == NULL ? NULL : smp_unpack_value(unpack);
    PyObject *state = kwargs == NULL ? NULL : smp_unpack_value(unpack);
    PyObject *value = NULL;

    if (state != NULL && PyTuple_Check(args)) {
        smp_calls_fini(&task->calls);
        task->calls = (smp_calls){0};
        task->entry = head->entry;
        task->number = head->number;
        smp_server_go_on_with(smp_the_session.server, head->entry);
        if (smp_stream_seed(task, smp_mix(head->seed, 1)) == 0) {
            task->foreseen = true;
            value = smp_run_entry(&smp_the_session.entries[head->entry],
                                  smp_served_flags(chain->flags, head),
                                  state == Py_None ? NULL : state, args,
                                  kwargs == Py_None ? NULL : kwargs);
            task->foreseen = false;
            smp_chain_leave(task);
        }
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(state);
    return unless_refused(task, value);
}

/* An exception if the ledger would add up the gradients of a chain's calls in another
 * order than those of single requests. */
static int
check_order(const smp_served_chain *chain, const smp_chain_head *head, size_t at)
{
    if ((chain->flags & SMP_FLAG_GRAPH) &&
        smp_gradients_share(head->entry, chain->entries, at)) {
        PyErr_SetString(PyExc_RuntimeError, "smp: calls of a chain share a parameter");
        return -1;
    }
    return 0;
}

/* Describes the outputs of a call; the last one's follow the descriptions, whole. */
static int
pack_outputs(smp_served_chain *chain, size_t at, PyObject *value,
             const smp_entry *entry)
{
    smp_served_call *call = &chain->calls[at];
    const bool       last = at + 1 == chain->n && chain->rest == 0;
    PyObject *const  before = chain->place.described;

    if (check_unchanged(call) < 0) {
        return -1;
    }
    if (chain->task->count != chain->count) {
        chain->nests = true;
        PyErr_SetString(PyExc_RuntimeError, "smp: a call of a chain calls other ranks");
        return -1;
    }
    smp_pack_init(&call->pack, last ? smp_the_session.comm : NULL,
                  chain->place.reply_to, call->unpack);
    chain->done = at + 1;
    call->pack.graph = (chain->flags & SMP_FLAG_GRAPH) != 0;
    call->pack.parts = last ? SMP_PACK_WHOLE : SMP_PACK_DESCRIBED;
    for (Py_ssize_t i = 0; last && before != NULL && i < PyList_GET_SIZE(before); i++) {
        if (smp_pack_bytes(&call->pack, TAG_BYTES, PyList_GET_ITEM(before, i)) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; last && i < at; i++) {
        PyObject *described = smp_pack_as_bytes(&chain->calls[i].pack);
        int       failed =
            described == NULL || smp_pack_bytes(&call->pack, TAG_BYTES, described) < 0;

        Py_XDECREF(described);
        if (failed) {
            return -1;
        }
    }
    if (smp_pack_value(&call->pack, value) < 0 ||
        smp_object_changes_pack(&call->pack, call->unpack, entry) < 0 ||
        smp_warn_of_hooks(call->unpack, &call->pack, entry) < 0) {
        return -1;
    }
    return smp_session_warn_if_laden(call->pack.laden, entry);
}

/* Keeps the graph of all calls, and their outputs for placeholders with a use; makes
 * the next owner's request. */
static int
keep(smp_served_chain *chain, smp_context *context, uint64_t call, smp_pass *pass)
{
    PyObject *outputs = PyList_New(0);
    int       failed = outputs == NULL;

    context->entries = chain->entries;
    context->nentries = chain->n;
    context->entry_now = chain->entries[chain->n - 1];
    chain->entries = NULL;

    context->held = PyList_New(0);
    failed = failed || context->held == NULL;
    for (size_t i = 0; !failed && i < chain->n; i++) {
        const smp_pack *pack = &chain->calls[i].pack;
        PyObject       *list = PyList_New((Py_ssize_t)pack->ntensors);

        failed = list == NULL || smp_pack_add_in_graph(pack, outputs) < 0;
        for (size_t j = 0; !failed && j < pack->ntensors; j++) {
            PyList_SET_ITEM(list, (Py_ssize_t)j, Py_NewRef(pack->tensors[j]));
        }
        failed = failed || ((i + 1 < chain->n || chain->rest > 0) &&
                            PyList_Append(context->held, list) < 0);
        Py_XDECREF(list);
    }
    failed = failed ||
             (chain->rest > 0 &&
              smp_pass_begin(pass, chain, chain->calls[0].unpack, outputs) < 0) ||
             smp_pass_note(context, chain) < 0 ||
             smp_context_keep(context, outputs, call) < 0;
    Py_XDECREF(outputs);
    return failed ? -1 : 0;
}

/* The last effect first. */
static int
undo_effects(smp_task *task)
{
    Py_ssize_t n = task->undo == NULL ? 0 : PyList_GET_SIZE(task->undo);
    int        failed = 0;

    while (failed == 0 && n-- > 0) {
        PyObject *done = PyObject_CallNoArgs(PyList_GET_ITEM(task->undo, n));

        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    Py_CLEAR(task->undo);
    return failed;
}

/* Takes the exception of call `at`: the caller makes all calls itself, and may get it
 * from there.  call: the request's. */
static bool
answer_undone(size_t at, const smp_served_chain *chain, smp_task *task, uint64_t call,
              smp_envelope *envelope)
{
    const smp_place *place = &chain->place;
    smp_pack         pack;
    bool             sent;

    if (!smp_session_may_answer()) {
        return false;
    }
    PyErr_Clear();
    if (undo_effects(task) < 0 || !smp_context_release(call)) {
        return false;
    }
    envelope->flags |= SMP_FLAG_RESET;
    smp_pack_init(&pack, smp_the_session.comm, place->reply_to, NULL);
    sent = smp_pack_u32(&pack, place->first + (uint32_t)at) == 0 &&
           smp_pack_u32(&pack, chain->nests) == 0 &&
           smp_pack_u32(&pack, place->stretch) == 0 &&
           smp_pack_send(&pack, envelope) == 0;
    smp_pack_fini(&pack);
    return sent;
}

static void
free_calls(smp_served_chain *chain)
{
    for (size_t i = 0; i < chain->n; i++) {
        smp_served_call *call = &chain->calls[i];

        if (i < chain->done) {
            smp_pack_fini(&call->pack);
        }
        if (i > 0) {
            smp_unpack_fini(&call->own);
        }
        free(call->versions);
        free(call->from);
    }
    free(chain->calls);
    free(chain->entries);
    smp_place_fini(&chain->place);
}

/* Reads the request up to its further calls, and makes room for this owner's.  An
 * exception that is set stays. */
static int
read_chain(smp_served_chain *chain, smp_unpack *first, uint64_t call)
{
    PyObject *type;
    PyObject *error;
    PyObject *traceback;
    PyObject *past;
    uint32_t  count = 0;
    uint32_t  here = 0;
    int       failed;

    PyErr_Fetch(&type, &error, &traceback);
    past = smp_unpack_value(first);
    failed = past == NULL ||
             smp_place_read(&chain->place, first, chain->source, call) < 0 ||
             smp_unpack_u32(first, &count) < 0 || smp_unpack_u32(first, &here) < 0;
    Py_XDECREF(past); /* the request has the tensors */
    if (!failed && (count > SMP_CHAIN_MOST || here > count ||
                    (count > here) != (chain->place.several &&
                                       PyTuple_GET_SIZE(chain->place.calls) > 0))) {
        failed = smp_malformed("a chain of %u calls", (unsigned)count) < 0;
    }
    if (!failed) {
        chain->n = here + 1;
        chain->rest = count - here;
        chain->calls = calloc(chain->n, sizeof(*chain->calls));
        chain->entries = calloc(chain->n, sizeof(*chain->entries));
        if (chain->calls == NULL || chain->entries == NULL) {
            chain->n = 0;
            PyErr_NoMemory();
            failed = 1;
        }
    }
    if (failed) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        return -1;
    }
    PyErr_Restore(type, error, traceback);
    chain->calls[0].unpack = first;
    return 0;
}

/* Prepares the next call: *head.  0, or -1 with an exception. */
static int
prepare(smp_served_chain *chain, smp_unpack *first, smp_context *context, size_t at,
        smp_chain_head *head)
{
    if (read_call(first, context, chain->calls, at, head) < 0 ||
        check_order(chain, head, at) < 0 ||
        (!(chain->flags & SMP_FLAG_GRAPH) &&
         smp_gradients_suspect(chain->task->microbatch, head->entry) < 0)) {
        return -1;
    }
    chain->entries[at] = head->entry;
    return 0;
}

enum { GO_ON, UNDO, FAIL };

/* Whether the calls up to `at` went well on all tp_ranks, and the next may run there.
 * good: how much of it this rank says: 2, 1 (the next may not), or 0.  raised: the
 * module has, in this call.
 *
 * Returns  GO_ON; UNDO, or FAIL for the step, with an exception. */
static int
all_go_on(const smp_served_chain *chain, size_t *at, int good, bool raised)
{
    const smp_ballot ballot = {.call = chain->place.agreed,
                               .subject = SMP_BALLOT_SERVED |
                                          (uint32_t)(chain->place.first + *at),
                               .entry = chain->task->entry};
    bool             complete = true;
    int              outcome = good;
    PyObject        *type;
    PyObject        *error;
    PyObject        *traceback;

    PyErr_Fetch(&type, &error, &traceback);
    if (chain->place.agreed != 0) {
        outcome = smp_session_agree(&ballot, (const uint32_t[]){1, 1}, (size_t)good,
                                    good < 2 ? &complete : NULL);
    }
    if (outcome < 0 || (outcome < 2 && type == NULL)) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        if (outcome >= 0) {
            PyErr_SetString(PyExc_RuntimeError,
                            "smp: another tp_rank has undone a chain of calls");
        }
    } else {
        PyErr_Restore(type, error, traceback);
    }
    *at += outcome > 0;
    /* The others wait in collectives of a call that has raised here. */
    return outcome == 2 ? GO_ON : raised && !complete ? FAIL : UNDO;
}

/* Runs this owner's calls.  value: the first one's, taken; NULL with an exception.  at:
 * the number of calls that went well.  As all_go_on(). */
static int
run_calls(smp_served_chain *chain, smp_unpack *first, PyObject *value,
          smp_context *context, smp_chain_head *head, smp_task *task, uint64_t call,
          smp_pass *pass, size_t *at)
{
    for (;;) {
        const bool last = *at + 1 == chain->n;
        const bool raised = value == NULL && !task->refused;
        int        good = 0;
        int        next;

        if (value != NULL && pack_outputs(chain, *at, value,
                                          &smp_the_session.entries[head->entry]) == 0) {
            good = 1 + (last ? smp_placeholders_fetch(task->placeholders) == 0 &&
                                   keep(chain, context, call, pass) == 0
                             : prepare(chain, first, context, *at + 1, head) == 0);
        }
        Py_XDECREF(value);
        next = all_go_on(chain, at, good, raised);
        if (last || next != GO_ON) {
            return next;
        }
        value = run_call(chain, head, chain->calls[*at].unpack, task);
    }
}

bool
smp_serve_chain(smp_unpack *first, PyObject *value, smp_context *context,
                smp_envelope *envelope, int source, smp_task *task)
{
    smp_served_chain chain = {.flags = envelope->flags,
                              .source = source,
                              .task = task,
                              .count = envelope->about};
    smp_chain_head   head = {.entry = envelope->entry};
    smp_envelope     response;
    smp_pass         pass = {0};
    size_t           at = 0;
    bool             sent = false;
    int              end;

    if (read_chain(&chain, first, envelope->call) < 0) {
        free_calls(&chain);
        return false;
    }
    chain.entries[0] = head.entry;
    context->count = task->count;
    end = run_calls(&chain, first, unless_refused(task, Py_XNewRef(value)), context,
                    &head, task, envelope->call, &pass, &at);
    envelope->about = task->count;
    response = *envelope;
    response.kind = SMP_MSG_RESPONSE;
    response.call = chain.place.reply;
    if (end == FAIL) {
        sent = false;
    } else if (end == UNDO) {
        sent = answer_undone(at, &chain, task, envelope->call, &response);
        envelope->flags = response.flags;
    } else if (chain.rest > 0) {
        sent = smp_pass_send(&pass, &chain, context, envelope) == 0;
    } else {
        size_t ninputs;

        response.seed = chain.place.several
                            ? smp_pass_unreached(&chain, context, &ninputs)
                            : context->unreached;
        sent = smp_pack_send(&chain.calls[chain.n - 1].pack, &response) == 0;
    }
    smp_pass_fini(&pass);
    free_calls(&chain);
    return sent;
}

PyObject *
smp_serve_chain_refuse(smp_task *task)
{
    task->refused = true;
    raise_refused();
    return NULL;
}

/* refuse_foreseen(undo): an exception in a call of a chain: it may run again.  A call
 * with collectives goes on instead, since the other tp_ranks come to them; then undo()
 * ends its effects. */
static PyObject *
py_refuse_foreseen(PyObject *unused, PyObject *undo)
{
    smp_task *task = smp_this_task;

    (void)unused;
    if (task == NULL || !task->foreseen) {
        Py_RETURN_NONE;
    }
    if (!smp_the_session.entries[task->entry].collective) {
        return smp_serve_chain_refuse(task);
    }
    task->refused = true;
    if ((task->undo == NULL && (task->undo = PyList_New(0)) == NULL) ||
        PyList_Append(task->undo, undo) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The outputs at the places, (number of a call, number of its tensor), as a list (new).
 */
static PyObject *
held_at(const smp_context *context, PyObject *places)
{
    PyObject *values = PyList_New(0);

    if (context->held == NULL || !PyList_Check(places)) {
        Py_XDECREF(values);
        (void)smp_malformed("a request for outputs that none has kept");
        return NULL;
    }
    for (Py_ssize_t i = 0; values != NULL && i < PyList_GET_SIZE(places); i++) {
        unsigned  call;
        unsigned  number;
        PyObject *list = NULL;
        PyObject *tensor = NULL;

        if (PyArg_ParseTuple(PyList_GET_ITEM(places, i), "II", &call, &number)) {
            list = PyList_GetItem(context->held, (Py_ssize_t)call);
        }
        if (list != NULL) {
            tensor = PyList_GetItem(list, (Py_ssize_t)number);
        }
        if (tensor == NULL || PyList_Append(values, tensor) < 0) {
            Py_CLEAR(values);
        }
    }
    return values;
}

bool
smp_serve_fetch(smp_message *request)
{
    smp_envelope envelope = *smp_message_envelope(request);
    const int    source = request->source;
    smp_unpack   unpack;
    smp_pack     pack;
    PyObject    *places = NULL;
    PyObject    *values = NULL;
    bool         sent = false;
    smp_context *context = smp_context_find(envelope.about);

    smp_pack_init(&pack, smp_the_session.comm, source, NULL);
    pack.graph = false;
    if (smp_unpack_init(&unpack, smp_the_session.comm, request, NULL, false, false) ==
            0 &&
        context != NULL && (places = smp_unpack_value(&unpack)) != NULL &&
        (values = held_at(context, places)) != NULL) {
        envelope.kind = SMP_MSG_RESPONSE;
        sent =
            smp_pack_value(&pack, values) == 0 && smp_pack_send(&pack, &envelope) == 0;
    }
    Py_XDECREF(places);
    Py_XDECREF(values);
    smp_pack_fini(&pack);
    smp_unpack_fini(&unpack);
    return sent;
}

static PyMethodDef functions[] = {
    {"refuse_foreseen", py_refuse_foreseen, METH_O,
     "refuse_foreseen(undo): raises in a call of a chain, or keeps undo() for its end"},
    {NULL, NULL, 0, NULL},
};

int
smp_serve_chain_add(PyObject *module)
{
    name_register_prehook = PyUnicode_InternFromString("register_prehook");
    return name_register_prehook == NULL ? -1
                                         : PyModule_AddFunctions(module, functions);
}
