/* Local steps, parcels out and in, and the merging of terms. */
#include "comm/collective/inter_host/stage.h"

#include <string.h>

#include "comm/memory/block.h"

/* Bytes of the result merged at a time. */
#define MERGE_BYTES ((size_t)256 << 10)

/* A block for a member of another host. */
static smp_status
take_block(smp_hierarchical *hier, int member, size_t bytes, smp_block **out)
{
    return smp_comm_block(hier->wire->comm, hier->wire->members[member].rank, bytes,
                          out);
}

/* A block for use here: of this rank's pool, asked for in the name of any member that
 * has not left. */
smp_status
smp_hierarchical_own_block(smp_hierarchical *hier, size_t bytes, smp_block **out)
{
    for (int m = 0; m < hier->size; m++) {
        if (!hier->wire->members[m].local &&
            take_block(hier, m, bytes, out) == SMP_OK) {
            return SMP_OK;
        }
    }
    return smp_block_private(bytes, out);
}

/* Bytes of a node's term in a block of terms, on a cache line. */
static size_t
node_bytes(const smp_hierarchical *hier, int n, size_t count)
{
    smp_dtype dtype = hier->call.dtype;
    size_t    bytes = smp_dtype_bytes(n == 1 ? dtype : smp_term_dtype(dtype));

    return (count * bytes + 63) / 64 * 64;
}

/* Bytes of the terms of a host. */
static size_t
host_bytes(const smp_hierarchical *hier, int host, size_t count)
{
    size_t bytes = 0;

    for (int i = 0; i < hier->hosts.nnodes; i++) {
        if (hier->hosts.nodes[i].host == host) {
            bytes += node_bytes(hier, hier->hosts.nodes[i].n, count);
        }
    }
    return bytes;
}

/* A block for the terms of `count` elements, the target of the partials. */
static smp_status
make_terms(smp_hierarchical *hier, int peer, size_t count)
{
    size_t     bytes = host_bytes(hier, hier->host, count);
    uint8_t   *at;
    smp_status status = peer == hier->self
                            ? smp_hierarchical_own_block(hier, bytes, &hier->made)
                            : take_block(hier, peer, bytes, &hier->made);

    if (status != SMP_OK) {
        return status;
    }
    at = smp_block_data(hier->made);
    for (int i = 0; i < hier->npartials; i++) {
        hier->partials[i].out = at;
        at += node_bytes(hier, hier->partials[i].n, count);
    }
    return SMP_OK;
}

/* Begins a local stage: fills and posts its first step. */
static smp_status
begin_local(smp_hierarchical *hier, const smp_stage *stage, int *member)
{
    smp_collective *op = hier->op;
    int             n = hier->barrier->size;
    smp_range      *ranges = &hier->route.ranges[stage->ranges];
    smp_range       own = ranges[hier->place];
    smp_local_part  part = {.in = stage->in, .out = stage->out, .most = stage->most};

    for (int p = 0; p < n; p++) {
        smp_range none = {0, 0, 0};

        switch (stage->kind) {
        case SMP_STAGE_SHARE:
            part.operation = SMP_ALL_GATHER;
            op->pulls[p] =
                stage->taker < 0 || stage->taker == hier->place ? ranges[p] : none;
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
        part.partials = hier->partials;
        part.npartials = hier->npartials;
        if (own.count != 0) {
            smp_status status = make_terms(hier, stage->peer, own.count);

            if (status != SMP_OK) {
                return status;
            }
        }
    }
    smp_collective_begin_part(op, &hier->call, &part, &hier->notice);
    smp_epoch_barrier_post(hier->barrier);
    hier->begun = true;
    hier->seen = false;
    return SMP_OK;
}

/* One step of a local stage, posted by all; *done: it was the last. */
static smp_status
step_local(smp_hierarchical *hier, const smp_stage *stage, bool *done, int *member)
{
    bool       whole;
    int        place = 0;
    smp_status status;

    if (!hier->seen) {
        smp_collective_see(hier->op);
        for (int i = 0; i < hier->npartials; i++) {
            hier->factors[i] = hier->op->factors[hier->partials[i].first];
        }
        hier->seen = true;
    }
    status = smp_collective_collect(hier->op, &whole, &place);
    if (status != SMP_OK) {
        *member = smp_hosts_member(&hier->hosts, hier->host, place);
        return status;
    }
    if (whole && smp_collective_next(hier->op)) {
        smp_epoch_barrier_post(hier->barrier);
    } else if (whole) {
        *done = true;
        if (stage->kind == SMP_STAGE_REDUCE && stage->peer == hier->self) {
            hier->own[stage->slot] = hier->made;
            hier->made = NULL;
        }
    }
    return SMP_OK;
}

static smp_status
send_stage(smp_hierarchical *hier, const smp_stage *stage)
{
    size_t     element = smp_dtype_bytes(hier->call.dtype);
    smp_block *block = hier->made;
    size_t     factors = 0;
    smp_status status;

    hier->made = NULL;
    if (stage->kind == SMP_STAGE_SEND_TERMS) {
        factors = (size_t)hier->npartials * sizeof(double);
    } else {
        status = take_block(hier, stage->peer, stage->range.count * element, &block);
        if (status != SMP_OK) {
            return status;
        }
        memcpy(smp_block_data(block), stage->in + stage->range.from * element,
               stage->range.count * element);
    }
    return smp_wire_send(hier->wire, stage->peer, SMP_PARCEL_DATA, hier->sequence,
                         stage->tag, hier->factors, factors, block);
}

/* Takes a parcel of the right size, if it has come. */
static smp_status
receive_stage(smp_hierarchical *hier, const smp_stage *stage, bool *done)
{
    size_t       element = smp_dtype_bytes(hier->call.dtype);
    int          host = hier->hosts.host_of[stage->peer];
    size_t       want = stage->range.count * element;
    size_t       rest_want = 0;
    size_t       rest;
    smp_message *message = smp_wire_take(hier->wire, SMP_PARCEL_DATA, stage->peer,
                                         hier->sequence, stage->tag);

    if (message == NULL) {
        return SMP_OK;
    }
    if (stage->kind == SMP_STAGE_RECEIVE_TERMS) {
        want = host_bytes(hier, host, stage->range.count);
        rest_want = (size_t)smp_hosts_nodes(&hier->hosts, host) * sizeof(double);
    }
    (void)smp_parcel_rest(message, &rest);
    if (message->nblocks != 1 || smp_block_bytes(message->blocks[0]) != want ||
        rest != rest_want) {
        smp_message_free(message);
        return SMP_ERR_MALFORMED;
    }
    *done = true;
    if (stage->kind == SMP_STAGE_RECEIVE_TERMS) {
        hier->terms[host] = message;
        return SMP_OK;
    }
    memcpy(stage->out + stage->range.to * element, smp_block_data(message->blocks[0]),
           want);
    smp_message_free(message);
    return SMP_OK;
}

/* Finds the terms of a host in its block; a member alone on its host has its tensor as
 * terms. */
static void
find_terms(smp_hierarchical *hier, const smp_stage *stage, int host)
{
    size_t         count = stage->range.count;
    const uint8_t *at =
        stage->in + stage->range.from * smp_dtype_bytes(hier->call.dtype);
    const double *factors = hier->factors;
    size_t        rest;
    int           n = 0;

    if (host == hier->host) {
        if (hier->own[stage->slot] != NULL) {
            at = smp_block_data(hier->own[stage->slot]);
        }
    } else {
        at = smp_block_data(hier->terms[host]->blocks[0]);
        factors =
            (const double *)(const void *)smp_parcel_rest(hier->terms[host], &rest);
    }
    for (int i = 0; i < hier->hosts.nnodes; i++) {
        const smp_node *node = &hier->hosts.nodes[i];

        if (node->host == host) {
            hier->merged[i] =
                (smp_term){.data = at, .n = node->n, .factor = factors[n++]};
            at += node_bytes(hier, node->n, count);
        }
    }
}

/* Drops the terms of a round. */
static void
forget_round(smp_hierarchical *hier, int slot)
{
    for (int h = 0; h < hier->hosts.nhosts; h++) {
        smp_message_free(hier->terms[h]);
        hier->terms[h] = NULL;
    }
    smp_block_release(hier->own[slot]);
    hier->own[slot] = NULL;
}

void
smp_hierarchical_forget_terms(smp_hierarchical *hier)
{
    for (int slot = 0; slot < SMP_ROUTE_SLOTS; slot++) {
        forget_round(hier, slot);
    }
    smp_block_release(hier->made);
    hier->made = NULL;
}

/* Merges the next piece; *done: it was the last. */
static void
merge_stage(smp_hierarchical *hier, const smp_stage *stage, bool *done)
{
    smp_dtype dtype = hier->call.dtype;
    size_t    element = smp_dtype_bytes(dtype);
    size_t    term = smp_dtype_bytes(smp_term_dtype(dtype));
    size_t    piece = MERGE_BYTES / element;
    size_t    count = stage->range.count - hier->merged_to;
    uint8_t  *out = stage->out + (stage->range.to + hier->merged_to) * element;

    count = count < piece ? count : piece;
    for (int h = 0; h < hier->hosts.nhosts; h++) {
        find_terms(hier, stage, h);
    }
    for (int i = 0; i < hier->hosts.nnodes; i++) {
        const uint8_t *data = hier->merged[i].data;

        hier->merged[i].data =
            data + hier->merged_to * (hier->merged[i].n == 1 ? element : term);
    }
    smp_reduce_terms(hier->op->kernels, hier->call.reduction, dtype, out, hier->merged,
                     hier->hosts.nnodes, count, hier->op->scratch);
    hier->merged_to += count;
    if (hier->merged_to == stage->range.count) {
        *done = true;
        hier->merged_to = 0;
        forget_round(hier, stage->slot);
    }
}

/* A local stage; *done as below. */
static smp_status
local_stage(smp_hierarchical *hier, const smp_stage *stage, bool *done, int *member)
{
    if (!hier->begun) {
        smp_status status = begin_local(hier, stage, member);

        if (status != SMP_OK) {
            return status;
        }
    }
    *member = -1;
    return smp_epoch_barrier_arrived(hier->barrier)
               ? step_local(hier, stage, done, member)
               : SMP_OK;
}

smp_status
smp_hierarchical_stage(smp_hierarchical *hier, const smp_stage *stage, bool *done,
                       bool *waits, int *member)
{
    smp_status status = SMP_OK;

    *member = stage->peer;
    switch (stage->kind) {
    case SMP_STAGE_SHARE:
    case SMP_STAGE_EXCHANGE:
    case SMP_STAGE_REDUCE:
        status = local_stage(hier, stage, done, member);
        hier->waits_local = *waits =
            !*done && !smp_epoch_barrier_arrived(hier->barrier);
        return status;
    case SMP_STAGE_SEND:
    case SMP_STAGE_SEND_TERMS:
        *done = true;
        return send_stage(hier, stage);
    case SMP_STAGE_RECEIVE:
    case SMP_STAGE_RECEIVE_TERMS:
        status = receive_stage(hier, stage, done);
        *waits = !*done;
        return status;
    case SMP_STAGE_MERGE:
        merge_stage(hier, stage, done);
        return SMP_OK;
    }
    return status;
}
