/* A chain's response, as calls to be made. */
#include "python/modules/foreseen.h"

#include <stdlib.h>

#include "python/modules/object_changes.h"
#include "python/modules/session.h"
#include "python/values/registry.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

void
smp_chain_free(smp_chain *chain)
{
    if (chain == NULL) {
        return;
    }
    for (size_t i = 0; chain->next != NULL && i < chain->n; i++) {
        smp_foreseen *next = &chain->next[i];

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
        smp_foreseen *next = &chain->next[i];
        const size_t  n = next->call->nsources;

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
    smp_foreseen  *next = &chain->next[call];
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
        smp_foreseen *next = &chain->next[i];

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

PyObject *
smp_chain_read_outputs(smp_unpack *outputs, const smp_pack *pack)
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
        smp_foreseen *next = &chain->next[chain->n];

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
    value = smp_chain_read_outputs(&chain->described[0], pack);
    if (value == NULL) {
        goto fail;
    }
    task->chain = chain;
    return value;
fail:
    smp_chain_free(chain);
    return NULL;
}
