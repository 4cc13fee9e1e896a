/* The replay of a chain. */
#include "python/modules/chain.h"

#include <stdlib.h>
#include <string.h>

#include "python/modules/misses.h"
#include "python/modules/object_changes.h"
#include "python/modules/placeholders.h"
#include "python/modules/wait.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_value.h"
#include "python/values/registry.h"
#include "python/values/tensor.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

/* One further call of a chain. */
typedef struct {
    smp_link     *link; /* of the call before it */
    smp_follower *call; /* owned */
    uint64_t      seed;
    PyObject    **tensors; /* owned: the expected arguments */
    PyObject    **nodes; /* owned: grad_fn of placeholders among them, of other chains;
                            NULL: this chain's node, or none */
    long *versions;
    int  *grads;  /* owned: whether each requires grad */
    bool  shares; /* arguments with grad of the request: see links.c */
} foreseen;

typedef struct smp_chain {
    uint32_t    modes;     /* its calls' */
    uint64_t    agreed;    /* smp_chain_plan's */
    size_t      n;         /* further calls */
    size_t      at;        /* the next one, from 0 */
    foreseen   *next;      /* owned */
    long        sequence;  /* autograd's, at the end of the call before it */
    PyObject   *node;      /* owned: Recv's; NULL: no graph */
    smp_unpack *described; /* owned: outputs of all calls but the last */
    smp_unpack  last;
} smp_chain;

static PyObject *name_retains;
static PyObject *name_of;
static PyObject *name_given_to;

/* ---------------------------------------------------------------------- the replay */

static void
free_chain(smp_chain *chain)
{
    if (chain == NULL) {
        return;
    }
    for (size_t i = 0; chain->next != NULL && i < chain->n; i++) {
        foreseen *next = &chain->next[i];

        for (size_t j = 0; next->tensors != NULL && j < next->call->nsources; j++) {
            Py_XDECREF(next->tensors[j]);
            Py_XDECREF(next->nodes == NULL ? NULL : next->nodes[j]);
        }
        free(next->tensors);
        free(next->nodes);
        free(next->versions);
        free(next->grads);
        smp_follower_let_go(next->call);
    }
    for (size_t i = 0; chain->described != NULL && i < chain->n; i++) {
        smp_unpack_fini(&chain->described[i]);
    }
    smp_unpack_fini(&chain->last);
    Py_XDECREF(chain->node);
    free(chain->next);
    free(chain->described);
    free(chain);
}

/* Reads the descriptions of all outputs but the last call's. */
static int
read_described(smp_chain *chain)
{
    for (size_t i = 0; i < chain->n; i++) {
        const char *bytes;
        uint32_t    nbytes;

        if (smp_unpack_raw(&chain->last, 1) == NULL ||
            (bytes = smp_unpack_sized(&chain->last, &nbytes)) == NULL ||
            smp_unpack_init_described(&chain->described[i], bytes, nbytes) < 0) {
            return -1;
        }
    }
    return 0;
}

static size_t
count_in_graph(const smp_unpack *unpack)
{
    size_t n = 0;

    for (size_t i = 0; i < unpack->ntensors; i++) {
        n += unpack->requires_grad[i];
    }
    return n;
}

/* Puts Recv's outputs, from `*at`, in the place of these tensors. */
static int
exchange(smp_unpack *unpack, PyObject *outputs, Py_ssize_t *at)
{
    const Py_ssize_t n = (Py_ssize_t)count_in_graph(unpack);
    PyObject        *its = PyTuple_GetSlice(outputs, *at, *at + n);
    if (its == NULL) {
        return -1;
    }
    smp_unpack_exchange(unpack, its);
    Py_DECREF(its);
    *at += n;
    return 0;
}

static int
add_in_graph(PyObject *list, const smp_unpack *unpack)
{
    PyObject *its = smp_unpack_in_graph(unpack);
    int       failed = its == NULL || PyList_SetSlice(list, PyList_GET_SIZE(list),
                                                      PyList_GET_SIZE(list), its);

    Py_XDECREF(its);
    return failed ? -1 : 0;
}

/* The numbers in the request of a call's tensors, -1 for others: its (owned by the
 * list), of the calls before it. */
static int
number_in_request(int32_t **its, size_t at, const smp_chain_source *sources, size_t n)
{
    its[at] = malloc((n + 1) * sizeof(**its));
    if (its[at] == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t j = 0; j < n; j++) {
        const size_t   number = smp_chain_number(sources[j]);
        const unsigned back = smp_chain_back(sources[j]);

        its[at][j] = smp_chain_is_output(sources[j]) ? -1
                     : back == SMP_CHAIN_OF_REQUEST  ? (int32_t)number
                                                     : its[at - 1 - back][number];
    }
    return 0;
}

/* The request's tensors with requires_grad, of each call in turn (new). */
static PyObject *
inputs_of(smp_chain *chain, const smp_chain_plan *plan, const smp_pack *pack)
{
    PyObject *inputs = PyList_New(0);
    int32_t **its = calloc(chain->n + 1, sizeof(*its)); /* by call, by tensor */
    int       failed = inputs == NULL ? -1 : smp_pack_add_in_graph(pack, inputs);

    if (its == NULL ||
        (its[0] = malloc((pack->ntensors + 1) * sizeof(**its))) == NULL) {
        PyErr_NoMemory();
        failed = -1;
    }
    for (size_t j = 0; failed == 0 && j < pack->ntensors; j++) {
        its[0][j] = (int32_t)j;
    }
    for (size_t i = 0; failed == 0 && i < chain->n; i++) {
        foreseen    *next = &chain->next[i];
        const size_t n = next->call->nsources;

        failed = number_in_request(its, i + 1, plan->sources[i], n);
        for (size_t j = 0; failed == 0 && j < n; j++) {
            const int32_t number = its[i + 1][j];

            if (number >= 0 && pack->in_graph[number]) {
                next->shares = true;
                failed = PyList_Append(inputs, pack->tensors[number]);
            }
        }
    }
    for (size_t i = 0; its != NULL && i <= chain->n; i++) {
        free(its[i]);
    }
    free(its);
    if (failed < 0) {
        Py_CLEAR(inputs);
    }
    return inputs;
}

/* The outputs in the graph of each owner's calls, where there are several. */
static void
count_outputs(const smp_chain *chain, smp_call_object *call)
{
    size_t at = 0;

    for (size_t i = 0; i <= chain->n && call->nstretches > 0; i++) {
        if (at + 1 < call->nstretches && call->stretches[at + 1].first == i) {
            at++;
        }
        call->stretches[at].noutputs +=
            count_in_graph(i < chain->n ? &chain->described[i] : &chain->last);
    }
}

/* Makes the caller's half of the graph, for the outputs of all calls. */
static int
make_graph(smp_chain *chain, const smp_chain_plan *plan, smp_call_object *call,
           const smp_pack *pack, uint64_t unreached)
{
    PyObject  *inputs;
    PyObject  *outputs;
    Py_ssize_t at = 0;
    int        failed = 0;

    call->outputs = PyList_New(0);
    if (call->outputs == NULL) {
        return -1;
    }
    for (size_t i = 0; i < chain->n; i++) {
        if (add_in_graph(call->outputs, &chain->described[i]) < 0) {
            return -1;
        }
    }
    if (add_in_graph(call->outputs, &chain->last) < 0) {
        return -1;
    }
    count_outputs(chain, call);
    if (PyList_GET_SIZE(call->outputs) == 0) {
        return 0;
    }
    inputs = inputs_of(chain, plan, pack);
    outputs = inputs == NULL ? NULL : smp_nodes_apply(call, inputs, unreached, true);
    Py_XDECREF(inputs);
    if (outputs == NULL) {
        return -1;
    }
    for (size_t i = 0; failed == 0 && i < chain->n; i++) {
        failed = exchange(&chain->described[i], outputs, &at);
    }
    failed = failed == 0 ? exchange(&chain->last, outputs, &at) : failed;
    chain->node = PyObject_GetAttr(PyTuple_GET_ITEM(outputs, 0), smp_names.grad_fn);
    Py_DECREF(outputs);
    return chain->node == NULL ? -1 : failed;
}

/* Tells each placeholder where its values are: (call, (number of the call in the chain,
 * number among its tensors), link). */
static int
label(smp_chain *chain, smp_call_object *call, smp_task *task)
{
    if ((task->placeholders == NULL && (task->placeholders = PyList_New(0)) == NULL) ||
        (call->placeholders = PyList_New(0)) == NULL) {
        return -1;
    }
    for (size_t i = 0; i < chain->n; i++) {
        const smp_unpack *unpack = &chain->described[i];

        for (size_t j = 0; j < unpack->ntensors; j++) {
            PyObject *tensor = unpack->tensors[j];
            PyObject *origin =
                Py_BuildValue("O(nn)K", call, (Py_ssize_t)i, (Py_ssize_t)j,
                              (unsigned long long)(uintptr_t)chain->next[i].link);
            PyObject *weak = origin == NULL ? NULL : PyWeakref_NewRef(tensor, NULL);
            int       failed = weak == NULL ||
                         PyObject_SetAttr(tensor, smp_names.origin, origin) < 0 ||
                         PyList_Append(task->placeholders, weak) < 0 ||
                         PyList_Append(call->placeholders, weak) < 0;

            Py_XDECREF(origin);
            Py_XDECREF(weak);
            if (failed) {
                return -1;
            }
        }
    }
    return 0;
}

/* An argument of a chain's call (borrowed): of the request, of an earlier call, or of
 * the outputs of the former one.  NULL: there is no such tensor. */
static PyObject *
find_argument(const smp_chain *chain, size_t call, smp_chain_source source,
              const smp_pack *pack)
{
    const size_t      number = smp_chain_number(source);
    const unsigned    back = smp_chain_back(source);
    const smp_unpack *outputs = &chain->described[call];
    PyObject *const  *tensors = pack->tensors;
    size_t            n = pack->ntensors;

    if (smp_chain_is_output(source)) {
        tensors = outputs->tensors;
        n = outputs->ntensors;
    } else if (back < call) {
        tensors = chain->next[call - 1 - back].tensors;
        n = chain->next[call - 1 - back].call->nsources;
    }
    return number < n ? tensors[number] : NULL;
}

/* Notes the node of an argument that is an output of a chain before this one. */
static int
expect_node(const smp_chain *chain, size_t call, size_t at, smp_chain_source source)
{
    foreseen      *next = &chain->next[call];
    const unsigned back = smp_chain_back(source);

    if (smp_chain_is_output(source)) {
        return 0;
    }
    if (back < call) { /* an argument of a call of the chain, too */
        next->nodes[at] =
            Py_XNewRef(chain->next[call - 1 - back].nodes[smp_chain_number(source)]);
    } else if (smp_is_placeholder(next->tensors[at])) {
        next->nodes[at] = PyObject_GetAttr(next->tensors[at], smp_names.grad_fn);
        return next->nodes[at] == NULL ? -1 : 0;
    }
    return 0;
}

/* The tensors that each call will have as arguments. */
static int
expect_arguments(smp_chain *chain, const smp_chain_plan *plan, const smp_pack *pack)
{
    for (size_t i = 0; i < chain->n; i++) {
        foreseen *next = &chain->next[i];

        next->tensors = calloc(next->call->nsources + 1, sizeof(PyObject *));
        next->nodes = calloc(next->call->nsources + 1, sizeof(PyObject *));
        next->versions = malloc((next->call->nsources + 1) * sizeof(*next->versions));
        next->grads = malloc((next->call->nsources + 1) * sizeof(*next->grads));
        if (next->tensors == NULL || next->nodes == NULL || next->versions == NULL ||
            next->grads == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (size_t j = 0; j < next->call->nsources; j++) {
            PyObject *tensor = find_argument(chain, i, plan->sources[i][j], pack);

            if (tensor == NULL) {
                return smp_malformed("a chain with fewer outputs than before");
            }
            next->tensors[j] = Py_NewRef(tensor);
            next->versions[j] = smp_history_version(tensor);
            next->grads[j] = smp_attr_true(tensor, smp_names.requires_grad);
            if (next->grads[j] < 0 ||
                expect_node(chain, i, j, plan->sources[i][j]) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* The value of a call (new), and its changes of objects among its arguments. */
static PyObject *
read_outputs(smp_unpack *outputs, const smp_pack *pack)
{
    smp_arguments arguments = smp_pack_arguments(pack);
    PyObject     *value;

    outputs->request = &arguments;
    value = smp_unpack_value(outputs);
    if (value != NULL && smp_object_changes_apply(outputs, pack) < 0) {
        Py_CLEAR(value);
    }
    outputs->request = NULL;
    return value;
}

PyObject *
smp_chain_begin(smp_task *task, const smp_call_site *site, const smp_chain_plan *plan,
                smp_call_object *call, const smp_pack *pack, smp_message *response)
{
    const uint64_t unreached = smp_message_envelope(response)->seed;
    smp_chain     *chain = calloc(1, sizeof(*chain));
    PyObject      *value = NULL;

    if (chain == NULL) {
        smp_message_free(response);
        return PyErr_NoMemory();
    }
    chain->modes = site->modes;
    chain->agreed = plan->agreed;
    if (smp_unpack_init(&chain->last, smp_the_session.comm, response, NULL, false,
                        false) < 0) {
        goto fail;
    }
    chain->next = calloc(plan->n, sizeof(*chain->next));
    chain->described = calloc(plan->n, sizeof(*chain->described));
    if (chain->next == NULL || chain->described == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (; chain->n < plan->n; chain->n++) {
        foreseen *next = &chain->next[chain->n];

        next->link = plan->links[chain->n];
        next->call = plan->calls[chain->n];
        next->call->refs++;
        next->seed = plan->seeds[chain->n];
    }
    call->open = true;
    if (read_described(chain) < 0 ||
        make_graph(chain, plan, call, pack, unreached) < 0 ||
        label(chain, call, task) < 0 || expect_arguments(chain, plan, pack) < 0 ||
        (chain->sequence = smp_links_sequence()) < 0 ||
        smp_history_add(task, pack) < 0) {
        goto fail;
    }
    value = read_outputs(&chain->described[0], pack);
    if (value == NULL) {
        goto fail;
    }
    task->chain = chain;
    return value;
fail:
    free_chain(chain);
    return NULL;
}

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
is_untouched(const smp_chain *chain, const foreseen *next, size_t at)
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
are_foreseen(const smp_chain *chain, const foreseen *next, const smp_pack *pack,
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
is_foreseen(const smp_chain *chain, const foreseen *next, smp_call_site *site,
            smp_pack *pack, smp_miss *why)
{
    *why = SMP_MISS_MODULE;
    if (site->entry != next->call->entry || site->before != next->call->before) {
        return 0;
    }
    *why = SMP_MISS_MODES;
    if (!site->chains || site->modes != chain->modes) {
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
check_unchanged(const foreseen *next, const smp_pack *pack)
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
give_to(const foreseen *next, const smp_pack *pack)
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
    free_chain(chain);
    return failed;
}

int
smp_chain_replay(smp_task *task, smp_call_site *site, PyObject **value)
{
    smp_chain      *chain = task->chain;
    const foreseen *next;
    smp_unpack     *outputs;
    smp_pack        pack;
    smp_miss        why;
    bool            foreseen_here;
    int             same;

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
        smp_link_miss(next->link);
        free_chain(chain);
        task->chain = NULL;
        smp_pack_fini(&pack);
        return same;
    }
    chain->at++;
    outputs = chain->at < chain->n ? &chain->described[chain->at] : &chain->last;
    *value = read_outputs(outputs, &pack);
    if (chain->at == chain->n) {
        task->chain = NULL;
        if (*value != NULL && smp_links_returned(task, site, &pack, outputs) < 0) {
            Py_CLEAR(*value);
        }
        free_chain(chain);
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
