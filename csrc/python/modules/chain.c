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

/* The arguments of a call by the task. */
typedef struct {
    PyObject **weak;     /* owned, weak references, by number */
    long      *versions; /* owned */
    size_t     n;
    size_t     room;
} past_call;

/* The last calls of a task, whose arguments later ones may have again: masks, say. */
typedef struct smp_history {
    past_call calls[SMP_CHAIN_FARTHEST + 1]; /* by count, round and round */
    size_t    count;
} smp_history;

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

static void
forget_call(past_call *past)
{
    while (past->n > 0) {
        Py_DECREF(past->weak[--past->n]);
    }
}

static void
free_history(smp_history *history)
{
    for (size_t i = 0; history != NULL && i <= SMP_CHAIN_FARTHEST; i++) {
        forget_call(&history->calls[i]);
        free(history->calls[i].weak);
        free(history->calls[i].versions);
    }
    free(history);
}

/* The arguments of the call so many before the last one; NULL: none is known. */
static past_call *
past_at(smp_history *history, size_t back)
{
    if (history == NULL || back > SMP_CHAIN_FARTHEST || back >= history->count) {
        return NULL;
    }
    return &history->calls[(history->count - 1 - back) % (SMP_CHAIN_FARTHEST + 1)];
}

/* The call is over.  0, or -1 with an exception. */
static int
remember_call(smp_task *task, const smp_pack *pack)
{
    past_call *past;

    if (task->history == NULL) {
        task->history = calloc(1, sizeof(*task->history));
    }
    if (task->history == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    task->history->count++;
    past = past_at(task->history, 0);
    forget_call(past);
    if (pack->ntensors > past->room) {
        PyObject **weak = realloc(past->weak, pack->ntensors * sizeof(*weak));
        long      *versions;

        past->weak = weak == NULL ? past->weak : weak;
        versions = realloc(past->versions, pack->ntensors * sizeof(*versions));
        past->versions = versions == NULL ? past->versions : versions;
        if (weak == NULL || versions == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        past->room = pack->ntensors;
    }
    while (past->n < pack->ntensors) {
        PyObject *weak = PyWeakref_NewRef(pack->tensors[past->n], NULL);

        if (weak == NULL) {
            return -1;
        }
        past->versions[past->n] = version_of(pack->tensors[past->n]);
        past->weak[past->n++] = weak;
    }
    return 0;
}

/* An argument of an earlier call (borrowed); NULL: it is gone, or has changed. */
static PyObject *
past_tensor(const past_call *past, size_t number)
{
    PyObject *tensor;

    if (past == NULL || number >= past->n) {
        return NULL;
    }
    tensor = PyWeakref_GET_OBJECT(past->weak[number]);
    if (tensor == Py_None || past->versions[number] < 0 ||
        version_of(tensor) != past->versions[number]) {
        return NULL;
    }
    return tensor;
}

/* The same for a call of a plan, whose source is before the chain: see chain.h. */
static PyObject *
past_source(const smp_task *task, size_t call, smp_chain_source source)
{
    const unsigned back = smp_chain_back(source);

    return back <= call ? NULL
                        : past_tensor(past_at(task->history, back - call - 1),
                                      smp_chain_number(source));
}

/* Where the tensor comes from, unchanged since: an argument or an output of the trail's
 * call, or an argument of an earlier one.  False: from elsewhere. */
static bool
find_source(const smp_trail *trail, smp_history *history, PyObject *tensor,
            smp_chain_source *source)
{
    for (size_t i = 0; i < trail->n; i++) {
        if (trail->tensors[i] == tensor) {
            const bool   output = i >= trail->narguments;
            const size_t number = output ? i - trail->narguments : i;

            *source = smp_chain_source_of(0, number, output);
            return trail->versions[i] >= 0 && version_of(tensor) == trail->versions[i];
        }
    }
    for (size_t back = 1; back <= SMP_CHAIN_FARTHEST; back++) {
        const past_call *past = past_at(history, back);

        for (size_t i = 0; past != NULL && i < past->n; i++) {
            if (past_tensor(past, i) == tensor) {
                *source = smp_chain_source_of((unsigned)back, i, false);
                return true;
            }
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

/* Whether a call may have this argument in a chain.  The gradients of both calls for
 * one argument are terms of the caller's sum: between them comes none from a use by the
 * caller, so it makes no node of its own there. */
static bool
may_share(const smp_trail *trail, smp_chain_source source, bool in_graph)
{
    return !in_graph || smp_chain_is_output(source) ||
           (smp_chain_back(source) == 0 && sequence_now() == trail->sequence);
}

/* NULL without an exception: the call does not follow from earlier ones alone. */
static smp_follower *
make_follower(const smp_trail *trail, smp_history *history, const smp_call_site *site,
              const smp_pack *pack)
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

        if (!find_source(trail, history, pack->tensors[call->nsources], source) ||
            !may_share(trail, *source, pack->in_graph[call->nsources])) {
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
        trail->link->next = make_follower(trail, task->history, site, pack);
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
    if (link == NULL || remember_call(task, pack) < 0) {
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

/* Its first calls alone are left. */
static void
cut_plan(smp_chain_plan *plan, size_t n)
{
    while (plan->n > n) {
        let_go(plan->calls[--plan->n]);
        free(plan->sources[plan->n]);
        plan->sources[plan->n] = NULL;
    }
}

/* Ends the plan before a call with an argument of a call before the chain, where that
 * is gone, or in the graph. */
static void
end_where_unknown(const smp_task *task, smp_chain_plan *plan)
{
    for (size_t i = 0; i < plan->n; i++) {
        const smp_follower *call = plan->calls[i];

        for (size_t j = 0; j < call->nsources; j++) {
            PyObject *tensor;

            if (smp_chain_back(call->sources[j]) <= i) {
                continue;
            }
            tensor = past_source(task, i, call->sources[j]);
            if (tensor == NULL || smp_attr_true(tensor, smp_names.requires_grad) != 0) {
                PyErr_Clear();
                cut_plan(plan, i);
                return;
            }
        }
    }
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
        plan->sources[plan->n] = NULL;
        link->next->refs++;
        plan->links[plan->n++] = link;
        key = key_of(task->entry, link->next->entry, link->next->before, site->grad);
    }
    end_where_unknown(task, plan);
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
    cut_plan(plan, 0);
}

/* Appends the arguments of calls before the chain, and finds all sources in the
 * request.
 */
static int
pack_past(smp_pack *pack, const smp_task *task, smp_chain_plan *plan)
{
    PyObject *past = PyList_New(0);
    int       failed = past == NULL ? -1 : 0;

    for (size_t i = 0; failed == 0 && i < plan->n; i++) {
        const smp_follower *call = plan->calls[i];

        plan->sources[i] = malloc((call->nsources + 1) * sizeof(**plan->sources));
        if (plan->sources[i] == NULL) {
            PyErr_NoMemory();
            failed = -1;
        }
        for (size_t j = 0; failed == 0 && j < call->nsources; j++) {
            PyObject *tensor = past_source(task, i, call->sources[j]);

            plan->sources[i][j] = call->sources[j];
            failed = tensor == NULL ? 0 : PyList_Append(past, tensor);
        }
    }
    failed = failed == 0 ? smp_pack_value(pack, past) : failed;
    for (size_t i = 0; failed == 0 && i < plan->n; i++) {
        for (size_t j = 0; j < plan->calls[i]->nsources; j++) {
            const PyObject *tensor = past_source(task, i, plan->sources[i][j]);

            for (size_t k = 0; tensor != NULL && k < pack->ntensors; k++) {
                if (pack->tensors[k] == tensor) {
                    plan->sources[i][j] =
                        smp_chain_source_of(SMP_CHAIN_OF_REQUEST, k, false);
                    tensor = NULL;
                }
            }
        }
    }
    Py_XDECREF(past);
    return failed;
}

int
smp_chain_pack(smp_pack *pack, const smp_task *task, smp_chain_plan *plan)
{
    int failed =
        pack_past(pack, task, plan) < 0 || smp_pack_u32(pack, (uint32_t)plan->n) < 0
            ? -1
            : 0;

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
                         smp_pack_sized(pack, TAG_BYTES, plan->sources[i],
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

/* The tensors that each call will have as arguments. */
static int
expect_arguments(smp_chain *chain, const smp_chain_plan *plan, const smp_pack *pack)
{
    for (size_t i = 0; i < chain->n; i++) {
        foreseen *next = &chain->next[i];

        next->tensors = calloc(next->call->nsources + 1, sizeof(PyObject *));
        next->versions = malloc((next->call->nsources + 1) * sizeof(*next->versions));
        if (next->tensors == NULL || next->versions == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (size_t j = 0; j < next->call->nsources; j++) {
            PyObject *tensor = find_argument(chain, i, plan->sources[i][j], pack);

            if (tensor == NULL) {
                return smp_malformed("a chain with fewer outputs than before");
            }
            next->tensors[j] = Py_NewRef(tensor);
            next->versions[j] = version_of(tensor);
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
    if (read_described(chain) < 0 ||
        make_graph(chain, plan, call, pack, unreached) < 0 ||
        label(chain, call, task) < 0 || expect_arguments(chain, plan, pack) < 0 ||
        (chain->sequence = sequence_now()) < 0 || remember_call(task, pack) < 0) {
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
    } else if (*value != NULL && remember_call(task, &pack) < 0) {
        Py_CLEAR(*value);
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
    free_history(task->history);
    task->history = NULL;
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
