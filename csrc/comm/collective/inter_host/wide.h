/* One operation of a group on several hosts.
 *
 * First the members of a host show each other what they call; the first of them, its
 * node leader, sends that to the other hosts' node leaders; what these say it compares
 * with it, and shows the outcome to its host: the signature check.  So all know whether
 * they agree before a result is written.  Then the operation goes its route
 * (comm/collective/inter_host/route.h).
 *
 * Ownership  Borrows lockstep, op, which are of this host's members, and wire.
 * Threads    one at a time.
 */
#ifndef SMP_COMM_COLLECTIVE_INTER_HOST_WIDE_H
#define SMP_COMM_COLLECTIVE_INTER_HOST_WIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/inter_host/wide_state.h"
#include "common/status.h"

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
