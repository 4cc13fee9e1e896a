/* Ranks that look for deadlocks all the time, in programs that come to their end, and
 * then in one that does not.  Spec: csrc/comm/collective/checks/deadlock.h,
 * inter_host/cross_host_deadlock.h.
 */
#define _GNU_SOURCE
#define WORLD_SPIN_US 0
#include "comm/collective/checks/deadlock.h"
#include "comm/collective/queue.h"
#include "comm/neighbour.h"
#include "traffic.h"
#include "world.h"

enum { GROUPS = 4, CALLS = 400, PROGRAMS = 20, PENDING = 6 };

/* A group of some of the ranks, with its queue; no queue: this rank is not in it. */
typedef struct {
    smp_group *group;
    smp_queue *queue;
    int32_t    sum; /* of its ranks' numbers */
} line;

typedef struct {
    smp_work_item item;
    smp_call      call;
    int32_t       value;
    int32_t       want;
    bool          announced;
} sum;

/* All ranks, all but the first, all but the last, the first and the last. */
static bool
is_in(const world *w, int group, int rank)
{
    switch (group) {
    case 0:
        return true;
    case 1:
        return rank != 0 || w->size == 2;
    case 2:
        return rank != w->size - 1 || w->size == 2;
    default:
        return rank == 0 || rank == w->size - 1;
    }
}

static int
open_lines(world *w, smp_carrier *carrier, line *lines)
{
    for (int g = 0; g < GROUPS; g++) {
        int              ranks[WORLD_RANKS];
        int              failed;
        smp_group_config config = {.ranks = ranks,
                                   .id = 1 + (uint64_t)g,
                                   .name = "hasty",
                                   .timeout_ns = WORLD_DEADLINE_NS};

        lines[g] = (line){0};
        for (int r = 0; r < w->size; r++) {
            if (is_in(w, g, r)) {
                ranks[config.size++] = r;
                lines[g].sum += r + 1;
            }
        }
        if (is_in(w, g, w->rank)) {
            CHECK_STATUS(smp_group_create(w->comm, &config, &lines[g].group, &failed),
                         SMP_OK);
            CHECK_STATUS(smp_queue_create(carrier, lines[g].group, &lines[g].queue),
                         SMP_OK);
        }
    }
    return 0;
}

static void
issue(const world *w, const line *l, sum *s, bool announced)
{
    *s = (sum){.value = w->rank + 1, .want = l->sum, .announced = announced};
    s->call = (smp_call){.operation = SMP_ALL_REDUCE,
                         .dtype = SMP_I32,
                         .count = 1,
                         .in = &s->value,
                         .out = &s->value};
    s->item.calls = &s->call;
    s->item.ncalls = 1;
    smp_work_item_issue(&s->item, l->queue, announced);
}

/* By the only thread of the rank; what is announced is heard of by it, too. */
static smp_status
finish(smp_carrier *carrier, sum *s)
{
    smp_work_item *heard;

    while (!smp_work_item_wait_alone(&s->item, smp_clock_ns() + SMP_NS_PER_MS, 0)) {
    }
    if (s->announced) {
        (void)smp_carrier_finished(carrier, &heard);
    }
    if (s->item.status != SMP_OK) {
        fprintf(stderr, "%s\n", s->item.error != NULL ? s->item.error : "");
        smp_work_item_fini(&s->item);
    }
    return s->item.status;
}

/* The same calls on all ranks, in one order; what is waited for when is each rank's
 * own business. */
static int
run_program(world *w, smp_carrier *carrier, line *lines, uint64_t seed)
{
    uint64_t own = seed * 100 + (uint64_t)w->rank;
    sum      sums[CALLS]; /* none is used twice: another may be heard of in its place */
    sum     *pending[PENDING];
    int      n = 0;

    for (int i = 0; i < CALLS; i++) {
        line *l = &lines[next_random(&seed) % GROUPS];
        bool  announced = n < PENDING && next_random(&own) % 2 == 0;

        if (l->queue == NULL) {
            continue;
        }
        issue(w, l, &sums[i], announced);
        if (announced) {
            pending[n++] = &sums[i];
        } else {
            CHECK_STATUS(finish(carrier, &sums[i]), SMP_OK);
            CHECK(sums[i].value == sums[i].want);
        }
        while (n != 0 && next_random(&own) % 3 == 0) {
            CHECK_STATUS(finish(carrier, pending[--n]), SMP_OK);
            CHECK(pending[n]->value == pending[n]->want);
        }
    }
    while (n != 0) {
        CHECK_STATUS(finish(carrier, pending[--n]), SMP_OK);
    }
    return 0;
}

TEST_RANK(programs_that_come_to_their_end_are_left_to_it)
{
    line         lines[GROUPS];
    smp_carrier *carrier;
    sum          last;

    CHECK_STATUS(smp_carrier_create(&carrier), SMP_OK);
    CHECK(open_lines(w, carrier, lines) == 0);
    for (uint64_t seed = 1; seed <= (uint64_t)world_times(PROGRAMS); seed++) {
        CHECK(run_program(w, carrier, lines, seed) == 0);
    }
    /* All of two groups have come to an end: the first and the last rank enter them in
     * opposite order. */
    if (w->rank == 0 || w->rank == w->size - 1) {
        issue(w, &lines[w->rank == 0 ? 0 : 3], &last, false);
        while (
            !smp_work_item_wait_alone(&last.item, smp_clock_ns() + SMP_NS_PER_MS, 0)) {
        }
        CHECK_STATUS(last.item.status, SMP_ERR_DEADLOCK);
        CHECK(strstr(last.item.error, "deadlock: waits for rank ") != NULL);
        smp_work_item_fini(&last.item);
    }
    w->barrier(w);
    for (int g = 0; g < GROUPS; g++) {
        smp_queue_destroy(lines[g].queue);
        smp_group_destroy(lines[g].group);
    }
    smp_carrier_destroy(carrier);
    return 0;
}

/* ------------------------------------------------ a ring of control blocks, by hand */

enum { STEP = 5, TOKEN = 9 };

/* One that shows `step` of the group. */
static smp_control_block *
put_control(const world *w, int rank, uint64_t id, uint64_t step)
{
    smp_neighbour      neighbour;
    smp_control_block *control;

    if (!smp_comm_neighbour(w->comm, rank, &neighbour) ||
        (control = smp_control_block_take(neighbour.segment->controls)) == NULL) {
        abort();
    }
    atomic_store(&control->slots[step & 1].notice.step, step);
    control->slots[step & 1].notice.sequence = 1;
    atomic_store(&control->id, id);
    return control;
}

/* What rank 0 finds of the ring in one look more. */
static bool
is_sure_after_a_look(smp_deadlock *deadlock, const world *w)
{
    (void)smp_deadlock_look(deadlock, w->comm);
    return deadlock->is_sure;
}

/* Whether it leaves with one look more; not because it was sure for long. */
static bool
leaves_after_a_look(smp_deadlock *deadlock, const world *w)
{
    deadlock->first_ns = smp_clock_ns() + WORLD_DEADLINE_NS;
    return smp_deadlock_look(deadlock, w->comm);
}

/* Each rank is stuck in a group of its own, where the next one has not come. */
static int
look_at_rings(const world *w)
{
    smp_control_block *stuck[WORLD_RANKS];
    smp_control_block *absent[WORLD_RANKS];
    smp_deadlock       deadlock;

    CHECK_STATUS(smp_deadlock_init(&deadlock, w->comm), SMP_OK);
    for (int r = 0; r < w->size; r++) {
        stuck[r] = put_control(w, r, 1 + (uint64_t)r, STEP);
        absent[r] = put_control(w, (r + 1) % w->size, 1 + (uint64_t)r, STEP - 1);
        atomic_store(&stuck[r]->stuck, TOKEN);
    }
    for (int r = 0; r < w->size; r++) {
        /* It has gone on, to another step of the same call. */
        smp_deadlock_forget(&deadlock);
        CHECK(!is_sure_after_a_look(&deadlock, w));
        atomic_store(&stuck[r]->slots[(STEP + 1) & 1].notice.step, STEP + 1);
        CHECK(!is_sure_after_a_look(&deadlock, w));
        CHECK(is_sure_after_a_look(&deadlock, w));
        atomic_store(&stuck[r]->slots[(STEP + 1) & 1].notice.step, STEP - 1);
        CHECK(!is_sure_after_a_look(&deadlock, w));

        /* It has issued another call meanwhile. */
        smp_deadlock_forget(&deadlock);
        CHECK(!is_sure_after_a_look(&deadlock, w));
        atomic_store(&stuck[r]->stuck, TOKEN + 1);
        CHECK(!is_sure_after_a_look(&deadlock, w));
        atomic_store(&stuck[r]->stuck, TOKEN);

        /* The next one has come. */
        smp_deadlock_forget(&deadlock);
        atomic_store(&absent[r]->slots[STEP & 1].notice.step, STEP);
        CHECK(!is_sure_after_a_look(&deadlock, w));
        CHECK(!is_sure_after_a_look(&deadlock, w));
        atomic_store(&absent[r]->slots[STEP & 1].notice.step, 0);
    }
    /* All are told, or none: the others are to be sure, too, of this wait of theirs. */
    smp_deadlock_forget(&deadlock);
    CHECK(!is_sure_after_a_look(&deadlock, w));
    CHECK(is_sure_after_a_look(&deadlock, w));
    for (int r = 1; r < w->size; r++) {
        CHECK(!leaves_after_a_look(&deadlock, w));
        atomic_store(&stuck[r]->sure, TOKEN - 1);
        CHECK(!leaves_after_a_look(&deadlock, w));
        atomic_store(&stuck[r]->sure, TOKEN);
    }
    CHECK(atomic_load(&stuck[0]->sure) == TOKEN);
    CHECK(leaves_after_a_look(&deadlock, w));
    CHECK(deadlock.n == w->size);
    for (int r = 0; r < w->size; r++) {
        CHECK(deadlock.ring[r].rank == r);
    }
    CHECK(strncmp(deadlock.text, "waits for rank 1, ", 18) == 0);
    smp_deadlock_fini(&deadlock);
    return 0;
}

TEST_RANK(a_ring_is_one_when_each_is_seen_twice_in_the_same_wait)
{
    int failed = w->rank == 0 ? look_at_rings(w) : 0;

    w->barrier(w);
    return failed;
}

int
main(void)
{
    static const world_test by_hand = {
        .name = "a_ring_is_one_when_each_is_seen_twice_in_the_same_wait",
        .rank = a_ring_is_one_when_each_is_seen_twice_in_the_same_wait};
    static const char *const hosts[] = {NULL, "ab", NULL, "abb", NULL};
    static const int         sizes[] = {2, 2, 3, 3, 4};
    int                      failed = 0;
    int                      ran = 0;

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        world_test test = {.name = "programs_that_come_to_their_end_are_left_to_it",
                           .rank = programs_that_come_to_their_end_are_left_to_it,
                           .hosts = hosts[i]};

        if (world_learns(false, sizes[i] <= 3)) {
            failed += world_run_processes(&test, "shm,tcp", sizes[i]) != 0;
            ran++;
        }
        if (world_learns(true, sizes[i] <= 3)) {
            failed += world_run_threads(&test, "shm,tcp", sizes[i]) != 0;
            ran++;
        }
    }
    for (int size = 2; size <= 4; size++) {
        failed += world_run_processes(&by_hand, "shm", size) != 0;
        ran++;
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0;
}
