/* A hierarchical operation: one of a group on several hosts.
 *
 * First the members of a host show each other their calls.  The first member, the
 * host's node leader, sends these to the other hosts' node leaders and compares them
 * with theirs.  It shows the outcome to its host: the signature check.  So all know
 * whether they agree before a result is written.  Then the operation goes its route
 * (comm/collective/inter_host/route.h).
 *
 * Ownership  Borrows barrier and op, of this host's members, and wire.
 * Threads    one at a time.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_HIERARCHICAL_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_HIERARCHICAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/inter_host/hierarchical_state.h"
#include "common/status.h"

/* lowest[m]: the lowest member on m's host.  SMP_ERR_NO_MEMORY.  fini takes an all-zero
 * one. */
smp_status smp_hierarchical_init(smp_hierarchical *hier, smp_epoch_barrier *barrier,
                                 smp_collective *op, smp_wire *wire, const int *lowest,
                                 size_t round_bytes);
void       smp_hierarchical_fini(smp_hierarchical *hier);

/* Begins an operation.  SMP_ERR_INVALID. */
smp_status smp_hierarchical_begin(smp_hierarchical *hier, const smp_call *call,
                                  uint64_t sequence);

/* Goes on a bit; *waits: nothing can be done until others have.  Errors: *member, if
 * not -1, is the cause: it is lost or has left; SMP_ERR_SYSTEM: its memory cannot be
 * read; SMP_ERR_MALFORMED: its message makes no sense. */
smp_status smp_hierarchical_go_on(smp_hierarchical *hier, bool *waits, int *member);

/* Whether it waits for this member. */
bool smp_hierarchical_awaits(const smp_hierarchical *hier, int member);

/* Whether an awaited member will never come, or is lost: *member.  As
 * smp_epoch_barrier_trouble(). */
smp_status smp_hierarchical_trouble(smp_hierarchical *hier, int *member);

/* A member's text at its giving up; false: it has not given up. */
bool smp_hierarchical_why(const smp_hierarchical *hier, int member, char *out,
                          size_t bytes);

/* Tells other hosts of this host's missing members, if they are news. */
void smp_hierarchical_note(smp_hierarchical *hier);

/* Waits until there may be something to do, or until_ns. */
void smp_hierarchical_wait(smp_hierarchical *hier, int64_t until_ns);

#endif
