/* The meeting of a group's members, and their parting. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/checks/rank_list.h"
#include "comm/collective/group.h"
#include "comm/collective/group_state.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"

/* Bytes of tensors on the way between hosts at a time, by default. */
#define ROUND_BYTES ((size_t)32 << 20)

/* The members, and this one's number. */
static smp_status
list_ranks(smp_group *group, smp_comm *comm, const smp_group_config *config,
           int *failed)
{
    size_t bytes = (size_t)(config->size > 0 ? config->size : 1) * sizeof(int);

    if (config->size < 1 || config->size > SMP_GROUP_MEMBERS || config->id == 0) {
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
          const bool *local, const smp_deadline *deadline, int *failed,
          smp_rank_list *absent)
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
    status = smp_epoch_barrier_init(&group->barrier, comm, ranks, n, config->id,
                                    config->reading, deadline, failed, absent);
    free(ranks);
    if (status == SMP_OK) {
        memcpy(group->barrier.members[group->barrier.self].control->name, group->name,
               sizeof(group->name));
    }
    return status;
}

/* Other hosts need not wait for this member.  Before the epoch barrier's end: the wire
 * rings its doorbell. */
static void
leave_hosts(smp_group *group, smp_status status, const char *why)
{
    if (group->is_hierarchical) {
        smp_wire_fail(&group->wire, 0, status, why);
        smp_wire_fini(&group->wire);
    }
}

/* The missing members of other hosts. */
static void
list_far(smp_group *group, smp_rank_list *absent)
{
    int member;

    if (group->is_hierarchical) {
        (void)smp_wire_receive(&group->wire, &member); /* it may have come just now */
        smp_wire_absent(&group->wire, absent);
    }
}

/* Meets all members: first says hello to other hosts, so that no member there waits for
 * one refused on its own host. */
static smp_status
meet(smp_group *group, smp_comm *comm, const smp_group_config *config,
     const smp_deadline *deadline, int *failed, smp_rank_list *absent)
{
    bool         *local = calloc((size_t)group->size, sizeof(bool));
    smp_doorbell *doorbell;
    char          why[96];
    smp_status    status = SMP_OK;

    if (local == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int m = 0; m < group->size; m++) {
        smp_neighbour neighbour;

        local[m] = smp_comm_neighbour(comm, group->ranks[m], &neighbour);
        group->is_hierarchical = group->is_hierarchical || !local[m];
    }
    if (group->is_hierarchical) {
        status = smp_wire_init(&group->wire, comm, group->ranks, local, group->size,
                               group->self, config->id, group->name, failed);
    }
    if (status != SMP_OK) {
        status = smp_epoch_barrier_blame(comm, status, failed, why, sizeof(why));
        goto out;
    }
    status = meet_host(group, comm, config, local, deadline, failed, absent);
    if (status != SMP_OK) {
        list_far(group, absent);
        status = smp_epoch_barrier_blame(comm, status, failed, why, sizeof(why));
        goto err_leave;
    }
    if (group->is_hierarchical) {
        doorbell = &group->barrier.members[group->barrier.self].control->doorbell;
        status = smp_wire_meet(&group->wire, doorbell, deadline, failed);
    }
    if (status == SMP_OK) {
        goto out;
    }
    list_far(group, absent);
    status = smp_epoch_barrier_blame(comm, status, failed, why, sizeof(why));
    smp_epoch_barrier_fail(&group->barrier, status, why);
    leave_hosts(group, status, why);
    smp_epoch_barrier_fini(&group->barrier);
    goto out;

err_leave:
    leave_hosts(group, status, why);
out:
    free(local);
    return status;
}

/* The state of operations across hosts. */
static smp_status
make_hierarchical(smp_group *group, const smp_group_config *config)
{
    int       *lowest = calloc((size_t)group->size, sizeof(int));
    size_t     bytes = config->round_bytes != 0 ? config->round_bytes : ROUND_BYTES;
    smp_status status = SMP_ERR_NO_MEMORY;

    if (lowest != NULL) {
        for (int m = 0; m < group->size; m++) {
            lowest[m] = group->wire.members[m].host;
        }
        status = smp_hierarchical_init(&group->hier, &group->barrier, &group->op,
                                       &group->wire, lowest, bytes);
    }
    free(lowest);
    return status;
}

/* The reason of a failed creation, for people. */
static void
explain(const smp_comm *comm, const smp_group_config *config, smp_status status,
        int failed, smp_rank_list *absent, int64_t waited_ns)
{
    char missing[SMP_RANK_LIST_TEXT];
    char why[SMP_RANK_LIST_TEXT + 64];

    if (config->why == NULL) {
        return;
    }
    if (status == SMP_ERR_TIMED_OUT && absent->n != 0) {
        smp_rank_list_say(absent, missing, sizeof(missing));
        snprintf(why, sizeof(why), "timed out after %.1f s without %s",
                 (double)waited_ns / (double)SMP_NS_PER_S, missing);
    } else if (status == SMP_ERR_LIMIT) {
        snprintf(why, sizeof(why), "rank %d is in %d groups, and cannot be in more",
                 smp_comm_name(comm, failed), SMP_CONTROL_BLOCKS);
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

/* A member leaving because a rank is lost says so: the others may not have heard of the
 * loss. */
static void
say_who_is_lost(smp_group *group)
{
    const smp_comm *comm = group->barrier.comm;
    int             lost = smp_comm_lost(comm);
    char            text[32];

    if (lost >= 0 && group->phase != SMP_GROUP_ENDED && !smp_group_is_child(group)) {
        snprintf(text, sizeof(text), "rank %d is lost", smp_comm_name(comm, lost));
        smp_epoch_barrier_fail(&group->barrier, SMP_ERR_PEER_LOST, text);
        if (group->is_hierarchical) { /* a finished operation is not undone */
            smp_wire_fail(&group->wire, group->sequence + !smp_group_is_active(group),
                          SMP_ERR_PEER_LOST, text);
        }
    }
}

smp_status
smp_group_create(smp_comm *comm, const smp_group_config *config, smp_group **out,
                 int *failed)
{
    smp_group    *group = calloc(1, sizeof(*group));
    smp_deadline  deadline = {smp_clock_deadline(config->timeout_ns), config->gives_up,
                              config->gives_up_arg};
    smp_rank_list absent = {0};
    int64_t       began = smp_clock_ns();
    smp_status    status;

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
    status = meet(group, comm, config, &deadline, failed, &absent);
    if (status != SMP_OK) {
        goto err_free;
    }
    status = smp_collective_init(&group->op, &group->barrier);
    if (status == SMP_OK && group->is_hierarchical) {
        status = make_hierarchical(group, config);
    }
    if (status != SMP_OK) {
        goto err_fini;
    }
    *out = group;
    return SMP_OK;

err_fini:
    smp_epoch_barrier_fail(&group->barrier, status, smp_status_text(status));
    leave_hosts(group, status, smp_status_text(status));
    smp_collective_fini(&group->op);
    smp_epoch_barrier_fini(&group->barrier);
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
    if (group->is_hierarchical &&
        !smp_group_is_child(group)) { /* a child does not have their messages */
        smp_wire_fini(&group->wire);  /* first: it rings the control block's doorbell */
        smp_hierarchical_fini(&group->hier);
    }
    smp_devices_fini(
        &group->op.devices); /* the epoch barrier says when the others have */
    smp_epoch_barrier_fini(&group->barrier);
    smp_collective_fini(&group->op);
    free(group->ranks);
    free(group->scratch);
    free(group);
}
