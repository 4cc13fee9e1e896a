/* A group: one operation at a time, and its errors in words. */
#include "comm/collective/group.h"

#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/clock.h"
#include "comm/collective/collective.h"
#include "comm/collective/lockstep.h"
#include "comm/fork.h"
#include "comm/neighbour.h"

/* How long the news of a death may take, when a member's memory cannot be read. */
#define NEWS_NS (200 * SMP_NS_PER_MS)

/* What one call of progress may take, about. */
#define PROGRESS_NS (1 * SMP_NS_PER_MS)

struct smp_group {
    smp_lockstep   lockstep;
    smp_collective op;
    char           name[64];
    int64_t        timeout_ns;
    uint64_t       sequence;   /* of the last operation */
    bool           active;     /* it is under way */
    bool           agreed;     /* all members call the same */
    int64_t        started_ns; /* when somebody was found missing; 0: nobody was */
    smp_status     broken;     /* what every later call returns */
    char           error[640];
};

/* ------------------------------------------------------------------------- errors */

/* The own call in words. */
static void
describe_own(const smp_group *group, char *out, size_t bytes)
{
    const smp_lockstep *lockstep = &group->lockstep;

    smp_notice_describe(
        &smp_lockstep_slot(lockstep, lockstep->self, group->op.first)->notice, out,
        bytes);
}

static void
set_error(smp_group *group, const char *what)
{
    snprintf(group->error, sizeof(group->error), "group '%s': %s", group->name, what);
}

/* Ends the operation and the group. */
static smp_status
give_up(smp_group *group, smp_status status, const char *why)
{
    char call[96];
    char text[512];

    describe_own(group, call, sizeof(call));
    snprintf(text, sizeof(text), "%s: %s", call, why);
    set_error(group, text);
    smp_lockstep_fail(&group->lockstep, status, text);
    group->active = false;
    group->broken = status;
    return status;
}

/* "rank 2, rank 3": the members that are missing; as many as there is room for. */
static void
list_missing(const smp_group *group, char *out, size_t bytes)
{
    size_t used = 0;

    out[0] = '\0';
    for (int m = 0; m < group->lockstep.size; m++) {
        int n;

        if (smp_lockstep_posted(&group->lockstep, m)) {
            continue;
        }
        n = snprintf(out + used, bytes - used, "%srank %d", used != 0 ? ", " : "",
                     group->lockstep.members[m].rank);
        if (n < 0 || (size_t)n >= bytes - used) {
            if (bytes >= 4) {
                memcpy(out + bytes - 4, "...", 4);
            }
            return;
        }
        used += (size_t)n;
    }
}

/* "; rank 1 waits in group 'b' for barrier 3": what a missing member does instead, if
 * it is seen to; groups entered in another order by others look like that. */
static void
describe_elsewhere(const smp_group *group, char *out, size_t bytes)
{
    const smp_lockstep *lockstep = &group->lockstep;

    out[0] = '\0';
    for (int m = 0; m < lockstep->size; m++) {
        const smp_shelf *shelf = smp_lockstep_posted(lockstep, m)
                                     ? NULL
                                     : smp_lockstep_elsewhere(lockstep, m);

        if (shelf != NULL) {
            const smp_notice *a = &shelf->slots[0].notice;
            const smp_notice *b = &shelf->slots[1].notice;
            char              call[96];
            char              name[sizeof(shelf->name)];

            memcpy(name, shelf->name, sizeof(name));
            name[sizeof(name) - 1] = '\0';
            smp_notice_describe(a->sequence > b->sequence ? a : b, call, sizeof(call));
            snprintf(out, bytes, "; rank %d waits in group '%s' for %s",
                     lockstep->members[m].rank, name, call);
            return;
        }
    }
}

static smp_status
give_up_late(smp_group *group, int64_t waited_ns)
{
    char missing[96];
    char elsewhere[192];
    char text[352];

    list_missing(group, missing, sizeof(missing));
    describe_elsewhere(group, elsewhere, sizeof(elsewhere));
    snprintf(text, sizeof(text), "timed out after %.1f s without %s%s",
             (double)waited_ns / (double)SMP_NS_PER_S, missing, elsewhere);
    return give_up(group, SMP_ERR_TIMED_OUT, text);
}

/* A member will not come: `status` of smp_lockstep_trouble(). */
static smp_status
give_up_without(smp_group *group, smp_status status, int member)
{
    const smp_lockstep *lockstep = &group->lockstep;
    int                 rank = lockstep->members[member].rank;
    char                text[256];
    char                why[192];

    if (smp_lockstep_why(lockstep, member, why, sizeof(why))) {
        snprintf(text, sizeof(text), "rank %d gave up: %s", rank, why);
    } else {
        snprintf(text, sizeof(text), "rank %d %s", rank,
                 status == SMP_ERR_PEER_LOST ? "is lost" : "has left");
    }
    return give_up(group, status, text);
}

/* A member's memory, which could be read when the group was made, cannot be read any
 * more: it has died, or the address was none. */
static smp_status
give_up_reading(smp_group *group, int member)
{
    int     rank = group->lockstep.members[member].rank;
    int64_t until = smp_clock_ns() + NEWS_NS;
    char    text[96];

    while (!smp_comm_gone(group->lockstep.comm, rank) && smp_clock_ns() < until) {
        sched_yield();
    }
    if (smp_comm_gone(group->lockstep.comm, rank)) {
        return give_up_without(group,
                               smp_comm_left(group->lockstep.comm, rank)
                                   ? SMP_ERR_CLOSED
                                   : SMP_ERR_PEER_LOST,
                               member);
    }
    snprintf(text, sizeof(text), "the tensor of rank %d cannot be read", rank);
    return give_up(group, SMP_ERR_SYSTEM, text);
}

/* ---------------------------------------------------------------------- operations */

/* Whether the operation can go on waiting. */
static smp_status
check_waiting(smp_group *group)
{
    int64_t limit =
        group->op.call.timeout_ns != 0 ? group->op.call.timeout_ns : group->timeout_ns;
    int        member = 0;
    int64_t    now;
    smp_status status = smp_lockstep_trouble(&group->lockstep, &member);

    if (status != SMP_OK) {
        return give_up_without(group, status, member);
    }
    now = smp_clock_ns();
    if (group->started_ns == 0) {
        group->started_ns = now;
    }
    if (limit >= 0 && now - group->started_ns >= limit) {
        return give_up_late(group, now - group->started_ns);
    }
    return SMP_OK;
}

/* The others call something else: the operation is over, the group is not. */
static smp_status
disagree(smp_group *group, const char *how)
{
    set_error(group, how);
    smp_lockstep_read(&group->lockstep);
    group->active = false;
    return SMP_ERR_MISMATCH;
}

/* What can be done now that all have posted the step. */
static smp_status
take_step(smp_group *group)
{
    char       how[320];
    bool       whole;
    int        member = 0;
    smp_status status;

    if (!group->agreed) {
        if (!smp_collective_agreed(&group->op, how, sizeof(how))) {
            return disagree(group, how);
        }
        group->agreed = true;
    }
    status = smp_collective_collect(&group->op, &whole, &member);
    if (status != SMP_OK) {
        return give_up_reading(group, member);
    }
    if (whole && smp_collective_next(&group->op)) {
        smp_lockstep_post(&group->lockstep);
    } else if (whole) {
        smp_lockstep_read(&group->lockstep);
        group->active = false;
    }
    return SMP_OK;
}

/* Goes on until the operation is over or somebody is missing. */
static smp_status
take_steps(smp_group *group, int64_t until_ns)
{
    smp_status status = SMP_OK;

    while (status == SMP_OK && group->active &&
           smp_lockstep_arrived(&group->lockstep)) {
        status = take_step(group);
        if (until_ns != SMP_NEVER && smp_clock_ns() >= until_ns) {
            break;
        }
    }
    return status;
}

static bool
is_child(const smp_group *group)
{
    return group->lockstep.generation != smp_fork_generation();
}

/* --------------------------------------------------------------------------- public */

smp_status
smp_group_create(smp_comm *comm, const smp_group_config *config, smp_group **out,
                 int *failed)
{
    smp_group *group = calloc(1, sizeof(*group));
    int64_t    deadline = smp_clock_deadline(config->timeout_ns);
    smp_status status;

    *failed = smp_comm_rank(comm);
    if (group == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    strncpy(group->name, config->name, sizeof(group->name) - 1);
    group->timeout_ns = config->timeout_ns;
    status = smp_lockstep_init(&group->lockstep, comm, config->ranks, config->size,
                               config->id, !config->only_shelves, deadline, failed);
    if (status != SMP_OK) {
        goto err_free;
    }
    memcpy(group->lockstep.members[group->lockstep.self].shelf->name, group->name,
           sizeof(group->name));
    status = smp_collective_init(&group->op, &group->lockstep);
    if (status != SMP_OK) {
        goto err_fini;
    }
    *out = group;
    return SMP_OK;

err_fini:
    smp_lockstep_fail(&group->lockstep, status, "could not make the group");
    smp_lockstep_fini(&group->lockstep);
err_free:
    free(group);
    return status;
}

void
smp_group_destroy(smp_group *group)
{
    if (group != NULL) {
        smp_lockstep_fini(&group->lockstep);
        smp_collective_fini(&group->op);
        free(group);
    }
}

smp_status
smp_group_start(smp_group *group, const smp_call *call)
{
    smp_status status;

    if (is_child(group)) {
        set_error(group, "a forked process is no member");
        return SMP_ERR_CLOSED;
    }
    if (group->broken != SMP_OK) {
        return group->broken;
    }
    assert(!group->active);
    status = smp_collective_begin(&group->op, call, group->sequence + 1);
    if (status != SMP_OK) {
        set_error(group, "no such operation, reduction of that dtype, root or count");
        return status;
    }
    group->sequence++;
    group->active = true;
    group->agreed = false;
    group->started_ns = 0;
    smp_lockstep_post(&group->lockstep);
    return SMP_OK;
}

smp_status
smp_group_progress(smp_group *group, bool *over)
{
    smp_status status = group->broken;

    if (group->active) {
        status = take_steps(group, smp_clock_ns() + PROGRESS_NS);
        if (status == SMP_OK && group->active &&
            !smp_lockstep_arrived(&group->lockstep)) {
            status = check_waiting(group);
        }
    }
    *over = !group->active;
    return status;
}

/* When the operation times out, or until_ns. */
static int64_t
wait_deadline(const smp_group *group, int64_t until_ns)
{
    int64_t limit =
        group->op.call.timeout_ns != 0 ? group->op.call.timeout_ns : group->timeout_ns;

    if (limit < 0 || limit > SMP_NEVER - group->started_ns) {
        return until_ns;
    }
    limit += group->started_ns;
    return limit < until_ns ? limit : until_ns;
}

smp_status
smp_group_wait(smp_group *group, int64_t until_ns, bool *over)
{
    smp_status status = group->broken;

    while (status == SMP_OK && group->active) {
        status = take_steps(group, SMP_NEVER);
        if (status == SMP_OK && group->active && !smp_lockstep_look(&group->lockstep)) {
            status = check_waiting(group);
            if (status == SMP_OK) {
                smp_lockstep_wait(&group->lockstep, wait_deadline(group, until_ns));
            }
            if (status == SMP_OK && !smp_lockstep_arrived(&group->lockstep) &&
                until_ns != SMP_NEVER && smp_clock_ns() >= until_ns) {
                break;
            }
        }
    }
    *over = !group->active;
    return status;
}

smp_status
smp_group_run(smp_group *group, const smp_call *call)
{
    bool       over = false;
    smp_status status = smp_group_start(group, call);

    return status == SMP_OK ? smp_group_wait(group, SMP_NEVER, &over) : status;
}

const char *
smp_group_error(const smp_group *group)
{
    return group->error;
}

int
smp_group_size(const smp_group *group)
{
    return group->lockstep.size;
}

int
smp_group_member(const smp_group *group)
{
    return group->lockstep.self;
}

uint64_t
smp_group_sequence(const smp_group *group)
{
    return group->sequence;
}

bool
smp_group_reads_memory(const smp_group *group)
{
    return group->lockstep.readable;
}

const char *
smp_operation_name(smp_operation operation)
{
    static const char *const names[SMP_OPERATIONS] = {
        [SMP_BARRIER] = "barrier",       [SMP_ALL_REDUCE] = "all-reduce",
        [SMP_REDUCE] = "reduce",         [SMP_REDUCE_SCATTER] = "reduce-scatter",
        [SMP_ALL_GATHER] = "all-gather", [SMP_BROADCAST] = "broadcast",
        [SMP_GATHER] = "gather",         [SMP_SCATTER] = "scatter",
        [SMP_ALL_TO_ALL] = "all-to-all",
    };

    return (unsigned)operation < SMP_OPERATIONS ? names[operation] : "unknown";
}
