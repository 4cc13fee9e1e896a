/* How the hosts of a group come to know that all members call the same
 * (comm/collective/inter_host/wide.h). */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_PARLEY_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_PARLEY_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/inter_host/wide_state.h"
#include "common/status.h"

/* Looks at what this host's members have shown, in the step that all have posted. */
void smp_parley_listen(smp_wide *wide);

/* The node leader: sends that to the other node leaders.  Errors of smp_wire_send(),
 * with *member. */
smp_status smp_parley_tell(smp_wide *wide, int *member);

/* The node leader: takes what has come from the others; *all: everything has.
 * SMP_ERR_MALFORMED with *member. */
smp_status smp_parley_hear(smp_wide *wide, bool *all, int *member);

/* The node leader: compares all calls, and writes the verdict into its next slot. */
void smp_parley_judge(smp_wide *wide);

/* Whether the node leader's verdict, in the step that all have posted, is that all
 * agree; else says who calls what. */
bool smp_parley_verdict(const smp_wide *wide, char *refusal, size_t bytes);

/* Drops what other node leaders have said. */
void smp_parley_forget(smp_wide *wide);

#endif
