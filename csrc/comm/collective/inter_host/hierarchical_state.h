/* The state of a hierarchical operation, for hierarchical.c, signature.c and
 * stage.c. */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_HIERARCHICAL_STATE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_HIERARCHICAL_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/agreement.h"
#include "comm/collective/inter_host/hosts.h"
#include "comm/collective/inter_host/route.h"
#include "comm/collective/inter_host/wire.h"
#include "comm/collective/intra_host/collective.h"
#include "comm/collective/intra_host/epoch_barrier.h"

/* An operation's life goes from top to bottom. */
typedef enum {
    SMP_HIERARCHICAL_SHOWN,    /* this host's members show their calls */
    SMP_HIERARCHICAL_ASKED,    /* a node leader waits for other hosts */
    SMP_HIERARCHICAL_COMPARED, /* the outcome is shown, or waited for */
    SMP_HIERARCHICAL_ON_ROUTE,
    SMP_HIERARCHICAL_OVER,
    SMP_HIERARCHICAL_REFUSED, /* members call different things */
} smp_hierarchical_phase;

typedef struct {
    smp_epoch_barrier *barrier;
    smp_collective    *op;
    smp_wire          *wire;
    smp_hosts          hosts;
    smp_route          route;
    int                size; /* members */
    int                self;
    int                host;
    int                place;
    smp_said          *said;  /* owned: [size] */
    smp_message      **calls; /* owned: [nhosts] of owned: other hosts' signatures */
    smp_message      **terms; /* owned: [nhosts] of owned: their terms to be merged */
    smp_partial       *partials; /* owned: [npartials]; this host's nodes */
    int                npartials;
    double            *factors; /* owned: [npartials], as they travel */
    smp_term          *merged;  /* owned: [nodes] */
    uint64_t          *counts;  /* owned: [2 * size]: split sizes in the slots' form */

    smp_call               call; /* the operation under way, like all below */
    smp_notice             notice;
    uint64_t               sequence;
    smp_hierarchical_phase phase;
    smp_refusal            refusal;
    size_t                 ticks;
    size_t                 tick;
    size_t                 stage;     /* of the route */
    bool                   begun;     /* the stage is under way */
    bool                   seen;      /* its first step has been looked at */
    size_t                 merged_to; /* elements */
    smp_block             *made;      /* owned: the last terms, until they are sent */
    smp_block *own[SMP_ROUTE_SLOTS];  /* owned: this host's terms of this member's
                                         part, until they are merged */
    smp_block *result;                /* owned, or NULL */
    bool       waits_local;           /* a member on this host is missing */
    int        noted; /* the number of missing ones in the last note to other hosts */
} smp_hierarchical;

/* The node leader of a host. */
static inline int
smp_hierarchical_leader(const smp_hierarchical *hier, int host)
{
    return smp_hosts_member(&hier->hosts, host, 0);
}

/* This member's slot of the epoch barrier's next step. */
static inline smp_slot *
smp_hierarchical_next_slot(const smp_hierarchical *hier)
{
    return smp_epoch_barrier_slot(hier->barrier, hier->barrier->self,
                                  hier->barrier->step + 1);
}

#endif
