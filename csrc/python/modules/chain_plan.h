/* The calls of a chain before they are made: those foreseen after a call, in its
 * request.
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_CHAIN_PLAN_H
#define SMP_PYTHON_MODULES_CHAIN_PLAN_H

#include "python/modules/links.h"
#include "python/modules/nodes.h"

/* The most calls of a chain, but the first. */
#define SMP_CHAIN_MOST 63

typedef struct {
    smp_link         *links[SMP_CHAIN_MOST]; /* borrowed */
    smp_follower     *calls[SMP_CHAIN_MOST]; /* owned, until smp_chain_let_go() */
    uint64_t          seeds[SMP_CHAIN_MOST];
    smp_chain_source *sources[SMP_CHAIN_MOST]; /* owned: of each, in the request */
    size_t            n;                       /* further calls */
    uint64_t agreed; /* from the first call's number, where all tp_ranks make these
                                 calls (server/ballots.h); 0: each for itself */
} smp_chain_plan;

/* Draws the call's seed, unless it is drawn.  0, or -1 with an exception. */
int smp_call_draw(smp_call_site *site);

/* The calls after this one, as learned; of a call with collectives those that all
 * tp_ranks have learned.  0, or -1 with an exception. */
int smp_chain_foresee(smp_task *task, smp_call_site *site, smp_chain_plan *plan);

/* Whether one of them has parameters with requires_grad. */
bool smp_chain_trains(const smp_chain_plan *plan);

void smp_chain_let_go(smp_chain_plan *plan);

/* Finds the owners of the first call and of those planned: call->stretches, where there
 * are several.  0, or -1 with an exception. */
int smp_chain_part(smp_call_object *call, const smp_task *task,
                   const smp_chain_plan *plan);

/* Appends them to the request, and tensors of calls before it. */
int smp_chain_pack(smp_pack *pack, const smp_task *task, smp_chain_plan *plan,
                   const smp_call_object *call);

#endif
