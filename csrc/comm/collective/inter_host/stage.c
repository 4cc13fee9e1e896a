/* Local steps, parcels out and in, and the merging of terms. */
#include "comm/collective/inter_host/stage.h"

#include <string.h>

#include "comm/memory/block.h"

/* What is merged at a time: bytes of the result. */
#define MERGE_BYTES ((size_t)256 << 10)

/* A block for a member of another host. */
static smp_status
take_block(smp_wide *wide, int member, size_t bytes, smp_block **out)
{
    return smp_comm_block(wide->wire->comm, wide->wire->members[member].rank, bytes,
                          out);
}

/* A block that stays here: of this rank's pool, which is asked for in the name of
 * anyone who has not left. */
smp_status
smp_wide_own_block(smp_wide *wide, size_t bytes, smp_block **out)
{
    for (int m = 0; m < wide->size; m++) {
        if (!wide->wire->members[m].local &&
            take_block(wide, m, bytes, out) == SMP_OK) {
            return SMP_OK;
        }
    }
    return smp_block_private(bytes, out);
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
    smp_status status = peer == wide->self
                            ? smp_wide_own_block(wide, bytes, &wide->made)
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
            wide->own[stage->slot] = wide->made;
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

/* Finds the terms of a host in its block; those of a member that is alone on its host
 * are its tensor. */
static void
find_terms(smp_wide *wide, const smp_stage *stage, int host)
{
    size_t         count = stage->range.count;
    const uint8_t *at =
        stage->in + stage->range.from * smp_dtype_bytes(wide->call.dtype);
    const double *factors = wide->factors;
    size_t        rest;
    int           n = 0;

    if (host == wide->host) {
        if (wide->own[stage->slot] != NULL) {
            at = smp_block_data(wide->own[stage->slot]);
        }
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

/* Drops the terms of a round. */
static void
forget_round(smp_wide *wide, int slot)
{
    for (int h = 0; h < wide->hosts.nhosts; h++) {
        smp_message_free(wide->terms[h]);
        wide->terms[h] = NULL;
    }
    smp_block_release(wide->own[slot]);
    wide->own[slot] = NULL;
}

void
smp_wide_forget_terms(smp_wide *wide)
{
    for (int slot = 0; slot < SMP_ROUTE_SLOTS; slot++) {
        forget_round(wide, slot);
    }
    smp_block_release(wide->made);
    wide->made = NULL;
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
        find_terms(wide, stage, h);
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
        forget_round(wide, stage->slot);
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

smp_status
smp_wide_stage(smp_wide *wide, const smp_stage *stage, bool *done, bool *waits,
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
