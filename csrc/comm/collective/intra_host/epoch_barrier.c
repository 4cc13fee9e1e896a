/* Meeting, waiting, giving up. */
#define _GNU_SOURCE
#include "comm/collective/intra_host/epoch_barrier.h"

#include <assert.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/collective/checks/identity.h"
#include "comm/collective/intra_host/reading.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/jitter.h"
#include "common/spin.h"

/* A waiter with a core of its own keeps it for this long.  Then, and from the beginning
 * without one, it gives way to others for GIVE_WAY; then it sleeps. */
#define SPIN_NS (50 * SMP_NS_PER_US)
#define GIVE_WAY_NS (200 * SMP_NS_PER_US)

/* Looks between two looks at the clock. */
#define LOOKS 64

/* A sleeper looks around this often: a dead member does not ring. */
#define SLEEP_NS (20 * SMP_NS_PER_MS)
#define MEETING_SLEEP_NS (1 * SMP_NS_PER_MS)

/* A member leaving or giving up during a meeting may have heard of a death before the
 * others: the most time of that news. */
#define NEWS_NS (200 * SMP_NS_PER_MS)

/* The most time from the end of a process's memory to its own: the system frees the
 * memory first, then closes the sockets. */
#define END_NS (3 * SMP_NS_PER_S)

/* The most time of fini's wait for readers. */
#define READERS_NS (1 * SMP_NS_PER_S)

static void
ring_others(const smp_epoch_barrier *barrier)
{
    for (int m = 0; m < barrier->size; m++) {
        smp_control_block *control = barrier->members[m].control;

        if (m != barrier->self && control != NULL) {
            smp_doorbell_ring(&control->doorbell);
        }
    }
}

/* Whether a member has ended, or shows its control block to others now. */
static bool
is_away(const smp_epoch_barrier *barrier, int member)
{
    const smp_member *m = &barrier->members[member];

    return smp_comm_gone(barrier->comm, m->rank) ||
           atomic_load(&m->control->id) != barrier->id ||
           atomic_load(&m->control->nonce) != m->nonce;
}

/* ---------------------------------------------------------------------- meeting */

/* While they meet, a member's first slot has a greeting for each other one: the nonce
 * of its control block.  A control block of an earlier meeting with the same id greets
 * no new member. */
static _Atomic uint64_t *
greetings(smp_control_block *control)
{
    return (_Atomic uint64_t *)(void *)control->slots[0].data;
}

/* Finds the member's control block and greets it.  SMP_OK: it has greeted this one.
 * SMP_ERR_TIMED_OUT: not yet.  SMP_ERR_MISMATCH. */
static smp_status
greet(smp_epoch_barrier *barrier, int member, uint64_t id)
{
    smp_member        *m = &barrier->members[member];
    smp_control_block *own = barrier->members[barrier->self].control;
    smp_control_block *control = smp_control_block_find(m->segment->controls, id);
    uint64_t           digest;

    if (control == NULL) {
        return SMP_ERR_TIMED_OUT;
    }
    m->control = control;
    digest = control->digest;
    m->arena = control->arena;
    m->nonce = atomic_load(&control->nonce);
    if (atomic_load(&control->id) !=
        id) { /* forgotten, and perhaps another group's now */
        return SMP_ERR_TIMED_OUT;
    }
    if (digest != own->digest) {
        return SMP_ERR_MISMATCH;
    }
    atomic_store(&greetings(own)[member], m->nonce);
    return atomic_load(&greetings(control)[barrier->self]) == barrier->nonce
               ? SMP_OK
               : SMP_ERR_TIMED_OUT;
}

/* SMP_OK: all have greeted; else *failed is a missing one. */
static smp_status
greet_all(smp_epoch_barrier *barrier, uint64_t id, int *failed)
{
    smp_status all = SMP_OK;

    for (int m = 0; m < barrier->size && all != SMP_ERR_MISMATCH; m++) {
        smp_status status = m != barrier->self ? greet(barrier, m, id) : SMP_OK;

        barrier->members[m].greeted = status == SMP_OK;
        if (status != SMP_OK) {
            *failed = m;
            all = status;
        }
    }
    ring_others(barrier);
    return all;
}

/* After a mismatch: lets the others see it too, for at most a while. */
static void
linger(const smp_epoch_barrier *barrier, uint64_t id)
{
    int64_t until = smp_clock_ns() + READERS_NS;

    for (int m = 0; m < barrier->size; m++) {
        const smp_member        *other = &barrier->members[m];
        const smp_control_block *control = NULL;

        while (m != barrier->self && smp_clock_ns() < until &&
               !smp_comm_gone(barrier->comm, other->rank) &&
               (control == NULL || atomic_load(&control->failed) == SMP_OK)) {
            control = smp_control_block_find(other->segment->controls, id);
            sched_yield();
        }
    }
}

/* The members without a greeting. */
static void
list_absent(const smp_epoch_barrier *barrier, smp_rank_list *absent)
{
    for (int m = 0; m < barrier->size && absent != NULL; m++) {
        if (!barrier->members[m].greeted) {
            smp_rank_list_add(absent,
                              smp_comm_name(barrier->comm, barrier->members[m].rank));
        }
    }
}

static smp_status
meet(smp_epoch_barrier *barrier, uint64_t id, const smp_deadline *deadline, int *failed,
     smp_rank_list *absent)
{
    smp_doorbell *doorbell = &barrier->members[barrier->self].control->doorbell;
    int64_t       give_way = smp_clock_ns() + GIVE_WAY_NS;
    int           member = barrier->self;

    for (;;) {
        int64_t    now = smp_clock_ns();
        smp_status gone = SMP_OK;
        smp_status status;

        /* Before the look at the control blocks: an ended member's writes are there by
         * then.  A dead member is named before those leaving because of its death. */
        for (int m = 0; m < barrier->size && gone != SMP_ERR_PEER_LOST; m++) {
            int  rank = barrier->members[m].rank;
            bool left = smp_comm_left(barrier->comm, rank);

            if (smp_comm_gone(barrier->comm, rank) && (!left || gone == SMP_OK)) {
                gone = left ? SMP_ERR_CLOSED : SMP_ERR_PEER_LOST;
                *failed = rank;
            }
        }
        smp_doorbell_lie_down(doorbell);
        status = greet_all(barrier, id, &member);
        if (status != SMP_ERR_TIMED_OUT) {
            smp_doorbell_get_up(doorbell);
            *failed = barrier->members[member].rank;
            return status;
        }
        if (gone != SMP_OK) {
            return gone;
        }
        status = smp_deadline_left(deadline, now);
        if (status != SMP_OK) {
            list_absent(barrier, absent);
            *failed = barrier->members[member].rank;
            return status;
        }
        if (now < give_way) {
            sched_yield();
        } else {
            smp_doorbell_sleep(doorbell, now + MEETING_SLEEP_NS);
        }
        smp_doorbell_get_up(doorbell);
    }
}

/* Whether this process can read the member's mark in its memory.  An unreadable member
 * may live all the same: in another pid namespace, under another user's capabilities,
 * behind a filter of system calls. */
static bool
can_read(const smp_epoch_barrier *barrier, int member)
{
    const smp_member *m = &barrier->members[member];
    uint64_t          nonce = 0;

    return smp_read_process(m->pid, &nonce, m->control->probe, sizeof(nonce)) == 0 &&
           nonce == m->nonce;
}

/* Whether this member is to read the others' memory, as far as it is concerned. */
static bool
wants_to_read(const smp_epoch_barrier *barrier, smp_reading reading)
{
    if (reading == SMP_READ_NEVER ||
        (reading == SMP_READ_WHERE_FASTER && (!barrier->spins || barrier->size == 1))) {
        return false;
    }
    for (int m = 0; m < barrier->size; m++) {
        if (!can_read(barrier, m)) {
            return false;
        }
    }
    return reading == SMP_READ_ALWAYS || smp_reading_pays();
}

/* Finds out together whether everyone reads everyone: the first step. */
static smp_status
agree_on_reading(smp_epoch_barrier *barrier, smp_reading reading,
                 const smp_deadline *deadline, int *failed, smp_rank_list *absent)
{
    smp_slot  *own;
    smp_status status;
    int        member;

    /* Even: the greetings are in the slot of the step after the next. */
    barrier->step = barrier->members[0].nonce >> 16 << 1;
    own = smp_epoch_barrier_slot(barrier, barrier->self, barrier->step + 1);

    /* No operation yet: a field of the notice says it. */
    own->notice.uneven = wants_to_read(barrier, reading);
    smp_epoch_barrier_post(barrier);
    while (!smp_epoch_barrier_arrived(barrier)) {
        int64_t now = smp_clock_ns();

        status = smp_epoch_barrier_trouble(barrier, &member);
        if (status == SMP_OK) {
            status = smp_deadline_left(deadline, now);
            member = barrier->awaited;
        }
        if (status != SMP_OK) {
            for (int m = 0; m < barrier->size; m++) {
                barrier->members[m].greeted = smp_epoch_barrier_posted(barrier, m);
            }
            list_absent(barrier, absent);
            *failed = barrier->members[member].rank;
            return status;
        }
        smp_epoch_barrier_wait(barrier, now + SMP_DEADLINE_LOOK_NS);
    }
    barrier->reads = true;
    for (int m = 0; m < barrier->size; m++) {
        const smp_notice *its =
            &smp_epoch_barrier_slot(barrier, m, barrier->step)->notice;

        barrier->reads = barrier->reads && its->uneven;
    }
    smp_epoch_barrier_read(barrier);
    return SMP_OK;
}

/* The members without their control blocks; *failed as in init. */
static smp_status
list_members(smp_epoch_barrier *barrier, const int *ranks, int *failed)
{
    barrier->self = -1;
    for (int m = 0; m < barrier->size; m++) {
        smp_neighbour neighbour;

        if (!smp_comm_neighbour(barrier->comm, ranks[m], &neighbour)) {
            *failed = ranks[m];
            return SMP_ERR_UNREACHABLE;
        }
        smp_segment_ref(neighbour.segment);
        barrier->members[m] = (smp_member){
            .rank = ranks[m], .pid = neighbour.pid, .segment = neighbour.segment};
        if (ranks[m] == smp_comm_rank(barrier->comm)) {
            barrier->self = m;
        }
    }
    assert(barrier->self >= 0);
    return SMP_OK;
}

static void
forget_members(smp_epoch_barrier *barrier)
{
    for (int m = 0; m < barrier->size; m++) {
        smp_segment_unref(barrier->members[m].segment);
    }
    free(barrier->members);
}

smp_status
smp_epoch_barrier_blame(const smp_comm *comm, smp_status status, int *failed, char *why,
                        size_t bytes)
{
    int64_t until = smp_clock_ns() + NEWS_NS;

    if (status == SMP_ERR_CLOSED || status == SMP_ERR_PEER_LOST) {
        while (smp_comm_lost(comm) < 0 && smp_clock_ns() < until) {
            sched_yield();
        }
        if (smp_comm_lost(comm) >= 0) {
            *failed = smp_comm_lost(comm);
            status = SMP_ERR_PEER_LOST;
        }
    }
    snprintf(why, bytes, "could not make the group: rank %d %s%s",
             smp_comm_name(comm, *failed),
             status == SMP_ERR_PEER_LOST ? "is lost"
             : status == SMP_ERR_CLOSED  ? "has left"
                                         : "fails: ",
             status == SMP_ERR_PEER_LOST || status == SMP_ERR_CLOSED
                 ? ""
                 : smp_status_text(status));
    return status;
}

smp_status
smp_epoch_barrier_init(smp_epoch_barrier *barrier, smp_comm *comm, const int *ranks,
                       int size, uint64_t id, smp_reading reading,
                       const smp_deadline *deadline, int *failed, smp_rank_list *absent)
{
    smp_member        *own;
    smp_control_block *control;
    char               why[96];
    smp_status         status;

    assert(size >= 1 && size <= SMP_GROUP_MEMBERS && id != 0);
    *failed = smp_comm_rank(comm);
    *barrier = (smp_epoch_barrier){.comm = comm,
                                   .size = size,
                                   .spins = smp_comm_spins(comm),
                                   .id = id,
                                   .nonce = smp_new_nonce(barrier),
                                   .generation = smp_fork_generation()};
    barrier->members = calloc((size_t)size, sizeof(smp_member));
    if (barrier->members == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    status = list_members(barrier, ranks, failed);
    if (status != SMP_OK) {
        goto err_forget;
    }
    own = &barrier->members[barrier->self];
    control = smp_control_block_take(own->segment->controls);
    if (control == NULL) {
        status = SMP_ERR_LIMIT;
        goto err_forget;
    }
    smp_segment_make_pages(control->slots, sizeof(control->slots));
    own->control = control;
    own->arena = (uint64_t)(uintptr_t)own->segment->arena;
    own->nonce = barrier->nonce;
    atomic_store(&control->nonce, barrier->nonce);
    control->probe = (uint64_t)(uintptr_t)&barrier->nonce;
    control->arena = own->arena;
    control->digest = smp_members_digest(ranks, size);
    atomic_store(&control->id, id);
    status = meet(barrier, id, deadline, failed, absent);
    if (status == SMP_OK) {
        status = agree_on_reading(barrier, reading, deadline, failed, absent);
    }
    if (status != SMP_OK) {
        goto err_forget_control;
    }
    return SMP_OK;

err_forget_control:
    status = smp_epoch_barrier_blame(comm, status, failed, why, sizeof(why));
    smp_epoch_barrier_fail(barrier, status, why);
    if (status == SMP_ERR_MISMATCH) {
        linger(barrier, id);
    }
    smp_control_block_forget(control);
err_forget:
    forget_members(barrier);
    return status;
}

void
smp_epoch_barrier_fini(smp_epoch_barrier *barrier)
{
    smp_control_block *control = barrier->members[barrier->self].control;
    int64_t            until = smp_clock_ns() + READERS_NS;
    bool               read = true;

    if (barrier->generation == smp_fork_generation()) {
        for (int m = 0; m < barrier->size; m++) {
            const smp_member *other = &barrier->members[m];

            while (m != barrier->self &&
                   atomic_load(&other->control->read) != barrier->step &&
                   atomic_load(&other->control->failed) == SMP_OK &&
                   !is_away(barrier, m) && read) {
                read = smp_clock_ns() < until;
                sched_yield();
            }
        }
        if (read && atomic_load(&control->holds) == 0) {
            smp_control_block_give_back(control);
        } else {
            smp_control_block_leave(control);
        }
    }
    forget_members(barrier);
}

/* ------------------------------------------------------------------------ steps */

void
smp_epoch_barrier_post(smp_epoch_barrier *barrier)
{
    smp_slot *own;

    barrier->step++;
    barrier->awaited = 0;
    own = smp_epoch_barrier_slot(barrier, barrier->self, barrier->step);
    smp_jitter();
    atomic_store(&own->notice.step, barrier->step);
    smp_jitter();
    ring_others(barrier);
}

/* Looks until `until_ns`, between the looks as `gives_way` says. */
static bool
look_for_a_while(smp_epoch_barrier *barrier, bool gives_way, int64_t until_ns)
{
    int looks = gives_way ? 1 : LOOKS;

    do {
        for (int i = 0; i < looks; i++) {
            if (smp_epoch_barrier_arrived(barrier)) {
                return true;
            }
            if (gives_way) {
                sched_yield();
            } else {
                smp_spin_pause();
            }
        }
    } while (smp_clock_ns() < until_ns);
    return smp_epoch_barrier_arrived(barrier);
}

bool
smp_epoch_barrier_look(smp_epoch_barrier *barrier)
{
    for (int i = 0; i < LOOKS && barrier->spins; i++) {
        if (smp_epoch_barrier_arrived(barrier)) {
            return true;
        }
        smp_spin_pause();
    }
    return smp_epoch_barrier_arrived(barrier);
}

void
smp_epoch_barrier_wait(smp_epoch_barrier *barrier, int64_t until_ns)
{
    smp_control_block *own = barrier->members[barrier->self].control;
    smp_doorbell      *doorbell = &own->doorbell;
    int64_t            start;
    int                member;

    if (smp_epoch_barrier_arrived(barrier)) {
        return;
    }
    start = smp_clock_ns();
    if (barrier->spins && look_for_a_while(barrier, false, start + SPIN_NS)) {
        return;
    }
    if (look_for_a_while(barrier, true, start + GIVE_WAY_NS)) {
        return;
    }
    atomic_store(&own->waits, barrier->step);
    for (;;) {
        int64_t now = smp_clock_ns();

        smp_doorbell_lie_down(
            doorbell); /* before both looks: a member giving up rings too */
        if (smp_epoch_barrier_trouble(barrier, &member) != SMP_OK ||
            smp_epoch_barrier_arrived(barrier) || now >= until_ns) {
            break;
        }
        smp_doorbell_sleep(doorbell,
                           until_ns - now < SLEEP_NS ? until_ns : now + SLEEP_NS);
    }
    smp_doorbell_get_up(doorbell);
    atomic_store(&own->waits, 0);
}

/* The evidence of a control block's operation for its owner's wait: it sleeps for it,
 * it has not finished it, it gave up; 0: none. */
static int
weight(const smp_control_block *control)
{
    uint64_t a = atomic_load(&control->slots[0].notice.step);
    uint64_t b = atomic_load(&control->slots[1].notice.step);

    if (atomic_load(&control->failed) != SMP_OK) {
        return 1;
    }
    if ((a > b ? a : b) == atomic_load(&control->read)) {
        return 0;
    }
    return atomic_load(&control->waits) != 0 ? 3 : 2;
}

const smp_control_block *
smp_epoch_barrier_elsewhere(const smp_epoch_barrier *barrier, int member)
{
    const smp_control_block *controls = barrier->members[member].segment->controls;
    const smp_control_block *best = NULL;

    for (int i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        uint64_t id = atomic_load(&controls[i].id);

        if (id != 0 && id != barrier->id && weight(&controls[i]) != 0 &&
            (best == NULL || weight(&controls[i]) > weight(best))) {
            best = &controls[i];
        }
    }
    return best;
}

smp_status
smp_epoch_barrier_trouble(const smp_epoch_barrier *barrier, int *member)
{
    smp_status first = SMP_OK;

    for (int m = barrier->awaited; m < barrier->size; m++) {
        const smp_member *other = &barrier->members[m];
        /* Before the look at its slot: its posts are there by then. */
        bool       gone = is_away(barrier, m);
        smp_status status = (smp_status)atomic_load(&other->control->failed);

        if (m == barrier->self || (!gone && status == SMP_OK) ||
            smp_epoch_barrier_posted(barrier, m)) {
            continue;
        }
        /* A dead member is named before those leaving because of its death. */
        if (smp_comm_gone(barrier->comm, other->rank) &&
            !smp_comm_left(barrier->comm, other->rank)) {
            *member = m;
            return SMP_ERR_PEER_LOST;
        }
        if (first == SMP_OK) {
            *member = m;
            first = status != SMP_OK ? status : SMP_ERR_CLOSED;
        }
    }
    return first;
}

void
smp_epoch_barrier_read(smp_epoch_barrier *barrier)
{
    atomic_store_explicit(&barrier->members[barrier->self].control->read, barrier->step,
                          memory_order_release);
}

void
smp_epoch_barrier_fail(smp_epoch_barrier *barrier, smp_status status, const char *why)
{
    smp_control_block *control = barrier->members[barrier->self].control;

    strncpy(control->why, why, sizeof(control->why) - 1);
    atomic_store(&control->failed, (uint32_t)status);
    ring_others(barrier);
}

smp_status
smp_epoch_barrier_given_up(const smp_epoch_barrier *barrier, int *member)
{
    for (int m = 0; m < barrier->size; m++) {
        uint32_t failed = atomic_load(&barrier->members[m].control->failed);

        if (m != barrier->self && failed != SMP_OK) {
            *member = m;
            return (smp_status)failed;
        }
    }
    return SMP_OK;
}

bool
smp_epoch_barrier_all_here(const smp_epoch_barrier *barrier)
{
    for (int m = 0; m < barrier->size; m++) {
        const smp_slot *slot = smp_epoch_barrier_slot(barrier, m, barrier->step);

        /* Not only acquire: this load comes after the store of `failed`. */
        if (atomic_load(&slot->notice.step) != barrier->step) {
            return false;
        }
    }
    return true;
}

void
smp_epoch_barrier_retreat(const smp_epoch_barrier *barrier, uint64_t last)
{
    int64_t until = smp_clock_ns() + READERS_NS;

    for (int m = 0; m < barrier->size; m++) {
        const smp_control_block *control = barrier->members[m].control;
        const smp_slot          *slot = smp_epoch_barrier_slot(barrier, m, last);

        while (m != barrier->self && atomic_load(&slot->notice.step) != last &&
               atomic_load(&control->failed) == SMP_OK && !is_away(barrier, m) &&
               smp_clock_ns() < until) {
            sched_yield();
        }
    }
}

smp_user *
smp_epoch_barrier_users(const smp_epoch_barrier *barrier)
{
    smp_user *users = calloc((size_t)barrier->size, sizeof(*users));

    for (int m = 0; m < barrier->size && users != NULL; m++) {
        const smp_member *member = &barrier->members[m];

        if (m != barrier->self) {
            smp_segment_ref(member->segment);
            users[m] = (smp_user){member->segment, member->control, member->nonce,
                                  member->pid};
        }
    }
    return users;
}

bool
smp_epoch_barrier_why(const smp_epoch_barrier *barrier, int member, char *out,
                      size_t bytes)
{
    const smp_control_block *control = barrier->members[member].control;
    size_t n = sizeof(control->why) < bytes ? sizeof(control->why) : bytes;

    if (atomic_load(&control->failed) == SMP_OK) {
        return false;
    }
    memcpy(out, control->why, n);
    out[n - 1] = '\0';
    return true;
}

bool
smp_epoch_barrier_in_arena(const smp_epoch_barrier *barrier, int member,
                           uint64_t address, size_t bytes)
{
    const smp_member *m = &barrier->members[member];
    size_t            room = m->segment->arena_bytes;

    return address >= m->arena && address - m->arena <= room &&
           bytes <= room - (address - m->arena);
}

uint8_t *
smp_epoch_barrier_mapped(const smp_epoch_barrier *barrier, int member, uint64_t address,
                         size_t bytes)
{
    const smp_member *m = &barrier->members[member];

    if (member == barrier->self) {
        return (uint8_t *)(uintptr_t)address;
    }
    return smp_epoch_barrier_in_arena(barrier, member, address, bytes)
               ? m->segment->arena + (address - m->arena)
               : NULL;
}

/* A formerly readable process has no memory any more: its pidfd or its socket, watched
 * by the comm, tells whether it has ended. */
static smp_status
await_end(const smp_epoch_barrier *barrier, int rank)
{
    int64_t until = smp_clock_ns() + END_NS;

    while (!smp_comm_gone(barrier->comm, rank)) {
        if (smp_clock_ns() >= until) {
            return SMP_ERR_SYSTEM;
        }
        sched_yield();
    }
    return smp_comm_left(barrier->comm, rank) ? SMP_ERR_CLOSED : SMP_ERR_PEER_LOST;
}

smp_status
smp_epoch_barrier_copy(const smp_epoch_barrier *barrier, int member, void *to,
                       uint64_t from, size_t bytes)
{
    const smp_member *m = &barrier->members[member];
    int               why = smp_read_process(m->pid, to, from, bytes);

    return why == 0       ? SMP_OK
           : why == ESRCH ? await_end(barrier, m->rank)
                          : SMP_ERR_SYSTEM;
}
