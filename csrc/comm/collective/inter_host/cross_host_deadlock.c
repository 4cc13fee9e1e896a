/* Telling, and hearing the own token back. */
#include "comm/collective/inter_host/cross_host_deadlock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/checks/agreement.h"
#include "comm/neighbour.h"
#include "common/clock.h"

#ifdef SMP_HASTY
#    define LOOK_NS 0
#else
#    define LOOK_NS (50 * SMP_NS_PER_MS)
#endif

/* Behind the head of a parcel whose tag is the sender's token. */
typedef struct {
    uint64_t   heard; /* the receiver's token, or 0 */
    smp_notice notice;
} stuck_body;

/* The latest that one rank says in groups that this one is not in now. */
typedef struct {
    const smp_hierarchical *hier;
    int                     rank;
    uint64_t                token; /* 0: nothing */
    uint64_t                heard;
    char                    name[64];
    char                    call[96];
} heard_stuck;

/* How many operations this rank has begun in the group with that id. */
static uint64_t
begun(const smp_hierarchical *hier, uint64_t id)
{
    const smp_epoch_barrier *barrier = hier->barrier;
    const smp_control_block *control =
        smp_control_block_find(barrier->members[barrier->self].segment->controls, id);
    uint64_t a = control != NULL ? control->slots[0].notice.sequence : UINT64_MAX;
    uint64_t b = control != NULL ? control->slots[1].notice.sequence : UINT64_MAX;

    return a > b ? a : b;
}

/* Keeps it if it is what the rank says, and later than what was found. */
static bool
hear(void *arg, const char *name, const smp_message *message)
{
    heard_stuck *found = arg;
    smp_parcel   head;
    stuck_body   said;

    if (message->source != found->rank ||
        message->nbytes != sizeof(head) + sizeof(said)) {
        return false;
    }
    memcpy(&head, message->bytes, sizeof(head));
    memcpy(&said, message->bytes + sizeof(head), sizeof(said));
    if (head.kind == SMP_PARCEL_STUCK && head.tag >= found->token &&
        head.sequence > begun(found->hier, head.post.address)) {
        found->token = head.tag;
        found->heard = said.heard;
        snprintf(found->name, sizeof(found->name), "%s", name);
        smp_notice_describe(&said.notice, found->call, sizeof(found->call));
    }
    return false; /* on to the next */
}

/* Says it once. */
static void
tell(smp_cross_host_deadlock *deadlock, smp_hierarchical *hier, int member,
     uint64_t token, uint64_t heard)
{
    smp_told  *told = &deadlock->told[member];
    stuck_body said = {.heard = heard, .notice = hier->notice};

    if (told->token != token || told->heard != heard) {
        *told = (smp_told){token, heard};
        (void)smp_wire_send(hier->wire, member, SMP_PARCEL_STUCK, hier->sequence, token,
                            &said, sizeof(said), NULL);
    }
}

smp_status
smp_cross_host_init(smp_cross_host_deadlock *deadlock, int members)
{
    *deadlock =
        (smp_cross_host_deadlock){.told = calloc((size_t)members, sizeof(smp_told))};
    return deadlock->told != NULL ? SMP_OK : SMP_ERR_NO_MEMORY;
}

void
smp_cross_host_fini(smp_cross_host_deadlock *deadlock)
{
    free(deadlock->told);
    deadlock->told = NULL;
}

static bool
look(smp_cross_host_deadlock *deadlock, smp_hierarchical *hier)
{
    smp_comm *comm = hier->wire->comm;

    for (int m = 0; m < hier->size; m++) {
        heard_stuck found = {.hier = hier, .rank = hier->wire->members[m].rank};

        if (hier->hosts.host_of[m] == hier->host || !smp_hierarchical_awaits(hier, m)) {
            continue;
        }
        (void)smp_post_elsewhere(smp_comm_post(comm), &hier->wire->channel, hear,
                                 &found);
        tell(deadlock, hier, m, deadlock->token, found.token);
        if (found.token != 0 && found.heard == deadlock->token) {
            snprintf(deadlock->text, sizeof(deadlock->text),
                     "waits for rank %d, which waits in group '%s' (%s) for rank %d",
                     smp_comm_name(comm, found.rank), found.name, found.call,
                     smp_comm_name(comm, smp_comm_rank(comm)));
            return true;
        }
    }
    return false;
}

bool
smp_cross_host_look(smp_cross_host_deadlock *deadlock, smp_hierarchical *hier,
                    uint64_t token)
{
    int64_t now = smp_clock_ns();

    if (now - deadlock->looked_ns < LOOK_NS) {
        return false;
    }
    deadlock->looked_ns = now;
    deadlock->token = token;
    return look(deadlock, hier);
}

bool
smp_cross_host_look_again(smp_cross_host_deadlock *deadlock, smp_hierarchical *hier)
{
    return deadlock->token != 0 && look(deadlock, hier);
}
