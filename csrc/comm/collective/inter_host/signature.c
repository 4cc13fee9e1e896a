/* Signatures from host to host, and the node leader's outcome. */
#include "comm/collective/inter_host/signature.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The outcome in the node leader's slot. */
typedef struct {
    uint64_t    agreed;
    smp_refusal refusal;
} outcome;

static const uint64_t *
slot_counts(const smp_slot *slot)
{
    return (const uint64_t *)(const void *)slot->data;
}

static int
name_of(const smp_hierarchical *hier, int member)
{
    return smp_comm_name(hier->wire->comm, hier->wire->members[member].rank);
}

/* Reads the signatures shown by this host's members. */
static void
hear_host(smp_hierarchical *hier)
{
    for (int p = 0; p < hier->barrier->size; p++) {
        int       m = smp_hosts_member(&hier->hosts, hier->host, p);
        smp_slot *slot = smp_epoch_barrier_slot(hier->barrier, p, hier->barrier->step);

        hier->said[m] = (smp_said){.name = name_of(hier, m),
                                   .notice = &slot->notice,
                                   .counts = slot_counts(slot)};
    }
}

/* An all-to-all with split sizes needs the places of its parts in this host's tensors.
 * If not all have called it, the result is not used. */
static void
find_parts(smp_hierarchical *hier)
{
    hier->route.longest = 0;
    for (int p = 0; p < hier->barrier->size && hier->call.out_counts != NULL; p++) {
        int             m = smp_hosts_member(&hier->hosts, hier->host, p);
        const smp_said *said = &hier->said[m];

        hier->route.starts[p] = 0;
        for (int to = 0; to < hier->size && said->notice->uneven == 2; to++) {
            size_t count = (size_t)said->counts[to];

            hier->route.starts[p] += to < hier->self ? count : 0;
            if (hier->hosts.host_of[to] == hier->host && count > hier->route.longest) {
                hier->route.longest = count;
            }
        }
    }
}

void
smp_signature_read(smp_hierarchical *hier)
{
    hear_host(hier);
    find_parts(hier);
}

/* Bytes of a member's call in a parcel. */
static size_t
said_bytes(const smp_hierarchical *hier, const smp_notice *notice)
{
    return sizeof(*notice) +
           (size_t)notice->uneven * (size_t)hier->size * sizeof(uint64_t);
}

smp_status
smp_signature_send(smp_hierarchical *hier, int *member)
{
    size_t     bytes = 0;
    uint8_t   *all;
    uint8_t   *at;
    smp_status status = SMP_OK;

    for (int p = 0; p < hier->barrier->size; p++) {
        int m = smp_hosts_member(&hier->hosts, hier->host, p);

        bytes += said_bytes(hier, hier->said[m].notice);
    }
    assert(bytes != 0); /* this member is one of them */
    all = at = malloc(bytes);
    if (all == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int p = 0; p < hier->barrier->size; p++) {
        int               m = smp_hosts_member(&hier->hosts, hier->host, p);
        const smp_notice *notice = hier->said[m].notice;

        memcpy(at, notice, sizeof(*notice));
        memcpy(at + sizeof(*notice), hier->said[m].counts,
               said_bytes(hier, notice) - sizeof(*notice));
        at += said_bytes(hier, notice);
    }
    for (int h = 0; h < hier->hosts.nhosts && status == SMP_OK; h++) {
        if (h != hier->host) {
            *member = smp_hierarchical_leader(hier, h);
            status = smp_wire_send(hier->wire, *member, SMP_PARCEL_CALLS,
                                   hier->sequence, 0, all, bytes, NULL);
        }
    }
    free(all);
    return status;
}

/* The calls of another host's members, from its node leader's parcel; false: it makes
 * no sense. */
static bool
hear(smp_hierarchical *hier, int host, const smp_message *message)
{
    size_t         left;
    const uint8_t *at = smp_parcel_rest(message, &left);

    for (int p = 0; p < smp_hosts_count(&hier->hosts, host); p++) {
        int               m = smp_hosts_member(&hier->hosts, host, p);
        const smp_notice *notice = (const smp_notice *)(const void *)at;

        if (left < sizeof(*notice) || notice->uneven > 2 ||
            left < said_bytes(hier, notice)) {
            return false;
        }
        hier->said[m] = (smp_said){
            .name = name_of(hier, m),
            .notice = notice,
            .counts = (const uint64_t *)(const void *)(at + sizeof(*notice)),
        };
        at += said_bytes(hier, notice);
        left -= said_bytes(hier, notice);
    }
    return left == 0;
}

smp_status
smp_signature_receive(smp_hierarchical *hier, bool *all, int *member)
{
    *all = true;
    for (int h = 0; h < hier->hosts.nhosts; h++) {
        if (h == hier->host || hier->calls[h] != NULL) {
            continue;
        }
        *member = smp_hierarchical_leader(hier, h);
        hier->calls[h] =
            smp_wire_take(hier->wire, SMP_PARCEL_CALLS, *member, hier->sequence, 0);
        if (hier->calls[h] == NULL) {
            *all = false;
        } else if (!hear(hier, h, hier->calls[h])) {
            return SMP_ERR_MALFORMED;
        }
    }
    return SMP_OK;
}

void
smp_signature_forget(smp_hierarchical *hier)
{
    for (int h = 0; h < hier->hosts.nhosts; h++) {
        smp_message_free(hier->calls[h]);
        hier->calls[h] = NULL;
    }
}

void
smp_signature_compare(smp_hierarchical *hier)
{
    outcome *v = (outcome *)(void *)smp_hierarchical_next_slot(hier)->data;
    size_t   most;

    v->agreed = smp_agreement(hier->said, hier->size, &most, &v->refusal);
    smp_signature_forget(hier);
}

bool
smp_signature_agreed(const smp_hierarchical *hier, smp_refusal *refusal)
{
    const smp_slot *slot =
        smp_epoch_barrier_slot(hier->barrier, 0, hier->barrier->step);
    const outcome *v = (const outcome *)(const void *)slot->data;

    if (v->agreed == 0) {
        *refusal = v->refusal;
    }
    return v->agreed != 0;
}
