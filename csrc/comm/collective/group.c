/* A group: one operation at a time, in steps of all members. */
#include "comm/collective/group.h"

#include <stdatomic.h>
#include <string.h>

#include "comm/collective/group_state.h"
#include "comm/collective/group_words.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"

/* On several hosts, a wait for a member of the same host lasts so much longer than the
 * time-out: that member may itself wait for another host, and then names the missing
 * one.
 */
#define GRACE_NS (1 * SMP_NS_PER_S)

/* The time until other hosts hear of members missing here. */
#define NOTE_NS (2 * SMP_NS_PER_MS)

/* The most time of the operation's waits; < 0: no limit. */
static int64_t
time_limit(const smp_group *group)
{
    const smp_call *call = group->is_hierarchical ? &group->hier.call : &group->op.call;
    int64_t         limit =
        call->hints.timeout_ns != 0 ? call->hints.timeout_ns : group->timeout_ns;

    return limit >= 0 && group->is_hierarchical && group->hier.waits_local
               ? limit + GRACE_NS
               : limit;
}

/* Whether the operation can go on waiting. */
static smp_status
check_waiting(smp_group *group)
{
    int64_t    limit = time_limit(group);
    int        member = 0;
    int64_t    now;
    smp_status status = group->is_hierarchical
                            ? smp_hierarchical_trouble(&group->hier, &member)
                            : smp_epoch_barrier_trouble(&group->barrier, &member);

    if (status != SMP_OK) {
        return smp_group_give_up_without(group, status, member);
    }
    now = smp_clock_ns();
    if (group->started_ns == 0) {
        group->started_ns = now;
    }
    if (limit >= 0 && now - group->started_ns >= limit) {
        return smp_group_give_up_late(group, now - group->started_ns);
    }
    if (group->is_hierarchical && now - group->started_ns >= NOTE_NS) {
        smp_hierarchical_note(&group->hier);
    }
    return SMP_OK;
}

/* Keeps the refusal's text and keys, for members with different calls. */
static smp_status
refuse(smp_group *group, const smp_refusal *refusal)
{
    smp_group_set_error(group, refusal->text);
    memcpy(group->keys, refusal->keys, sizeof(group->keys));
    smp_group_enter(group, SMP_GROUP_IDLE, SMP_OK);
    return refusal->status;
}

/* The others call something else: the operation is over, the group is not. */
static smp_status
disagree(smp_group *group, const smp_refusal *refusal)
{
    smp_collective_finish(&group->op);
    smp_epoch_barrier_read(&group->barrier);
    return refuse(group, refusal);
}

/* Takes the next steps, on several hosts; *waits: none is possible now. */
static smp_status
take_wide_step(smp_group *group, bool *waits)
{
    int        member = -1;
    smp_status status = smp_hierarchical_go_on(&group->hier, waits, &member);

    if (status != SMP_OK) {
        return smp_group_give_up_hierarchical(group, status, member);
    }
    if (group->hier.phase == SMP_HIERARCHICAL_REFUSED) {
        return refuse(group, &group->hier.refusal);
    }
    if (group->hier.phase == SMP_HIERARCHICAL_OVER) {
        smp_group_enter(group, SMP_GROUP_IDLE, SMP_OK);
    }
    return SMP_OK;
}

/* Begins a step with its slot filled. */
static smp_status
post(smp_group *group)
{
    smp_status status = smp_collective_prepare(&group->op);

    if (status != SMP_OK) {
        return smp_group_give_up(group, status, group->op.why);
    }
    smp_epoch_barrier_post(&group->barrier);
    return SMP_OK;
}

/* Takes a step posted by all. */
static smp_status
take_step(smp_group *group)
{
    smp_refusal refusal;
    bool        whole;
    int         member = 0;
    smp_status  status;

    if (group->phase == SMP_GROUP_SHOWS) {
        if (!smp_collective_agreed(&group->op, &refusal)) {
            return disagree(group, &refusal);
        }
        smp_group_enter(group, SMP_GROUP_AGREES, SMP_OK);
    }
    status = smp_collective_collect(&group->op, &whole, &member);
    if (status != SMP_OK) {
        return smp_group_give_up_reading(group, status, member);
    }
    if (whole && smp_collective_next(&group->op)) {
        return post(group);
    }
    if (whole) {
        smp_epoch_barrier_read(&group->barrier);
        smp_group_enter(group, SMP_GROUP_IDLE, SMP_OK);
    }
    return SMP_OK;
}

/* Goes on until the operation is over or a member is missing: *waits. */
static smp_status
take_steps(smp_group *group, bool *waits)
{
    smp_status status = SMP_OK;

    *waits = false;
    while (status == SMP_OK && smp_group_is_active(group) && !*waits) {
        if (group->is_hierarchical) {
            status = take_wide_step(group, waits);
        } else if (smp_epoch_barrier_arrived(&group->barrier)) {
            status = take_step(group);
        } else {
            *waits = true;
        }
    }
    return status;
}

/* --------------------------------------------------------------------------- public */

static void
add(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

/* A meeting moves nothing, and no caller has asked for it. */
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

    if (smp_group_is_child(group)) {
        smp_group_set_error(group, "a forked process is no member");
        return SMP_ERR_CLOSED;
    }
    if (group->phase == SMP_GROUP_ENDED) {
        return smp_group_refuse(group, call);
    }
    if (group->is_hierarchical && (call->gather != NULL || call->offer != NULL)) {
        smp_group_set_error(group, "tensors of devices are gathered inside one host");
        return SMP_ERR_INVALID;
    }
    if (group->is_hierarchical && smp_call_has_columns(call)) {
        smp_group_set_error(group, "columns are moved inside one host");
        return SMP_ERR_INVALID;
    }
    status = group->is_hierarchical
                 ? smp_hierarchical_begin(&group->hier, call, group->sequence + 1)
                 : smp_collective_begin(&group->op, call, group->sequence + 1);
    if (status != SMP_OK) {
        smp_group_set_error(
            group, "no such operation, reduction of that dtype, root or count");
        return status;
    }
    group->sequence++;
    count_call(group, call);
    smp_group_enter(group, SMP_GROUP_SHOWS, SMP_OK);
    group->started_ns = 0;
    return group->is_hierarchical ? SMP_OK : post(group);
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

    if (!group->is_hierarchical) {
        smp_epoch_barrier_wait(&group->barrier, deadline);
        return;
    }
    if (group->hier.place == 0 && group->hier.noted == 0 && group->hier.waits_local) {
        int64_t note = smp_clock_ns() + NOTE_NS;

        deadline = note < deadline ? note : deadline;
    }
    smp_hierarchical_wait(&group->hier, deadline);
}

smp_status
smp_group_wait(smp_group *group, int64_t until_ns, bool *over)
{
    smp_status status = group->broken;

    while (status == SMP_OK && smp_group_is_active(group)) {
        bool waits;

        status = take_steps(group, &waits);
        if (status != SMP_OK || !smp_group_is_active(group) ||
            (!group->is_hierarchical && smp_epoch_barrier_look(&group->barrier))) {
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
    *over = !smp_group_is_active(group);
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
    return smp_group_is_active(group) && group->started_ns != 0
               ? smp_clock_ns() - group->started_ns
               : 0;
}

void
smp_group_describe(const smp_group *group, const smp_call *next, uint64_t after,
                   char *out, size_t bytes)
{
    smp_group_say_wait(group, next, after, out, bytes);
}

const char *
smp_group_error(const smp_group *group)
{
    return group->error;
}

void
smp_group_keys(const smp_group *group, uint32_t keys[2])
{
    memcpy(keys, group->keys, sizeof(group->keys));
}

void
smp_group_rename(smp_group *group, const char *name)
{
    smp_epoch_barrier *barrier = &group->barrier;
    smp_post          *post = smp_comm_post(barrier->comm);

    if (group->is_hierarchical) { /* other groups' errors read the channel's name */
        smp_channel_set_name(post, &group->wire.channel, NULL);
    }
    memset(group->name, 0, sizeof(group->name));
    strncpy(group->name, name, sizeof(group->name) - 1);
    if (group->is_hierarchical) {
        smp_channel_set_name(post, &group->wire.channel, group->name);
    }
    memcpy(barrier->members[barrier->self].control->name, group->name,
           sizeof(group->name));
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
    return group->barrier.reads;
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
    return !group->is_hierarchical;
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
        .device_reads =
            atomic_load_explicit(&group->op.devices.reads, memory_order_relaxed),
        .tensor_bytes = atomic_load_explicit(&wire->tensor_bytes, memory_order_relaxed),
        .other_bytes = atomic_load_explicit(&wire->other_bytes, memory_order_relaxed),
        .parcels = atomic_load_explicit(&wire->parcels, memory_order_relaxed),
    };
}
