/* Members of a group, perhaps still with use of this process's memory after the group's
 * end here: one was stopped meanwhile, or waits for a device.
 *
 * Threads  any; one array: one at a time.
 */
#ifndef SMP_COMM_MEMORY_USER_H
#define SMP_COMM_MEMORY_USER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "comm/memory/control_block.h"
#include "comm/memory/segment.h"

typedef struct {
    smp_segment             *segment; /* owned: one reference; NULL: none */
    const smp_control_block *control; /* in the segment: the member's state */
    uint64_t                 nonce;   /* of its meeting */
    pid_t pid; /* 0: it cannot be seen from here, and never counts as dead */
} smp_user;

/* Whether it may have this process's device memory open. */
bool smp_user_holds(const smp_user *user);

/* Whether it may be within the operation with the last step `last`: it has not posted
 * that step, given up or left. */
bool smp_user_operates(const smp_user *user, uint64_t last);

/* Frees users[n] with their references.  Takes NULL. */
void smp_user_forget(smp_user *users, int n);

#endif
