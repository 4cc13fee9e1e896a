/* The phases of an operation, and who is waited for. */
#define _GNU_SOURCE
#include "comm/collective/inter_host/wide.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/inter_host/signature.h"
#include "comm/collective/inter_host/stage.h"
#include "comm/neighbour.h"
#include "common/clock.h"

/* A waiter gives way to others for so long, then it sleeps, and looks around this
 * often: nobody rings for a dead member. */
#define GIVE_WAY_NS (200 * SMP_NS_PER_US)
#define SLEEP_NS (20 * SMP_NS_PER_MS)

static bool
is_leader(const smp_wide *wide)
{
    return wide->place == 0;
}

/* Shows the calls' notice in a step that has nothing else of it. */
static void
post_empty(smp_wide *wide)
{
    smp_call_say_again(&wide->notice, &smp_wide_next_slot(wide)->notice);
    smp_lockstep_post(wide->lockstep);
}

/* ------------------------------------------------------------------------- stages */

static smp_status
plan_beat(smp_wide *wide)
{
    wide->stage = 0;
    wide->begun = false;
    return smp_route_plan(&wide->route, &wide->call, wide->beat,
                          wide->result != NULL ? smp_block_data(wide->result) : NULL);
}

/* All agree: begins the route. */
static smp_status
set_out(smp_wide *wide)
{
    size_t elements = smp_route_result(&wide->route, &wide->call);

    wide->phase = SMP_WIDE_ON_ROUTE;
    wide->beats = smp_route_beats(&wide->route, &wide->call);
    wide->beat = 0;
    if (wide->beats == 0) {
        wide->route.nstages = 0;
        return SMP_OK;
    }
    if (elements != 0) {
        smp_status status = smp_wide_own_block(
            wide, elements * smp_dtype_bytes(wide->call.dtype), &wide->result);

        if (status != SMP_OK) {
            return status;
        }
    }
    return plan_beat(wide);
}

/* The next stage of the route, or its end. */
static smp_status
step_route(smp_wide *wide, bool *waits, int *member)
{
    bool       done = false;
    smp_status status;

    if (wide->stage < wide->route.nstages) {
        status = smp_wide_stage(wide, &wide->route.stages[wide->stage], &done, waits,
                                member);
        if (status == SMP_OK && done) {
            wide->stage++;
            wide->begun = false;
        }
        return status;
    }
    if (wide->beat + 1 < wide->beats) {
        wide->beat++;
        return plan_beat(wide);
    }
    smp_lockstep_read(wide->lockstep);
    if (wide->result != NULL) {
        smp_block_release(wide->result);
        wide->result = NULL;
    }
    wide->phase = SMP_WIDE_OVER;
    return SMP_OK;
}

/* ------------------------------------------------------------------------- public */

smp_status
smp_wide_init(smp_wide *wide, smp_lockstep *lockstep, smp_collective *op,
              smp_wire *wire, const int *lowest, size_t round_bytes)
{
    size_t     n = (size_t)wire->size;
    smp_status status;

    *wide = (smp_wide){
        .lockstep = lockstep,
        .op = op,
        .wire = wire,
        .size = wire->size,
        .self = wire->self,
    };
    status = smp_hosts_init(&wide->hosts, lowest, wire->size);
    if (status != SMP_OK) {
        return status;
    }
    wide->host = wide->hosts.host_of[wide->self];
    wide->place = wide->hosts.place_of[wide->self];
    wide->npartials = smp_hosts_nodes(&wide->hosts, wide->host);
    wide->said = calloc(n, sizeof(smp_said));
    wide->calls = calloc(n, sizeof(smp_message *));
    wide->terms = calloc(n, sizeof(smp_message *));
    wide->partials = calloc(n, sizeof(smp_partial));
    wide->factors = calloc(n, sizeof(double));
    wide->merged = calloc(n, sizeof(smp_term));
    wide->counts = calloc(2 * n, sizeof(uint64_t));
    status = smp_route_init(&wide->route, &wide->hosts, wide->self, round_bytes);
    if (wide->said == NULL || wide->calls == NULL || wide->terms == NULL ||
        wide->partials == NULL || wide->factors == NULL || wide->merged == NULL ||
        wide->counts == NULL || status != SMP_OK) {
        smp_wide_fini(wide);
        return SMP_ERR_NO_MEMORY;
    }
    for (int i = 0, p = 0; i < wide->hosts.nnodes; i++) {
        const smp_node *node = &wide->hosts.nodes[i];

        if (node->host == wide->host) {
            wide->partials[p++] = (smp_partial){.first = node->place, .n = node->n};
        }
    }
    return SMP_OK;
}

void
smp_wide_fini(smp_wide *wide)
{
    if (wide->calls != NULL && wide->terms != NULL) {
        smp_signature_forget(wide);
        smp_wide_forget_terms(wide);
    }
    if (wide->result != NULL) {
        smp_block_release(wide->result);
    }
    free(wide->said);
    free((void *)wide->calls);
    free((void *)wide->terms);
    free(wide->partials);
    free(wide->factors);
    free(wide->merged);
    free(wide->counts);
    smp_route_fini(&wide->route);
    smp_hosts_fini(&wide->hosts);
}

smp_status
smp_wide_begin(smp_wide *wide, const smp_call *call, uint64_t sequence)
{
    smp_slot *slot = smp_wide_next_slot(wide);

    if (!smp_call_copy(call, wide->size, &wide->call)) {
        return SMP_ERR_INVALID;
    }
    smp_call_say(&wide->call, wide->size, sequence, &slot->notice,
                 (uint64_t *)(void *)slot->data);
    smp_call_say(&wide->call, wide->size, sequence, &wide->notice, wide->counts);
    wide->sequence = sequence;
    wide->phase = SMP_WIDE_SHOWN;
    wide->begun = false;
    wide->merged_to = 0;
    wide->noted = 0;
    wide->factors[0] = wide->call.factor; /* alone on its host, no other step says it */
    smp_lockstep_post(wide->lockstep);
    return SMP_OK;
}

smp_status
smp_wide_go_on(smp_wide *wide, bool *waits, int *member)
{
    bool       all = true;
    smp_status status;

    *waits = false;
    status = smp_wire_receive(wide->wire, member);
    if (status != SMP_OK) {
        return status;
    }
    *member = -1;
    wide->waits_local = false;
    switch (wide->phase) {
    case SMP_WIDE_SHOWN:
        wide->waits_local = *waits = !smp_lockstep_arrived(wide->lockstep);
        if (*waits) {
            return SMP_OK;
        }
        smp_signature_read(wide);
        if (is_leader(wide)) {
            wide->phase = SMP_WIDE_ASKED;
            return smp_signature_send(wide, member);
        }
        wide->phase = SMP_WIDE_COMPARED;
        post_empty(wide);
        return SMP_OK;
    case SMP_WIDE_ASKED:
        status = smp_signature_receive(wide, &all, member);
        *waits = !all;
        if (status == SMP_OK && all) {
            smp_signature_compare(wide);
            wide->phase = SMP_WIDE_COMPARED;
            post_empty(wide);
        }
        return status;
    case SMP_WIDE_COMPARED:
        wide->waits_local = *waits = !smp_lockstep_arrived(wide->lockstep);
        if (*waits) {
            return SMP_OK;
        }
        if (smp_signature_agreed(wide, wide->refusal, sizeof(wide->refusal))) {
            return set_out(wide);
        }
        smp_lockstep_read(wide->lockstep);
        wide->phase = SMP_WIDE_REFUSED;
        return SMP_OK;
    case SMP_WIDE_ON_ROUTE:
        return step_route(wide, waits, member);
    case SMP_WIDE_OVER:
    case SMP_WIDE_REFUSED:
        break;
    }
    return SMP_OK;
}

/* ------------------------------------------------------------------------ waiting */

/* Whether a host's node leader has said that the member has come. */
static bool
is_noted(const smp_wide *wide, int member)
{
    int                host = wide->hosts.host_of[member];
    int                place = wide->hosts.place_of[member];
    const smp_message *note = smp_wire_find(
        wide->wire, SMP_PARCEL_NOTE, smp_wide_leader(wide, host), wide->sequence, 0);
    size_t         bytes;
    const uint8_t *missing = note != NULL ? smp_parcel_rest(note, &bytes) : NULL;

    return note != NULL && (size_t)place < bytes && missing[place] == 0;
}

/* What is waited for from a member of another host; false: nothing. */
static bool
wants(const smp_wide *wide, int member, smp_parcel_kind *kind, uint64_t *tag)
{
    int host = wide->hosts.host_of[member];

    if (wide->waits_local || host == wide->host) {
        return false;
    }
    if (wide->phase == SMP_WIDE_ASKED) {
        *kind = SMP_PARCEL_CALLS;
        *tag = 0;
        return wide->calls[host] == NULL && member == smp_wide_leader(wide, host);
    }
    if (wide->phase != SMP_WIDE_ON_ROUTE || wide->stage >= wide->route.nstages) {
        return false;
    }
    *kind = SMP_PARCEL_DATA;
    *tag = wide->route.stages[wide->stage].tag;
    return wide->route.stages[wide->stage].peer == member;
}

bool
smp_wide_awaits(const smp_wide *wide, int member)
{
    int             host = wide->hosts.host_of[member];
    smp_parcel_kind kind;
    uint64_t        tag;

    if (host == wide->host) {
        return wide->waits_local &&
               !smp_lockstep_posted(wide->lockstep, wide->hosts.place_of[member]);
    }
    if (wide->phase == SMP_WIDE_ASKED) {
        return wide->calls[host] == NULL && !is_noted(wide, member);
    }
    return wants(wide, member, &kind, &tag);
}

/* What is wrong with a member of another host: it is lost, it gave up in this operation
 * or before, or something is waited for from it and it has left.  (Others may have
 * finished this operation and left: who needs them says so.) */
static smp_status
far_trouble(smp_wide *wide, int member)
{
    const smp_far  *far = &wide->wire->members[member];
    smp_comm       *comm = wide->wire->comm;
    bool            gone = smp_comm_gone(comm, far->rank);
    smp_parcel_kind kind;
    uint64_t        tag;
    bool            wanted = wants(wide, member, &kind, &tag);

    if (gone && wanted) { /* what it sent before is there by now */
        int source;

        (void)smp_wire_receive(wide->wire, &source);
    }
    if (wanted &&
        smp_wire_find(wide->wire, kind, member, wide->sequence, tag) != NULL) {
        return SMP_OK;
    }
    if (far->failed != SMP_OK && (wanted || far->failed_in <= wide->sequence)) {
        return far->failed;
    }
    if (gone && !smp_comm_left(comm, far->rank)) {
        return SMP_ERR_PEER_LOST;
    }
    return wanted && (far->left || gone) ? SMP_ERR_CLOSED : SMP_OK;
}

/* Whether that is why: such a member is named before those that go because of it. */
static bool
is_death(const smp_wide *wide, smp_status status, int member)
{
    int rank;

    if (status != SMP_ERR_PEER_LOST) {
        return false;
    }
    rank = wide->wire->members[member].rank;
    return smp_comm_gone(wide->wire->comm, rank) &&
           !smp_comm_left(wide->wire->comm, rank);
}

smp_status
smp_wide_trouble(smp_wide *wide, int *member)
{
    smp_status first = SMP_OK;
    int        place;

    if (wide->waits_local) {
        first = smp_lockstep_trouble(wide->lockstep, &place);
        if (first != SMP_OK) {
            *member = smp_hosts_member(&wide->hosts, wide->host, place);
        }
    }
    for (int m = 0; m < wide->size && !is_death(wide, first, *member); m++) {
        if (wide->hosts.host_of[m] != wide->host) {
            smp_status status = far_trouble(wide, m);

            if (first == SMP_OK || is_death(wide, status, m)) {
                first = status;
                *member = m;
            }
        }
    }
    return first;
}

bool
smp_wide_why(const smp_wide *wide, int member, char *out, size_t bytes)
{
    const smp_far *far = &wide->wire->members[member];

    if (wide->hosts.host_of[member] == wide->host) {
        return smp_lockstep_why(wide->lockstep, wide->hosts.place_of[member], out,
                                bytes);
    }
    if (far->failed == SMP_OK) {
        return false;
    }
    snprintf(out, bytes, "%s", far->why != NULL ? far->why : "");
    return true;
}

void
smp_wide_note(smp_wide *wide)
{
    int      n = wide->lockstep->size;
    int      missing = 0;
    uint8_t *places;

    if (!is_leader(wide) || wide->phase != SMP_WIDE_SHOWN) {
        return;
    }
    places = calloc((size_t)n, 1);
    for (int p = 0; p < n && places != NULL; p++) {
        places[p] = !smp_lockstep_posted(wide->lockstep, p);
        missing += places[p];
    }
    if (places != NULL && missing != wide->noted) {
        wide->noted = missing;
        for (int h = 0; h < wide->hosts.nhosts; h++) {
            if (h != wide->host) { /* only words: who does not hear it waits */
                (void)smp_wire_send(wide->wire, smp_wide_leader(wide, h),
                                    SMP_PARCEL_NOTE, wide->sequence, 0, places,
                                    (size_t)n, NULL);
            }
        }
    }
    free(places);
}

/* Whether something has changed for who waits. */
static bool
stirs(smp_wide *wide)
{
    return smp_wire_stirs(wide->wire) ||
           (wide->waits_local && smp_lockstep_arrived(wide->lockstep));
}

void
smp_wide_wait(smp_wide *wide, int64_t until_ns)
{
    smp_control_block *own = wide->lockstep->members[wide->place].control;
    int64_t            now = smp_clock_ns();
    int64_t            give_way = now + GIVE_WAY_NS;
    int                place;

    while (!stirs(wide) && now < give_way && now < until_ns) {
        sched_yield();
        now = smp_clock_ns();
    }
    if (stirs(wide) || now >= until_ns) {
        return;
    }
    atomic_store(&own->waits, wide->lockstep->step);
    smp_doorbell_lie_down(
        &own->doorbell); /* before both looks: who gives up rings too */
    if (!stirs(wide) && (!wide->waits_local ||
                         smp_lockstep_trouble(wide->lockstep, &place) == SMP_OK)) {
        smp_doorbell_sleep(&own->doorbell,
                           until_ns - now < SLEEP_NS ? until_ns : now + SLEEP_NS);
    }
    smp_doorbell_get_up(&own->doorbell);
    atomic_store(&own->waits, 0);
}
