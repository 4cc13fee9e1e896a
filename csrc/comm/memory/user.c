/* A member's use of another's memory, by its control block. */
#define _GNU_SOURCE
#include "comm/memory/user.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Whether the member lives, and is in the same meeting. */
static bool
is_there(const smp_user *user)
{
    return user->segment != NULL && atomic_load(&user->control->nonce) == user->nonce &&
           (kill(user->pid, 0) == 0 || errno != ESRCH);
}

bool
smp_user_holds(const smp_user *user)
{
    return is_there(user) && atomic_load(&user->control->holds) != 0;
}

bool
smp_user_operates(const smp_user *user, uint64_t last)
{
    return is_there(user) && atomic_load(&user->control->id) != 0 &&
           atomic_load(&user->control->failed) == SMP_OK &&
           atomic_load(&user->control->slots[last & 1].notice.step) != last;
}

void
smp_user_forget(smp_user *users, int n)
{
    for (int i = 0; i < n; i++) {
        smp_segment_unref(users[i].segment);
    }
    free(users);
}
