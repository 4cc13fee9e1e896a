/* One stage of a route, done step by step (comm/collective/inter_host/hierarchical.h).
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_STAGE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_STAGE_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/inter_host/hierarchical_state.h"
#include "comm/collective/inter_host/route.h"
#include "comm/messaging/comm.h"
#include "common/status.h"

/* Goes on with it; *done: it is over.  *waits, *member and errors as
 * smp_hierarchical_go_on(). */
smp_status smp_hierarchical_stage(smp_hierarchical *hier, const smp_stage *stage,
                                  bool *done, bool *waits, int *member);

/* Drops terms to be merged, or sent. */
void smp_hierarchical_forget_terms(smp_hierarchical *hier);

/* A block for use here: of this rank's pool, asked for in the name of any member that
 * has not left.  SMP_ERR_NO_MEMORY. */
smp_status smp_hierarchical_own_block(smp_hierarchical *hier, size_t bytes,
                                      smp_block **out);

#endif
