/* Looking for a ring, breadth first: so it is one of the shortest. */
#include "comm/collective/checks/deadlock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/checks/agreement.h"
#include "comm/neighbour.h"
#include "common/clock.h"

/* Between two looks, and between the first and the one that makes sure. */
#ifdef SMP_HASTY
#    define LOOK_NS 0
#    define SURE_NS 0
#else
#    define LOOK_NS (50 * SMP_NS_PER_MS)
#    define SURE_NS (200 * SMP_NS_PER_MS)
#endif

/* How long one that is sure waits for the others to be so, too. */
#define TOGETHER_NS (5 * SMP_NS_PER_S)

/* The last step that the owner has posted. */
static uint64_t
last_step(smp_control_block *control)
{
    uint64_t a = atomic_load(&control->slots[0].notice.step);
    uint64_t b = atomic_load(&control->slots[1].notice.step);

    return a > b ? a : b;
}

/* Whether the rank is stuck, and where. */
static bool
see(const smp_comm *comm, int rank, smp_stuck *out)
{
    smp_neighbour neighbour;

    if (smp_comm_gone(comm, rank) || !smp_comm_neighbour(comm, rank, &neighbour)) {
        return false;
    }
    for (int i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        smp_control_block *control = &neighbour.segment->controls[i];
        uint64_t           token = atomic_load(&control->stuck);

        if (token != 0) {
            *out = (smp_stuck){rank, control, atomic_load(&control->id),
                               last_step(control), token};
            return out->id != 0 && atomic_load(&control->stuck) == token;
        }
    }
    return false;
}

/* Whether a stuck rank waits for `rank`. */
static bool
lacks(const smp_comm *comm, const smp_stuck *stuck, int rank)
{
    smp_neighbour      neighbour;
    smp_control_block *control;

    if (rank == stuck->rank || smp_comm_gone(comm, rank) ||
        !smp_comm_neighbour(comm, rank, &neighbour)) {
        return false;
    }
    control = smp_control_block_find(neighbour.segment->controls, stuck->id);
    return control != NULL &&
           atomic_load(&control->slots[stuck->step & 1].notice.step) != stuck->step &&
           atomic_load(&control->failed) == SMP_OK;
}

/* Fills `found` with the way from this rank to seen[last]; its length. */
static int
take_way(smp_deadlock *deadlock, int last)
{
    int length = 0;
    int place;

    for (int i = last; i >= 0; i = deadlock->from[i]) {
        length++;
    }
    place = length;
    for (int i = last; i >= 0; i = deadlock->from[i]) {
        deadlock->found[--place] = deadlock->seen[i];
    }
    return length;
}

/* Whether one of those that were seen is this rank. */
static bool
is_seen(const smp_deadlock *deadlock, int n, int rank)
{
    for (int i = 0; i < n; i++) {
        if (deadlock->seen[i].rank == rank) {
            return true;
        }
    }
    return false;
}

/* Fills `found` with a ring that begins with this rank; its length, or 0. */
static int
find_ring(smp_deadlock *deadlock, const smp_comm *comm)
{
    int self = smp_comm_rank(comm);
    int n = 1;

    if (!see(comm, self, &deadlock->seen[0])) {
        return 0;
    }
    deadlock->from[0] = -1;
    for (int at = 0; at < n; at++) {
        if (at != 0 && lacks(comm, &deadlock->seen[at], self)) {
            return take_way(deadlock, at);
        }
        for (int rank = 0; rank < smp_comm_size(comm); rank++) {
            if (!is_seen(deadlock, n, rank) && lacks(comm, &deadlock->seen[at], rank) &&
                see(comm, rank, &deadlock->seen[n])) {
                deadlock->from[n++] = at;
            }
        }
    }
    return 0;
}

static bool
same_ring(const smp_deadlock *deadlock, int n)
{
    for (int i = 0; i < n; i++) {
        const smp_stuck *a = &deadlock->ring[i];
        const smp_stuck *b = &deadlock->found[i];

        if (a->rank != b->rank || a->control != b->control || a->id != b->id ||
            a->step != b->step || a->token != b->token) {
            return false;
        }
    }
    return n == deadlock->n;
}

/* Whether all others are sure, too; what they said stays on their control blocks. */
static bool
all_are_sure(const smp_deadlock *deadlock)
{
    for (int i = 1; i < deadlock->n; i++) {
        if (atomic_load(&deadlock->ring[i].control->sure) != deadlock->ring[i].token) {
            return false;
        }
    }
    return true;
}

bool
smp_control_block_describe(const smp_control_block *control, char *name,
                           size_t name_bytes, char *call, size_t call_bytes)
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

/* The ring in words, while all of it is there. */
static void
describe(smp_deadlock *deadlock, const smp_comm *comm)
{
    size_t bytes = sizeof(deadlock->text);
    char  *out = deadlock->text;
    size_t used = 0;

    out[0] = '\0';
    for (int i = 1; i < deadlock->n && used < bytes; i++) {
        char name[64] = "";
        char call[96] = "";
        int  n;

        (void)smp_control_block_describe(deadlock->ring[i].control, name, sizeof(name),
                                         call, sizeof(call));
        n = snprintf(out + used, bytes - used,
                     "%srank %d, which waits in group '%s' (%s) for ",
                     i == 1 ? "waits for " : "",
                     smp_comm_name(comm, deadlock->ring[i].rank), name, call);
        used += n > 0 ? (size_t)n : 0;
    }
    if (used < bytes) {
        snprintf(out + used, bytes - used, "rank %d",
                 smp_comm_name(comm, deadlock->ring[0].rank));
    } else if (bytes >= 4) {
        memcpy(out + bytes - 4, "...", 4);
    }
}

smp_status
smp_deadlock_init(smp_deadlock *deadlock, const smp_comm *comm)
{
    size_t n = (size_t)smp_comm_size(comm);

    *deadlock = (smp_deadlock){
        .ring = calloc(n, sizeof(smp_stuck)),
        .found = calloc(n, sizeof(smp_stuck)),
        .seen = calloc(n, sizeof(smp_stuck)),
        .from = calloc(n, sizeof(int)),
    };
    if (deadlock->ring == NULL || deadlock->found == NULL || deadlock->seen == NULL ||
        deadlock->from == NULL) {
        smp_deadlock_fini(deadlock);
        return SMP_ERR_NO_MEMORY;
    }
    return SMP_OK;
}

void
smp_deadlock_fini(smp_deadlock *deadlock)
{
    free(deadlock->ring);
    free(deadlock->found);
    free(deadlock->seen);
    free(deadlock->from);
    *deadlock = (smp_deadlock){0};
}

void
smp_deadlock_forget(smp_deadlock *deadlock)
{
    deadlock->n = 0;
    deadlock->is_sure = false;
}

bool
smp_deadlock_look(smp_deadlock *deadlock, const smp_comm *comm)
{
    int64_t now = smp_clock_ns();
    int     n;

    if (now - deadlock->looked_ns < LOOK_NS) {
        return false;
    }
    deadlock->looked_ns = now;
    if (deadlock->is_sure && all_are_sure(deadlock)) {
        return true;
    }
    n = find_ring(deadlock, comm);
    if (n == 0) { /* perhaps one looked after its signals just now */
        return false;
    }
    if (!same_ring(deadlock, n)) {
        memcpy(deadlock->ring, deadlock->found, (size_t)n * sizeof(smp_stuck));
        deadlock->n = n;
        deadlock->first_ns = now;
        deadlock->is_sure = false;
    } else if (now - deadlock->first_ns >= SURE_NS) {
        if (!deadlock->is_sure) {
            describe(deadlock, comm);
        }
        deadlock->is_sure = true;
        atomic_store(&deadlock->ring[0].control->sure, deadlock->ring[0].token);
    }
    return deadlock->is_sure && now - deadlock->first_ns >= TOGETHER_NS;
}
