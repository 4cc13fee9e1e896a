#include "python/modules/passing.h"

#include <stdlib.h>

#include "python/modules/reach.h"
#include "python/modules/session.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_tensor.h"
#include "python/values/pack_value.h"
#include "python/values/unpack_value.h"

/* ------------------------------------------------------------------------- places */

int
smp_place_pack(smp_pack *pack, const smp_stretch *stretches, size_t nstretches,
               uint64_t agreed)
{
    PyObject *calls;

    if (smp_pack_new_value(pack, PyLong_FromUnsignedLongLong(agreed)) < 0) {
        return -1;
    }
    if (nstretches == 0) {
        return smp_pack_value(pack, Py_None);
    }
    calls = PyTuple_New((Py_ssize_t)nstretches - 1);
    for (size_t i = 1; calls != NULL && i < nstretches; i++) {
        PyObject *call = PyLong_FromUnsignedLongLong(stretches[i].call);

        if (call == NULL) {
            Py_CLEAR(calls);
        } else {
            PyTuple_SET_ITEM(calls, (Py_ssize_t)i - 1, call);
        }
    }
    return calls == NULL
               ? -1
               : smp_pack_new_value(pack, Py_BuildValue("(IIiKKKiN[]OKn)", 0U, 0U, -1,
                                                        0ULL, 0ULL, 0ULL, -1, calls,
                                                        Py_None, 0ULL, (Py_ssize_t)0));
}

static int
read_number(smp_unpack *unpack, uint64_t *number)
{
    PyObject *value = smp_unpack_value(unpack);

    *number = value == NULL ? 0 : PyLong_AsUnsignedLongLong(value);
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

int
smp_place_read(smp_place *place, smp_unpack *unpack, int source, uint64_t call)
{
    PyObject          *value;
    unsigned           stretch;
    unsigned           first;
    int                reply_to;
    int                entry;
    unsigned long long numbers[4];
    Py_ssize_t         ninputs;
    PyObject          *calls;
    PyObject          *described;
    PyObject          *origins;

    *place = (smp_place){.reply_to = source, .reply = call};
    if (read_number(unpack, &place->agreed) < 0) {
        return -1;
    }
    value = smp_unpack_value(unpack);
    if (value == NULL || value == Py_None) {
        Py_XDECREF(value);
        return value == NULL ? -1 : 0;
    }
    if (!PyTuple_Check(value) ||
        !PyArg_ParseTuple(value, "IIiKKKiO!O!OKn", &stretch, &first, &reply_to,
                          &numbers[0], &numbers[1], &numbers[2], &entry, &PyTuple_Type,
                          &calls, &PyList_Type, &described, &origins, &numbers[3],
                          &ninputs)) {
        PyErr_Clear();
        Py_DECREF(value);
        return smp_malformed("a chain's place");
    }
    place->several = true;
    place->stretch = stretch;
    place->first = first;
    if (reply_to >= 0) {
        place->reply_to = reply_to;
        place->reply = numbers[0];
    }
    place->previous_call = numbers[1];
    place->previous_number = numbers[2];
    place->previous_entry = entry;
    place->unreached = numbers[3];
    place->ninputs = (size_t)ninputs;
    place->calls = Py_NewRef(calls);
    place->described = Py_NewRef(described);
    place->origins = origins == Py_None ? NULL : Py_NewRef(origins);
    Py_DECREF(value);
    return 0;
}

void
smp_place_fini(smp_place *place)
{
    Py_XDECREF(place->calls);
    Py_XDECREF(place->described);
    Py_XDECREF(place->origins);
}

/* The origin of a tensor of the request (borrowed); Py_None: the caller's. */
static PyObject *
origin_of(const smp_place *place, size_t number)
{
    if (place->origins == NULL || !PyList_Check(place->origins) ||
        number >= (size_t)PyList_GET_SIZE(place->origins)) {
        return Py_None;
    }
    return PyList_GET_ITEM(place->origins, (Py_ssize_t)number);
}

/* ------------------------------------------------------------------------ forward */

/* A tensor of the call number `at` of the chain, counted from this owner's first, if it
 * is here: `tensor` is NULL where a later owner has it.  -1 with an exception. */
static int
find_here(const smp_served_chain *chain, const smp_unpack *first, size_t at,
          smp_chain_source source, smp_argument *found)
{
    const size_t   number = smp_chain_number(source);
    const unsigned back = smp_chain_back(source);
    size_t         n;

    *found = (smp_argument){0};
    if (back == SMP_CHAIN_OF_REQUEST) {
        n = first->ntensors;
        if (number < n) {
            *found = (smp_argument){first->tensors[number], true, number};
        }
    } else if (smp_chain_is_output(source)) {
        if (at > chain->n) {
            return 0;
        }
        n = chain->calls[at - 1].pack.ntensors;
        if (number < n) {
            found->tensor = chain->calls[at - 1].pack.tensors[number];
        }
    } else {
        if (back >= at) {
            return smp_malformed("a chain's tensor from nowhere");
        }
        if (at - 1 - back >= chain->n) {
            return 0;
        }
        n = chain->calls[at - 1 - back].unpack->ntensors;
        if (number < n) {
            *found = smp_served_argument(&chain->calls[at - 1 - back], number);
        }
    }
    return number < n ? 0 : smp_malformed("a chain's tensor from nowhere");
}

/* Notes the origin of the pack's last tensor. */
static int
add_origin(smp_pass *pass, const smp_served_chain *chain, const smp_argument *tensor)
{
    Py_ssize_t number = 0;
    PyObject  *origin;
    int        failed;

    if (!pass->pack.in_graph[pass->pack.ntensors - 1]) {
        return PyList_Append(pass->origins, Py_None);
    }
    if (tensor->request) {
        return PyList_Append(pass->origins, origin_of(&chain->place, tensor->number));
    }
    while (number < PyList_GET_SIZE(pass->outputs) &&
           PyList_GET_ITEM(pass->outputs, number) != tensor->tensor) {
        number++;
    }
    if (number == PyList_GET_SIZE(pass->outputs)) {
        PyErr_SetString(PyExc_RuntimeError, "smp: a chain's output without an edge");
        return -1;
    }
    origin = Py_BuildValue("(In)", chain->place.stretch, number);
    failed = origin == NULL ? -1 : PyList_Append(pass->origins, origin);
    Py_XDECREF(origin);
    return failed;
}

/* The tensors of the next owner's first call, in its values' order. */
static int
pack_first(smp_pass *pass, const smp_served_chain *chain)
{
    const smp_written_call *call = &pass->calls[0];

    for (uint32_t i = 0; i < call->head.nsources; i++) {
        smp_argument tensor;

        if (find_here(chain, pass->first, chain->n, smp_written_source(call, i),
                      &tensor) < 0 ||
            smp_pack_new_tensor(&pass->pack, tensor.tensor) < 0 ||
            add_origin(pass, chain, &tensor) < 0) {
            return -1;
        }
        if (pass->pack.ntensors != i + 1) {
            PyErr_SetString(PyExc_RuntimeError,
                            "smp: two arguments of a chain's call are one tensor");
            return -1;
        }
    }
    pass->pack.values.size = 0; /* its own values have the numbers of its tensors */
    return smp_buffer_put(&pass->pack.values, call->values, call->nvalues);
}

/* Tensors that only later calls have; without grad, since the next owner has no call
 * for their gradients. */
static int
pack_later(smp_pass *pass, const smp_served_chain *chain)
{
    PyObject *later = PyList_New(0);
    int       failed = later == NULL ? -1 : 0;

    for (size_t i = 1; failed == 0 && i < chain->rest; i++) {
        const smp_written_call *call = &pass->calls[i];

        for (uint32_t j = 0; failed == 0 && j < call->head.nsources; j++) {
            smp_argument tensor;

            failed = find_here(chain, pass->first, chain->n + i,
                               smp_written_source(call, j), &tensor);
            if (failed == 0 && tensor.tensor != NULL) {
                failed = PyList_Append(later, tensor.tensor);
            }
        }
    }
    if (failed == 0) {
        const size_t before = pass->pack.ntensors;

        failed = smp_pack_value(&pass->pack, later);
        for (size_t i = before; failed == 0 && i < pass->pack.ntensors; i++) {
            if (pass->pack.in_graph[i]) {
                PyErr_SetString(PyExc_RuntimeError,
                                "smp: a later call of a chain needs a gradient of an "
                                "earlier one's argument");
                failed = -1;
            } else {
                failed = PyList_Append(pass->origins, Py_None);
            }
        }
    }
    Py_XDECREF(later);
    return failed;
}

static int
pack_call(smp_pass *pass, const smp_served_chain *chain, size_t i)
{
    const smp_written_call *call = &pass->calls[i];
    const size_t            n = call->head.nsources;
    smp_chain_source       *sources = malloc((n + 1) * sizeof(*sources));
    int                     failed = 0;

    if (sources == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t j = 0; failed == 0 && j < n; j++) {
        smp_argument tensor;

        sources[j] = smp_written_source(call, j);
        failed = find_here(chain, pass->first, chain->n + i, sources[j], &tensor);
        for (size_t k = 0; tensor.tensor != NULL && k < pass->pack.ntensors; k++) {
            if (pass->pack.tensors[k] == tensor.tensor) {
                sources[j] = smp_chain_source_of(SMP_CHAIN_OF_REQUEST, k, false);
                break;
            }
        }
    }
    failed = failed == 0 &&
                     smp_pack_sized(&pass->pack, TAG_BYTES, &call->head,
                                    sizeof(call->head)) == 0 &&
                     smp_pack_sized(&pass->pack, TAG_BYTES, call->values,
                                    call->nvalues) == 0 &&
                     smp_pack_sized(&pass->pack, TAG_BYTES, sources,
                                    n * sizeof(*sources)) == 0
                 ? 0
                 : -1;
    free(sources);
    return failed;
}

int
smp_pass_begin(smp_pass *pass, const smp_served_chain *chain, smp_unpack *first,
               PyObject *outputs)
{
    int owner;

    pass->first = first;
    pass->calls = calloc(chain->rest, sizeof(*pass->calls));
    pass->outputs = outputs;
    pass->origins = PyList_New(0);
    pass->described = PyList_GetSlice(chain->place.described, 0,
                                      PyList_GET_SIZE(chain->place.described));
    if (pass->calls == NULL) {
        PyErr_NoMemory();
    }
    if (pass->calls == NULL || pass->origins == NULL || pass->described == NULL) {
        return -1;
    }
    for (size_t i = 0; i < chain->rest; i++) {
        if (smp_served_read(first, &pass->calls[i]) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < chain->n; i++) {
        PyObject *bytes = smp_pack_as_bytes(&chain->calls[i].pack);
        int       failed = bytes == NULL || PyList_Append(pass->described, bytes) < 0;

        Py_XDECREF(bytes);
        if (failed) {
            return -1;
        }
    }
    owner = smp_the_session.entries[pass->calls[0].head.entry].owner;
    smp_pack_init(&pass->pack, smp_the_session.comm, smp_session_rank_of_comm(owner),
                  NULL);
    pass->pack.graph = (chain->flags & SMP_FLAG_GRAPH) != 0;
    return pack_first(pass, chain) < 0 || pack_later(pass, chain) < 0 ? -1 : 0;
}

int
smp_pass_send(smp_pass *pass, const smp_served_chain *chain, const smp_context *context,
              const smp_envelope *envelope)
{
    const smp_place      *place = &chain->place;
    const smp_chain_head *head = &pass->calls[0].head;
    const int             owner = smp_the_session.entries[head->entry].owner;
    smp_envelope          next = *envelope;
    PyObject             *calls = place->calls;
    size_t                ninputs;
    const uint64_t        unreached = smp_pass_unreached(chain, context, &ninputs);
    size_t                here = 0;
    int                   failed;

    while (here + 1 < chain->rest &&
           smp_the_session.entries[pass->calls[here + 1].head.entry].owner == owner) {
        here++;
    }
    next.kind = SMP_MSG_FORWARD;
    next.flags = smp_served_flags(envelope->flags, head);
    next.flags |=
        SMP_FLAG_PASSED | SMP_FLAG_STATE; /* a chain's values have one, or None */
    next.entry = head->entry;
    next.call = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(calls, 0));
    next.seed = head->seed;
    next.number = head->number;
    failed =
        smp_pack_new_value(&pass->pack, PyLong_FromUnsignedLongLong(place->agreed)) <
            0 ||
        smp_pack_new_value(
            &pass->pack,
            Py_BuildValue("(IIiKKKiNOOKn)", place->stretch + 1,
                          (unsigned)(place->first + chain->n), place->reply_to,
                          (unsigned long long)place->reply,
                          (unsigned long long)envelope->call,
                          (unsigned long long)envelope->number, (int)envelope->entry,
                          PyTuple_GetSlice(calls, 1, PyTuple_GET_SIZE(calls)),
                          pass->described, pass->origins, (unsigned long long)unreached,
                          (Py_ssize_t)ninputs)) < 0 ||
        smp_pack_u32(&pass->pack, (uint32_t)(chain->rest - 1)) < 0 ||
        smp_pack_u32(&pass->pack, (uint32_t)here) < 0;
    for (size_t i = 1; !failed && i < chain->rest; i++) {
        failed = pack_call(pass, chain, i) < 0;
    }
    if (failed) {
        return -1;
    }
    smp_server_note(smp_the_session.server, SMP_EVENT_PASS, head->entry, owner);
    return smp_pack_send(&pass->pack, &next);
}

void
smp_pass_fini(smp_pass *pass)
{
    smp_pack_fini(&pass->pack);
    free(pass->calls);
    Py_XDECREF(pass->origins);
    Py_XDECREF(pass->described);
}

/* The origins of Enter's inputs: of the first call's, then of each further one's. */
static int
add_origins(PyObject *list, const smp_served_chain *chain)
{
    const smp_unpack *first = chain->calls[0].unpack;

    for (size_t i = 0; i < first->ntensors; i++) {
        if (first->requires_grad[i] &&
            PyList_Append(list, origin_of(&chain->place, i)) < 0) {
            return -1;
        }
    }
    for (size_t i = 1; i < chain->n; i++) {
        const smp_served_call *call = &chain->calls[i];

        for (size_t j = 0; j < call->unpack->ntensors; j++) {
            const smp_argument *from = &call->from[j];
            int grad = smp_attr_true(from->tensor, smp_names.requires_grad);

            if (grad < 0 ||
                (grad && from->request &&
                 PyList_Append(list, origin_of(&chain->place, from->number)) < 0)) {
                return -1;
            }
        }
    }
    return 0;
}

int
smp_pass_note(smp_context *context, const smp_served_chain *chain)
{
    const smp_place *place = &chain->place;

    if (!place->several) {
        return 0;
    }
    context->origins = PyList_New(0);
    if (context->origins == NULL || add_origins(context->origins, chain) < 0) {
        return -1;
    }
    if ((chain->flags & SMP_FLAG_GRAPH) &&
        (size_t)PyList_GET_SIZE(context->origins) != context->ninputs) {
        return smp_malformed("a chain of %zu inputs, not %zd", context->ninputs,
                             PyList_GET_SIZE(context->origins));
    }
    context->several = true;
    context->stretch = place->stretch;
    context->first = place->first;
    context->previous = chain->source;
    context->previous_call = place->previous_call;
    context->previous_number = place->previous_number;
    context->previous_entry = place->previous_entry;
    return 0;
}

uint64_t
smp_pass_unreached(const smp_served_chain *chain, const smp_context *context,
                   size_t *ninputs)
{
    uint64_t unreached = chain->place.unreached;

    *ninputs = chain->place.ninputs;
    for (size_t i = 0; i < context->ninputs; i++) {
        if (PyList_GET_ITEM(context->origins, (Py_ssize_t)i) != Py_None) {
            continue;
        }
        if (*ninputs < 64 && !smp_is_reached(context->unreached, i)) {
            unreached |= UINT64_C(1) << *ninputs;
        }
        ++*ninputs;
    }
    return unreached;
}
