/* A group's texts and ends. */
#include "comm/collective/group_words.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "comm/collective/checks/rank_list.h"
#include "comm/collective/group_state.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"

/* A member at its end unmaps its tensors before its death is known: for so long an
 * unreadable address may be one of those. */
#define NEWS_NS (1 * SMP_NS_PER_S)

/* The own call in words. */
static void
describe_own(const smp_group *group, char *out, size_t bytes)
{
    const smp_epoch_barrier *barrier = &group->barrier;
    const smp_notice        *notice =
        group->is_hierarchical
                   ? &group->hier.notice
                   : &smp_epoch_barrier_slot(barrier, barrier->self, group->op.first)->notice;

    smp_notice_describe(notice, out, bytes);
}

/* A member's name in errors. */
static int
name_of(const smp_group *group, int member)
{
    return smp_comm_name(group->barrier.comm, group->ranks[member]);
}

/* Whether the operation waits for this member. */
static bool
is_missing(const smp_group *group, int member)
{
    return group->is_hierarchical ? smp_hierarchical_awaits(&group->hier, member)
                                  : !smp_epoch_barrier_posted(&group->barrier, member);
}

/* A member's place on this host; -1: it is on another. */
static int
place_of(const smp_group *group, int member)
{
    const smp_hosts *hosts = &group->hier.hosts;

    if (!group->is_hierarchical) {
        return member;
    }
    return hosts->host_of[member] == group->hier.host ? hosts->place_of[member] : -1;
}

void
smp_group_set_error(smp_group *group, const char *what)
{
    snprintf(group->error, sizeof(group->error), "group '%s': %s", group->name, what);
}

/* Others may be writing into this member's tensors, or reading them: waits until they
 * have seen its giving up.  A member yet to begin sees it before.  A tensor's block
 * open to later writes is not used again until they end. */
static void
take_back_tensors(smp_group *group)
{
    smp_collective *op = &group->op;
    uint64_t        last;
    smp_refusal     refusal;

    if (group->phase != SMP_GROUP_AGREES &&
        !(smp_epoch_barrier_all_here(&group->barrier) &&
          smp_collective_agreed(op, &refusal))) {
        return;
    }
    last = op->first + op->steps - 1;
    if (op->way == SMP_BY_MEMORY || op->way == SMP_BY_READING) {
        smp_epoch_barrier_retreat(&group->barrier, last);
    }
    if (op->way == SMP_BY_MEMORY && op->writes) { /* a late read harms no member */
        smp_comm_keep(group->barrier.comm, op->call.out, smp_collective_written(op),
                      smp_epoch_barrier_users(&group->barrier), group->size, last);
    }
}

/* "barrier 3: timed out": words beyond so many bytes end with "...". */
static void
join_words(char *out, size_t bytes, const char *what, const char *why)
{
    int n = snprintf(out, bytes, "%s: %s", what, why);

    if (n < 0 || (size_t)n >= bytes) {
        memcpy(out + bytes - 4, "...", 4);
    }
}

smp_status
smp_group_give_up(smp_group *group, smp_status status, const char *why)
{
    char call[96];

    describe_own(group, call, sizeof(call));
    join_words(group->end, sizeof(group->end), call, why);
    smp_group_set_error(group, group->end);
    smp_epoch_barrier_fail(&group->barrier, status, group->end);
    if (group->is_hierarchical) {
        smp_wire_fail(&group->wire, group->sequence, status, group->end);
    } else {
        take_back_tensors(group);
        smp_collective_finish(&group->op);
    }
    smp_group_enter(group, SMP_GROUP_ENDED, status);
    return status;
}

smp_status
smp_group_refuse(smp_group *group, const smp_call *next)
{
    smp_notice notice = {0};
    char       call[96];
    char       text[SMP_WHY_BYTES + 128];

    smp_call_say(next, 0, group->sequence + 1, &notice, NULL);
    smp_notice_describe(&notice, call, sizeof(call));
    snprintf(text, sizeof(text), "%s: the group ended before: %s", call, group->end);
    smp_group_set_error(group, text);
    return group->broken;
}

/* "ranks 2, 3": the missing members; "": none. */
static void
list_missing(const smp_group *group, char *out, size_t bytes)
{
    smp_rank_list missing = {.names = group->scratch};

    for (int m = 0; m < group->size; m++) {
        if (is_missing(group, m)) {
            smp_rank_list_add(&missing, name_of(group, m));
        }
    }
    smp_rank_list_say(&missing, out, bytes);
}

/* The call of a control block's owner in its group.  False: none yet. */
static bool
describe_control(const smp_control_block *control, char *name, size_t name_bytes,
                 char *call, size_t call_bytes)
{
    const smp_notice *a = &control->slots[0].notice;
    const smp_notice *b = &control->slots[1].notice;
    const smp_notice *last = a->sequence > b->sequence ? a : b;

    if (last->sequence == 0) {
        return false;
    }
    snprintf(name, name_bytes, "%.*s", (int)sizeof(control->name) - 1, control->name);
    smp_notice_describe(last, call, call_bytes);
    return true;
}

/* A call in another group by a member of this host: "waits in group 'b' for barrier 3".
 */
static bool
is_beside(const smp_group *group, int member, char *out, size_t bytes)
{
    const smp_control_block *control =
        smp_epoch_barrier_elsewhere(&group->barrier, place_of(group, member));
    bool has_failed;
    char name[sizeof(group->name)];
    char call[96];

    if (control == NULL ||
        !describe_control(control, name, sizeof(name), call, sizeof(call))) {
        return false;
    }
    has_failed = atomic_load(&control->failed) != SMP_OK;
    snprintf(out, bytes,
             has_failed ? "gave up in group '%s': %s" : "waits in group '%s' for %s",
             name, call);
    return true;
}

/* The same of a member of another host. */
static bool
is_far_beside(const smp_group *group, int member, char *out, size_t bytes)
{
    char name[sizeof(group->name)];
    char call[96];

    if (!smp_wire_elsewhere(&group->wire, member, name, sizeof(name), call,
                            sizeof(call))) {
        return false;
    }
    snprintf(out, bytes, "waits in group '%s' for %s", name, call);
    return true;
}

/* "; rank 1 waits in group 'b' for barrier 3": a missing member's call instead, if
 * visible; groups entered in another order look like this. */
static void
describe_elsewhere(const smp_group *group, char *out, size_t bytes)
{
    out[0] = '\0';
    for (int m = 0; m < group->size; m++) {
        char what[208];

        if (is_missing(group, m) &&
            (place_of(group, m) < 0 ? is_far_beside(group, m, what, sizeof(what))
                                    : is_beside(group, m, what, sizeof(what)))) {
            snprintf(out, bytes, "; rank %d %s", name_of(group, m), what);
            return;
        }
    }
}

smp_status
smp_group_give_up_late(smp_group *group, int64_t waited_ns)
{
    char missing[SMP_RANK_LIST_TEXT];
    char elsewhere[240];
    char text[SMP_WHY_BYTES];

    list_missing(group, missing, sizeof(missing));
    describe_elsewhere(group, elsewhere, sizeof(elsewhere));
    snprintf(text, sizeof(text), "timed out after %.1f s without %s%s",
             (double)waited_ns / (double)SMP_NS_PER_S, missing, elsewhere);
    return smp_group_give_up(group, SMP_ERR_TIMED_OUT, text);
}

smp_status
smp_group_give_up_without(smp_group *group, smp_status status, int member)
{
    int  rank = name_of(group, member);
    char text[SMP_WHY_BYTES + 32];
    char why[SMP_WHY_BYTES];
    int  source;
    bool has_said;

    if (group->is_hierarchical) { /* its message may have come just now */
        (void)smp_wire_receive(&group->wire, &source);
    }
    has_said = group->is_hierarchical
                   ? smp_hierarchical_why(&group->hier, member, why, sizeof(why))
                   : smp_epoch_barrier_why(&group->barrier, member, why, sizeof(why));

    if (has_said) {
        snprintf(text, sizeof(text), "rank %d gave up: %s", rank, why);
    } else {
        snprintf(text, sizeof(text), "rank %d %s", rank,
                 status == SMP_ERR_PEER_LOST ? "is lost" : "has left");
    }
    return smp_group_give_up(group, status, text);
}

/* Whether its tensors are its own again: it is gone, or gave up. */
static bool
has_ended(const smp_group *group, int member)
{
    char why[2];

    return smp_comm_gone(group->barrier.comm, group->ranks[member]) ||
           (group->is_hierarchical
                ? smp_hierarchical_why(&group->hier, member, why, sizeof(why))
                : smp_epoch_barrier_why(&group->barrier, member, why, sizeof(why)));
}

smp_status
smp_group_give_up_reading(smp_group *group, smp_status status, int member)
{
    int  rank = group->ranks[member];
    bool on_device = group->op.way == SMP_BY_DEVICE || group->op.way == SMP_BY_READING;
    int64_t until = smp_clock_ns() + NEWS_NS;
    char    text[96];

    if (status != SMP_ERR_SYSTEM || (on_device && member != group->self)) {
        return smp_group_give_up_without(group, status, member);
    }
    if (on_device) {
        return smp_group_give_up(group, status, group->op.why);
    }
    while (!has_ended(group, member) && smp_clock_ns() < until) {
        sched_yield();
    }
    if (has_ended(group, member)) {
        return smp_group_give_up_without(group,
                                         smp_comm_left(group->barrier.comm, rank)
                                             ? SMP_ERR_CLOSED
                                             : SMP_ERR_PEER_LOST,
                                         member);
    }
    snprintf(text, sizeof(text), "the tensor of rank %d cannot be read",
             name_of(group, member));
    return smp_group_give_up(group, SMP_ERR_SYSTEM, text);
}

smp_status
smp_group_give_up_hierarchical(smp_group *group, smp_status status, int member)
{
    char text[96];

    if (member >= 0 && status == SMP_ERR_SYSTEM) {
        return smp_group_give_up_reading(group, status, member);
    }
    if (member >= 0 && status == SMP_ERR_MALFORMED) {
        snprintf(text, sizeof(text), "what rank %d sent makes no sense",
                 name_of(group, member));
        return smp_group_give_up(group, status, text);
    }
    if (member >= 0 && (status == SMP_ERR_PEER_LOST || status == SMP_ERR_CLOSED ||
                        has_ended(group, member))) {
        return smp_group_give_up_without(group, status, member);
    }
    return smp_group_give_up(group, status, smp_status_text(status));
}

void
smp_group_say_wait(const smp_group *group, const smp_call *next, uint64_t after,
                   char *out, size_t bytes)
{
    char call[96];
    char missing[SMP_RANK_LIST_TEXT];
    char elsewhere[240];
    char queued[120] = "";

    if (next != NULL) {
        smp_notice notice = {0};

        smp_call_say(next, 0, group->sequence + after, &notice, NULL);
        smp_notice_describe(&notice, call, sizeof(call));
        snprintf(queued, sizeof(queued), "%s stands behind ", call);
    }
    if (!smp_group_is_active(group)) {
        snprintf(out, bytes, "group '%s': %sothers", group->name, queued);
        return;
    }
    describe_own(group, call, sizeof(call));
    list_missing(group, missing, sizeof(missing));
    describe_elsewhere(group, elsewhere, sizeof(elsewhere));
    snprintf(out, bytes, "group '%s': %s%s%s%s%s%s", group->name, queued, call,
             next != NULL ? ", which " : " ",
             missing[0] != '\0' ? "waits for " : "is being done", missing, elsewhere);
}
