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
#include "comm/collective/lockstep.h"
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
    smp_lockstep     lockstep; /* of the members on this host */
    smp_collective   op;       /* theirs */
    bool             is_wide;  /* there are others: */
    smp_wire         wire;
    smp_wide         wide;
    char             name[64];
    int64_t          timeout_ns;
    uint64_t         sequence;   /* of the last operation */
    bool             active;     /* it is under way */
    bool             agreed;     /* all members call the same */
    int64_t          started_ns; /* when somebody was found missing; 0: nobody was */
    smp_status       broken;     /* what every later call returns */
    _Atomic uint64_t operations; /* begun, for smp_group_count() */
    _Atomic uint64_t bytes;
    char             error[640];
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
    if (group->is_wide) {
        smp_wire_fail(&group->wire, group->sequence, status, text);
    } else {
        take_back_tensors(group);
    }
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
    for (int m = 0; m < group->size; m++) {
        int n;

        if (!is_missing(group, m)) {
            continue;
        }
        n = snprintf(out + used, bytes - used, "%srank %d", used != 0 ? ", " : "",
                     group->ranks[m]);
        if (n < 0 || (size_t)n >= bytes - used) {
            if (bytes >= 4) {
                memcpy(out + bytes - 4, "...", 4);
            }
            return;
        }
        used += (size_t)n;
    }
}

/* For what a member of this host sleeps in another group. */
static bool
waits_beside(const smp_group *group, int member, char *name, size_t name_bytes,
             char *call, size_t call_bytes)
{
    const smp_shelf *shelf =
        smp_lockstep_elsewhere(&group->lockstep, place_of(group, member));
    const smp_notice *a;
    const smp_notice *b;

    if (shelf == NULL) {
        return false;
    }
    a = &shelf->slots[0].notice;
    b = &shelf->slots[1].notice;
    snprintf(name, name_bytes, "%.*s", (int)sizeof(shelf->name) - 1, shelf->name);
    smp_notice_describe(a->sequence > b->sequence ? a : b, call, call_bytes);
    return true;
}

/* "; rank 1 waits in group 'b' for barrier 3": what a missing member does instead, if
 * it is seen to; groups entered in another order by others look like that. */
static void
describe_elsewhere(const smp_group *group, char *out, size_t bytes)
{
    out[0] = '\0';
    for (int m = 0; m < group->size; m++) {
        char name[sizeof(group->name)];
        char call[96];

        if (is_missing(group, m) &&
            (place_of(group, m) < 0
                 ? smp_wire_elsewhere(&group->wire, m, name, sizeof(name), call,
                                      sizeof(call))
                 : waits_beside(group, m, name, sizeof(name), call, sizeof(call)))) {
            snprintf(out, bytes, "; rank %d waits in group '%s' for %s",
                     group->ranks[m], name, call);
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
    int  rank = group->ranks[member];
    char text[256];
    char why[192];
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
    snprintf(text, sizeof(text), "the tensor of rank %d cannot be read", rank);
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
                 group->ranks[member]);
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
        smp_lockstep_post(&group->lockstep);
    } else if (whole) {
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
    if (group->ranks == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    memcpy(group->ranks, config->ranks, bytes);
    group->size = config->size;
    return SMP_OK;
}

/* Meets the members of this host. */
static smp_status
meet_host(smp_group *group, smp_comm *comm, const smp_group_config *config,
          const bool *local, const smp_patience *patience, int *failed)
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
                               !config->only_shelves, patience, failed);
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

/* Meets all members: first says hello to other hosts, so that nobody there waits for a
 * member that does not come to terms with its own. */
static smp_status
meet(smp_group *group, smp_comm *comm, const smp_group_config *config,
     const smp_patience *patience, int *failed)
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
    status = meet_host(group, comm, config, local, patience, failed);
    if (status != SMP_OK) {
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

/* Who leaves because a rank is lost says so: the others may not have heard of it. */
static void
say_who_is_lost(smp_group *group)
{
    int  lost = smp_comm_lost(group->lockstep.comm);
    char text[32];

    if (lost >= 0 && group->broken == SMP_OK && !is_child(group)) {
        snprintf(text, sizeof(text), "rank %d is lost", lost);
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
    status = meet(group, comm, config, &patience, failed);
    if (status != SMP_OK) {
        goto err_free;
    }
    status = smp_collective_init(&group->op, &group->lockstep);
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
    smp_lockstep_fini(&group->lockstep);
err_free:
    free(group->ranks);
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
    smp_lockstep_fini(&group->lockstep);
    smp_collective_fini(&group->op);
    free(group->ranks);
    free(group);
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
    status = group->is_wide
                 ? smp_wide_begin(&group->wide, call, group->sequence + 1)
                 : smp_collective_begin(&group->op, call, group->sequence + 1);
    if (status != SMP_OK) {
        set_error(group, "no such operation, reduction of that dtype, root or count");
        return status;
    }
    group->sequence++;
    atomic_store_explicit(&group->operations, group->sequence, memory_order_relaxed);
    atomic_fetch_add_explicit(&group->bytes,
                              smp_call_bytes(call, group->size, group->self),
                              memory_order_relaxed);
    group->active = true;
    group->agreed = false;
    group->started_ns = 0;
    if (!group->is_wide) {
        smp_lockstep_post(&group->lockstep);
    }
    return SMP_OK;
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
    return group->lockstep.readable;
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
        .tensor_bytes = atomic_load_explicit(&wire->tensor_bytes, memory_order_relaxed),
        .other_bytes = atomic_load_explicit(&wire->other_bytes, memory_order_relaxed),
        .parcels = atomic_load_explicit(&wire->parcels, memory_order_relaxed),
    };
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
