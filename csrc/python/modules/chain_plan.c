#include "python/modules/chain_plan.h"

#include <stdlib.h>

#include "common/mix.h"
#include "python/modules/passing.h"
#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/modules/wait.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_value.h"
#include "python/values/tensor.h"

int
smp_call_draw(smp_call_site *site)
{
    if (!site->drawn && smp_stream_draw(&site->seed) < 0) {
        return -1;
    }
    site->drawn = true;
    return 0;
}

/* An argument of a call before the chain, or the task's own (borrowed); NULL: it is
 * gone, has changed, or the source of the plan's call is in the chain. */
static PyObject *
past_source(const smp_task *task, size_t call, smp_chain_source source)
{
    const unsigned back = smp_chain_back(source);

    if (back == SMP_CHAIN_OF_REQUEST || back <= call) {
        return NULL;
    }
    return smp_history_at(task, back == SMP_HISTORY_GIVEN ? back : back - call - 1,
                          smp_chain_number(source));
}

/* Its first calls alone are left. */
static void
cut_plan(smp_chain_plan *plan, size_t n)
{
    while (plan->n > n) {
        smp_follower_let_go(plan->calls[--plan->n]);
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

/* Leaves the calls planned by all tp_ranks. */
static int
agree(smp_chain_plan *plan, const smp_call_site *site)
{
    const smp_ballot ballot = {
        .call = plan->agreed, .subject = SMP_BALLOT_PLAN, .entry = site->entry};
    uint32_t words[SMP_CHAIN_MOST];
    int      outcome;

    for (size_t i = 0; i < plan->n; i++) {
        words[i] = plan->calls[i]->word;
    }
    outcome = smp_session_agree(&ballot, words, plan->n, NULL);
    cut_plan(plan, outcome < 0 ? 0 : (size_t)outcome);
    return outcome < 0 ? -1 : 0;
}

int
smp_chain_foresee(smp_task *task, smp_call_site *site, smp_chain_plan *plan)
{
    const smp_entry *first = &smp_the_session.entries[site->entry];
    int32_t          entry = site->entry;
    uint32_t         before = site->before;
    const bool       collective = first->collective && first->chains &&
                            task->backward_depth == 0 && !smp_the_session.in_sequence;

    plan->n = 0;
    plan->agreed = 0;
    while (site->chains && plan->n < SMP_CHAIN_MOST) {
        smp_link        *link = smp_link_find(task, entry, before, site->modes);
        const smp_entry *next = link == NULL || link->next == NULL
                                    ? NULL
                                    : &smp_the_session.entries[link->next->entry];

        if (next == NULL || !next->chains || next->nests ||
            (next->collective && !collective)) {
            break;
        }
        plan->calls[plan->n] = link->next;
        plan->sources[plan->n] = NULL;
        link->next->refs++;
        plan->links[plan->n++] = link;
        entry = link->next->entry;
        before = link->next->before;
    }
    end_where_unknown(task, plan);
    if (collective) {
        plan->agreed =
            smp_call_of(task->number, (uint64_t)site->entry, site->before, task->phase);
        if (task->foreseen) { /* the task may run again, with the same numbers */
            plan->agreed = smp_mix(plan->agreed, 1);
        }
        if (agree(plan, site) < 0) {
            return -1;
        }
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
            failed = tensor == NULL ? failed : smp_malformed("an argument of a chain");
        }
    }
    Py_XDECREF(past);
    return failed;
}

static uint64_t
number_of(const smp_task *task, const smp_follower *call)
{
    return smp_call_of(task->number, (uint64_t)call->entry, call->before, task->phase);
}

int
smp_chain_part(smp_call_object *call, const smp_task *task, const smp_chain_plan *plan)
{
    int owner = call->owner;

    for (size_t i = 0; i < plan->n; i++) {
        const smp_follower *next = plan->calls[i];
        smp_stretch        *stretch;

        if (smp_the_session.entries[next->entry].owner == owner) {
            continue;
        }
        owner = smp_the_session.entries[next->entry].owner;
        if (call->stretches == NULL) {
            call->stretches = calloc(plan->n + 1, sizeof(*call->stretches));
            if (call->stretches == NULL) {
                PyErr_NoMemory();
                return -1;
            }
            call->stretches[call->nstretches++] = (smp_stretch){
                .owner = call->owner, .call = call->call, .number = call->number};
        }
        stretch = &call->stretches[call->nstretches++];
        *stretch = (smp_stretch){.owner = owner,
                                 .call = smp_server_next_call(smp_the_session.server),
                                 .number = number_of(task, next),
                                 .first = i + 1};
    }
    return 0;
}

int
smp_chain_pack(smp_pack *pack, const smp_task *task, smp_chain_plan *plan,
               const smp_call_object *call)
{
    const size_t here = call->nstretches == 0 ? plan->n : call->stretches[1].first - 1;
    int          failed = pack_past(pack, task, plan) < 0 ||
                         smp_place_pack(pack, call->stretches, call->nstretches,
                                                 plan->agreed) < 0 ||
                         smp_pack_u32(pack, (uint32_t)plan->n) < 0 ||
                         smp_pack_u32(pack, (uint32_t)here) < 0
                              ? -1
                              : 0;

    for (size_t i = 0; failed == 0 && i < plan->n; i++) {
        const smp_follower  *next = plan->calls[i];
        const smp_chain_head head = {
            .seed = plan->seeds[i],
            .number = number_of(task, next),
            .entry = next->entry,
            .nsources = (uint32_t)next->nsources,
            .flags = next->flags,
        };

        failed = smp_pack_sized(pack, TAG_BYTES, &head, sizeof(head)) < 0 ||
                         smp_pack_sized(pack, TAG_BYTES, next->values.at,
                                        next->values.size) < 0 ||
                         smp_pack_sized(pack, TAG_BYTES, plan->sources[i],
                                        next->nsources * sizeof(*next->sources)) < 0
                     ? -1
                     : 0;
    }
    return failed;
}
