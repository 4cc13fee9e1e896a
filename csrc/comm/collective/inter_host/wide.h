/* One operation of a group on several hosts.
 *
 * First the members of a host show each other what they call; the first of them, its
 * speaker, sends that to the other hosts' speakers; what these say it compares with it,
 * and shows the verdict to its host.  So all know whether they agree before a result is
 * written.  Then the operation goes its route (comm/collective/inter_host/route.h).
 *
 * Ownership  Borrows lockstep, op, which are of this host's members, and wire.
 * Threads    one at a time.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_WIDE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_WIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/agreement.h"
#include "comm/collective/inter_host/hosts.h"
#include "comm/collective/inter_host/route.h"
#include "comm/collective/inter_host/wire.h"
#include "comm/collective/intra_host/collective.h"
#include "comm/collective/intra_host/lockstep.h"
#include "common/status.h"

/* An operation's life goes from top to bottom. */
typedef enum {
    SMP_WIDE_SHOWN,  /* this host's members show what they call */
    SMP_WIDE_ASKED,  /* a speaker waits for other hosts */
    SMP_WIDE_JUDGED, /* the verdict is shown, or waited for */
    SMP_WIDE_ON_ROUTE,
    SMP_WIDE_OVER,
    SMP_WIDE_REFUSED, /* members call different things */
} smp_wide_phase;

typedef struct {
    smp_lockstep   *lockstep;
    smp_collective *op;
    smp_wire       *wire;
    smp_hosts       hosts;
    smp_route       route;
    int             size; /* members */
    int             self;
    int             host;
    int             place;
    smp_said       *said;  /* owned: [size] */
    smp_message   **calls; /* owned: [nhosts] of owned: what other hosts say */
    smp_message   **terms; /* owned: [nhosts] of owned: what they sent to be merged */
    smp_partial    *partials; /* owned: [npartials]; this host's nodes */
    int             npartials;
    double         *factors; /* owned: [npartials], as they travel */
    smp_term       *merged;  /* owned: [nodes] */
    uint64_t       *counts;  /* owned: [2 * size]: split sizes in the slots' form */

    smp_call       call; /* the operation under way, like all below */
    smp_notice     notice;
    uint64_t       sequence;
    smp_wide_phase phase;
    char           refusal[320];
    size_t         beats;
    size_t         beat;
    size_t         stage;     /* of the route */
    bool           begun;     /* the stage is under way */
    bool           seen;      /* its first step has been looked at */
    size_t         merged_to; /* elements */
    smp_block     *made;      /* owned: the last terms, until they are sent */
    smp_block     *own[SMP_ROUTE_SLOTS]; /* owned: this host's terms of this member's
                                            part, until they are merged */
    smp_block *result;                   /* owned, or NULL */
    bool       waits_local;              /* somebody on this host is missing */
    int        noted; /* how many were missing when other hosts were told */
} smp_wide;

/* The member that speaks for a host. */
static inline int
smp_wide_speaker(const smp_wide *wide, int host)
{
    return smp_hosts_member(&wide->hosts, host, 0);
}

/* This member's slot of the lockstep's next step. */
static inline smp_slot *
smp_wide_next_slot(const smp_wide *wide)
{
    return smp_lockstep_slot(wide->lockstep, wide->lockstep->self,
                             wide->lockstep->step + 1);
}

/* lowest[m]: the lowest member on m's host.  SMP_ERR_NO_MEMORY.  fini takes one that is
 * all zero. */
smp_status smp_wide_init(smp_wide *wide, smp_lockstep *lockstep, smp_collective *op,
                         smp_wire *wire, const int *lowest, size_t round_bytes);
void       smp_wide_fini(smp_wide *wide);

/* Begins an operation.  SMP_ERR_INVALID. */
smp_status smp_wide_begin(smp_wide *wide, const smp_call *call, uint64_t sequence);

/* Goes on a bit; *waits: nothing can be done until others have.  Errors: *member, if it
 * is not -1, has to do with it: it is lost or has left; SMP_ERR_SYSTEM: its memory
 * cannot be read; SMP_ERR_MALFORMED: what it sent makes no sense. */
smp_status smp_wide_go_on(smp_wide *wide, bool *waits, int *member);

/* Whether it waits for that member. */
bool smp_wide_awaits(const smp_wide *wide, int member);

/* Whether one that it waits for will never come, or is lost: *member.  As
 * smp_lockstep_trouble(). */
smp_status smp_wide_trouble(smp_wide *wide, int *member);

/* What a member said when it gave up; false: it has not. */
bool smp_wide_why(const smp_wide *wide, int member, char *out, size_t bytes);

/* Tells other hosts who is missing on this one, if that is news. */
void smp_wide_note(smp_wide *wide);

/* Waits until there may be something to do, or until_ns. */
void smp_wide_wait(smp_wide *wide, int64_t until_ns);

#endif
