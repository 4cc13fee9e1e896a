/* A group: one operation at a time, and its errors in words. */
#include "comm/collective/group.h"

#include <assert.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/clock.h"
#include "comm/collective/call.h"
#include "comm/collective/collective.h"
#include "comm/collective/deadlock.h"
#include "comm/collective/lockstep.h"
#include "comm/collective/roll.h"
#include "comm/collective/standoff.h"
#include "comm/collective/wide.h"
#include "comm/collective/wire.h"
#include "comm/fork.h"
#include "comm/neighbour.h"

/* A member that ends unmaps its tensors before it is gone: for so long an address that
 * cannot be read may be one of those. */
#define NEWS_NS (200 * SMP_NS_PER_MS)

/* What one call of progress may take, about. */
#define PROGRESS_NS (1 * SMP_NS_PER_MS)

/* Bytes of tensors that are on the way between hosts at a time, if nobody says. */
#define ROUND_BYTES ((size_t)32 << 20)

/* On several hosts, who waits for a member of its own host waits so much longer than
 * the time-out: that one may itself wait for another host, and then knows whom to name.
 */
#define GRACE_NS (200 * SMP_NS_PER_MS)

/* When other hosts are told who is missing here. */
#define NOTE_NS (2 * SMP_NS_PER_MS)

struct smp_group {
    int              size;
    int              self;
    int             *ranks;    /* owned: [size] */
    int             *scratch;  /* owned: [size], for lists of ranks */
    smp_lockstep     lockstep; /* of the members on this host */
    smp_collective   op;       /* theirs */
    bool             is_wide;  /* there are others: */
    smp_wire         wire;
    smp_wide         wide;
    smp_deadlock     deadlock;
    smp_standoff     standoff; /* of a wide one */
    char             name[64];
    int64_t          timeout_ns;
    uint64_t         sequence;   /* of the last operation */
    bool             active;     /* it is under way */
    bool             agreed;     /* all members call the same */
    int64_t          started_ns; /* when somebody was found missing; 0: nobody was */
    smp_status       broken;     /* what every later call returns, */
    char             end[SMP_WHY_BYTES]; /* ... and what it was, in words */
    _Atomic uint64_t operations;         /* begun, for smp_group_count() */
    _Atomic uint64_t bytes;
    _Atomic uint64_t device_operations;
    _Atomic uint64_t device_bytes;
    char             error[SMP_GROUP_TEXT];
};

/* ------------------------------------------------------------------------- errors */

/* The own call in words. */
static void
describe_own(const smp_group *group, char *out, size_t bytes)
{
    const smp_lockstep *lockstep = &group->lockstep;
    const smp_notice   *notice =
        group->is_wide
              ? &group->wide.notice
              : &smp_lockstep_slot(lockstep, lockstep->self, group->op.first)->notice;

    smp_notice_describe(notice, out, bytes);
}

/* What errors call a member. */
static int
name_of(const smp_group *group, int member)
{
    return smp_comm_name(group->lockstep.comm, group->ranks[member]);
}

/* Whether the operation waits for that member. */
static bool
is_missing(const smp_group *group, int member)
{
    return group->is_wide ? smp_wide_awaits(&group->wide, member)
                          : !smp_lockstep_posted(&group->lockstep, member);
}

/* A member's place on this host; -1: it is on another. */
static int
place_of(const smp_group *group, int member)
{
    const smp_hosts *hosts = &group->wide.hosts;

    if (!group->is_wide) {
        return member;
    }
    return hosts->host_of[member] == group->wide.host ? hosts->place_of[member] : -1;
}

static void
set_error(smp_group *group, const char *what)
{
    snprintf(group->error, sizeof(group->error), "group '%s': %s", group->name, what);
}

/* Others may be writing into this member's tensors, or reading them: waits until they
 * have seen that it gave up.  Who has not begun yet will see it before. */
static void
take_back_tensors(smp_group *group)
{
    smp_collective *op = &group->op;
    char            how[320];

    if (!group->agreed && !(smp_lockstep_all_here(&group->lockstep) &&
                            smp_collective_agreed(op, how, sizeof(how)))) {
        return;
    }
    if (op->way == SMP_BY_MEMORY) {
        smp_lockstep_retreat(&group->lockstep, op->first + op->steps - 1);
    }
}

/* "barrier 3: timed out": words of so many bytes that do not fit end with "...". */
static void
join_words(char *out, size_t bytes, const char *what, const char *why)
{
    int n = snprintf(out, bytes, "%s: %s", what, why);

    if (n < 0 || (size_t)n >= bytes) {
        memcpy(out + bytes - 4, "...", 4);
    }
}

/* Ends the operation and the group. */
static smp_status
give_up(smp_group *group, smp_status status, const char *why)
{
    char call[96];

    describe_own(group, call, sizeof(call));
    join_words(group->end, sizeof(group->end), call, why);
    set_error(group, group->end);
    smp_lockstep_fail(&group->lockstep, status, group->end);
    if (group->is_wide) {
        smp_wire_fail(&group->wire, group->sequence, status, group->end);
    } else {
        take_back_tensors(group);
        smp_collective_finish(&group->op);
    }
    group->active = false;
    group->broken = status;
    return status;
}

/* The next call, of a group that has ended. */
static smp_status
refuse_after_end(smp_group *group, const smp_call *next)
{
    smp_notice notice = {0};
    char       call[96];
    char       text[SMP_WHY_BYTES + 128];

    smp_call_say(next, 0, group->sequence + 1, &notice, NULL);
    smp_notice_describe(&notice, call, sizeof(call));
    snprintf(text, sizeof(text), "%s: the group ended before: %s", call, group->end);
    set_error(group, text);
    return group->broken;
}

/* "ranks 2, 3": the members that are missing; "": none. */
static void
list_missing(const smp_group *group, char *out, size_t bytes)
{
    smp_roll missing = {.names = group->scratch};

    for (int m = 0; m < group->size; m++) {
        if (is_missing(group, m)) {
            smp_roll_add(&missing, name_of(group, m));
        }
    }
    smp_roll_say(&missing, out, bytes);
}

/* What a member of this host does in another group: "waits in group 'b' for barrier 3".
 */
static bool
is_beside(const smp_group *group, int member, char *out, size_t bytes)
{
    const smp_shelf *shelf =
        smp_lockstep_elsewhere(&group->lockstep, place_of(group, member));
    bool has_failed;
    char name[sizeof(group->name)];
    char call[96];

    if (shelf == NULL ||
        !smp_shelf_describe(shelf, name, sizeof(name), call, sizeof(call))) {
        return false;
    }
    has_failed = atomic_load(&shelf->failed) != SMP_OK;
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

/* "; rank 1 waits in group 'b' for barrier 3": what a missing member does instead, if
 * it is seen to; groups entered in another order by others look like that. */
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

static smp_status
give_up_late(smp_group *group, int64_t waited_ns)
{
    char missing[SMP_ROLL_TEXT];
    char elsewhere[240];
    char text[SMP_WHY_BYTES];

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
    int  rank = name_of(group, member);
    char text[SMP_WHY_BYTES + 32];
    char why[SMP_WHY_BYTES];
    int  source;
    bool has_said;

    if (group->is_wide) { /* what it has said may have come just now */
        (void)smp_wire_receive(&group->wire, &source);
    }
    has_said = group->is_wide
                   ? smp_wide_why(&group->wide, member, why, sizeof(why))
                   : smp_lockstep_why(&group->lockstep, member, why, sizeof(why));

    if (has_said) {
        snprintf(text, sizeof(text), "rank %d gave up: %s", rank, why);
    } else {
        snprintf(text, sizeof(text), "rank %d %s", rank,
                 status == SMP_ERR_PEER_LOST ? "is lost" : "has left");
    }
    return give_up(group, status, text);
}

/* The members wait for each other in a ring of groups. */
static smp_status
give_up_in_ring(smp_group *group, const char *ring)
{
    char why[320];

    snprintf(why, sizeof(why), "deadlock: %s", ring);
    return give_up(group, SMP_ERR_DEADLOCK, why);
}

/* Whether its tensors are its own again: it is gone, or gave up. */
static bool
has_ended(const smp_group *group, int member)
{
    char why[2];

    return smp_comm_gone(group->lockstep.comm, group->ranks[member]) ||
           (group->is_wide
                ? smp_wide_why(&group->wide, member, why, sizeof(why))
                : smp_lockstep_why(&group->lockstep, member, why, sizeof(why)));
}

/* A member's memory, which could be read when the group was made, cannot be read any
 * more: it has died or is about to end, or the address was none. */
static smp_status
give_up_reading(smp_group *group, smp_status status, int member)
{
    int     rank = group->ranks[member];
    int64_t until = smp_clock_ns() + NEWS_NS;
    char    text[96];

    if (status != SMP_ERR_SYSTEM) {
        return give_up_without(group, status, member);
    }
    if (member == group->self && group->op.way == SMP_BY_DEVICE) {
        return give_up(group, status, group->op.why);
    }
    while (!has_ended(group, member) && smp_clock_ns() < until) {
        sched_yield();
    }
    if (has_ended(group, member)) {
        return give_up_without(group,
                               smp_comm_left(group->lockstep.comm, rank)
                                   ? SMP_ERR_CLOSED
                                   : SMP_ERR_PEER_LOST,
                               member);
    }
    snprintf(text, sizeof(text), "the tensor of rank %d cannot be read",
             name_of(group, member));
    return give_up(group, SMP_ERR_SYSTEM, text);
}

/* ---------------------------------------------------------------------- operations */

/* How long the operation may wait; < 0: for ever. */
static int64_t
time_limit(const smp_group *group)
{
    const smp_call *call = group->is_wide ? &group->wide.call : &group->op.call;
    int64_t limit = call->timeout_ns != 0 ? call->timeout_ns : group->timeout_ns;

    return limit >= 0 && group->is_wide && group->wide.waits_local ? limit + GRACE_NS
                                                                   : limit;
}

/* Whether the operation can go on waiting. */
static smp_status
check_waiting(smp_group *group)
{
    int64_t    limit = time_limit(group);
    int        member = 0;
    int64_t    now;
    smp_status status = group->is_wide
                            ? smp_wide_trouble(&group->wide, &member)
                            : smp_lockstep_trouble(&group->lockstep, &member);

    if (status == SMP_ERR_CLOSED && group->deadlock.is_sure) {
        /* It has left because of that, too. */
        return give_up_in_ring(group, group->deadlock.text);
    }
    if (status == SMP_ERR_CLOSED && group->is_wide &&
        smp_standoff_look_again(&group->standoff, &group->wide)) {
        return give_up_in_ring(group, group->standoff.text);
    }
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
    if (group->is_wide && now - group->started_ns >= NOTE_NS) {
        smp_wide_note(&group->wide);
    }
    return SMP_OK;
}

/* The others call something else: the operation is over, the group is not. */
static smp_status
disagree(smp_group *group, const char *how)
{
    set_error(group, how);
    smp_collective_finish(&group->op);
    smp_lockstep_read(&group->lockstep);
    group->active = false;
    return SMP_ERR_MISMATCH;
}

/* Something on the way between hosts went wrong. */
static smp_status
give_up_wide(smp_group *group, smp_status status, int member)
{
    char text[96];

    if (member >= 0 && status == SMP_ERR_SYSTEM) {
        return give_up_reading(group, status, member);
    }
    if (member >= 0 && status == SMP_ERR_MALFORMED) {
        snprintf(text, sizeof(text), "what rank %d sent makes no sense",
                 name_of(group, member));
        return give_up(group, status, text);
    }
    if (member >= 0 && (status == SMP_ERR_PEER_LOST || status == SMP_ERR_CLOSED ||
                        has_ended(group, member))) {
        return give_up_without(group, status, member);
    }
    return give_up(group, status, smp_status_text(status));
}

/* What can be done now, on several hosts; *waits: nothing. */
static smp_status
take_wide_step(smp_group *group, bool *waits)
{
    int        member = -1;
    smp_status status = smp_wide_go_on(&group->wide, waits, &member);

    if (status != SMP_OK) {
        return give_up_wide(group, status, member);
    }
    if (group->wide.phase == SMP_WIDE_REFUSED) {
        set_error(group, group->wide.refusal);
        group->active = false;
        return SMP_ERR_MISMATCH;
    }
    group->active = group->wide.phase != SMP_WIDE_OVER;
    return SMP_OK;
}

/* Begins a step, of which the slot is filled. */
static smp_status
post(smp_group *group)
{
    smp_status status = smp_collective_prepare(&group->op);

    if (status != SMP_OK) {
        return give_up(group, status, group->op.why);
    }
    smp_lockstep_post(&group->lockstep);
    return SMP_OK;
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
        return give_up_reading(group, status, member);
    }
    if (whole && smp_collective_next(&group->op)) {
        return post(group);
    }
    if (whole) {
        smp_lockstep_read(&group->lockstep);
        group->active = false;
    }
    return SMP_OK;
}

/* Goes on until the operation is over or somebody is missing: *waits. */
static smp_status
take_steps(smp_group *group, int64_t until_ns, bool *waits)
{
    smp_status status = SMP_OK;

    *waits = false;
    while (status == SMP_OK && group->active) {
        if (group->is_wide) {
            status = take_wide_step(group, waits);
        } else if (smp_lockstep_arrived(&group->lockstep)) {
            status = take_step(group);
        } else {
            *waits = true;
        }
        if (*waits || (until_ns != SMP_NEVER && smp_clock_ns() >= until_ns)) {
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

/* ------------------------------------------------------------------------- meeting */

/* The members, and this one's number. */
static smp_status
list_ranks(smp_group *group, smp_comm *comm, const smp_group_config *config,
           int *failed)
{
    size_t bytes = (size_t)(config->size > 0 ? config->size : 1) * sizeof(int);

    if (config->size < 1 || config->size > SMP_SHELF_MEMBERS || config->id == 0) {
        return SMP_ERR_INVALID;
    }
    group->self = -1;
    for (int m = 0; m < config->size; m++) {
        *failed = config->ranks[m];
        if (*failed < 0 || *failed >= smp_comm_size(comm)) {
            return SMP_ERR_INVALID;
        }
        for (int other = 0; other < m; other++) {
            if (config->ranks[other] == *failed) {
                return SMP_ERR_INVALID;
            }
        }
        if (*failed == smp_comm_rank(comm)) {
            group->self = m;
        }
    }
    *failed = smp_comm_rank(comm);
    if (group->self < 0) {
        return SMP_ERR_INVALID;
    }
    group->ranks = malloc(bytes);
    group->scratch = malloc(bytes);
    if (group->ranks == NULL || group->scratch == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    memcpy(group->ranks, config->ranks, bytes);
    group->size = config->size;
    return SMP_OK;
}

/* Meets the members of this host. */
static smp_status
meet_host(smp_group *group, smp_comm *comm, const smp_group_config *config,
          const bool *local, const smp_patience *patience, int *failed,
          smp_roll *absent)
{
    int       *ranks = calloc((size_t)group->size, sizeof(int));
    int        n = 0;
    smp_status status;

    if (ranks == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int m = 0; m < group->size; m++) {
        if (local[m]) {
            ranks[n++] = group->ranks[m];
        }
    }
    status = smp_lockstep_init(&group->lockstep, comm, ranks, n, config->id,
                               config->reading, patience, failed, absent);
    free(ranks);
    if (status == SMP_OK) {
        memcpy(group->lockstep.members[group->lockstep.self].shelf->name, group->name,
               sizeof(group->name));
    }
    return status;
}

/* Other hosts need not wait for this member.  Before the lockstep's end: the wire rings
 * its bell. */
static void
leave_hosts(smp_group *group, smp_status status, const char *why)
{
    if (group->is_wide) {
        smp_wire_fail(&group->wire, 0, status, why);
        smp_wire_fini(&group->wire);
    }
}

/* The members of other hosts that have not come. */
static void
list_far(smp_group *group, smp_roll *absent)
{
    int member;

    if (group->is_wide) {
        (void)smp_wire_receive(&group->wire, &member); /* it may have come just now */
        smp_wire_absent(&group->wire, absent);
    }
}

/* Meets all members: first says hello to other hosts, so that nobody there waits for a
 * member that does not come to terms with its own. */
static smp_status
meet(smp_group *group, smp_comm *comm, const smp_group_config *config,
     const smp_patience *patience, int *failed, smp_roll *absent)
{
    bool      *local = calloc((size_t)group->size, sizeof(bool));
    smp_bell  *bell;
    char       why[96];
    smp_status status = SMP_OK;

    if (local == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int m = 0; m < group->size; m++) {
        smp_neighbour neighbour;

        local[m] = smp_comm_neighbour(comm, group->ranks[m], &neighbour);
        group->is_wide = group->is_wide || !local[m];
    }
    if (group->is_wide) {
        status = smp_wire_init(&group->wire, comm, group->ranks, local, group->size,
                               group->self, config->id, group->name, failed);
    }
    if (status != SMP_OK) {
        status = smp_lockstep_blame(comm, status, failed, why, sizeof(why));
        goto out;
    }
    status = meet_host(group, comm, config, local, patience, failed, absent);
    if (status != SMP_OK) {
        list_far(group, absent);
        status = smp_lockstep_blame(comm, status, failed, why, sizeof(why));
        goto err_leave;
    }
    if (group->is_wide) {
        bell = &group->lockstep.members[group->lockstep.self].shelf->bell;
        status = smp_wire_meet(&group->wire, bell, patience, failed);
    }
    if (status == SMP_OK) {
        goto out;
    }
    list_far(group, absent);
    status = smp_lockstep_blame(comm, status, failed, why, sizeof(why));
    smp_lockstep_fail(&group->lockstep, status, why);
    leave_hosts(group, status, why);
    smp_lockstep_fini(&group->lockstep);
    goto out;

err_leave:
    leave_hosts(group, status, why);
out:
    free(local);
    return status;
}

/* What an operation across hosts needs. */
static smp_status
make_wide(smp_group *group, const smp_group_config *config)
{
    int       *lowest = calloc((size_t)group->size, sizeof(int));
    size_t     bytes = config->round_bytes != 0 ? config->round_bytes : ROUND_BYTES;
    smp_status status = SMP_ERR_NO_MEMORY;

    if (lowest != NULL) {
        for (int m = 0; m < group->size; m++) {
            lowest[m] = group->wire.members[m].host;
        }
        status = smp_wide_init(&group->wide, &group->lockstep, &group->op, &group->wire,
                               lowest, bytes);
    }
    free(lowest);
    return status;
}

/* Why there is no group, for people. */
static void
explain(const smp_comm *comm, const smp_group_config *config, smp_status status,
        int failed, smp_roll *absent, int64_t waited_ns)
{
    char missing[SMP_ROLL_TEXT];
    char why[SMP_ROLL_TEXT + 64];

    if (config->why == NULL) {
        return;
    }
    if (status == SMP_ERR_TIMED_OUT && absent->n != 0) {
        smp_roll_say(absent, missing, sizeof(missing));
        snprintf(why, sizeof(why), "timed out after %.1f s without %s",
                 (double)waited_ns / (double)SMP_NS_PER_S, missing);
    } else if (status == SMP_ERR_LIMIT) {
        snprintf(why, sizeof(why), "rank %d is in %d groups, and cannot be in more",
                 smp_comm_name(comm, failed), SMP_SHELVES);
    } else {
        snprintf(why, sizeof(why), "rank %d %s", smp_comm_name(comm, failed),
                 status == SMP_ERR_PEER_LOST  ? "is lost"
                 : status == SMP_ERR_CLOSED   ? "has left"
                 : status == SMP_ERR_MISMATCH ? "has another list of ranks"
                                              : smp_status_text(status));
    }
    snprintf(config->why, SMP_GROUP_TEXT, "group '%s': could not make the group: %s",
             config->name, why);
}

/* Who leaves because a rank is lost says so: the others may not have heard of it. */
static void
say_who_is_lost(smp_group *group)
{
    const smp_comm *comm = group->lockstep.comm;
    int             lost = smp_comm_lost(comm);
    char            text[32];

    if (lost >= 0 && group->broken == SMP_OK && !is_child(group)) {
        snprintf(text, sizeof(text), "rank %d is lost", smp_comm_name(comm, lost));
        smp_lockstep_fail(&group->lockstep, SMP_ERR_PEER_LOST, text);
        if (group->is_wide) { /* what is over it does not undo */
            smp_wire_fail(&group->wire, group->sequence + !group->active,
                          SMP_ERR_PEER_LOST, text);
        }
    }
}

/* --------------------------------------------------------------------------- public */

smp_status
smp_group_create(smp_comm *comm, const smp_group_config *config, smp_group **out,
                 int *failed)
{
    smp_group   *group = calloc(1, sizeof(*group));
    smp_patience patience = {smp_clock_deadline(config->timeout_ns), config->gives_up,
                             config->gives_up_arg};
    smp_roll     absent = {0};
    int64_t      began = smp_clock_ns();
    smp_status   status;

    *failed = smp_comm_rank(comm);
    if (group == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    strncpy(group->name, config->name, sizeof(group->name) - 1);
    group->timeout_ns = config->timeout_ns;
    status = list_ranks(group, comm, config, failed);
    if (status != SMP_OK) {
        goto err_free;
    }
    absent.names = group->scratch;
    status = meet(group, comm, config, &patience, failed, &absent);
    if (status != SMP_OK) {
        goto err_free;
    }
    status = smp_collective_init(&group->op, &group->lockstep);
    if (status == SMP_OK) {
        status = smp_deadlock_init(&group->deadlock, comm);
    }
    if (status == SMP_OK && group->is_wide) {
        status = smp_standoff_init(&group->standoff, group->size);
    }
    if (status == SMP_OK && group->is_wide) {
        status = make_wide(group, config);
    }
    if (status != SMP_OK) {
        goto err_fini;
    }
    *out = group;
    return SMP_OK;

err_fini:
    smp_lockstep_fail(&group->lockstep, status, smp_status_text(status));
    leave_hosts(group, status, smp_status_text(status));
    smp_collective_fini(&group->op);
    smp_deadlock_fini(&group->deadlock);
    smp_standoff_fini(&group->standoff);
    smp_lockstep_fini(&group->lockstep);
err_free:
    explain(comm, config, status, *failed, &absent, smp_clock_ns() - began);
    free(group->ranks);
    free(group->scratch);
    free(group);
    return status;
}

void
smp_group_destroy(smp_group *group)
{
    if (group == NULL) {
        return;
    }
    say_who_is_lost(group);
    if (group->is_wide && !is_child(group)) { /* whose messages a child does not have */
        smp_wire_fini(&group->wire);          /* first: it rings the shelf's bell */
        smp_wide_fini(&group->wide);
    }
    smp_devices_fini(&group->op.devices); /* the lockstep says when the others have */
    smp_lockstep_fini(&group->lockstep);
    smp_collective_fini(&group->op);
    smp_deadlock_fini(&group->deadlock);
    smp_standoff_fini(&group->standoff);
    free(group->ranks);
    free(group->scratch);
    free(group);
}

static void
add(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

/* A meeting moves nothing, and nobody has called it. */
static void
count_call(smp_group *group, const smp_call *call)
{
    uint64_t bytes = smp_call_bytes(call, group->size, group->self);

    if (call->offer != NULL) {
        return;
    }
    add(&group->operations, 1);
    add(&group->bytes, bytes);
    if (call->gather != NULL) {
        add(&group->device_operations, 1);
        add(&group->device_bytes, bytes);
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
        return refuse_after_end(group, call);
    }
    assert(!group->active);
    if (group->is_wide && (call->gather != NULL || call->offer != NULL)) {
        set_error(group, "tensors of devices are gathered inside one host");
        return SMP_ERR_INVALID;
    }
    status = group->is_wide
                 ? smp_wide_begin(&group->wide, call, group->sequence + 1)
                 : smp_collective_begin(&group->op, call, group->sequence + 1);
    if (status != SMP_OK) {
        set_error(group, "no such operation, reduction of that dtype, root or count");
        return status;
    }
    group->sequence++;
    count_call(group, call);
    group->active = true;
    group->agreed = false;
    group->started_ns = 0;
    smp_deadlock_forget(&group->deadlock);
    smp_standoff_forget(&group->standoff);
    return group->is_wide ? SMP_OK : post(group);
}

smp_status
smp_group_progress(smp_group *group, bool *over)
{
    smp_status status = group->broken;
    bool       waits = false;

    if (group->active) {
        status = take_steps(group, smp_clock_ns() + PROGRESS_NS, &waits);
        if (status == SMP_OK && waits) {
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
    int64_t limit = time_limit(group);

    if (limit < 0 || limit > SMP_NEVER - group->started_ns) {
        return until_ns;
    }
    limit += group->started_ns;
    return limit < until_ns ? limit : until_ns;
}

/* Waits until something has changed, or until_ns. */
static void
wait_for_others(smp_group *group, int64_t until_ns)
{
    int64_t deadline = wait_deadline(group, until_ns);

    if (!group->is_wide) {
        smp_lockstep_wait(&group->lockstep, deadline);
        return;
    }
    if (group->wide.place == 0 && group->wide.noted == 0 && group->wide.waits_local) {
        int64_t note = smp_clock_ns() + NOTE_NS;

        deadline = note < deadline ? note : deadline;
    }
    smp_wide_wait(&group->wide, deadline);
}

smp_status
smp_group_wait(smp_group *group, int64_t until_ns, bool *over)
{
    smp_status status = group->broken;

    while (status == SMP_OK && group->active) {
        bool waits;

        status = take_steps(group, SMP_NEVER, &waits);
        if (status != SMP_OK || !group->active ||
            (!group->is_wide && smp_lockstep_look(&group->lockstep))) {
            continue;
        }
        status = check_waiting(group);
        if (status == SMP_OK) {
            wait_for_others(group, until_ns);
        }
        if (until_ns != SMP_NEVER && smp_clock_ns() >= until_ns) {
            break;
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

int64_t
smp_group_waited_ns(const smp_group *group)
{
    return group->active && group->started_ns != 0 ? smp_clock_ns() - group->started_ns
                                                   : 0;
}

void
smp_group_describe(const smp_group *group, const smp_call *next, uint64_t after,
                   char *out, size_t bytes)
{
    char call[96];
    char missing[SMP_ROLL_TEXT];
    char elsewhere[240];
    char queued[120] = "";

    if (next != NULL) {
        smp_notice notice = {0};

        smp_call_say(next, 0, group->sequence + after, &notice, NULL);
        smp_notice_describe(&notice, call, sizeof(call));
        snprintf(queued, sizeof(queued), "%s stands behind ", call);
    }
    if (!group->active) {
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

void
smp_group_show_stuck(smp_group *group, uint64_t token)
{
    atomic_store(&group->lockstep.members[group->lockstep.self].shelf->stuck, token);
}

smp_status
smp_group_look_around(smp_group *group, uint64_t token)
{
    if (smp_deadlock_look(&group->deadlock, group->lockstep.comm)) {
        return give_up_in_ring(group, group->deadlock.text);
    }
    if (group->is_wide && smp_standoff_look(&group->standoff, &group->wide, token)) {
        return give_up_in_ring(group, group->standoff.text);
    }
    return SMP_OK;
}

const char *
smp_group_error(const smp_group *group)
{
    return group->error;
}

int
smp_group_size(const smp_group *group)
{
    return group->size;
}

int
smp_group_member(const smp_group *group)
{
    return group->self;
}

uint64_t
smp_group_sequence(const smp_group *group)
{
    return group->sequence;
}

bool
smp_group_reads_memory(const smp_group *group)
{
    return group->lockstep.reads;
}

smp_exchange *
smp_group_exchange(const smp_group *group, const char **why)
{
    const smp_devices *devices = &group->op.devices;

    *why = "";
    if (!atomic_load(&devices->decided)) {
        return NULL;
    }
    *why = devices->why;
    return devices->met ? devices->exchange : NULL;
}

bool
smp_group_rest(const smp_group *group)
{
    const smp_exchange *exchange = group->op.devices.exchange;

    return exchange == NULL || smp_exchange_rest(exchange);
}

bool
smp_group_is_on_one_host(const smp_group *group)
{
    return !group->is_wide;
}

void
smp_group_count(const smp_group *group, smp_group_use *out)
{
    const smp_wire *wire = &group->wire; /* all zero on one host */

    *out = (smp_group_use){
        .operations = atomic_load_explicit(&group->operations, memory_order_relaxed),
        .bytes = atomic_load_explicit(&group->bytes, memory_order_relaxed),
        .device_operations =
            atomic_load_explicit(&group->device_operations, memory_order_relaxed),
        .device_bytes =
            atomic_load_explicit(&group->device_bytes, memory_order_relaxed),
        .tensor_bytes = atomic_load_explicit(&wire->tensor_bytes, memory_order_relaxed),
        .other_bytes = atomic_load_explicit(&wire->other_bytes, memory_order_relaxed),
        .parcels = atomic_load_explicit(&wire->parcels, memory_order_relaxed),
    };
}
