/* One operation's route through the hosts: a list of stages for each member.
 *
 * All members of a host have the same local stages in the same order, and do them
 * together (comm/collective/intra_host/collective.h); the others are a member's own. No
 * stage but a receiving one waits for another host.
 *
 *   all-gather      Each member sends its tensor to one member of every other host, so
 *                   each byte goes once to each host; its members share the parts.
 *   broadcast       The root's host shares the tensor; then each of its members sends a
 *                   slice of it to every other host, as for an all-gather.
 *   reduce-scatter  For each receiver, one member of every host reduces that part of
 *                   its host's tensors as far as the tree of sums allows.  It sends
 *                   these terms, of the nodes within the host (hosts.h), to the
 *                   receiver.  The receiver merges them.
 *   all-reduce      A reduce-scatter of even parts, then an all-gather of them.
 *   reduce          A reduce-scatter among the members of the root's host; then the
 *                   root gathers the result.
 *   others          Each pair on its own.
 *
 * Large tensors go in rounds, each with its stages.  A round's phases are parted by its
 * waits for other hosts.  Rounds overlap in a pipeline, so that bytes of one are on the
 * way while another is summed and copied.  Its ticks:
 *
 *     tick     0    1    2    3    4    5 ...
 *     phase 0  r0   r1   r2   r3   r4   r5     sends to other hosts
 *     phase 1            r0   r1   r2   r3     takes that, sends results
 *     phase 2                      r0   r1     takes these
 *
 * In a tick, the phases are done from top to bottom.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_ROUTE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_ROUTE_H

#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/call.h"
#include "comm/collective/inter_host/hosts.h"
#include "common/status.h"

typedef enum {
    SMP_STAGE_SHARE,         /* local: a member's range goes to the others */
    SMP_STAGE_EXCHANGE,      /* local: ranges between each two */
    SMP_STAGE_REDUCE,        /* local: each makes the terms of its range */
    SMP_STAGE_SEND_TERMS,    /* those of the last REDUCE, to peer */
    SMP_STAGE_RECEIVE_TERMS, /* from peer */
    SMP_STAGE_MERGE,         /* all terms become a part of the result */
    SMP_STAGE_SEND,
    SMP_STAGE_RECEIVE,
} smp_stage_kind;

/* The local ones go by `ranges`, one for each place on the host: SHARE: its member's
 * for others; REDUCE: its member's to reduce; EXCHANGE: the ranges taken from each
 * place by this member, and after these its own for each place. */
typedef struct {
    smp_stage_kind kind;
    int            phase;
    int            slot;   /* REDUCE, MERGE: where terms for this member wait */
    int            peer;   /* member; of REDUCE: for whom this one's terms are, or -1 */
    int            taker;  /* SHARE: the place of the only taking member, or -1 */
    uint64_t       tag;    /* of the parcel */
    smp_range      range;  /* MERGE: count, and where it goes */
    size_t         ranges; /* where its own begin in the route's */
    size_t         most;   /* the longest of all members' */
    const uint8_t *in;     /* borrowed: elements of the call's dtype, like out */
    uint8_t       *out;
} smp_stage;

typedef struct {
    const smp_hosts *hosts; /* borrowed */
    int              self;
    size_t           round_bytes; /* of tensors in one round, about */
    int              phase;       /* of the plan */
    int              slot;        /* ... and of its round */
    smp_stage       *stages;      /* owned: [nstages], of this tick */
    size_t           nstages;
    size_t           stages_room;
    smp_range       *ranges; /* owned: [nranges] */
    size_t           nranges;
    size_t           ranges_room;
    smp_range       *parts; /* owned: [size]; of all members, while planning */

    /* For an all-to-all with counts, set before plan: where this member's part begins
     * in the tensor of each member of this host (owned: [places]), and the longest
     * range between two of them. */
    size_t *starts;
    size_t  longest;
} smp_route;

/* Ticks from a phase of a round to its next. */
#define SMP_ROUTE_AHEAD 2

/* Rounds with terms waiting at a time. */
#define SMP_ROUTE_SLOTS (SMP_ROUTE_AHEAD + 1)

/* bytes: of tensors on the way at a time, about.  SMP_ERR_NO_MEMORY.  fini takes an
 * all-zero one. */
smp_status smp_route_init(smp_route *route, const smp_hosts *hosts, int self,
                          size_t bytes);
void       smp_route_fini(smp_route *route);

/* The number of a call's ticks. */
size_t smp_route_ticks(const smp_route *route, const smp_call *call);

/* The elements of this member's `result` for smp_route_plan(). */
size_t smp_route_result(const smp_route *route, const smp_call *call);

/* Makes the stages of a tick.  SMP_ERR_NO_MEMORY. */
smp_status smp_route_plan(smp_route *route, const smp_call *call, size_t tick,
                          uint8_t *result);

#endif
