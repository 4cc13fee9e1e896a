#include "python/modules/links.h"

#include <stdlib.h>
#include <string.h>

#include "common/mix.h"
#include "python/modules/placeholders.h"
#include "python/modules/session.h"
#include "python/values/ptrmap.h"
#include "python/values/registry.h"
#include "python/values/wire.h"

/* A link is looked for in so many calls, and given up after so many misses. */
enum { MOST_TRIES = 4, MOST_MISSES = 2 };

/* The last call of a task, for its successor to learn from. */
typedef struct smp_trail {
    smp_link  *link;
    uint32_t   modes;
    PyObject **tensors;  /* owned: of its request, then its outputs */
    long      *versions; /* owned */
    size_t     narguments;
    size_t     n;
    long       sequence; /* autograd's, at its end */
} smp_trail;

static smp_ptrmap links_by_key;
static smp_link **links; /* owned, by number */
static size_t     nlinks;
static size_t     link_room;

/* A call is known by its caller's entry, its own, the count of such calls before, and
 * modes. */
static const void *
key_of(int32_t caller, int32_t entry, uint32_t before, uint32_t modes)
{
    const uint64_t places = ((uint64_t)(uint32_t)caller << 32) | (uint32_t)entry;

    return (const void *)(uintptr_t)(smp_mix(smp_mix(places, before), modes) +
                                     1); /* never NULL */
}

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
link_of(const smp_task *task, const smp_call_site *site)
{
    const void *key = key_of(task->entry, site->entry, site->before, site->modes);
    smp_link   *link = find_link(key);

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
    *link = (smp_link){.caller = task->entry,
                       .entry = site->entry,
                       .before = site->before,
                       .modes = site->modes};
    links[nlinks++] = link;
    return link;
}

void
smp_follower_let_go(smp_follower *call)
{
    if (call != NULL && --call->refs == 0) {
        free(call->values.at);
        free(call->sources);
        free(call);
    }
}

void
smp_link_end(smp_link *link, bool for_good)
{
    smp_follower_let_go(link->next);
    link->next = NULL;
    link->misses = 0;
    link->tries = for_good ? MOST_TRIES : link->tries + 1;
}

void
smp_link_unlearn(smp_link *link, const smp_follower *call)
{
    if (link->next == call) {
        smp_follower_let_go(link->next);
        link->next = NULL;
        link->misses = 0;
    }
}

void
smp_link_miss(smp_link *link)
{
    if (++link->misses >= MOST_MISSES) {
        smp_link_end(link, false);
    }
}

/* Whether another call leads to the link's. */
static bool
is_followed(const smp_link *link)
{
    for (size_t i = 0; i < nlinks; i++) {
        const smp_follower *next = links[i]->next;

        if (next != NULL && links[i]->caller == link->caller &&
            links[i]->modes == link->modes && next->entry == link->entry &&
            next->before == link->before) {
            return true;
        }
    }
    return false;
}

/* (caller, [entry, ...]) (new), from the link on. */
static PyObject *
chain_from(const smp_link *link)
{
    const int32_t caller = link->caller;
    PyObject     *calls = PyList_New(0);
    PyObject     *entry = PyLong_FromLong(link->entry);
    int failed = calls == NULL || entry == NULL || PyList_Append(calls, entry) < 0;

    for (size_t i = 0; !failed && link != NULL && link->next != NULL && i < nlinks;
         i++) {
        Py_XSETREF(entry, PyLong_FromLong(link->next->entry));
        failed = entry == NULL || PyList_Append(calls, entry) < 0;
        link = find_link(
            key_of(link->caller, link->next->entry, link->next->before, link->modes));
    }
    Py_XDECREF(entry);
    if (failed) {
        Py_XDECREF(calls);
        return NULL;
    }
    return Py_BuildValue("(iN)", (int)caller, calls);
}

PyObject *
smp_links_as_chains(void)
{
    PyObject *chains = PyList_New(0);

    for (size_t i = 0; chains != NULL && i < nlinks; i++) {
        PyObject *chain;

        if (links[i]->next == NULL || is_followed(links[i])) {
            continue;
        }
        chain = chain_from(links[i]);
        if (chain == NULL || PyList_Append(chains, chain) < 0) {
            Py_CLEAR(chains);
        }
        Py_XDECREF(chain);
    }
    return chains;
}

void
smp_links_forget(void)
{
    for (size_t i = 0; i < nlinks; i++) {
        smp_follower_let_go(links[i]->next);
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

/* Where the tensor comes from, unchanged since: an argument or an output of the trail's
 * call, or an argument of an earlier one.  False: from elsewhere. */
static bool
find_source(const smp_trail *trail, const smp_task *task, PyObject *tensor,
            smp_chain_source *source)
{
    PyObject *whole;
    size_t    back;
    size_t    number;

    for (size_t i = 0; i < trail->n; i++) {
        if (trail->tensors[i] == tensor) {
            const bool output = i >= trail->narguments;

            number = output ? i - trail->narguments : i;
            *source = smp_chain_source_of(0, number, output);
            return trail->versions[i] >= 0 &&
                   smp_history_version(tensor) == trail->versions[i];
        }
    }
    whole = smp_aliased(tensor);
    for (size_t i = trail->narguments; whole != NULL && i < trail->n; i++) {
        if (trail->tensors[i] == whole) {
            *source = smp_chain_source_of(0, i - trail->narguments, true) |
                      (smp_chain_source)SMP_CHAIN_ALIAS;
            Py_DECREF(whole);
            return trail->versions[i] >= 0 &&
                   smp_history_version(tensor) == trail->versions[i];
        }
    }
    Py_XDECREF(whole);
    if (!smp_history_find(task, tensor, &back, &number)) {
        return false;
    }
    *source = smp_chain_source_of((unsigned)back, number, false);
    return true;
}

long
smp_links_sequence(void)
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
           (smp_chain_back(source) == 0 && smp_links_sequence() == trail->sequence);
}

static uint64_t
mix_bytes(uint64_t h, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i += sizeof(h)) {
        uint64_t word = 0;

        memcpy(&word, (const char *)bytes + i,
               n - i < sizeof(word) ? n - i : sizeof(word));
        h = smp_mix(h, word);
    }
    return h;
}

/* Alike on all tp_ranks with the same follower. */
static uint32_t
word_of(const smp_follower *call)
{
    uint64_t h = smp_mix(smp_mix((uint64_t)call->entry, call->before), call->flags);

    h = mix_bytes(smp_mix(h, call->values.size), call->values.at, call->values.size);
    return (uint32_t)mix_bytes(smp_mix(h, call->nsources), call->sources,
                               call->nsources * sizeof(*call->sources));
}

/* NULL without an exception: the call does not follow from earlier ones alone. */
static smp_follower *
make_follower(const smp_trail *trail, const smp_task *task, const smp_call_site *site,
              const smp_pack *pack)
{
    smp_follower *call;

    if (!site->chains || site->modes != trail->modes || pack->laden != NULL) {
        return NULL;
    }
    call = calloc(1, sizeof(*call));
    if (call == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *call = (smp_follower){
        .refs = 1, .entry = site->entry, .flags = site->flags, .before = site->before};
    call->sources = malloc((pack->ntensors + 1) * sizeof(*call->sources));
    if (call->sources == NULL) {
        PyErr_NoMemory();
        goto none;
    }
    for (; call->nsources < pack->ntensors; call->nsources++) {
        smp_chain_source *source = &call->sources[call->nsources];

        if (!find_source(trail, task, pack->tensors[call->nsources], source) ||
            !may_share(trail, *source, pack->in_graph[call->nsources])) {
            goto none;
        }
    }
    if (smp_buffer_put(&call->values, pack->values.at, pack->values.size) < 0 ||
        (site->state == NULL &&
         smp_buffer_put(&call->values, &(uint8_t){TAG_NONE}, 1) < 0)) {
        goto none;
    }
    call->word = word_of(call);
    return call;
none:
    smp_follower_let_go(call);
    return NULL;
}

int
smp_links_called(smp_task *task, const smp_call_site *site, const smp_pack *pack)
{
    smp_trail *trail = task->trail;

    if (trail == NULL) {
        return 0;
    }
    task->trail = NULL;
    if (trail->link->next == NULL) { /* no other microbatch was sooner */
        trail->link->next = make_follower(trail, task, site, pack);
        trail->link->tries += site->chains; /* a checkpoint may go again */
    }
    free_trail(trail);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

int
smp_links_returned(smp_task *task, const smp_call_site *site, const smp_pack *pack,
                   const smp_unpack *outputs)
{
    smp_link  *link;
    smp_trail *trail;

    if (!site->chains || pack->laden != NULL) {
        return 0;
    }
    link = link_of(task, site);
    if (link == NULL || smp_history_add(task, pack) < 0) {
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
                         .modes = site->modes,
                         .narguments = pack->ntensors,
                         .sequence = smp_links_sequence()};
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

        trail->versions[trail->n] = smp_history_version(tensor);
        trail->tensors[trail->n++] = Py_NewRef(tensor);
    }
    free_trail(task->trail);
    task->trail = trail;
    return 0;
}

smp_link *
smp_link_find(const smp_task *task, int32_t entry, uint32_t before, uint32_t modes)
{
    return find_link(key_of(task->entry, entry, before, modes));
}

void
smp_links_leave(smp_task *task)
{
    if (task->trail != NULL) {
        task->trail->link->tries++;
        free_trail(task->trail);
        task->trail = NULL;
    }
    smp_history_forget(task);
}
