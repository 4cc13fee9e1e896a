/* The signature check: how the hosts of a group come to know that all members call the
 * same (comm/collective/inter_host/hierarchical.h).
 *
 * A signature is what a member says of its call: a notice, and the sizes of its parts.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_SIGNATURE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_SIGNATURE_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/inter_host/hierarchical_state.h"
#include "common/status.h"

/* Reads the signatures that this host's members have shown, in the step that all have
 * posted. */
void smp_signature_read(smp_hierarchical *hier);

/* The node leader: sends them to the other node leaders.  Errors of smp_wire_send(),
 * with *member. */
smp_status smp_signature_send(smp_hierarchical *hier, int *member);

/* The node leader: takes those that have come from the others; *all: they all
 * have.
 * SMP_ERR_MALFORMED with *member. */
smp_status smp_signature_receive(smp_hierarchical *hier, bool *all, int *member);

/* The node leader: compares all signatures, and writes the outcome into its next slot.
 */
void smp_signature_compare(smp_hierarchical *hier);

/* Whether the node leader's outcome, in the step that all have posted, is that all
 * agree; else says who calls what. */
bool smp_signature_agreed(const smp_hierarchical *hier, smp_refusal *refusal);

/* Drops the signatures that other node leaders have sent. */
void smp_signature_forget(smp_hierarchical *hier);

#endif
