/* The senders, ranges and receivers, in their order. */
#include "comm/collective/inter_host/route.h"

#include <stdlib.h>
#include <string.h>

/* A member's range of one round is never shorter than this. */
#define MIN_ROUND 4096

/* Rounds on the way at a time: phase 0 of SMP_ROUTE_SLOTS, and other hosts' parcels of
 * the next phases. */
#define ROUNDS_ON_THE_WAY 8

/* The phases of an all-reduce, the most. */
#define PHASES 3

/* Tags of parcels of one round: a pair sends at most one of each. */
enum { TAG_TERMS, TAG_RESULTS, TAGS };

/* ---------------------------------------------------------------------- the list */

static int
own_host(const smp_route *route)
{
    return route->hosts->host_of[route->self];
}

static int
own_place(const smp_route *route)
{
    return route->hosts->place_of[route->self];
}

static int
places(const smp_route *route)
{
    return smp_hosts_count(route->hosts, own_host(route));
}

/* The next stage, of zeros, or NULL. */
static smp_stage *
add_stage(smp_route *route, smp_stage_kind kind)
{
    if (route->nstages == route->stages_room) {
        size_t     room = 2 * route->stages_room + 16;
        smp_stage *stages = realloc(route->stages, room * sizeof(*stages));

        if (stages == NULL) {
            return NULL;
        }
        route->stages = stages;
        route->stages_room = room;
    }
    route->stages[route->nstages] = (smp_stage){.kind = kind,
                                                .phase = route->phase,
                                                .slot = route->slot,
                                                .peer = -1,
                                                .taker = -1};
    return &route->stages[route->nstages++];
}

/* A local stage with so many ranges, of zeros, or NULL. */
static smp_stage *
add_local(smp_route *route, smp_stage_kind kind, size_t nranges)
{
    smp_stage *stage;

    if (route->nranges + nranges > route->ranges_room) {
        size_t     room = 2 * route->ranges_room + nranges;
        smp_range *ranges = realloc(route->ranges, room * sizeof(*ranges));

        if (ranges == NULL) {
            return NULL;
        }
        route->ranges = ranges;
        route->ranges_room = room;
    }
    memset(&route->ranges[route->nranges], 0, nranges * sizeof(smp_range));
    stage = add_stage(route, kind);
    if (stage != NULL) {
        stage->ranges = route->nranges;
        route->nranges += nranges;
    }
    return stage;
}

static smp_status
add_transfer(smp_route *route, smp_stage_kind kind, int peer, uint64_t tag,
             smp_range range, const uint8_t *in, uint8_t *out)
{
    smp_stage *stage;

    if (range.count == 0) {
        return SMP_OK;
    }
    stage = add_stage(route, kind);
    if (stage == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    stage->peer = peer;
    stage->tag = tag;
    stage->range = range;
    stage->in = in;
    stage->out = out;
    return SMP_OK;
}

/* ------------------------------------------------------------------------- rounds */

/* Whether the members cut one tensor among themselves. */
static bool
is_cut(smp_operation operation)
{
    return operation == SMP_ALL_REDUCE || operation == SMP_REDUCE ||
           operation == SMP_BROADCAST;
}

/* Elements of a range moved in one round. */
static size_t
round_elements(const smp_route *route, const smp_call *call)
{
    size_t elements = route->round_bytes / smp_dtype_bytes(call->dtype);

    if (!is_cut(call->operation)) {
        elements /= (size_t)route->hosts->size;
    }
    return elements > MIN_ROUND ? elements : MIN_ROUND;
}

static smp_range
window(const smp_route *route, const smp_call *call, smp_range range, size_t round)
{
    size_t elements = round_elements(route, call);

    return call->out_counts != NULL
               ? range
               : smp_range_window(range, round * elements, elements);
}

/* Piece i of n of a range, on cache lines. */
static smp_range
cut(smp_range whole, int i, int n, size_t element)
{
    size_t line = 64 / element;
    size_t each = (whole.count + (size_t)n - 1) / (size_t)n;
    size_t first;
    size_t end;

    each = (each + line - 1) / line * line;
    first = (size_t)i * each < whole.count ? (size_t)i * each : whole.count;
    end = first + each < whole.count ? first + each : whole.count;
    return (smp_range){whole.from + first, whole.to + first, end - first};
}

/* --------------------------------------------------------------------- the stages */

/* Each member of this host has a range of `in` for `taker`, or for all if -1: parts[of
 * the member at a place of `host`, in this wave].  Without any: no stage. */
static smp_status
add_share(smp_route *route, int host, int wave, int taker, const uint8_t *in,
          uint8_t *out)
{
    int        n = places(route);
    int        there = smp_hosts_count(route->hosts, host);
    size_t     most = 0;
    smp_stage *stage = add_local(route, SMP_STAGE_SHARE, (size_t)n);

    if (stage == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int p = 0; p < n && wave * n + p < there; p++) {
        smp_range r = route->parts[smp_hosts_member(route->hosts, host, wave * n + p)];

        if (host != own_host(route)) { /* it has come, and lies where it goes */
            r.from = r.to;
        }
        route->ranges[stage->ranges + (size_t)p] = r;
        most = r.count > most ? r.count : most;
    }
    stage->most = most;
    stage->taker = taker;
    stage->in = in;
    stage->out = out;
    if (most == 0) {
        route->nstages--;
    }
    return SMP_OK;
}

/* Sends this member's part to one member of each other host. */
static smp_status
send_part(smp_route *route, uint64_t tag, const uint8_t *in)
{
    const smp_hosts *hosts = route->hosts;
    smp_status       status = SMP_OK;

    for (int k = 1; k < hosts->nhosts && status == SMP_OK; k++) {
        int host = (own_host(route) + k) % hosts->nhosts;
        int place = own_place(route) % smp_hosts_count(hosts, host);

        status =
            add_transfer(route, SMP_STAGE_SEND, smp_hosts_member(hosts, host, place),
                         tag, route->parts[route->self], in, NULL);
    }
    return status;
}

/* Takes the parts of other hosts' members, and shares them here. */
static smp_status
take_parts(smp_route *route, uint64_t tag, uint8_t *out)
{
    const smp_hosts *hosts = route->hosts;
    int              n = places(route);
    smp_status       status = SMP_OK;

    route->phase++;
    for (int k = 1; k < hosts->nhosts; k++) {
        int host = (own_host(route) + k) % hosts->nhosts;
        int there = smp_hosts_count(hosts, host);

        for (int wave = 0; wave * n < there && status == SMP_OK; wave++) {
            int place = wave * n + own_place(route);

            if (place < there) {
                int peer = smp_hosts_member(hosts, host, place);

                status = add_transfer(route, SMP_STAGE_RECEIVE, peer, tag,
                                      route->parts[peer], NULL, out);
            }
            if (status == SMP_OK && n > 1) {
                status = add_share(route, host, wave, -1, out, out);
            }
        }
    }
    return status;
}

/* The members of this host make the terms for the members of `host`, as many at a time
 * as there are here. */
static smp_status
reduce_for(smp_route *route, int host, uint64_t tag, const uint8_t *in)
{
    const smp_hosts *hosts = route->hosts;
    int              n = places(route);
    int              there = smp_hosts_count(hosts, host);

    for (int wave = 0; wave * n < there; wave++) {
        smp_stage *stage = add_local(route, SMP_STAGE_REDUCE, (size_t)n);
        size_t     most = 0;
        int        peer = -1;
        smp_range  range = {0, 0, 0};

        if (stage == NULL) {
            return SMP_ERR_NO_MEMORY;
        }
        for (int p = 0; p < n && wave * n + p < there; p++) {
            int       receiver = smp_hosts_member(hosts, host, wave * n + p);
            smp_range r = route->parts[receiver];

            r.to = 0;
            route->ranges[stage->ranges + (size_t)p] = r;
            most = r.count > most ? r.count : most;
            if (p == own_place(route) && r.count != 0) {
                peer = receiver;
                range = r;
            }
        }
        if (most == 0) {
            route->nstages--;
            continue;
        }
        stage->most = most;
        stage->peer = peer;
        stage->in = in;
        if (peer >= 0 && peer != route->self &&
            add_transfer(route, SMP_STAGE_SEND_TERMS, peer, tag, range, NULL, NULL) !=
                SMP_OK) {
            return SMP_ERR_NO_MEMORY;
        }
    }
    return SMP_OK;
}

/* Every member gets its part, reduced, at out + to. */
static smp_status
reduce_parts(smp_route *route, uint64_t tag, const uint8_t *in, uint8_t *out)
{
    const smp_hosts *hosts = route->hosts;
    smp_range        own = route->parts[route->self];
    smp_status       status = SMP_OK;

    int last = places(route) > 1 ? hosts->nhosts : hosts->nhosts - 1;

    for (int k = 1; k <= last && status == SMP_OK; k++) { /* the own host comes last */
        status = reduce_for(route, (own_host(route) + k) % hosts->nhosts, tag, in);
    }
    route->phase++;
    for (int k = 1; k < hosts->nhosts && status == SMP_OK; k++) {
        int host = (own_host(route) + k) % hosts->nhosts;
        int place = own_place(route) % smp_hosts_count(hosts, host);

        status =
            add_transfer(route, SMP_STAGE_RECEIVE_TERMS,
                         smp_hosts_member(hosts, host, place), tag, own, NULL, NULL);
    }
    return status == SMP_OK
               ? add_transfer(route, SMP_STAGE_MERGE, route->self, tag, own, in, out)
               : status;
}

/* ------------------------------------------------------------------ the operations */

static smp_status
plan_all_reduce(smp_route *route, const smp_call *call, uint64_t tag, smp_range whole)
{
    int        n = route->hosts->size;
    size_t     element = smp_dtype_bytes(call->dtype);
    smp_status status;

    for (int m = 0; m < n; m++) {
        route->parts[m] = cut(whole, m, n, element);
    }
    status = reduce_parts(route, tag + TAG_TERMS, call->in, call->out);
    if (status == SMP_OK) {
        status = send_part(route, tag + TAG_RESULTS, call->out);
    }
    if (status == SMP_OK && places(route) > 1) {
        status = add_share(route, own_host(route), 0, -1, call->out, call->out);
    }
    return status == SMP_OK ? take_parts(route, tag + TAG_RESULTS, call->out) : status;
}

/* The members of the root's host have slices. */
static void
slice(smp_route *route, const smp_call *call, smp_range whole)
{
    const smp_hosts *hosts = route->hosts;
    int              host = hosts->host_of[call->root];
    int              n = smp_hosts_count(hosts, host);

    memset(route->parts, 0, (size_t)hosts->size * sizeof(smp_range));
    for (int p = 0; p < n; p++) {
        route->parts[smp_hosts_member(hosts, host, p)] =
            cut(whole, p, n, smp_dtype_bytes(call->dtype));
    }
}

static smp_status
plan_reduce(smp_route *route, const smp_call *call, uint64_t tag, smp_range whole,
            uint8_t *result)
{
    const smp_hosts *hosts = route->hosts;
    bool             is_root = route->self == call->root;
    uint8_t         *out = is_root ? call->out : result;
    smp_status       status;

    slice(route, call, whole);
    if (!is_root) { /* the result has place for a slice */
        route->parts[route->self].to = 0;
    }
    status = reduce_parts(route, tag + TAG_TERMS, call->in, out);
    if (status != SMP_OK || hosts->host_of[call->root] != own_host(route) ||
        places(route) == 1) {
        return status;
    }
    for (int p = 0; p < places(route); p++) {
        smp_range *part = &route->parts[smp_hosts_member(hosts, own_host(route), p)];

        part->to = part->from;
        part->from = p == hosts->place_of[call->root] ? part->to : 0;
    }
    return add_share(route, own_host(route), 0, hosts->place_of[call->root], out, out);
}

static smp_status
plan_broadcast(smp_route *route, const smp_call *call, uint64_t tag, smp_range whole)
{
    const smp_hosts *hosts = route->hosts;
    bool             is_root = route->self == call->root;
    const uint8_t   *in = is_root ? call->in : call->out;

    slice(route, call, whole);
    if (hosts->host_of[call->root] != own_host(route)) {
        return take_parts(route, tag + TAG_RESULTS, call->out);
    }
    if (is_root) { /* it need not wait for its host */
        if (send_part(route, tag + TAG_RESULTS, in) != SMP_OK) {
            return SMP_ERR_NO_MEMORY;
        }
    }
    if (places(route) > 1 || (is_root && call->out != NULL && call->out != call->in)) {
        for (int p = 0; p < places(route); p++) {
            smp_range none = {0, 0, 0};
            int       m = smp_hosts_member(hosts, own_host(route), p);

            route->parts[m] = m == call->root ? whole : none;
        }
        if (add_share(route, own_host(route), 0, -1, in, call->out) != SMP_OK) {
            return SMP_ERR_NO_MEMORY;
        }
        slice(route, call, whole);
    }
    return is_root ? SMP_OK : send_part(route, tag + TAG_RESULTS, in);
}

/* The call's ranges for each pair with this member. */
static smp_range
pair_range(const smp_route *route, const smp_call *call, size_t round, int source,
           int receiver)
{
    return window(route, call, smp_call_range(call, route->self, source, receiver),
                  round);
}

static smp_status
plan_all_gather(smp_route *route, const smp_call *call, uint64_t tag, size_t round)
{
    smp_status status;

    for (int m = 0; m < route->hosts->size; m++) {
        route->parts[m] = pair_range(route, call, round, m, route->self);
    }
    status = send_part(route, tag + TAG_RESULTS, call->in);
    if (status == SMP_OK) {
        status = add_share(route, own_host(route), 0, -1, call->in, call->out);
    }
    return status == SMP_OK ? take_parts(route, tag + TAG_RESULTS, call->out) : status;
}

static smp_status
plan_reduce_scatter(smp_route *route, const smp_call *call, uint64_t tag, size_t round)
{
    for (int m = 0; m < route->hosts->size; m++) {
        route->parts[m] = pair_range(route, call, round, route->self, m);
    }
    return reduce_parts(route, tag + TAG_TERMS, call->in, call->out);
}

static smp_status
plan_gather(smp_route *route, const smp_call *call, uint64_t tag, size_t round)
{
    const smp_hosts *hosts = route->hosts;
    smp_status       status = SMP_OK;

    if (hosts->host_of[call->root] != own_host(route)) {
        return add_transfer(route, SMP_STAGE_SEND, call->root, tag + TAG_RESULTS,
                            pair_range(route, call, round, route->self, call->root),
                            call->in, NULL);
    }
    for (int m = 0; m < hosts->size; m++) {
        route->parts[m] = pair_range(route, call, round, m, call->root);
    }
    status = add_share(route, own_host(route), 0, hosts->place_of[call->root], call->in,
                       call->out);
    route->phase++;
    for (int m = 0; m < hosts->size && route->self == call->root; m++) {
        if (hosts->host_of[m] != own_host(route) && status == SMP_OK) {
            status = add_transfer(route, SMP_STAGE_RECEIVE, m, tag + TAG_RESULTS,
                                  route->parts[m], NULL, call->out);
        }
    }
    return status;
}

/* The beginning of this member's part in the tensor of the member at a place. */
static size_t
from_in(const smp_route *route, const smp_call *call, int place, size_t from)
{
    return call->out_counts != NULL ? route->starts[place] : from;
}

static smp_status
add_exchange(smp_route *route, const smp_call *call, size_t round)
{
    smp_range  whole = {0, 0, call->count};
    int        n = places(route);
    smp_stage *stage = add_local(route, SMP_STAGE_EXCHANGE, 2 * (size_t)n);

    if (stage == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    stage->in = call->in;
    stage->out = call->out;
    stage->most = call->out_counts != NULL ? route->longest
                                           : window(route, call, whole, round).count;
    for (int p = 0; p < n; p++) {
        int        m = smp_hosts_member(route->hosts, own_host(route), p);
        smp_range *pull = &route->ranges[stage->ranges + (size_t)p];

        *pull = pair_range(route, call, round, m, route->self);
        pull->from = from_in(route, call, p, pull->from);
        pull[n] = pair_range(route, call, round, route->self, m);
    }
    return SMP_OK;
}

/* Scatter and all-to-all. */
static smp_status
plan_pairs(smp_route *route, const smp_call *call, uint64_t tag, size_t round)
{
    const smp_hosts *hosts = route->hosts;
    smp_status       status = SMP_OK;

    for (int k = 1; k < hosts->size && status == SMP_OK; k++) {
        int m = (route->self + k) % hosts->size;

        if (hosts->host_of[m] != own_host(route)) {
            status = add_transfer(route, SMP_STAGE_SEND, m, tag + TAG_RESULTS,
                                  pair_range(route, call, round, route->self, m),
                                  call->in, NULL);
        }
    }
    if (status == SMP_OK && (call->operation != SMP_SCATTER ||
                             hosts->host_of[call->root] == own_host(route))) {
        status = add_exchange(route, call, round);
    }
    route->phase++;
    for (int k = 1; k < hosts->size && status == SMP_OK; k++) {
        int m = (route->self + hosts->size - k) % hosts->size;

        if (hosts->host_of[m] != own_host(route)) {
            status = add_transfer(route, SMP_STAGE_RECEIVE, m, tag + TAG_RESULTS,
                                  pair_range(route, call, round, m, route->self), NULL,
                                  call->out);
        }
    }
    return status;
}

static smp_status
plan_round(smp_route *route, const smp_call *call, size_t round, uint8_t *result)
{
    uint64_t  tag = (uint64_t)round * TAGS;
    smp_range whole = window(route, call, (smp_range){0, 0, call->count}, round);

    route->phase = 0;
    route->slot = (int)(round % SMP_ROUTE_SLOTS);
    switch (call->operation) {
    case SMP_ALL_REDUCE:
        return plan_all_reduce(route, call, tag, whole);
    case SMP_REDUCE:
        return plan_reduce(route, call, tag, whole, result);
    case SMP_REDUCE_SCATTER:
        return plan_reduce_scatter(route, call, tag, round);
    case SMP_ALL_GATHER:
        return plan_all_gather(route, call, tag, round);
    case SMP_BROADCAST:
        return plan_broadcast(route, call, tag, whole);
    case SMP_GATHER:
        return plan_gather(route, call, tag, round);
    case SMP_SCATTER:
    case SMP_ALL_TO_ALL:
        return plan_pairs(route, call, tag, round);
    case SMP_BARRIER:
    case SMP_OPERATIONS:
        break;
    }
    return SMP_OK;
}

/* ------------------------------------------------------------------ rounds and ticks
 */

static size_t
rounds_of(const smp_route *route, const smp_call *call)
{
    size_t elements = round_elements(route, call);
    size_t most;

    if (call->operation == SMP_BARRIER) {
        return 0;
    }
    most = call->out_counts != NULL ? 1 : smp_call_longest(call, route->hosts->size);
    return (most + elements - 1) / elements;
}

/* Keeps a phase's among the stages from `first` on. */
static void
keep_phase(smp_route *route, size_t first, int phase)
{
    size_t n = first;

    for (size_t i = first; i < route->nstages; i++) {
        if (route->stages[i].phase == phase) {
            route->stages[n++] = route->stages[i];
        }
    }
    route->nstages = n;
}

/* ------------------------------------------------------------------------- public */

smp_status
smp_route_init(smp_route *route, const smp_hosts *hosts, int self, size_t bytes)
{
    *route = (smp_route){
        .hosts = hosts,
        .self = self,
        .round_bytes = bytes / ROUNDS_ON_THE_WAY,
        .parts = calloc((size_t)hosts->size, sizeof(smp_range)),
        .starts = calloc((size_t)hosts->size, sizeof(size_t)),
    };
    return route->parts != NULL && route->starts != NULL ? SMP_OK : SMP_ERR_NO_MEMORY;
}

void
smp_route_fini(smp_route *route)
{
    free(route->stages);
    free(route->ranges);
    free(route->parts);
    free(route->starts);
}

size_t
smp_route_ticks(const smp_route *route, const smp_call *call)
{
    size_t rounds = rounds_of(route, call);
    size_t waits = call->operation == SMP_ALL_REDUCE ? 2 : 1;

    return rounds > 1 ? rounds + waits * SMP_ROUTE_AHEAD : rounds;
}

size_t
smp_route_result(const smp_route *route, const smp_call *call)
{
    smp_range whole = {0, 0, call->count};

    if (call->operation != SMP_REDUCE || route->self == call->root ||
        route->hosts->host_of[call->root] != own_host(route)) {
        return 0;
    }
    return cut(window(route, call, whole, 0), 0, places(route),
               smp_dtype_bytes(call->dtype))
        .count;
}

smp_status
smp_route_plan(smp_route *route, const smp_call *call, size_t tick, uint8_t *result)
{
    size_t     rounds = rounds_of(route, call);
    smp_status status = SMP_OK;

    route->nstages = 0;
    route->nranges = 0;
    if (rounds <= 1) {
        return plan_round(route, call, tick, result);
    }
    for (size_t p = 0; p < PHASES && status == SMP_OK; p++) {
        size_t round = tick - p * SMP_ROUTE_AHEAD;
        size_t first = route->nstages;

        if (p * SMP_ROUTE_AHEAD <= tick && round < rounds) {
            status = plan_round(route, call, round, result);
            keep_phase(route, first, (int)p);
        }
    }
    return status;
}
