/* The phases of an operation, and its awaited members. */
#define _GNU_SOURCE
#include "comm/collective/inter_host/hierarchical.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/inter_host/signature.h"
#include "comm/collective/inter_host/stage.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"

/* A waiter gives way to others for so long, then it sleeps, and looks around this
 * often: a dead member does not ring. */
#define GIVE_WAY_NS (200 * SMP_NS_PER_US)
#define SLEEP_NS (20 * SMP_NS_PER_MS)

static bool
is_leader(const smp_hierarchical *hier)
{
    return hier->place == 0;
}

/* Shows the calls' notice in a step without other contents. */
static void
post_empty(smp_hierarchical *hier)
{
    smp_call_say_again(&hier->notice, &smp_hierarchical_next_slot(hier)->notice);
    smp_epoch_barrier_post(hier->barrier);
}

/* ------------------------------------------------------------------------- stages */

static smp_status
plan_tick(smp_hierarchical *hier)
{
    hier->stage = 0;
    hier->begun = false;
    return smp_route_plan(&hier->route, &hier->call, hier->tick,
                          hier->result != NULL ? smp_block_data(hier->result) : NULL);
}

/* All agree: begins the route. */
static smp_status
set_out(smp_hierarchical *hier)
{
    size_t elements = smp_route_result(&hier->route, &hier->call);

    hier->phase = SMP_HIERARCHICAL_ON_ROUTE;
    hier->ticks = smp_route_ticks(&hier->route, &hier->call);
    hier->tick = 0;
    if (hier->ticks == 0) {
        hier->route.nstages = 0;
        return SMP_OK;
    }
    if (elements != 0) {
        smp_status status = smp_hierarchical_own_block(
            hier, elements * smp_dtype_bytes(hier->call.dtype), &hier->result);

        if (status != SMP_OK) {
            return status;
        }
    }
    return plan_tick(hier);
}

/* The next stage of the route, or its end. */
static smp_status
step_route(smp_hierarchical *hier, bool *waits, int *member)
{
    bool       done = false;
    smp_status status;

    if (hier->stage < hier->route.nstages) {
        status = smp_hierarchical_stage(hier, &hier->route.stages[hier->stage], &done,
                                        waits, member);
        if (status == SMP_OK && done) {
            hier->stage++;
            hier->begun = false;
        }
        return status;
    }
    if (hier->tick + 1 < hier->ticks) {
        hier->tick++;
        return plan_tick(hier);
    }
    smp_epoch_barrier_read(hier->barrier);
    if (hier->result != NULL) {
        smp_block_release(hier->result);
        hier->result = NULL;
    }
    hier->phase = SMP_HIERARCHICAL_OVER;
    return SMP_OK;
}

/* ------------------------------------------------------------------------- public */

smp_status
smp_hierarchical_init(smp_hierarchical *hier, smp_epoch_barrier *barrier,
                      smp_collective *op, smp_wire *wire, const int *lowest,
                      size_t round_bytes)
{
    size_t     n = (size_t)wire->size;
    smp_status status;

    *hier = (smp_hierarchical){
        .barrier = barrier,
        .op = op,
        .wire = wire,
        .size = wire->size,
        .self = wire->self,
    };
    status = smp_hosts_init(&hier->hosts, lowest, wire->size);
    if (status != SMP_OK) {
        return status;
    }
    hier->host = hier->hosts.host_of[hier->self];
    hier->place = hier->hosts.place_of[hier->self];
    hier->npartials = smp_hosts_nodes(&hier->hosts, hier->host);
    hier->said = calloc(n, sizeof(smp_said));
    hier->calls = calloc(n, sizeof(smp_message *));
    hier->terms = calloc(n, sizeof(smp_message *));
    hier->partials = calloc(n, sizeof(smp_partial));
    hier->factors = calloc(n, sizeof(double));
    hier->merged = calloc(n, sizeof(smp_term));
    hier->counts = calloc(2 * n, sizeof(uint64_t));
    status = smp_route_init(&hier->route, &hier->hosts, hier->self, round_bytes);
    if (hier->said == NULL || hier->calls == NULL || hier->terms == NULL ||
        hier->partials == NULL || hier->factors == NULL || hier->merged == NULL ||
        hier->counts == NULL || status != SMP_OK) {
        smp_hierarchical_fini(hier);
        return SMP_ERR_NO_MEMORY;
    }
    for (int i = 0, p = 0; i < hier->hosts.nnodes; i++) {
        const smp_node *node = &hier->hosts.nodes[i];

        if (node->host == hier->host) {
            hier->partials[p++] = (smp_partial){.first = node->place, .n = node->n};
        }
    }
    return SMP_OK;
}

void
smp_hierarchical_fini(smp_hierarchical *hier)
{
    if (hier->calls != NULL && hier->terms != NULL) {
        smp_signature_forget(hier);
        smp_hierarchical_forget_terms(hier);
    }
    if (hier->result != NULL) {
        smp_block_release(hier->result);
    }
    free(hier->said);
    free((void *)hier->calls);
    free((void *)hier->terms);
    free(hier->partials);
    free(hier->factors);
    free(hier->merged);
    free(hier->counts);
    smp_route_fini(&hier->route);
    smp_hosts_fini(&hier->hosts);
}

smp_status
smp_hierarchical_begin(smp_hierarchical *hier, const smp_call *call, uint64_t sequence)
{
    smp_slot *slot = smp_hierarchical_next_slot(hier);

    if (!smp_call_copy(call, hier->size, &hier->call)) {
        return SMP_ERR_INVALID;
    }
    smp_call_say(&hier->call, hier->size, sequence, &slot->notice,
                 (uint64_t *)(void *)slot->data);
    smp_call_say(&hier->call, hier->size, sequence, &hier->notice, hier->counts);
    hier->sequence = sequence;
    hier->phase = SMP_HIERARCHICAL_SHOWN;
    hier->begun = false;
    hier->merged_to = 0;
    hier->noted = 0;
    hier->factors[0] = hier->call.factor; /* alone on its host, no other step says it */
    smp_epoch_barrier_post(hier->barrier);
    return SMP_OK;
}

smp_status
smp_hierarchical_go_on(smp_hierarchical *hier, bool *waits, int *member)
{
    bool       all = true;
    smp_status status;

    *waits = false;
    status = smp_wire_receive(hier->wire, member);
    if (status != SMP_OK) {
        return status;
    }
    *member = -1;
    hier->waits_local = false;
    switch (hier->phase) {
    case SMP_HIERARCHICAL_SHOWN:
        hier->waits_local = *waits = !smp_epoch_barrier_arrived(hier->barrier);
        if (*waits) {
            return SMP_OK;
        }
        smp_signature_read(hier);
        if (is_leader(hier)) {
            hier->phase = SMP_HIERARCHICAL_ASKED;
            return smp_signature_send(hier, member);
        }
        hier->phase = SMP_HIERARCHICAL_COMPARED;
        post_empty(hier);
        return SMP_OK;
    case SMP_HIERARCHICAL_ASKED:
        status = smp_signature_receive(hier, &all, member);
        *waits = !all;
        if (status == SMP_OK && all) {
            smp_signature_compare(hier);
            hier->phase = SMP_HIERARCHICAL_COMPARED;
            post_empty(hier);
        }
        return status;
    case SMP_HIERARCHICAL_COMPARED:
        hier->waits_local = *waits = !smp_epoch_barrier_arrived(hier->barrier);
        if (*waits) {
            return SMP_OK;
        }
        if (smp_signature_agreed(hier, &hier->refusal)) {
            return set_out(hier);
        }
        smp_epoch_barrier_read(hier->barrier);
        hier->phase = SMP_HIERARCHICAL_REFUSED;
        return SMP_OK;
    case SMP_HIERARCHICAL_ON_ROUTE:
        return step_route(hier, waits, member);
    case SMP_HIERARCHICAL_OVER:
    case SMP_HIERARCHICAL_REFUSED:
        break;
    }
    return SMP_OK;
}

/* ------------------------------------------------------------------------ waiting */

/* Whether a host's node leader has reported the member as present. */
static bool
is_noted(const smp_hierarchical *hier, int member)
{
    int                host = hier->hosts.host_of[member];
    int                place = hier->hosts.place_of[member];
    const smp_message *note =
        smp_wire_find(hier->wire, SMP_PARCEL_NOTE, smp_hierarchical_leader(hier, host),
                      hier->sequence, 0);
    size_t         bytes;
    const uint8_t *missing = note != NULL ? smp_parcel_rest(note, &bytes) : NULL;

    return note != NULL && (size_t)place < bytes && missing[place] == 0;
}

/* The awaited parcel of a member of another host; false: none. */
static bool
wants(const smp_hierarchical *hier, int member, smp_parcel_kind *kind, uint64_t *tag)
{
    int host = hier->hosts.host_of[member];

    if (hier->waits_local || host == hier->host) {
        return false;
    }
    if (hier->phase == SMP_HIERARCHICAL_ASKED) {
        *kind = SMP_PARCEL_CALLS;
        *tag = 0;
        return hier->calls[host] == NULL &&
               member == smp_hierarchical_leader(hier, host);
    }
    if (hier->phase != SMP_HIERARCHICAL_ON_ROUTE ||
        hier->stage >= hier->route.nstages) {
        return false;
    }
    *kind = SMP_PARCEL_DATA;
    *tag = hier->route.stages[hier->stage].tag;
    return hier->route.stages[hier->stage].peer == member;
}

bool
smp_hierarchical_awaits(const smp_hierarchical *hier, int member)
{
    int             host = hier->hosts.host_of[member];
    smp_parcel_kind kind;
    uint64_t        tag;

    if (host == hier->host) {
        return hier->waits_local &&
               !smp_epoch_barrier_posted(hier->barrier, hier->hosts.place_of[member]);
    }
    if (hier->phase == SMP_HIERARCHICAL_ASKED) {
        return hier->calls[host] == NULL && !is_noted(hier, member);
    }
    return wants(hier, member, &kind, &tag);
}

/* The trouble with a member of another host: it is lost, it gave up in this operation
 * or before, or it has left with a parcel awaited.  (Others may have finished this
 * operation and left: their absence shows where they are needed.) */
static smp_status
far_trouble(smp_hierarchical *hier, int member)
{
    const smp_far  *far = &hier->wire->members[member];
    smp_comm       *comm = hier->wire->comm;
    bool            gone = smp_comm_gone(comm, far->rank);
    smp_parcel_kind kind;
    uint64_t        tag;
    bool            wanted = wants(hier, member, &kind, &tag);

    if (gone && wanted) { /* its earlier messages have arrived by now */
        int source;

        (void)smp_wire_receive(hier->wire, &source);
    }
    if (wanted &&
        smp_wire_find(hier->wire, kind, member, hier->sequence, tag) != NULL) {
        return SMP_OK;
    }
    if (far->failed != SMP_OK && (wanted || far->failed_in <= hier->sequence)) {
        return far->failed;
    }
    if (gone && !smp_comm_left(comm, far->rank)) {
        return SMP_ERR_PEER_LOST;
    }
    return wanted && (far->left || gone) ? SMP_ERR_CLOSED : SMP_OK;
}

/* Whether the member's death is the cause: it is named before members leaving because
 * of it. */
static bool
is_death(const smp_hierarchical *hier, smp_status status, int member)
{
    int rank;

    if (status != SMP_ERR_PEER_LOST) {
        return false;
    }
    rank = hier->wire->members[member].rank;
    return smp_comm_gone(hier->wire->comm, rank) &&
           !smp_comm_left(hier->wire->comm, rank);
}

smp_status
smp_hierarchical_trouble(smp_hierarchical *hier, int *member)
{
    smp_status first = SMP_OK;
    int        place;

    if (hier->waits_local) {
        first = smp_epoch_barrier_trouble(hier->barrier, &place);
        if (first != SMP_OK) {
            *member = smp_hosts_member(&hier->hosts, hier->host, place);
        }
    }
    for (int m = 0; m < hier->size && !is_death(hier, first, *member); m++) {
        if (hier->hosts.host_of[m] != hier->host) {
            smp_status status = far_trouble(hier, m);

            if (first == SMP_OK || is_death(hier, status, m)) {
                first = status;
                *member = m;
            }
        }
    }
    return first;
}

bool
smp_hierarchical_why(const smp_hierarchical *hier, int member, char *out, size_t bytes)
{
    const smp_far *far = &hier->wire->members[member];

    if (hier->hosts.host_of[member] == hier->host) {
        return smp_epoch_barrier_why(hier->barrier, hier->hosts.place_of[member], out,
                                     bytes);
    }
    if (far->failed == SMP_OK) {
        return false;
    }
    snprintf(out, bytes, "%s", far->why != NULL ? far->why : "");
    return true;
}

void
smp_hierarchical_note(smp_hierarchical *hier)
{
    int      n = hier->barrier->size;
    int      missing = 0;
    uint8_t *places;

    if (!is_leader(hier) || hier->phase != SMP_HIERARCHICAL_SHOWN) {
        return;
    }
    places = calloc((size_t)n, 1);
    for (int p = 0; p < n && places != NULL; p++) {
        places[p] = !smp_epoch_barrier_posted(hier->barrier, p);
        missing += places[p];
    }
    if (places != NULL && missing != hier->noted) {
        hier->noted = missing;
        for (int h = 0; h < hier->hosts.nhosts; h++) {
            if (h != hier->host) { /* only a text: an unheard one costs a wait */
                (void)smp_wire_send(hier->wire, smp_hierarchical_leader(hier, h),
                                    SMP_PARCEL_NOTE, hier->sequence, 0, places,
                                    (size_t)n, NULL);
            }
        }
    }
    free(places);
}

/* Whether something has changed for a waiter. */
static bool
stirs(smp_hierarchical *hier)
{
    return smp_wire_stirs(hier->wire) ||
           (hier->waits_local && smp_epoch_barrier_arrived(hier->barrier));
}

void
smp_hierarchical_wait(smp_hierarchical *hier, int64_t until_ns)
{
    smp_control_block *own = hier->barrier->members[hier->place].control;
    int64_t            now = smp_clock_ns();
    int64_t            give_way = now + GIVE_WAY_NS;
    int                place;

    while (!stirs(hier) && now < give_way && now < until_ns) {
        sched_yield();
        now = smp_clock_ns();
    }
    if (stirs(hier) || now >= until_ns) {
        return;
    }
    atomic_store(&own->waits, hier->barrier->step);
    smp_doorbell_lie_down(
        &own->doorbell); /* before both looks: a member giving up rings too */
    if (!stirs(hier) && (!hier->waits_local ||
                         smp_epoch_barrier_trouble(hier->barrier, &place) == SMP_OK)) {
        smp_doorbell_sleep(&own->doorbell,
                           until_ns - now < SLEEP_NS ? until_ns : now + SLEEP_NS);
    }
    smp_doorbell_get_up(&own->doorbell);
    atomic_store(&own->waits, 0);
}
