/* A group's texts: the awaited members, its failures, and its ends.
 *
 * Every smp_group_give_up...() ends the operation under way and the group: the others
 * hear why, the tensors are the caller's again, and later calls get the returned
 * status.  All are for the group's thread.
 */
#ifndef SMP_COMM_COLLECTIVE_GROUP_WORDS_H
#define SMP_COMM_COLLECTIVE_GROUP_WORDS_H

#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/call.h"
#include "common/status.h"

typedef struct smp_group smp_group;

/* Sets the text of smp_group_error(), behind the group's name.  `what` is copied.
 */
void smp_group_set_error(smp_group *group, const char *what);

/* Returns `status`; `why` in words, copied. */
smp_status smp_group_give_up(smp_group *group, smp_status status, const char *why);

/* SMP_ERR_TIMED_OUT: names the members missing after so long. */
smp_status smp_group_give_up_late(smp_group *group, int64_t waited_ns);

/* A member will not come: `status` of smp_epoch_barrier_trouble(). */
smp_status smp_group_give_up_without(smp_group *group, smp_status status, int member);

/* A member's memory, readable when the group was made, cannot be read any more: the
 * member has died or is about to end, or the address was none.  Waits for the news, 1 s
 * at most. */
smp_status smp_group_give_up_reading(smp_group *group, smp_status status, int member);

/* Something on the way between hosts went wrong; member: with whom, or -1. */
smp_status smp_group_give_up_hierarchical(smp_group *group, smp_status status,
                                          int member);

/* The status for the next call of an ended group. */
smp_status smp_group_refuse(smp_group *group, const smp_call *next);

/* As smp_group_describe(). */
void smp_group_say_wait(const smp_group *group, const smp_call *next, uint64_t after,
                        char *out, size_t bytes);

#endif
