/* The links from call to call, and the replay of a chain. */
#include "python/modules/chain.h"

#include <stdlib.h>
#include <string.h>

#include "common/mix.h"
#include "python/modules/object_changes.h"
#include "python/modules/streams.h"
#include "python/modules/wait.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_value.h"
#include "python/values/ptrmap.h"
#include "python/values/registry.h"
#include "python/values/tensor.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

/* A link is looked for in so many calls, and given up after so many misses. */
enum { MOST_TRIES = 4, MOST_MISSES = 2 };

/* A call, as another one's follower.  Never changed: a replay may hold a former one. */
typedef struct smp_follower {
    int               refs;
    int32_t           entry;
    uint32_t          before;
    smp_buffer        values;  /* its arguments, keyword arguments and state */
    smp_chain_source *sources; /* owned */
    size_t            nsources;
} smp_follower;

/* From a call to its follower. */
typedef struct smp_link {
    smp_follower *next; /* owned; NULL: none known */
    int           tries;
    int           misses;
} smp_link;

/* The last call of a task, for its successor to learn from. */
typedef struct smp_trail {
    smp_link  *link;
    int        owner;
    bool       grad;
    PyObject **tensors;  /* owned: of its request, then its outputs */
    long      *versions; /* owned */
    size_t     narguments;
    size_t     n;
    long       sequence; /* autograd's, at its end */
} smp_trail;

/* One further call of a chain. */
typedef struct {
    smp_link     *link; /* of the call before it */
    smp_follower *call; /* owned */
    uint64_t      seed;
    PyObject    **tensors; /* owned: the expected arguments */
    long         *versions;
    bool          shares; /* arguments with grad of the request: see make_follower() */
} foreseen;

typedef struct smp_chain {
    bool        grad;
    size_t      n;         /* further calls */
    size_t      at;        /* the next one, from 0 */
    foreseen   *next;      /* owned */
    long        sequence;  /* autograd's, at the end of the call before it */
    PyObject   *node;      /* owned: Recv's; NULL: no graph */
    smp_unpack *described; /* owned: outputs of all calls but the last */
    smp_unpack  last;
} smp_chain;

static smp_ptrmap links_by_key;
static smp_link **links; /* owned, by number */
static size_t     nlinks;
static size_t     link_room;

static PyObject *name_origin;
static PyObject *name_retains;

/* ------------------------------------------------------------------------ the links */

/* A call is known by its caller's entry, its own, the count of such calls before, and
 * grad mode. */
static const void *
key_of(int32_t caller, int32_t entry, uint32_t before, bool grad)
{
    const uint64_t places = ((uint64_t)(uint32_t)caller << 32) | (uint32_t)entry;

    return (const void *)(uintptr_t)(smp_mix(smp_mix(places, before), grad) +
                                     1); /* never NULL */
}

/* NULL: the call has none. */
static smp_link *
find_link(const void *key)
{
    uint32_t number;

    if (links_by_key.slots == NULL || !smp_ptrmap_get(&links_by_key, key, &number)) {
        return NULL;
    }
    return links[number];
}

/* Made when new; NULL with an exception. */
static smp_link *
link_of(const void *key)
{
    smp_link *link = find_link(key);

    if (link != NULL) {
        return link;
    }
    if (links_by_key.slots == NULL) {
        smp_ptrmap_init(&links_by_key);
    }
    if (smp_array_reserve(&links, nlinks, &link_room) < 0) {
        return NULL;
    }
    link = calloc(1, sizeof(*link));
    if (link == NULL || !smp_ptrmap_add(&links_by_key, key, (uint32_t)nlinks)) {
        free(link);
        PyErr_NoMemory();
        return NULL;
    }
    links[nlinks++] = link;
    return link;
}

static void
let_go(smp_follower *call)
{
    if (call != NULL && --call->refs == 0) {
        free(call->values.at);
        free(call->sources);
        free(call);
    }
}

/* The follower was none; for_good: none will be looked for. */
static void
unlink_next(smp_link *link, bool for_good)
{
    let_go(link->next);
    link->next = NULL;
    link->misses = 0;
    link->tries = for_good ? MOST_TRIES : link->tries + 1;
}

static void
miss(smp_link *link)
{
    if (++link->misses >= MOST_MISSES) {
        unlink_next(link, false);
    }
}

void
smp_chain_forget(void)
{
    for (size_t i = 0; i < nlinks; i++) {
        let_go(links[i]->next);
        free(links[i]);
    }
    free(links);
    links = NULL;
    nlinks = 0;
    link_room = 0;
    if (links_by_key.slots != NULL) {
        smp_ptrmap_fini(&links_by_key);
        links_by_key = (smp_ptrmap){0};
    }
}

/* --------------------------------------------------------------------- the learning */

static void
free_trail(smp_trail *trail)
{
    if (trail != NULL) {
        for (size_t i = 0; i < trail->n; i++) {
            Py_DECREF(trail->tensors[i]);
        }
        free(trail->tensors);
        free(trail->versions);
        free(trail);
    }
}

/* The tensor's count of changes; -1: unknown, since it is one of inference mode. */
static long
version_of(PyObject *tensor)
{
    const long version = smp_tensor_version(tensor);

    PyErr_Clear();
    return version;
}

/* Where the tensor comes from: an argument or an output of the trail's call, unchanged
 * since.  False: from elsewhere. */
static bool
find_source(const smp_trail *trail, PyObject *tensor, smp_chain_source *source)
{
    for (size_t i = 0; i < trail->n; i++) {
        if (trail->tensors[i] == tensor) {
            const bool   output = i >= trail->narguments;
            const size_t number = output ? i - trail->narguments : i;

            *source = (smp_chain_source)(number << 1 | output);
            return trail->versions[i] >= 0 && version_of(tensor) == trail->versions[i];
        }
    }
    return false;
}

/* The count of nodes made by autograd on this thread; -1 with an exception. */
static long
sequence_now(void)
{
    PyObject *number = PyObject_CallNoArgs(smp_torch.sequence);
    long      now = number == NULL ? -1 : PyLong_AsLong(number);

    Py_XDECREF(number);
    return now;
}

/* NULL without an exception: the call does not follow from the trail's alone.  The
 * gradients of both calls for one argument are terms of the caller's sum: between them
 * comes none from a use by the caller, so it makes no node of its own there. */
static smp_follower *
make_follower(const smp_trail *trail, const smp_call_site *site, const smp_pack *pack)
{
    smp_follower *call;

    if (!site->chains || site->grad != trail->grad || pack->laden != NULL ||
        smp_the_session.entries[site->entry].owner != trail->owner) {
        return NULL;
    }
    call = calloc(1, sizeof(*call));
    if (call == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *call = (smp_follower){.refs = 1, .entry = site->entry, .before = site->before};
    call->sources = malloc((pack->ntensors + 1) * sizeof(*call->sources));
    if (call->sources == NULL) {
        PyErr_NoMemory();
        goto none;
    }
    for (; call->nsources < pack->ntensors; call->nsources++) {
        smp_chain_source *source = &call->sources[call->nsources];

        if (!find_source(trail, pack->tensors[call->nsources], source) ||
            ((*source & 1) == 0 && pack->in_graph[call->nsources] &&
             sequence_now() != trail->sequence)) {
            goto none;
        }
    }
    if (smp_buffer_put(&call->values, pack->values.at, pack->values.size) < 0 ||
        (site->state == NULL &&
         smp_buffer_put(&call->values, &(uint8_t){TAG_NONE}, 1) < 0)) {
        goto none;
    }
    return call;
none:
    let_go(call);
    return NULL;
}

int
smp_chain_called(smp_task *task, const smp_call_site *site, const smp_pack *pack)
{
    smp_trail *trail = task->trail;

    if (trail == NULL) {
        return 0;
    }
    task->trail = NULL;
    if (trail->link->next == NULL) { /* no other microbatch was sooner */
        trail->link->next = make_follower(trail, site, pack);
        trail->link->tries++;
    }
    free_trail(trail);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

int
smp_chain_returned(smp_task *task, const smp_call_site *site, const smp_pack *pack,
                   const smp_unpack *outputs)
{
    const void *key = key_of(task->entry, site->entry, site->before, site->grad);
    smp_link   *link;
    smp_trail  *trail;

    if (!site->chains || pack->laden != NULL) {
        return 0;
    }
    link = link_of(key);
    if (link == NULL) {
        return -1;
    }
    if (link->next != NULL || link->tries >= MOST_TRIES) {
        return 0;
    }
    trail = calloc(1, sizeof(*trail));
    if (trail == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *trail = (smp_trail){.link = link,
                         .owner = smp_the_session.entries[site->entry].owner,
                         .grad = site->grad,
                         .narguments = pack->ntensors,
                         .sequence = sequence_now()};
    trail->tensors =
        malloc((pack->ntensors + outputs->ntensors + 1) * sizeof(PyObject *));
    trail->versions =
        malloc((pack->ntensors + outputs->ntensors + 1) * sizeof(*trail->versions));
    if (trail->tensors == NULL || trail->versions == NULL) {
        PyErr_NoMemory();
    }
    if (PyErr_Occurred() != NULL) {
        free_trail(trail);
        return -1;
    }
    while (trail->n < pack->ntensors + outputs->ntensors) {
        PyObject *tensor = trail->n < pack->ntensors
                               ? pack->tensors[trail->n]
                               : outputs->tensors[trail->n - pack->ntensors];

        trail->versions[trail->n] = version_of(tensor);
        trail->tensors[trail->n++] = Py_NewRef(tensor);
    }
    free_trail(task->trail);
    task->trail = trail;
    return 0;
}

/* --------------------------------------------------------------------- the request */

int
smp_call_draw(smp_call_site *site)
{
    if (!site->drawn && smp_stream_draw(&site->seed) < 0) {
        return -1;
    }
    site->drawn = true;
    return 0;
}

int
smp_chain_foresee(smp_task *task, smp_call_site *site, smp_chain_plan *plan)
{
    const void *key = key_of(task->entry, site->entry, site->before, site->grad);

    plan->n = 0;
    if (!site->chains) {
        return 0;
    }
    while (plan->n < SMP_CHAIN_MOST) {
        smp_link *link = find_link(key);

        if (link == NULL || link->next == NULL ||
            !smp_the_session.entries[link->next->entry].chains ||
            smp_the_session.entries[link->next->entry].nests) {
            break;
        }
        plan->calls[plan->n] = link->next;
        link->next->refs++;
        plan->links[plan->n++] = link;
        key = key_of(task->entry, link->next->entry, link->next->before, site->grad);
    }
    if (plan->n == 0) {
        return 0;
    }
    return smp_call_draw(site) < 0 ? -1 : smp_stream_foresee(plan->seeds, plan->n);
}

bool
smp_chain_trains(const smp_chain_plan *plan)
{
    for (size_t i = 0; i < plan->n; i++) {
        if (smp_the_session.entries[plan->calls[i]->entry].trains) {
            return true;
        }
    }
    return false;
}

void
smp_chain_let_go(smp_chain_plan *plan)
{
    while (plan->n > 0) {
        let_go(plan->calls[--plan->n]);
    }
}

int
smp_chain_pack(smp_pack *pack, const smp_task *task, const smp_chain_plan *plan)
{
    int failed = smp_pack_u32(pack, (uint32_t)plan->n);

    for (size_t i = 0; failed == 0 && i < plan->n; i++) {
        const smp_follower  *call = plan->calls[i];
        const smp_chain_head head = {
            .seed = plan->seeds[i],
            .number = smp_call_of(task->number, (uint64_t)call->entry, call->before,
                                  task->phase),
            .entry = call->entry,
            .nsources = (uint32_t)call->nsources,
        };

        failed = smp_pack_sized(pack, TAG_BYTES, &head, sizeof(head)) < 0 ||
                         smp_pack_sized(pack, TAG_BYTES, call->values.at,
                                        call->values.size) < 0 ||
                         smp_pack_sized(pack, TAG_BYTES, call->sources,
                                        call->nsources * sizeof(*call->sources)) < 0
                     ? -1
                     : 0;
    }
    return failed;
}

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
        }
        free(next->tensors);
        free(next->versions);
        let_go(next->call);
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

/* Puts Recv's outputs, from `*at`, in the place of these tensors. */
static int
exchange(smp_unpack *unpack, PyObject *outputs, Py_ssize_t *at)
{
    Py_ssize_t n = 0;
    PyObject  *its;

    for (size_t i = 0; i < unpack->ntensors; i++) {
        n += unpack->requires_grad[i];
    }
    its = PyTuple_GetSlice(outputs, *at, *at + n);
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

/* The request's tensors with requires_grad, of each call in turn (new). */
static PyObject *
inputs_of(smp_chain *chain, const smp_pack *pack)
{
    PyObject *inputs = PyList_New(0);
    size_t    most = pack->ntensors;
    int32_t
        *former; /* by tensor of the former call: its number in the request, or -1 */
    int32_t *its;
    int      failed = inputs == NULL ? -1 : smp_pack_add_in_graph(pack, inputs);

    for (size_t i = 0; i < chain->n; i++) {
        most =
            chain->next[i].call->nsources > most ? chain->next[i].call->nsources : most;
    }
    former = malloc((most + 1) * sizeof(*former));
    its = malloc((most + 1) * sizeof(*its));
    if (former == NULL || its == NULL) {
        PyErr_NoMemory();
        failed = -1;
    }
    for (size_t j = 0; failed == 0 && j < pack->ntensors; j++) {
        former[j] = (int32_t)j;
    }
    for (size_t i = 0; failed == 0 && i < chain->n; i++) {
        foreseen           *next = &chain->next[i];
        const smp_follower *call = next->call;
        int32_t            *swap;

        for (size_t j = 0; failed == 0 && j < call->nsources; j++) {
            const smp_chain_source source = call->sources[j];

            its[j] = source & 1 ? -1 : former[source >> 1];
            if (its[j] >= 0 && pack->in_graph[its[j]]) {
                next->shares = true;
                failed = PyList_Append(inputs, pack->tensors[its[j]]);
            }
        }
        swap = former;
        former = its;
        its = swap;
    }
    free(former);
    free(its);
    if (failed < 0) {
        Py_CLEAR(inputs);
    }
    return inputs;
}

/* Makes the caller's half of the graph, for the outputs of all calls. */
static int
make_graph(smp_chain *chain, smp_call_object *call, const smp_pack *pack,
           uint64_t unreached)
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
    if (PyList_GET_SIZE(call->outputs) == 0) {
        return 0;
    }
    inputs = inputs_of(chain, pack);
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
                         PyObject_SetAttr(tensor, name_origin, origin) < 0 ||
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

/* The tensors that each call will have as arguments. */
static int
expect_arguments(smp_chain *chain, const smp_pack *pack)
{
    PyObject *const *former = pack->tensors;
    size_t           nformer = pack->ntensors;

    for (size_t i = 0; i < chain->n; i++) {
        foreseen         *next = &chain->next[i];
        const smp_unpack *outputs = &chain->described[i];

        next->tensors = calloc(next->call->nsources + 1, sizeof(PyObject *));
        next->versions = malloc((next->call->nsources + 1) * sizeof(*next->versions));
        if (next->tensors == NULL || next->versions == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (size_t j = 0; j < next->call->nsources; j++) {
            const smp_chain_source source = next->call->sources[j];
            const size_t           number = source >> 1;

            if (number >= (source & 1 ? outputs->ntensors : nformer)) {
                return smp_malformed("a chain with fewer outputs than before");
            }
            next->tensors[j] =
                Py_NewRef(source & 1 ? outputs->tensors[number] : former[number]);
            next->versions[j] = version_of(next->tensors[j]);
        }
        former = next->tensors;
        nformer = next->call->nsources;
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
    chain->grad = site->grad;
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
    if (read_described(chain) < 0 || make_graph(chain, call, pack, unreached) < 0 ||
        label(chain, call, task) < 0 || expect_arguments(chain, pack) < 0 ||
        (chain->sequence = sequence_now()) < 0) {
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

/* Whether nothing has happened to the tensor since the chain began; -1 with an
 * exception. */
static int
is_untouched(const smp_chain *chain, PyObject *tensor, long version)
{
    PyObject *found;
    bool      same;

    if (version < 0 || version_of(tensor) != version) {
        return 0;
    }
    if (!smp_is_placeholder(tensor)) {
        return 1;
    }
    found = PyObject_GetAttr(tensor, smp_names._backward_hooks);
    same = found == Py_None;
    Py_XDECREF(found);
    if (!same) {
        return found == NULL ? -1 : 0;
    }
    found = PyObject_GetAttr(tensor, smp_names.grad_fn);
    same = found == Py_None || found == chain->node;
    Py_XDECREF(found);
    if (!same) {
        return found == NULL ? -1 : 0;
    }
    found = PyObject_GetAttr(tensor, name_retains);
    same = found == Py_False;
    Py_XDECREF(found);
    return found == NULL ? -1 : same;
}

/* Whether the packed arguments are the foreseen ones; -1 with an exception. */
static int
are_foreseen(const smp_chain *chain, const foreseen *next, const smp_pack *pack)
{
    const smp_follower *call = next->call;

    if (pack->ntensors != call->nsources || pack->values.size != call->values.size ||
        memcmp(pack->values.at, call->values.at, call->values.size) != 0) {
        return 0;
    }
    for (size_t i = 0; i < pack->ntensors; i++) {
        int same = pack->tensors[i] == next->tensors[i];

        if (same) {
            same = is_untouched(chain, pack->tensors[i], next->versions[i]);
        }
        if (same != 1) {
            return same;
        }
    }
    return 1;
}

int
smp_chain_replay(smp_task *task, smp_call_site *site, PyObject **value)
{
    smp_chain      *chain = task->chain;
    const foreseen *next;
    smp_unpack     *outputs;
    smp_pack        pack;
    int             same = 0;

    if (chain == NULL) {
        return 0;
    }
    next = &chain->next[chain->at];
    smp_pack_init(&pack, NULL, 0, NULL);
    pack.parts = SMP_PACK_NUMBERED;
    pack.graph = false;
    if (site->chains && site->entry == next->call->entry &&
        site->before == next->call->before && site->grad == chain->grad &&
        (!next->shares || sequence_now() == chain->sequence)) {
        same = smp_call_draw(site);
    }
    if (same == 0 && site->drawn && site->seed == next->seed) {
        same = smp_pack_value(&pack, site->args) < 0 ||
                       smp_pack_value(&pack, site->kwargs == NULL ? Py_None
                                                                  : site->kwargs) < 0 ||
                       smp_pack_value(&pack,
                                      site->state == NULL ? Py_None : site->state) < 0
                   ? -1
                   : are_foreseen(chain, next, &pack);
    }
    if (same < 0) {
        PyErr_Clear(); /* the call itself raises it, with its name */
        same = 0;
    }
    if (same == 0) {
        miss(next->link);
        free_chain(chain);
        task->chain = NULL;
        smp_pack_fini(&pack);
        return 0;
    }
    chain->at++;
    outputs = chain->at < chain->n ? &chain->described[chain->at] : &chain->last;
    *value = read_outputs(outputs, &pack);
    if (chain->at == chain->n) {
        task->chain = NULL;
        if (*value != NULL && smp_chain_returned(task, site, &pack, outputs) < 0) {
            Py_CLEAR(*value);
        }
        free_chain(chain);
    }
    smp_pack_fini(&pack);
    return *value == NULL ? -1 : 1;
}

int
smp_chain_undone(const smp_call_site *site, const smp_chain_plan *plan,
                 smp_message *response)
{
    smp_unpack unpack;
    uint32_t   at;
    uint32_t   nests;
    int failed = smp_unpack_init(&unpack, smp_the_session.comm, response, NULL, false,
                                 false) < 0 ||
                 smp_unpack_u32(&unpack, &at) < 0 ||
                 smp_unpack_u32(&unpack, &nests) < 0;

    smp_unpack_fini(&unpack);
    if (failed) {
        return -1;
    }
    if (at > plan->n) {
        at = (uint32_t)plan->n;
    }
    if (nests) {
        const int32_t entry = at == 0 ? site->entry : plan->calls[at - 1]->entry;

        smp_the_session.entries[entry].nests = true;
    }
    unlink_next(plan->links[at == 0 ? 0 : at - 1], true);
    return 0;
}

void
smp_chain_leave(smp_task *task)
{
    if (task->chain != NULL) {
        miss(task->chain->next[task->chain->at].link);
        free_chain(task->chain);
        task->chain = NULL;
    }
    if (task->trail != NULL) {
        task->trail->link->tries++;
        free_trail(task->trail);
        task->trail = NULL;
    }
}

/* --------------------------------------------------------------------- the fetching */

/* Asks the owner for outputs of the call's chain. */
static smp_message *
ask_for(const smp_call_object *call, PyObject *places)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = {.kind = SMP_MSG_FORWARD,
                             .phase = (uint8_t)smp_this_task->phase,
                             .flags = SMP_FLAG_FETCH,
                             .microbatch = call->microbatch,
                             .step = session->step,
                             .entry = call->entry,
                             .call = smp_server_next_call(session->server),
                             .about = call->call};
    smp_pack     pack;
    int          failed;

    smp_pack_init(&pack, session->comm, smp_session_rank_of_comm(call->owner), NULL);
    failed = smp_pack_value(&pack, places) < 0 || smp_pack_send(&pack, &envelope) < 0;
    smp_pack_fini(&pack);
    return failed ? NULL
                  : smp_session_wait(envelope.call, SMP_WAIT_OUTPUTS, call->entry);
}

/* fetch_outputs(call, places) -> list of values of outputs of a chain. */
static PyObject *
py_fetch_outputs(PyObject *unused, PyObject *args)
{
    smp_call_object *call;
    PyObject        *places;
    smp_message     *response;
    smp_unpack       unpack;
    PyObject        *values = NULL;

    (void)unused;
    if (!PyArg_ParseTuple(args, "OO!", &call, &PyList_Type, &places)) {
        return NULL;
    }
    if (smp_this_task == NULL || !call->open || !smp_call_is_of_this_step(call)) {
        PyErr_Format(
            PyExc_RuntimeError,
            "smp: an output of module '%U' on pp_rank %d is read for the first "
            "time by a thread of the script, or after its step; read it in the "
            "function with @smp.step",
            call->path, call->owner);
        return NULL;
    }
    response = ask_for(call, places);
    if (response == NULL) {
        return NULL;
    }
    if (smp_unpack_init(&unpack, smp_the_session.comm, response, NULL, false, false) ==
        0) {
        values = smp_unpack_value(&unpack);
    }
    smp_unpack_fini(&unpack);
    return values;
}

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

/* touch_output(tensor, call, link): the caller uses an output of a chain.  From the
 * next step on the chain ends at its call.  In this one the calls after it that have
 * the tensor are made singly: autograd adds up gradients in the order of uses. */
static PyObject *
py_touch_output(PyObject *unused, PyObject *args)
{
    smp_task          *task = smp_this_task;
    PyObject          *tensor;
    smp_call_object   *call;
    unsigned long long link;

    (void)unused;
    if (!PyArg_ParseTuple(args, "OOK", &tensor, &call, &link)) {
        return NULL;
    }
    if (task == NULL || !smp_call_is_of_this_step(call)) {
        Py_RETURN_NONE;
    }
    unlink_next((smp_link *)(uintptr_t)link, true);
    if (task->chain != NULL && is_expected(task->chain, tensor)) {
        free_chain(task->chain);
        task->chain = NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"touch_output", py_touch_output, METH_VARARGS,
     "touch_output(tensor, call, link): the caller uses an output of a chain"},
    {"fetch_outputs", py_fetch_outputs, METH_VARARGS,
     "fetch_outputs(call, [(number of the call, number of its tensor)...]) -> tensors"},
    {NULL, NULL, 0, NULL},
};

int
smp_chain_add(PyObject *module)
{
    name_origin = PyUnicode_InternFromString("_smp_origin");
    name_retains = PyUnicode_InternFromString("retains_grad");
    if (name_origin == NULL || name_retains == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
