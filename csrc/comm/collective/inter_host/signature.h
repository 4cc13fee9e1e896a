/* The signature check: the hosts of a group compare all members' calls
 * (comm/collective/inter_host/hierarchical.h).
 *
 * A signature is a member's description of its call: a notice, and the sizes of its
 * parts.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_SIGNATURE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_SIGNATURE_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/inter_host/hierarchical_state.h"
#include "common/status.h"

/* Reads the signatures of this host's members, in the step posted by all. */
void smp_signature_read(smp_hierarchical *hier);

/* The node leader: sends them to the other node leaders.  Errors of smp_wire_send(),
 * with *member. */
smp_status smp_signature_send(smp_hierarchical *hier, int *member);

/* The node leader: takes the others' signatures; *all: all have come.
 * SMP_ERR_MALFORMED with *member. */
smp_status smp_signature_receive(smp_hierarchical *hier, bool *all, int *member);

/* The node leader: compares all signatures, and writes the outcome into its next slot.
 */
void smp_signature_compare(smp_hierarchical *hier);

/* Whether the node leader's outcome, in the step posted by all, is agreement; else
 * names the different calls. */
bool smp_signature_agreed(const smp_hierarchical *hier, smp_refusal *refusal);

/* Drops the signatures of other node leaders. */
void smp_signature_forget(smp_hierarchical *hier);

#endif
