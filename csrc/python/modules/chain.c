/* The replay of a chain. */
#include "python/modules/chain.h"

#include <stdlib.h>
#include <string.h>

#include "python/modules/foreseen.h"
#include "python/modules/misses.h"
#include "python/modules/placeholders.h"
#include "python/modules/wait.h"
#include "python/values/pack_value.h"
#include "python/values/registry.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"

static PyObject *name_retains;
static PyObject *name_of;
static PyObject *name_given_to;

/* Whether the attribute is that object; -1 with an exception. */
static int
is_at(PyObject *tensor, PyObject *name, const PyObject *what)
{
    PyObject *found = PyObject_GetAttr(tensor, name);

    Py_XDECREF(found);
    return found == NULL ? -1 : found == what;
}

/* Whether nothing has happened to the tensor since the chain began; -1 with an
 * exception. */
static int
is_untouched(const smp_chain *chain, const smp_foreseen *next, size_t at)
{
    PyObject       *tensor = next->tensors[at];
    const long      version = next->versions[at];
    const PyObject *node = next->nodes[at] == NULL ? chain->node : next->nodes[at];
    int             same;

    if (version < 0 || smp_history_version(tensor) != version) {
        return 0;
    }
    if (!smp_is_placeholder(tensor)) {
        return 1;
    }
    same = is_at(tensor, smp_names._backward_hooks, Py_None);
    if (same == 1) {
        same = is_at(tensor, smp_names.grad_fn, Py_None);
        same = same == 0 ? is_at(tensor, smp_names.grad_fn, node) : same;
    }
    return same == 1 ? is_at(tensor, name_retains, Py_False) : same;
}

/* Whether the tensor is an alias of the placeholder, and nothing has happened to it. */
static int
is_alias(PyObject *tensor, const PyObject *of, long version)
{
    PyObject *whole = smp_is_placeholder(tensor) ? smp_aliased(tensor) : NULL;
    const int same = whole == of;

    Py_XDECREF(whole);
    return same && smp_history_version(tensor) == version;
}

/* Whether the packed arguments are the foreseen ones; 0: *why not; -1 with an
 * exception. */
static int
are_foreseen(const smp_chain *chain, const smp_foreseen *next, const smp_pack *pack,
             smp_miss *why)
{
    const smp_follower *call = next->call;

    *why = SMP_MISS_VALUES;
    if (pack->ntensors != call->nsources || pack->values.size != call->values.size ||
        memcmp(pack->values.at, call->values.at, call->values.size) != 0) {
        return 0;
    }
    for (size_t i = 0; i < pack->ntensors; i++) {
        PyObject *given = pack->tensors[i];
        int       same = (call->sources[i] & SMP_CHAIN_ALIAS)
                             ? is_alias(given, next->tensors[i], next->versions[i])
                             : given == next->tensors[i];

        *why = SMP_MISS_TENSORS;
        if (same == 1) {
            *why = SMP_MISS_CHANGED;
            same = is_untouched(chain, next, i);
        }
        if (same == 1) { /* detach_() and requires_grad_() change no version */
            const int grad = smp_attr_true(given, smp_names.requires_grad);

            same = grad < 0 ? -1 : grad == next->grads[i];
        }
        if (same != 1) {
            return same;
        }
    }
    return 1;
}

/* Whether the call is the foreseen one, likewise.  pack: gets its arguments. */
static int
is_foreseen(const smp_chain *chain, const smp_foreseen *next, smp_call_site *site,
            smp_pack *pack, smp_miss *why)
{
    *why = SMP_MISS_MODULE;
    if (site->entry != next->call->entry || site->before != next->call->before) {
        return 0;
    }
    *why = SMP_MISS_MODES;
    if (!site->chains || site->modes != chain->modes ||
        site->flags != next->call->flags) {
        return 0;
    }
    *why = SMP_MISS_NODES;
    if (next->shares && smp_links_sequence() != chain->sequence) {
        return 0;
    }
    *why = SMP_MISS_DRAWN;
    if (smp_call_draw(site) < 0) {
        return -1;
    }
    if (site->seed != next->seed) {
        return 0;
    }
    if (smp_pack_value(pack, site->args) < 0 ||
        smp_pack_value(pack, site->kwargs == NULL ? Py_None : site->kwargs) < 0 ||
        smp_pack_value(pack, site->state == NULL ? Py_None : site->state) < 0) {
        return -1;
    }
    return are_foreseen(chain, next, pack, why);
}

/* Notes in the timeline that a foreseen call has been in vain. */
static void
note_miss(int32_t entry, smp_miss why)
{
    smp_server_note(smp_the_session.server, SMP_EVENT_MISS, entry, (int32_t)why);
}

/* Whether all tp_ranks make the next foreseen call, as this one does or does not;
 * without an agreement, whether this one does.  -1 with an exception. */
static int
all_make_it(const smp_chain *chain, int does)
{
    const smp_ballot ballot = {.call = chain->agreed,
                               .subject = SMP_BALLOT_MADE | (uint32_t)chain->at,
                               .entry = chain->next[chain->at].call->entry};

    return chain->agreed == 0
               ? does
               : smp_session_agree(&ballot, &(uint32_t){1}, does ? 1 : 0, NULL);
}

int
smp_chain_refuse_changed(const smp_entry *entry)
{
    PyErr_Format(
        PyExc_RuntimeError,
        "smp: another microbatch has changed an argument of module '%s' while the "
        "call was under way: give each microbatch a tensor of its own, or set "
        "'fast_mode': False",
        smp_entry_path(entry));
    return -1;
}

/* An exception if an argument has changed since the call was found as foreseen. */
static int
check_unchanged(const smp_foreseen *next, const smp_pack *pack)
{
    for (size_t i = 0; i < pack->ntensors; i++) {
        if (smp_history_version(pack->tensors[i]) != next->versions[i]) {
            return smp_chain_refuse_changed(
                &smp_the_session.entries[next->call->entry]);
        }
    }
    return 0;
}

/* Tells the arguments that are outputs of the chain the path of the call's module:
 * their gradients stay on its owner. */
static int
give_to(const smp_foreseen *next, const smp_pack *pack)
{
    PyObject *path = PyUnicode_FromString(
        smp_entry_path(&smp_the_session.entries[next->call->entry]));
    int failed = path == NULL ? -1 : 0;

    for (size_t i = 0; failed == 0 && i < pack->ntensors; i++) {
        PyObject *tensor = Py_NewRef(pack->tensors[i]);

        /* The gradient of another chain's output comes back to the caller. */
        while (failed == 0 && next->nodes[i] == NULL && smp_is_placeholder(tensor)) {
            PyObject *whole = PyObject_GetAttr(tensor, name_of);

            failed = whole == NULL ? -1 : PyObject_SetAttr(tensor, name_given_to, path);
            Py_SETREF(tensor, whole == NULL ? Py_NewRef(Py_None) : whole);
        }
        Py_DECREF(tensor);
    }
    Py_XDECREF(path);
    return failed;
}

/* This rank makes the next foreseen call by itself, or not at all. */
static int
drop(smp_task *task, smp_miss why)
{
    smp_chain *chain = task->chain;
    const int  failed = all_make_it(chain, false) < 0 ? -1 : 0;

    note_miss(chain->next[chain->at].call->entry, why);
    task->chain = NULL;
    smp_chain_free(chain);
    return failed;
}

int
smp_chain_replay(smp_task *task, smp_call_site *site, PyObject **value)
{
    smp_chain          *chain = task->chain;
    const smp_foreseen *next;
    smp_unpack         *outputs;
    smp_pack            pack;
    smp_miss            why;
    bool                foreseen_here;
    int                 same;

    if (chain == NULL) {
        return 0;
    }
    next = &chain->next[chain->at];
    smp_pack_init(&pack, NULL, 0, NULL);
    pack.parts = SMP_PACK_NUMBERED;
    pack.graph = false;
    same = is_foreseen(chain, next, site, &pack, &why);
    if (same < 0) {
        PyErr_Clear(); /* the call itself raises it, with its name */
        same = 0;
    }
    if (same == 1) {
        why = SMP_MISS_ELSEWHERE;
    }
    foreseen_here = same == 1;
    same = all_make_it(chain, same);
    if ((same == 0 && foreseen_here && check_unchanged(next, &pack) < 0) ||
        (same == 1 && site->grad && give_to(next, &pack) < 0)) {
        same = -1;
    }
    if (same <= 0) {
        note_miss(next->call->entry, why);
        if (why == SMP_MISS_MODES && site->flags != next->call->flags) {
            smp_link_unlearn(next->link, next->call);
        } else {
            smp_link_miss(next->link);
        }
        smp_chain_free(chain);
        task->chain = NULL;
        smp_pack_fini(&pack);
        return same;
    }
    chain->at++;
    outputs = chain->at < chain->n ? &chain->described[chain->at] : &chain->last;
    *value = smp_chain_read_outputs(outputs, &pack);
    if (chain->at == chain->n) {
        task->chain = NULL;
        if (*value != NULL && smp_links_returned(task, site, &pack, outputs) < 0) {
            Py_CLEAR(*value);
        }
        smp_chain_free(chain);
    } else if (*value != NULL && smp_history_add(task, &pack) < 0) {
        Py_CLEAR(*value);
    }
    smp_pack_fini(&pack);
    return *value == NULL ? -1 : 1;
}

int
smp_chain_undone(const smp_call_site *site, const smp_chain_plan *plan,
                 smp_call_object *call, smp_message *response)
{
    smp_unpack unpack;
    uint32_t   at;
    uint32_t   nests;
    uint32_t   stretch;
    int32_t    entry;
    int failed = smp_unpack_init(&unpack, smp_the_session.comm, response, NULL, false,
                                 false) < 0 ||
                 smp_unpack_u32(&unpack, &at) < 0 ||
                 smp_unpack_u32(&unpack, &nests) < 0 ||
                 smp_unpack_u32(&unpack, &stretch) < 0;

    smp_unpack_fini(&unpack);
    if (failed) {
        return -1;
    }
    if (at > plan->n) {
        at = (uint32_t)plan->n;
    }
    call->open = call->stretches != NULL; /* the owners before that one keep theirs */
    smp_call_release(call, stretch < call->nstretches ? stretch : 0);
    entry = at == 0 ? site->entry : plan->calls[at - 1]->entry;
    note_miss(entry, SMP_MISS_UNDONE);
    if (nests) {
        smp_the_session.entries[entry].nests = true;
    }
    smp_link_end(plan->links[at == 0 ? 0 : at - 1], true);
    return 0;
}

void
smp_chain_leave(smp_task *task)
{
    if (task->chain != NULL) {
        PyObject *type;
        PyObject *error;
        PyObject *traceback;

        smp_link_miss(task->chain->next[task->chain->at].link);
        PyErr_Fetch(&type, &error, &traceback);
        if (drop(task, SMP_MISS_END) < 0) {
            PyErr_Clear(); /* the step has failed */
        }
        PyErr_Restore(type, error, traceback);
    }
    smp_links_leave(task);
}

/* ------------------------------------------------------------------------ a touch */

/* Whether a foreseen call has the tensor as an argument. */
static bool
is_expected(const smp_chain *chain, const PyObject *tensor)
{
    for (size_t i = chain->at; i < chain->n; i++) {
        for (size_t j = 0; j < chain->next[i].call->nsources; j++) {
            if (chain->next[i].tensors[j] == tensor) {
                return true;
            }
        }
    }
    return false;
}

/* touch_output(tensor, call, link, used): the caller uses an output of a chain.  From
 * the next step on the chain ends at its call.  In this one the calls after it that
 * have the tensor are made singly: autograd adds up gradients in the order of uses.
 * Not used, but packed for a call of another rank's module before these: a miss. */
static PyObject *
py_touch_output(PyObject *unused, PyObject *args)
{
    smp_task          *task = smp_this_task;
    PyObject          *tensor;
    smp_call_object   *call;
    unsigned long long link;
    int                used;
    bool               expected;

    (void)unused;
    if (!PyArg_ParseTuple(args, "OOKp", &tensor, &call, &link, &used)) {
        return NULL;
    }
    if (task == NULL || !smp_call_is_of_this_step(call)) {
        Py_RETURN_NONE;
    }
    expected = task->chain != NULL && is_expected(task->chain, tensor);
    if (used) {
        smp_link_end((smp_link *)(uintptr_t)link, true);
    } else if (expected) {
        smp_link_miss((smp_link *)(uintptr_t)link);
    }
    if (expected && drop(task, SMP_MISS_USED) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* given(args, kwargs): the arguments of a model, in its step function. */
static PyObject *
py_given(PyObject *module, PyObject *args)
{
    PyObject *given;
    PyObject *kwargs;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &given, &PyDict_Type, &kwargs) ||
        (smp_this_task != NULL && smp_history_give(smp_this_task, given, kwargs) < 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* chains() -> [(caller, [entry, ...]), ...]: calls that follow one another, as learned.
 */
static PyObject *
py_chains(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return smp_links_as_chains();
}

static PyMethodDef functions[] = {
    {"chains", py_chains, METH_NOARGS, "chains() -> [(caller, [entry, ...]), ...]"},
    {"given", py_given, METH_VARARGS, "given(args, kwargs)"},
    {"touch_output", py_touch_output, METH_VARARGS,
     "touch_output(tensor, call, link, used): the caller uses an output of a chain"},
    {NULL, NULL, 0, NULL},
};

int
smp_chain_add(PyObject *module)
{
    name_retains = PyUnicode_InternFromString("retains_grad");
    name_of = PyUnicode_InternFromString("_smp_of");
    name_given_to = PyUnicode_InternFromString("_smp_given_to");
    if (name_retains == NULL || name_of == NULL || name_given_to == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
