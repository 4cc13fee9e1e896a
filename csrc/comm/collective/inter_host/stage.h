/* One stage of a route, done step by step (comm/collective/inter_host/wide.h). */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_STAGE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_STAGE_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/inter_host/route.h"
#include "comm/collective/inter_host/wide_state.h"
#include "comm/comm.h"
#include "common/status.h"

/* Goes on with it; *done: it is over.  *waits, *member and errors as
 * smp_wide_go_on(). */
smp_status smp_wide_stage(smp_wide *wide, const smp_stage *stage, bool *done,
                          bool *waits, int *member);

/* Drops terms that were to be merged, or sent. */
void smp_wide_forget_terms(smp_wide *wide);

/* A block that stays here: of this rank's pool, which is asked for in the name of
 * anyone who has not left.  SMP_ERR_NO_MEMORY. */
smp_status smp_wide_own_block(smp_wide *wide, size_t bytes, smp_block **out);

#endif
