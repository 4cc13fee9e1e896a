/* Agreement, stages, and who is waited for. */
#define _GNU_SOURCE
#include "comm/collective/wide.h"

#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/block.h"
#include "comm/clock.h"
#include "comm/neighbour.h"

/* A waiter gives way to others for so long, then it sleeps, and looks around this
 * often: nobody rings for a dead member. */
#define GIVE_WAY_NS (200 * SMP_NS_PER_US)
#define SLEEP_NS (20 * SMP_NS_PER_MS)

/* What is merged at a time: bytes of the result. */
#define MERGE_BYTES ((size_t)256 << 10)

/* A verdict in the speaker's slot. */
typedef struct {
    uint64_t agreed;
    char     refusal[320];
} verdict;

static bool
is_speaker(const smp_wide *wide)
{
    return wide->place == 0;
}

static int
speaker_of(const smp_wide *wide, int host)
{
    return smp_hosts_member(&wide->hosts, host, 0);
}

static smp_slot *
next_slot(const smp_wide *wide)
{
    smp_lockstep *lockstep = wide->lockstep;

    return smp_lockstep_slot(lockstep, lockstep->self, lockstep->step + 1);
}

/* ---------------------------------------------------------------------- agreement */

static const uint64_t *
slot_counts(const smp_slot *slot)
{
    return (const uint64_t *)(const void *)slot->data;
}

/* What this host's members have shown. */
static void
hear_host(smp_wide *wide)
{
    for (int p = 0; p < wide->lockstep->size; p++) {
        int       m = smp_hosts_member(&wide->hosts, wide->host, p);
        smp_slot *slot = smp_lockstep_slot(wide->lockstep, p, wide->lockstep->step);

        wide->said[m] = (smp_said){.rank = wide->wire->members[m].rank,
                                   .notice = &slot->notice,
                                   .counts = slot_counts(slot)};
    }
}

/* An all-to-all with split sizes needs to know where its parts lie in this host's
 * tensors; if not all have called it, what comes out is not used. */
static void
find_parts(smp_wide *wide)
{
    wide->route.longest = 0;
    for (int p = 0; p < wide->lockstep->size && wide->call.out_counts != NULL; p++) {
        int             m = smp_hosts_member(&wide->hosts, wide->host, p);
        const smp_said *said = &wide->said[m];

        wide->route.froms[p] = 0;
        for (int to = 0; to < wide->size && said->notice->uneven == 2; to++) {
            size_t count = (size_t)said->counts[to];

            wide->route.froms[p] += to < wide->self ? count : 0;
            if (wide->hosts.host_of[to] == wide->host && count > wide->route.longest) {
                wide->route.longest = count;
            }
        }
    }
}

/* Bytes that a member's call takes in a parcel. */
static size_t
said_bytes(const smp_wide *wide, const smp_notice *notice)
{
    return sizeof(*notice) +
           (size_t)notice->uneven * (size_t)wide->size * sizeof(uint64_t);
}

/* Sends what this host's members call to the other speakers. */
static smp_status
tell_hosts(smp_wide *wide, int *member)
{
    size_t     bytes = 0;
    uint8_t   *all;
    uint8_t   *at;
    smp_status status = SMP_OK;

    for (int p = 0; p < wide->lockstep->size; p++) {
        int m = smp_hosts_member(&wide->hosts, wide->host, p);

        bytes += said_bytes(wide, wide->said[m].notice);
    }
    assert(bytes != 0); /* this member is one of them */
    all = at = malloc(bytes);
    if (all == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int p = 0; p < wide->lockstep->size; p++) {
        int               m = smp_hosts_member(&wide->hosts, wide->host, p);
        const smp_notice *notice = wide->said[m].notice;

        memcpy(at, notice, sizeof(*notice));
        memcpy(at + sizeof(*notice), wide->said[m].counts,
               said_bytes(wide, notice) - sizeof(*notice));
        at += said_bytes(wide, notice);
    }
    for (int h = 0; h < wide->hosts.nhosts && status == SMP_OK; h++) {
        if (h != wide->host) {
            *member = speaker_of(wide, h);
            status = smp_wire_send(wide->wire, *member, SMP_PARCEL_CALLS,
                                   wide->sequence, 0, all, bytes, NULL);
        }
    }
    free(all);
    return status;
}

/* What another host's members call, from its speaker's parcel; false: it makes no
 * sense. */
static bool
hear(smp_wide *wide, int host, const smp_message *message)
{
    size_t         left;
    const uint8_t *at = smp_parcel_rest(message, &left);

    for (int p = 0; p < smp_hosts_count(&wide->hosts, host); p++) {
        int               m = smp_hosts_member(&wide->hosts, host, p);
        const smp_notice *notice = (const smp_notice *)(const void *)at;

        if (left < sizeof(*notice) || notice->uneven > 2 ||
            left < said_bytes(wide, notice)) {
            return false;
        }
        wide->said[m] = (smp_said){
            .rank = wide->wire->members[m].rank,
            .notice = notice,
            .counts = (const uint64_t *)(const void *)(at + sizeof(*notice)),
        };
        at += said_bytes(wide, notice);
        left -= said_bytes(wide, notice);
    }
    return left == 0;
}

/* Takes what has come from other speakers; *all: everything has. */
static smp_status
hear_hosts(smp_wide *wide, bool *all, int *member)
{
    *all = true;
    for (int h = 0; h < wide->hosts.nhosts; h++) {
        if (h == wide->host || wide->calls[h] != NULL) {
            continue;
        }
        *member = speaker_of(wide, h);
        wide->calls[h] =
            smp_wire_take(wide->wire, SMP_PARCEL_CALLS, *member, wide->sequence, 0);
        if (wide->calls[h] == NULL) {
            *all = false;
        } else if (!hear(wide, h, wide->calls[h])) {
            return SMP_ERR_MALFORMED;
        }
    }
    return SMP_OK;
}

static void
forget_calls(smp_wide *wide)
{
    for (int h = 0; h < wide->hosts.nhosts; h++) {
        smp_message_free(wide->calls[h]);
        wide->calls[h] = NULL;
    }
}

/* Compares all calls, and shows the verdict. */
static void
judge(smp_wide *wide)
{
    verdict *v = (verdict *)(void *)next_slot(wide)->data;
    size_t   most;

    v->agreed =
        smp_agreement(wide->said, wide->size, &most, v->refusal, sizeof(v->refusal));
    forget_calls(wide);
}

/* Shows the calls' notice in a step that has nothing else of it. */
static void
post_empty(smp_wide *wide)
{
    smp_slot *slot = next_slot(wide);

    slot->notice.sequence = wide->notice.sequence;
    slot->notice.operation = wide->notice.operation;
    slot->notice.dtype = wide->notice.dtype;
    slot->notice.reduction = wide->notice.reduction;
    slot->notice.uneven = wide->notice.uneven;
    slot->notice.root = wide->notice.root;
    slot->notice.count = wide->notice.count;
    smp_lockstep_post(wide->lockstep);
}

/* ------------------------------------------------------------------------- stages */

static smp_status
plan_round(smp_wide *wide)
{
    wide->stage = 0;
    wide->begun = false;
    return smp_route_plan(&wide->route, &wide->call, wide->round,
                          wide->result != NULL ? smp_block_data(wide->result) : NULL);
}

/* A block for a member of another host. */
static smp_status
take_block(smp_wide *wide, int member, size_t bytes, smp_block **out)
{
    return smp_comm_block(wide->wire->comm, wide->wire->members[member].rank, bytes,
                          out);
}

/* A block that stays here: of this rank's pool, which is asked for in the name of
 * anyone who has not left. */
static smp_status
take_own_block(smp_wide *wide, size_t bytes, smp_block **out)
{
    for (int m = 0; m < wide->size; m++) {
        if (!wide->wire->members[m].local &&
            take_block(wide, m, bytes, out) == SMP_OK) {
            return SMP_OK;
        }
    }
    return smp_block_private(bytes, out);
}

/* All agree: begins the route. */
static smp_status
set_out(smp_wide *wide)
{
    size_t elements = smp_route_result(&wide->route, &wide->call);

    wide->phase = SMP_WIDE_ON_ROUTE;
    wide->rounds = smp_route_rounds(&wide->route, &wide->call);
    wide->round = 0;
    if (wide->rounds == 0) {
        wide->route.nstages = 0;
        return SMP_OK;
    }
    if (elements != 0) {
        smp_status status = take_own_block(
            wide, elements * smp_dtype_bytes(wide->call.dtype), &wide->result);

        if (status != SMP_OK) {
            return status;
        }
    }
    return plan_round(wide);
}

/* Bytes of a node's term in a block of terms, on a cache line. */
static size_t
node_bytes(const smp_wide *wide, int n, size_t count)
{
    smp_dtype dtype = wide->call.dtype;
    size_t    bytes = smp_dtype_bytes(n == 1 ? dtype : smp_term_dtype(dtype));

    return (count * bytes + 63) / 64 * 64;
}

/* Bytes of the terms of a host. */
static size_t
host_bytes(const smp_wide *wide, int host, size_t count)
{
    size_t bytes = 0;

    for (int i = 0; i < wide->hosts.nnodes; i++) {
        if (wide->hosts.nodes[i].host == host) {
            bytes += node_bytes(wide, wide->hosts.nodes[i].n, count);
        }
    }
    return bytes;
}

/* A block for the terms of `count` elements, to which the partials lead. */
static smp_status
make_terms(smp_wide *wide, int peer, size_t count)
{
    size_t     bytes = host_bytes(wide, wide->host, count);
    uint8_t   *at;
    smp_status status = peer == wide->self ? take_own_block(wide, bytes, &wide->made)
                                           : take_block(wide, peer, bytes, &wide->made);

    if (status != SMP_OK) {
        return status;
    }
    at = smp_block_data(wide->made);
    for (int i = 0; i < wide->npartials; i++) {
        wide->partials[i].out = at;
        at += node_bytes(wide, wide->partials[i].n, count);
    }
    return SMP_OK;
}

/* Begins a local stage: fills and posts its first step. */
static smp_status
begin_local(smp_wide *wide, const smp_stage *stage, int *member)
{
    smp_collective *op = wide->op;
    int             n = wide->lockstep->size;
    smp_range      *ranges = &wide->route.ranges[stage->ranges];
    smp_range       own = ranges[wide->place];
    smp_local_part  part = {.in = stage->in, .out = stage->out, .most = stage->most};

    for (int p = 0; p < n; p++) {
        smp_range none = {0, 0, 0};

        switch (stage->kind) {
        case SMP_STAGE_SHARE:
            part.operation = SMP_ALL_GATHER;
            op->pulls[p] =
                stage->taker < 0 || stage->taker == wide->place ? ranges[p] : none;
            op->pushes[p] = own;
            break;
        case SMP_STAGE_EXCHANGE:
            part.operation = SMP_ALL_TO_ALL;
            op->pulls[p] = ranges[p];
            op->pushes[p] = ranges[n + p];
            break;
        default:
            part.operation = SMP_REDUCE_SCATTER;
            op->pulls[p] = own;
            op->pushes[p] = ranges[p];
            break;
        }
    }
    if (stage->kind == SMP_STAGE_REDUCE) {
        *member = stage->peer;
        part.partials = wide->partials;
        part.npartials = wide->npartials;
        if (own.count != 0) {
            smp_status status = make_terms(wide, stage->peer, own.count);

            if (status != SMP_OK) {
                return status;
            }
        }
    }
    smp_collective_begin_part(op, &wide->call, &part, &wide->notice);
    smp_lockstep_post(wide->lockstep);
    wide->begun = true;
    wide->seen = false;
    return SMP_OK;
}

/* One step of a local stage, which all have posted; *done: it was the last. */
static smp_status
step_local(smp_wide *wide, const smp_stage *stage, bool *done, int *member)
{
    bool       whole;
    int        place = 0;
    smp_status status;

    if (!wide->seen) {
        smp_collective_see(wide->op);
        for (int i = 0; i < wide->npartials; i++) {
            wide->factors[i] = wide->op->factors[wide->partials[i].first];
        }
        wide->seen = true;
    }
    status = smp_collective_collect(wide->op, &whole, &place);
    if (status != SMP_OK) {
        *member = smp_hosts_member(&wide->hosts, wide->host, place);
        return status;
    }
    if (whole && smp_collective_next(wide->op)) {
        smp_lockstep_post(wide->lockstep);
    } else if (whole) {
        *done = true;
        if (stage->kind == SMP_STAGE_REDUCE && stage->peer == wide->self) {
            wide->own = wide->made;
            wide->made = NULL;
        }
    }
    return SMP_OK;
}

static smp_status
send_stage(smp_wide *wide, const smp_stage *stage)
{
    size_t     element = smp_dtype_bytes(wide->call.dtype);
    smp_block *block = wide->made;
    size_t     factors = 0;
    smp_status status;

    wide->made = NULL;
    if (stage->kind == SMP_STAGE_SEND_TERMS) {
        factors = (size_t)wide->npartials * sizeof(double);
    } else {
        status = take_block(wide, stage->peer, stage->range.count * element, &block);
        if (status != SMP_OK) {
            return status;
        }
        memcpy(smp_block_data(block), stage->in + stage->range.from * element,
               stage->range.count * element);
    }
    return smp_wire_send(wide->wire, stage->peer, SMP_PARCEL_DATA, wide->sequence,
                         stage->tag, wide->factors, factors, block);
}

/* Takes a parcel of the right size, if it has come. */
static smp_status
receive_stage(smp_wide *wide, const smp_stage *stage, bool *done)
{
    size_t       element = smp_dtype_bytes(wide->call.dtype);
    int          host = wide->hosts.host_of[stage->peer];
    size_t       want = stage->range.count * element;
    size_t       rest_want = 0;
    size_t       rest;
    smp_message *message = smp_wire_take(wide->wire, SMP_PARCEL_DATA, stage->peer,
                                         wide->sequence, stage->tag);

    if (message == NULL) {
        return SMP_OK;
    }
    if (stage->kind == SMP_STAGE_RECEIVE_TERMS) {
        want = host_bytes(wide, host, stage->range.count);
        rest_want = (size_t)smp_hosts_nodes(&wide->hosts, host) * sizeof(double);
    }
    (void)smp_parcel_rest(message, &rest);
    if (message->nblocks != 1 || smp_block_bytes(message->blocks[0]) != want ||
        rest != rest_want) {
        smp_message_free(message);
        return SMP_ERR_MALFORMED;
    }
    *done = true;
    if (stage->kind == SMP_STAGE_RECEIVE_TERMS) {
        wide->terms[host] = message;
        return SMP_OK;
    }
    memcpy(stage->out + stage->range.to * element, smp_block_data(message->blocks[0]),
           want);
    smp_message_free(message);
    return SMP_OK;
}

/* Finds the terms of a host in its block. */
static void
find_terms(smp_wide *wide, int host, size_t count)
{
    const uint8_t *at;
    const double  *factors = wide->factors;
    size_t         rest;
    int            n = 0;

    if (host == wide->host) {
        at = smp_block_data(wide->own);
    } else {
        at = smp_block_data(wide->terms[host]->blocks[0]);
        factors =
            (const double *)(const void *)smp_parcel_rest(wide->terms[host], &rest);
    }
    for (int i = 0; i < wide->hosts.nnodes; i++) {
        const smp_node *node = &wide->hosts.nodes[i];

        if (node->host == host) {
            wide->merged[i] =
                (smp_term){.data = at, .n = node->n, .factor = factors[n++]};
            at += node_bytes(wide, node->n, count);
        }
    }
}

/* Drops what was to be merged, or sent. */
static void
forget_terms(smp_wide *wide)
{
    for (int h = 0; h < wide->hosts.nhosts; h++) {
        smp_message_free(wide->terms[h]);
        wide->terms[h] = NULL;
    }
    if (wide->own != NULL) {
        smp_block_release(wide->own);
        wide->own = NULL;
    }
    if (wide->made != NULL) {
        smp_block_release(wide->made);
        wide->made = NULL;
    }
}

/* Merges the next piece; *done: it was the last. */
static void
merge_stage(smp_wide *wide, const smp_stage *stage, bool *done)
{
    smp_dtype dtype = wide->call.dtype;
    size_t    element = smp_dtype_bytes(dtype);
    size_t    term = smp_dtype_bytes(smp_term_dtype(dtype));
    size_t    piece = MERGE_BYTES / element;
    size_t    count = stage->range.count - wide->merged_to;
    uint8_t  *out = stage->out + (stage->range.to + wide->merged_to) * element;

    count = count < piece ? count : piece;
    for (int h = 0; h < wide->hosts.nhosts; h++) {
        find_terms(wide, h, stage->range.count);
    }
    for (int i = 0; i < wide->hosts.nnodes; i++) {
        const uint8_t *data = wide->merged[i].data;

        wide->merged[i].data =
            data + wide->merged_to * (wide->merged[i].n == 1 ? element : term);
    }
    smp_reduce_terms(wide->op->kernels, wide->call.reduction, dtype, out, wide->merged,
                     wide->hosts.nnodes, count, wide->op->scratch);
    wide->merged_to += count;
    if (wide->merged_to == stage->range.count) {
        *done = true;
        wide->merged_to = 0;
        forget_terms(wide);
    }
}

/* A local stage; *done as below. */
static smp_status
local_stage(smp_wide *wide, const smp_stage *stage, bool *done, int *member)
{
    if (!wide->begun) {
        smp_status status = begin_local(wide, stage, member);

        if (status != SMP_OK) {
            return status;
        }
    }
    *member = -1;
    return smp_lockstep_arrived(wide->lockstep) ? step_local(wide, stage, done, member)
                                                : SMP_OK;
}

/* Goes on with the present stage; *done: it is over.  *waits as in go_on. */
static smp_status
go_on_route(smp_wide *wide, const smp_stage *stage, bool *done, bool *waits,
            int *member)
{
    smp_status status = SMP_OK;

    *member = stage->peer;
    switch (stage->kind) {
    case SMP_STAGE_SHARE:
    case SMP_STAGE_EXCHANGE:
    case SMP_STAGE_REDUCE:
        status = local_stage(wide, stage, done, member);
        wide->waits_local = *waits = !*done && !smp_lockstep_arrived(wide->lockstep);
        return status;
    case SMP_STAGE_SEND:
    case SMP_STAGE_SEND_TERMS:
        *done = true;
        return send_stage(wide, stage);
    case SMP_STAGE_RECEIVE:
    case SMP_STAGE_RECEIVE_TERMS:
        status = receive_stage(wide, stage, done);
        *waits = !*done;
        return status;
    case SMP_STAGE_MERGE:
        merge_stage(wide, stage, done);
        return SMP_OK;
    }
    return status;
}

/* The next stage of the route, or its end. */
static smp_status
step_route(smp_wide *wide, bool *waits, int *member)
{
    bool       done = false;
    smp_status status;

    if (wide->stage < wide->route.nstages) {
        status =
            go_on_route(wide, &wide->route.stages[wide->stage], &done, waits, member);
        if (status == SMP_OK && done) {
            wide->stage++;
            wide->begun = false;
        }
        return status;
    }
    if (wide->round + 1 < wide->rounds) {
        wide->round++;
        return plan_round(wide);
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
        forget_calls(wide);
        forget_terms(wide);
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
    smp_slot *slot = next_slot(wide);

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
    smp_lockstep_post(wide->lockstep);
    return SMP_OK;
}

smp_status
smp_wide_go_on(smp_wide *wide, bool *waits, int *member)
{
    const verdict *v;
    bool           all = true;
    smp_status     status;

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
        hear_host(wide);
        find_parts(wide);
        if (is_speaker(wide)) {
            wide->phase = SMP_WIDE_ASKED;
            return tell_hosts(wide, member);
        }
        wide->phase = SMP_WIDE_JUDGED;
        post_empty(wide);
        return SMP_OK;
    case SMP_WIDE_ASKED:
        status = hear_hosts(wide, &all, member);
        *waits = !all;
        if (status == SMP_OK && all) {
            judge(wide);
            wide->phase = SMP_WIDE_JUDGED;
            post_empty(wide);
        }
        return status;
    case SMP_WIDE_JUDGED:
        wide->waits_local = *waits = !smp_lockstep_arrived(wide->lockstep);
        if (*waits) {
            return SMP_OK;
        }
        v = (const verdict *)(const void *)smp_lockstep_slot(wide->lockstep, 0,
                                                             wide->lockstep->step)
                ->data;
        if (v->agreed != 0) {
            return set_out(wide);
        }
        memcpy(wide->refusal, v->refusal, sizeof(wide->refusal));
        wide->refusal[sizeof(wide->refusal) - 1] = '\0';
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

/* Whether a host's speaker has said that the member has come. */
static bool
is_noted(const smp_wide *wide, int member)
{
    int                host = wide->hosts.host_of[member];
    int                place = wide->hosts.place_of[member];
    const smp_message *note = smp_wire_find(wide->wire, SMP_PARCEL_NOTE,
                                            speaker_of(wide, host), wide->sequence, 0);
    size_t             bytes;
    const uint8_t     *missing = note != NULL ? smp_parcel_rest(note, &bytes) : NULL;

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
        return wide->calls[host] == NULL && member == speaker_of(wide, host);
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

smp_status
smp_wide_trouble(smp_wide *wide, int *member)
{
    smp_status status = SMP_OK;
    int        place;

    if (wide->waits_local) {
        status = smp_lockstep_trouble(wide->lockstep, &place);
        if (status != SMP_OK) {
            *member = smp_hosts_member(&wide->hosts, wide->host, place);
            return status;
        }
    }
    for (int m = 0; m < wide->size && status == SMP_OK; m++) {
        if (wide->hosts.host_of[m] != wide->host) {
            status = far_trouble(wide, m);
            *member = m;
        }
    }
    return status;
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

    if (!is_speaker(wide) || wide->phase != SMP_WIDE_SHOWN) {
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
                (void)smp_wire_send(wide->wire, speaker_of(wide, h), SMP_PARCEL_NOTE,
                                    wide->sequence, 0, places, (size_t)n, NULL);
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
    smp_shelf *own = wide->lockstep->members[wide->place].shelf;
    int64_t    now = smp_clock_ns();
    int64_t    give_way = now + GIVE_WAY_NS;

    while (!stirs(wide) && now < give_way && now < until_ns) {
        sched_yield();
        now = smp_clock_ns();
    }
    if (stirs(wide) || now >= until_ns) {
        return;
    }
    atomic_store(&own->waits, wide->lockstep->step);
    smp_bell_lie_down(&own->bell);
    if (!stirs(wide)) {
        smp_bell_sleep(&own->bell,
                       until_ns - now < SLEEP_NS ? until_ns : now + SLEEP_NS);
    }
    smp_bell_get_up(&own->bell);
    atomic_store(&own->waits, 0);
}
