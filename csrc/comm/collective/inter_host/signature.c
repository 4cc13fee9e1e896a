/* Signatures from host to host, and the node leader's outcome. */
#include "comm/collective/inter_host/signature.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The outcome in the node leader's slot. */
typedef struct {
    uint64_t agreed;
    char     refusal[320];
} outcome;

static const uint64_t *
slot_counts(const smp_slot *slot)
{
    return (const uint64_t *)(const void *)slot->data;
}

static int
name_of(const smp_wide *wide, int member)
{
    return smp_comm_name(wide->wire->comm, wide->wire->members[member].rank);
}

/* What this host's members have shown. */
static void
hear_host(smp_wide *wide)
{
    for (int p = 0; p < wide->lockstep->size; p++) {
        int       m = smp_hosts_member(&wide->hosts, wide->host, p);
        smp_slot *slot = smp_lockstep_slot(wide->lockstep, p, wide->lockstep->step);

        wide->said[m] = (smp_said){.name = name_of(wide, m),
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

        wide->route.starts[p] = 0;
        for (int to = 0; to < wide->size && said->notice->uneven == 2; to++) {
            size_t count = (size_t)said->counts[to];

            wide->route.starts[p] += to < wide->self ? count : 0;
            if (wide->hosts.host_of[to] == wide->host && count > wide->route.longest) {
                wide->route.longest = count;
            }
        }
    }
}

void
smp_signature_read(smp_wide *wide)
{
    hear_host(wide);
    find_parts(wide);
}

/* Bytes that a member's call takes in a parcel. */
static size_t
said_bytes(const smp_wide *wide, const smp_notice *notice)
{
    return sizeof(*notice) +
           (size_t)notice->uneven * (size_t)wide->size * sizeof(uint64_t);
}

smp_status
smp_signature_send(smp_wide *wide, int *member)
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
            *member = smp_wide_leader(wide, h);
            status = smp_wire_send(wide->wire, *member, SMP_PARCEL_CALLS,
                                   wide->sequence, 0, all, bytes, NULL);
        }
    }
    free(all);
    return status;
}

/* What another host's members call, from its node leader's parcel; false: it makes no
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
            .name = name_of(wide, m),
            .notice = notice,
            .counts = (const uint64_t *)(const void *)(at + sizeof(*notice)),
        };
        at += said_bytes(wide, notice);
        left -= said_bytes(wide, notice);
    }
    return left == 0;
}

smp_status
smp_signature_receive(smp_wide *wide, bool *all, int *member)
{
    *all = true;
    for (int h = 0; h < wide->hosts.nhosts; h++) {
        if (h == wide->host || wide->calls[h] != NULL) {
            continue;
        }
        *member = smp_wide_leader(wide, h);
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

void
smp_signature_forget(smp_wide *wide)
{
    for (int h = 0; h < wide->hosts.nhosts; h++) {
        smp_message_free(wide->calls[h]);
        wide->calls[h] = NULL;
    }
}

void
smp_signature_compare(smp_wide *wide)
{
    outcome *v = (outcome *)(void *)smp_wide_next_slot(wide)->data;
    size_t   most;

    v->agreed =
        smp_agreement(wide->said, wide->size, &most, v->refusal, sizeof(v->refusal));
    smp_signature_forget(wide);
}

bool
smp_signature_agreed(const smp_wide *wide, char *refusal, size_t bytes)
{
    const smp_slot *slot = smp_lockstep_slot(wide->lockstep, 0, wide->lockstep->step);
    const outcome  *v = (const outcome *)(const void *)slot->data;

    if (v->agreed == 0) {
        snprintf(refusal, bytes, "%s", v->refusal);
    }
    return v->agreed != 0;
}
