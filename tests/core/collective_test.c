/* Operations of groups, on ranks that are processes and threads.
 * Spec: csrc/comm/collective/group.h, csrc/comm/collective/kernels/reduce.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>

#include "comm/collective/group.h"
#include "comm/collective/intra_host/epoch_barrier.h"
#include "comm/memory/control_block.h"
#include "comm/messaging/neighbour.h"
#include "common/deadline.h"
#include "groups.h"

/* ----------------------------------------------------------------------- groups */

/* ------------------------------------------------------------------------ results */

static int
every_operation(world *w, bool only_slots)
{
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 9, only_slots, &group), SMP_OK);
    CHECK(smp_group_reads_memory(group) == !only_slots);
    for (int i = 0; i < COUNTS; i++) {
        CHECK(all_operations(w, group, SMP_F32, counts[i], (uint64_t)i) == 0);
    }
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(every_operation_gives_the_right_result_by_memory)
{
    return every_operation(w, false);
}

TEST_RANK(every_operation_gives_the_right_result_by_slots)
{
    return every_operation(w, true);
}

/* Runs a call with its tensors in blocks of this rank's pool. */
static int
run_in_pool(world *w, smp_group *group, reference_call *r)
{
    size_t     element = smp_dtype_bytes(r->call.dtype);
    size_t     in_bytes = r->in_elements * element;
    size_t     out_bytes = r->out_elements * element;
    void      *result = r->call.out;
    smp_block *in;
    smp_block *out;

    CHECK_STATUS(smp_comm_block(w->comm, (w->rank + 1) % w->size, in_bytes, &in),
                 SMP_OK);
    CHECK_STATUS(smp_comm_block(w->comm, (w->rank + 1) % w->size, out_bytes, &out),
                 SMP_OK);
    memcpy(smp_block_data(in), r->call.in, in_bytes);
    r->call.in = smp_block_data(in);
    r->call.out = r->out == NULL ? smp_block_data(in) : smp_block_data(out);
    CHECK_STATUS(smp_group_run(group, &r->call), SMP_OK);
    memcpy(result, r->call.out, out_bytes);
    r->call.out = result;
    smp_block_release(in);
    smp_block_release(out);
    return 0;
}

/* Of all members, and of some. */
TEST_RANK(tensors_in_pools_are_used_where_they_are)
{
    static const size_t sizes[] = {40000, 600001};
    smp_group          *group;

    CHECK_STATUS(make_world_group(w, 9, false, &group), SMP_OK);
    for (uint64_t seed = 0; seed < 16; seed++) {
        smp_operation  o = SMP_ALL_REDUCE + (smp_operation)(seed % 8);
        bool           uneven = seed % 5 == 0;
        reference_call r;

        if (!reference_make(&r, group, o, SMP_F32, sizes[seed / 8 % 2], uneven, seed)) {
            continue;
        }
        if (seed % 3 != 0 || w->rank % 2 == 0) {
            CHECK(run_in_pool(w, group, &r) == 0);
        } else {
            CHECK_STATUS(smp_group_run(group, &r.call), SMP_OK);
        }
        if (!reference_right(&r)) {
            fprintf(stderr, "rank %d: wrong %s, uneven %d, seed %d\n", w->rank,
                    smp_operation_name(o), uneven, (int)seed);
            return 1;
        }
        reference_free(&r);
    }
    smp_group_destroy(group);
    return 0;
}

/* ------------------------------------------------------------------------- columns */

/* Ranges one behind the other, of so many elements each, as columns of a matrix with so
 * many rows; or the way back. */
static void
lay_out(uint8_t *matrix, uint8_t *packed, const size_t *lengths, int n, size_t rows,
        size_t element, bool back)
{
    size_t stride = reference_sum(lengths, n) / rows;
    size_t first = 0;

    for (int m = 0; m < n; m++) {
        for (size_t i = 0; i < lengths[m]; i++) {
            size_t   width = lengths[m] / rows;
            size_t   at = i / width * stride + first + i % width;
            uint8_t *here = matrix + at * element;
            uint8_t *there = packed + (first * rows + i) * element;

            memcpy(back ? there : here, back ? here : there, element);
        }
        first += lengths[m] / rows;
    }
}

/* A call whose inputs or outputs are matrices, and must be what they are in one piece.
 */
static int
run_columns(world *w, smp_group *group, smp_operation operation, smp_dtype dtype,
            size_t count, bool uneven, uint64_t seed)
{
    static const size_t some[] = {1, 2, 5, 10};
    uint64_t            x = reference_random(seed + (uint64_t)w->rank);
    size_t              element = smp_dtype_bytes(dtype);
    size_t              in_rows = some[x % 4];
    size_t              out_rows = some[x / 4 % 4];
    uint8_t            *in;
    uint8_t            *out;
    reference_call      r;

    CHECK(reference_make(&r, group, operation, dtype, count, uneven, seed));
    in = malloc(r.in_elements * element + 1);
    out = malloc(r.out_elements * element + 1);
    CHECK(in != NULL && out != NULL);
    memcpy(in, r.in, r.in_elements * element);
    out[r.out_elements * element] = 0x5a;
    r.call.in = in;
    r.call.out = out;
    if (operation != SMP_ALL_GATHER) {
        r.call.in_rows = in_rows;
        lay_out(in, r.in, r.in_counts, r.n, in_rows, element, false);
    }
    if (operation != SMP_REDUCE_SCATTER) {
        r.call.out_rows = out_rows;
    }
    CHECK_STATUS(smp_group_run(group, &r.call), SMP_OK);
    CHECK(out[r.out_elements * element] == 0x5a);
    if (r.call.out_rows != 0) {
        lay_out(out, r.out, r.out_counts, r.n, out_rows, element, true);
    } else {
        memcpy(r.out, out, r.out_elements * element);
    }
    r.call.out = r.out;
    if (!reference_right(&r)) {
        fprintf(stderr, "rank %d: %s of %zu %s, %zu to %zu rows, uneven %d\n", w->rank,
                smp_operation_name(operation), count, smp_dtype_name(dtype), in_rows,
                out_rows, uneven);
        return 1;
    }
    free(in);
    free(out);
    reference_free(&r);
    return 0;
}

TEST_RANK(columns_go_from_their_rows_and_into_them)
{
    static const smp_operation operations[] = {SMP_ALL_GATHER, SMP_REDUCE_SCATTER,
                                               SMP_ALL_TO_ALL};
    /* Multiples of 4 times the rows, so that uneven ones can be cut, too. */
    static const size_t sizes[] = {0, 40, 1000, 16400, 70000};
    smp_group          *group;
    uint64_t            seed = 100;

    CHECK_STATUS(make_world_group(w, 9, false, &group), SMP_OK);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (int o = 0; o < 3; o++) {
            for (int uneven = 0; uneven < 2; uneven++) {
                CHECK(run_columns(w, group, operations[o], SMP_F32, sizes[i],
                                  uneven != 0, seed++) == 0);
                CHECK(run_columns(w, group, operations[o], SMP_BF16, sizes[i],
                                  uneven != 0, seed++) == 0);
            }
        }
    }
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(rows_that_do_not_fit_are_refused)
{
    float      in[64] = {0};
    float      out[64] = {0};
    size_t     counts[WORLD_RANKS] = {4, 6, 4, 4, 4, 4, 4, 4};
    bool       odd = w->rank == w->size - 1;
    smp_call   call = {.operation = SMP_ALL_TO_ALL,
                       .dtype = SMP_F32,
                       .count = 4,
                       .in_rows = 3,
                       .in = in,
                       .out = out};
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.in_rows = 0;
    call.out_rows = 3;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.counts = counts;
    call.out_counts = counts;
    call.out_rows = 4;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.counts = call.out_counts = NULL;
    call.operation = SMP_ALL_GATHER;
    call.in_rows = 2;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.operation = SMP_ALL_REDUCE;
    call.in_rows = 0;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.operation = SMP_ALL_TO_ALL;
    call.out_rows = 0;
    call.in_rows = odd ? 0 : 2;
    CHECK(refuse(w, group, &call, "calls all-to-all 1 of 4 float32 in columns, rank",
                 "calls all-to-all 1 of 4 float32") == 0);
    CHECK(random_calls(w, &group, 1, 5, 8) == 0);
    smp_group_destroy(group);
    return 0;
}

/* --------------------------------------------------------- reading others' memory */

/* What process_vm_readv answers: another pid namespace's process is not seen, a filter
 * of system calls refuses, and a number may mean another process.  On one machine it is
 * slow, on another so fast that a large read of a process's own memory takes no time.
 */
typedef enum { READS, REFUSED, UNSEEN, ANOTHER, SLOW, FAST } answer;

/* Of this process's calls, from now on. */
static answer planned;

/* Larger than what members read of each other in these tests. */
#define LARGE_READ ((size_t)2 << 20)

/* Longer than any other way of moving its bytes takes, under a sanitizer too. */
#define SLOW_READ_NS (250 * SMP_NS_PER_MS)

/* In place of libc's. */
ssize_t
process_vm_readv(pid_t pid, const struct iovec *local, unsigned long nlocal,
                 const struct iovec *remote, unsigned long nremote, unsigned long flags)
{
    int64_t until = smp_clock_ns() + SLOW_READ_NS;

    switch (planned) {
    case REFUSED:
        errno = EPERM;
        return -1;
    case UNSEEN:
        errno = ESRCH;
        return -1;
    case ANOTHER: /* has other bytes at that address */
        memset(local->iov_base, 0x5a, local->iov_len);
        return (ssize_t)local->iov_len;
    case SLOW:
        while (local->iov_len >= LARGE_READ && smp_clock_ns() < until) {
            (void)syscall(SYS_process_vm_readv, pid, local, nlocal, remote, nremote,
                          flags);
        }
        break;
    case FAST:
        if (local->iov_len >= LARGE_READ) {
            return (ssize_t)local->iov_len;
        }
        break;
    case READS:
        break;
    }
    return syscall(SYS_process_vm_readv, pid, local, nlocal, remote, nremote, flags);
}

/* Each member finds out by itself; it takes all of them, and a core for each. */
static int
make_group_that_chooses(world *w, answer of_last, bool want)
{
    int              ranks[] = {0, 1};
    smp_group_config config = {.ranks = ranks,
                               .size = 2,
                               .id = 11,
                               .name = "test",
                               .timeout_ns = WORLD_DEADLINE_NS};
    smp_group       *group;
    int              failed;

    planned = w->rank == w->size - 1 ? of_last : FAST;
    CHECK_STATUS(smp_group_create(w->comm, &config, &group, &failed), SMP_OK);
    CHECK(smp_group_reads_memory(group) == want);
    for (int i = 0; i < COUNTS; i++) {
        CHECK(all_operations(w, group, SMP_F32, counts[i], (uint64_t)i) == 0);
    }
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(members_read_where_that_is_faster)
{
    return make_group_that_chooses(w, FAST, smp_comm_spins(w->comm));
}

TEST_RANK(members_do_not_read_where_one_finds_it_slow)
{
    return make_group_that_chooses(w, SLOW, false);
}

/* The last rank alone cannot read; all agree on it, and nobody counts as lost. */
TEST_RANK(members_that_cannot_be_read_go_by_the_slots)
{
    for (answer a = READS; a <= ANOTHER; a++) {
        smp_group *group;

        planned = w->rank == w->size - 1 ? a : READS;
        CHECK_STATUS(make_world_group(w, 10 + (uint64_t)a, false, &group), SMP_OK);
        CHECK(smp_group_reads_memory(group) == (a == READS));
        for (int i = 0; i < COUNTS; i++) {
            CHECK(all_operations(w, group, SMP_F32, counts[i], (uint64_t)i) == 0);
        }
        CHECK(smp_comm_lost(w->comm) < 0);
        smp_group_destroy(group);
    }
    return 0;
}

/* The steps of ranks 0 and 1, who read each other's memory. */
static smp_status
step_with_the_other(world *w, uint64_t id, smp_epoch_barrier *barrier)
{
    static const int ranks[] = {0, 1};
    smp_deadline     deadline = {.at_ns = smp_clock_ns() + WORLD_DEADLINE_NS};
    int              failed;

    return smp_epoch_barrier_init(barrier, w->comm, ranks, 2, id, SMP_READ_ALWAYS,
                                  &deadline, &failed, NULL);
}

/* ... into any room, ended, and not beyond. */
TEST_RANK(why_a_member_gave_up_is_cut_where_there_is_less_room)
{
    char              long_one[2 * SMP_WHY_BYTES];
    char              why[2 * SMP_WHY_BYTES];
    smp_epoch_barrier barrier;

    memset(long_one, 'x', sizeof(long_one));
    long_one[sizeof(long_one) - 1] = '\0';
    CHECK_STATUS(step_with_the_other(w, 6, &barrier), SMP_OK);
    CHECK(!smp_epoch_barrier_why(&barrier, 1 - w->rank, why, sizeof(why)));
    w->barrier(w);
    smp_epoch_barrier_fail(&barrier, SMP_ERR_TIMED_OUT, long_one);
    w->barrier(w);
    for (size_t room = 1; room <= sizeof(why); room += room < 9 ? 1 : 199) {
        size_t most = room < SMP_WHY_BYTES ? room : SMP_WHY_BYTES;

        memset(why, '#', sizeof(why));
        CHECK(smp_epoch_barrier_why(&barrier, 1 - w->rank, why, room));
        CHECK(strlen(why) == most - 1);
        for (size_t i = most; i < sizeof(why); i++) {
            CHECK(why[i] == '#');
        }
    }
    w->barrier(w);
    smp_epoch_barrier_fini(&barrier);
    return 0;
}

/* Once it could be read: what the system says of the number alone kills nobody. */
TEST_RANK(a_member_that_is_not_seen_any_more_has_not_died)
{
    uint64_t          mine = 4711;
    uint64_t          its = 0;
    smp_epoch_barrier barrier;

    CHECK_STATUS(step_with_the_other(w, 5, &barrier), SMP_OK);
    CHECK(barrier.reads);
    atomic_store(&w->shared->scratch[w->rank], (int64_t)(uintptr_t)&mine);
    w->barrier(w);
    for (answer a = REFUSED; a <= UNSEEN; a++) {
        uint64_t from = (uint64_t)atomic_load(&w->shared->scratch[1 - w->rank]);

        planned = READS;
        CHECK_STATUS(
            smp_epoch_barrier_copy(&barrier, 1 - w->rank, &its, from, sizeof(its)),
            SMP_OK);
        CHECK(its == 4711);
        planned = a;
        CHECK_STATUS(
            smp_epoch_barrier_copy(&barrier, 1 - w->rank, &its, from, sizeof(its)),
            SMP_ERR_SYSTEM);
    }
    CHECK(smp_comm_lost(w->comm) < 0);
    w->barrier(w); /* nobody reads any more */
    smp_epoch_barrier_fini(&barrier);
    return 0;
}

/* ... and one that has died is named by what watches it. */
TEST_RANK(a_member_that_died_is_lost_when_it_is_read)
{
    uint64_t          its = 0;
    smp_epoch_barrier barrier;

    CHECK_STATUS(step_with_the_other(w, 5, &barrier), SMP_OK);
    atomic_store(&w->shared->scratch[w->rank], (int64_t)(uintptr_t)&its);
    w->barrier(w);
    if (w->rank == 1) {
        kill(getpid(), SIGKILL);
    }
    for (smp_status status = SMP_OK; status != SMP_ERR_PEER_LOST;) {
        uint64_t from = (uint64_t)atomic_load(&w->shared->scratch[1]);

        status = smp_epoch_barrier_copy(&barrier, 1, &its, from, sizeof(its));
        CHECK(status == SMP_OK || status == SMP_ERR_PEER_LOST);
    }
    CHECK(smp_comm_lost(w->comm) == 1);
    smp_epoch_barrier_fini(&barrier);
    return 0;
}

/* How a member ends what it does with another's memory. */
typedef enum { POSTS_THE_LAST, GIVES_UP, LEAVES, ENDS } its_end;

/* What a process has run, on all of its threads. */
static int64_t
run_by(pid_t pid)
{
    clockid_t       clock;
    struct timespec ran = {0};

    if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &ran) != 0) {
        abort();
    }
    return ran.tv_sec * SMP_NS_PER_S + ran.tv_nsec;
}

/* Member 1 uses the memory of member 0, which gives up and wants it back. */
static int
retreat(world *w, its_end end)
{
    _Atomic int64_t  *asks = &w->shared->scratch[2 * end];
    _Atomic int64_t  *has = &w->shared->scratch[2 * end + 1];
    uint64_t          last;
    int64_t           ran;
    smp_epoch_barrier barrier;

    CHECK_STATUS(step_with_the_other(w, 20 + (uint64_t)end, &barrier), SMP_OK);
    smp_epoch_barrier_post(&barrier);
    while (!smp_epoch_barrier_arrived(&barrier)) {
        smp_epoch_barrier_wait(&barrier, SMP_NEVER);
    }
    smp_epoch_barrier_read(&barrier);
    last = barrier.step + 1;
    if (w->rank == 0) {
        smp_epoch_barrier_fail(&barrier, SMP_ERR_TIMED_OUT, "a test");
        atomic_store(asks, smp_clock_ns());
        smp_epoch_barrier_retreat(&barrier, last);
        atomic_store(has, 1);
    } else {
        while (atomic_load(asks) == 0) {
            sched_yield();
        }
        /* It runs, and does not come back with the memory. */
        ran = run_by(w->shared->pids[0]);
        while (run_by(w->shared->pids[0]) < ran + 300 * SMP_NS_PER_US &&
               atomic_load(has) == 0) {
            sched_yield();
        }
        CHECK(atomic_load(has) == 0 ||
              smp_clock_ns() - atomic_load(asks) > SMP_NS_PER_S); /* its limit */
        if (end == POSTS_THE_LAST) {
            smp_epoch_barrier_post(&barrier);
        } else if (end == GIVES_UP) {
            smp_epoch_barrier_fail(&barrier, SMP_ERR_TIMED_OUT, "a test");
        }
        while (end != LEAVES && atomic_load(has) == 0) {
            sched_yield();
        }
    }
    if (end == LEAVES && w->rank == 1) {
        smp_epoch_barrier_fini(&barrier);
        while (atomic_load(has) == 0) {
            sched_yield();
        }
    }
    w->barrier(w);
    if (end != LEAVES || w->rank == 0) {
        smp_epoch_barrier_fini(&barrier);
    }
    return 0;
}

TEST_RANK(who_gives_up_leaves_its_memory_to_those_who_use_it)
{
    for (its_end end = 0; end < ENDS; end++) {
        CHECK(retreat(w, end) == 0);
    }
    return 0;
}

/* It waits for nobody's reading, and its control block is another group's then. */
TEST_RANK(who_leaves_last_gives_its_control_block_back)
{
    smp_epoch_barrier        barrier;
    const smp_control_block *control;

    CHECK_STATUS(step_with_the_other(w, 30, &barrier), SMP_OK);
    control = barrier.members[w->rank].control;
    w->barrier(w);
    if (w->rank == 1) {
        smp_epoch_barrier_fini(&barrier);
    }
    w->barrier(w);
    if (w->rank == 0) {
        smp_epoch_barrier_post(&barrier);
        smp_epoch_barrier_fini(&barrier);
    }
    CHECK(atomic_load(&control->taken) == SMP_CONTROL_FREE);
    w->barrier(w);
    return 0;
}

/* ------------------------------------------------------------------------- groups */

/* The last step that this rank has posted in the group with this id. */
static uint64_t
own_step(const world *w, uint64_t id)
{
    smp_neighbour            neighbour;
    const smp_control_block *control;
    uint64_t                 steps[2];

    if (!smp_comm_neighbour(w->comm, w->rank, &neighbour)) {
        abort();
    }
    control = smp_control_block_find(neighbour.segment->controls, id);
    for (int i = 0; i < 2; i++) {
        steps[i] = atomic_load(&control->slots[i].notice.step);
    }
    return steps[0] > steps[1] ? steps[0] : steps[1];
}

/* Two steps, also where members must not read each other's memory; through the slots
 * it takes one for every 64 KiB. */
TEST_RANK(an_all_gather_between_pools_does_not_go_through_the_slots)
{
    enum { ID = 9, COUNT = 300000 };
    smp_group *group;

    CHECK_STATUS(make_world_group(w, ID, true, &group), SMP_OK);
    for (int pooled = 0; pooled < 2; pooled++) {
        uint64_t       before = own_step(w, ID);
        reference_call r;

        CHECK(reference_make(&r, group, SMP_ALL_GATHER, SMP_F32, COUNT, false, 3));
        if (pooled != 0) {
            CHECK(run_in_pool(w, group, &r) == 0);
            CHECK(own_step(w, ID) - before == 2);
        } else {
            CHECK_STATUS(smp_group_run(group, &r.call), SMP_OK);
            CHECK(own_step(w, ID) - before > 10);
        }
        CHECK(reference_right(&r));
        reference_free(&r);
    }
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(a_rank_is_in_at_most_so_many_groups)
{
    static smp_group *groups[WORLD_RANKS][SMP_CONTROL_BLOCKS];
    smp_group       **mine = groups[w->rank];
    smp_group        *more;

    for (uint64_t i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        CHECK_STATUS(make_world_group(w, 1 + i, true, &mine[i]), SMP_OK);
    }
    CHECK_STATUS(make_world_group(w, 1000, true, &more), SMP_ERR_LIMIT);
    CHECK(random_calls(w, mine, SMP_CONTROL_BLOCKS, 100, 3) == 0);
    for (int i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        smp_group_destroy(mine[i]);
    }
    return 0;
}

/* The last rank does not come, more often than a rank can be in groups; then it does.
 */
TEST_RANK(meetings_that_fail_take_no_group_away)
{
    int              ranks[WORLD_RANKS];
    smp_group_config config = {.ranks = ranks,
                               .size = w->size,
                               .id = 3,
                               .name = "test",
                               .timeout_ns = 50 * SMP_NS_PER_US};
    int              failed;
    smp_group       *group;

    for (int r = 0; r < w->size; r++) {
        ranks[r] = r;
    }
    for (int i = 0; i < SMP_CONTROL_BLOCKS + 10 && w->rank != w->size - 1; i++) {
        CHECK_STATUS(smp_group_create(w->comm, &config, &group, &failed),
                     SMP_ERR_TIMED_OUT);
    }
    w->barrier(w);
    CHECK_STATUS(make_world_group(w, 3, true, &group), SMP_OK);
    CHECK(random_calls(w, &group, 1, 10, 3) == 0);
    smp_group_destroy(group);
    return 0;
}

/* ------------------------------------------------------------------ disagreements */

/* Whether no group is made, and what is said of it. */
static int
is_no_group(world *w, smp_group_config config, smp_status want, int want_failed,
            const char *words)
{
    char       why[SMP_GROUP_TEXT] = "";
    int        failed = -7;
    smp_group *group;

    config.why = why;
    CHECK_STATUS(smp_group_create(w->comm, &config, &group, &failed), want);
    CHECK(failed == want_failed || want == SMP_ERR_MISMATCH);
    if (strstr(why, "group 'test': could not make the group: rank ") != why ||
        strstr(why, words) == NULL) {
        fprintf(stderr, "'%s' lacks '%s'\n", why, words);
        return 1;
    }
    return 0;
}

TEST_RANK(a_group_needs_one_list_of_ranks_on_all)
{
    int              ranks[WORLD_RANKS];
    smp_group_config config = {.ranks = ranks,
                               .size = w->size,
                               .id = 3,
                               .name = "test",
                               .timeout_ns = WORLD_DEADLINE_NS};
    char             own[32];
    char             none[32];

    snprintf(own, sizeof(own), ": rank %d ", w->rank);
    snprintf(none, sizeof(none), ": rank %d ", w->size);
    for (int r = 0; r < w->size; r++) {
        ranks[r] = w->rank == 1 ? w->size - 1 - r : r;
    }
    if (w->size > 1) {
        CHECK(is_no_group(w, config, SMP_ERR_MISMATCH, 0,
                          " has another list of ranks") == 0);
    }
    ranks[0] = w->size;
    CHECK(is_no_group(w, config, SMP_ERR_INVALID, w->size, none) == 0);
    ranks[0] = -1;
    CHECK(is_no_group(w, config, SMP_ERR_INVALID, -1, ": rank -1 ") == 0);
    ranks[0] = ranks[1] = w->rank;
    config.size = 2;
    CHECK(is_no_group(w, config, SMP_ERR_INVALID, w->rank, own) == 0);
    config.size = 1;
    if (w->size > 1) {
        ranks[0] = other(w, 0); /* without this one */
        CHECK(is_no_group(w, config, SMP_ERR_INVALID, w->rank, own) == 0);
        ranks[0] = w->rank;
    }
    config.id = 0;
    CHECK(is_no_group(w, config, SMP_ERR_INVALID, w->rank, own) == 0);
    config.id = 3;
    config.size = 0;
    CHECK(is_no_group(w, config, SMP_ERR_INVALID, w->rank, own) == 0);
    config.size = SMP_GROUP_MEMBERS + 1;
    CHECK(is_no_group(w, config, SMP_ERR_INVALID, w->rank, own) == 0);
    w->barrier(w); /* nobody leaves while others meet */
    return 0;
}

/* ------------------------------------------------------------------------ trouble */

/* The last rank does not come. */
TEST_RANK(a_time_out_names_group_operation_and_the_missing_ranks)
{
    smp_call   call = {.operation = SMP_BARRIER};
    smp_call   reduce = {.operation = SMP_ALL_REDUCE, .dtype = SMP_F32};
    char       missing[32];
    smp_group *group;

    if (w->size == 1) {
        return 0;
    }
    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    CHECK_STATUS(smp_group_run(group, &call), SMP_OK);
    if (w->rank != w->size - 1) {
        smp_status status;

        call.hints.timeout_ns = 20 * SMP_NS_PER_MS;
        status = smp_group_run(group, &call);
        CHECK_STATUS(status, SMP_ERR_TIMED_OUT);
        snprintf(missing, sizeof(missing), "rank %d", w->size - 1);
        CHECK(says(group, "group 'test': barrier 2: "));
        CHECK(says(group, "timed out after "));
        CHECK(says(group, missing));
        CHECK_STATUS(smp_group_run(group, &reduce), SMP_ERR_TIMED_OUT);
        CHECK(says(group,
                   "group 'test': all-reduce 3 (sum) of 0 float32: the group ended "
                   "before: barrier 2: timed out after "));
    }
    w->barrier(w);
    if (w->rank == w->size - 1) { /* the others' slots are there, but no more */
        CHECK_STATUS(smp_group_run(group, &call), SMP_OK);
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(group, "rank 0 gave up: barrier 2: timed out"));
    }
    smp_group_destroy(group);
    return 0;
}

/* All but the last rank give up an operation on tensors in their pools and use them for
 * something else; then the last one comes. */
static int
come_too_late(world *w, smp_operation operation, uint64_t id)
{
    enum { COUNT = 50000 };
    size_t     bytes = (size_t)w->size * COUNT * sizeof(float);
    bool       is_late = w->rank == w->size - 1;
    smp_call   call = {.operation = operation, .dtype = SMP_F32, .count = COUNT};
    smp_block *in;
    smp_block *out;
    smp_group *group;

    CHECK_STATUS(make_world_group(w, id, false, &group), SMP_OK);
    CHECK_STATUS(smp_comm_block(w->comm, (w->rank + 1) % w->size, bytes, &in), SMP_OK);
    CHECK_STATUS(smp_comm_block(w->comm, (w->rank + 1) % w->size, bytes, &out), SMP_OK);
    memset(smp_block_data(in), 0, bytes);
    call.in = smp_block_data(in);
    call.out = smp_block_data(out);
    if (!is_late) {
        call.hints.timeout_ns = SMP_NS_PER_MS;
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
        memset(smp_block_data(out), 7, bytes);
    }
    w->barrier(w);
    if (is_late) {
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(group, "rank 0 gave up: "));
    }
    w->barrier(w);
    for (size_t i = 0; i < bytes && !is_late; i++) {
        CHECK(((const uint8_t *)smp_block_data(out))[i] == 7);
    }
    smp_block_release(in);
    smp_block_release(out);
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(who_gave_up_has_its_tensors_for_itself)
{
    CHECK(w->size == 1 || come_too_late(w, SMP_ALL_GATHER, 3) == 0);
    CHECK(w->size == 1 || come_too_late(w, SMP_REDUCE_SCATTER, 4) == 0);
    CHECK(w->size == 1 || come_too_late(w, SMP_ALL_REDUCE, 5) == 0);
    return 0;
}

static uint64_t
pool_in_use(const world *w)
{
    smp_comm_stats stats;

    smp_comm_counters(w->comm, &stats);
    return stats.pool_in_use;
}

/* Rank 1 stops where it writes into the tensors of others; rank 0 gives up and gives
 * its tensors back. */
TEST_RANK(a_block_is_not_used_again_while_a_member_may_write_into_it)
{
    enum { COUNT = 50000 };
    smp_call   call = {.operation = SMP_ALL_GATHER, .dtype = SMP_F32, .count = COUNT};
    size_t     bytes = 2 * COUNT * sizeof(float);
    bool       over = false;
    smp_block *in;
    smp_block *out;
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    CHECK_STATUS(smp_comm_block(w->comm, 1 - w->rank, bytes / 2, &in), SMP_OK);
    CHECK_STATUS(smp_comm_block(w->comm, 1 - w->rank, bytes, &out), SMP_OK);
    memset(smp_block_data(in), 0, bytes / 2);
    call.in = smp_block_data(in);
    call.out = smp_block_data(out);
    call.hints.timeout_ns = w->rank == 0 ? SMP_NS_PER_MS : 0;
    CHECK_STATUS(smp_group_start(group, &call), SMP_OK);
    w->barrier(w); /* both have begun it; rank 1 goes on only when rank 0 has ended */
    if (w->rank == 0) {
        CHECK_STATUS(smp_group_wait(group, SMP_NEVER, &over), SMP_ERR_TIMED_OUT);
        smp_block_release(in);
        smp_block_release(out);
        CHECK(pool_in_use(w) >= bytes);
    }
    w->barrier(w);
    if (w->rank == 1) {
        CHECK_STATUS(smp_group_wait(group, SMP_NEVER, &over), SMP_ERR_TIMED_OUT);
        smp_block_release(in);
        smp_block_release(out);
    }
    w->barrier(w);
    CHECK(pool_in_use(w) == 0);
    smp_group_destroy(group);
    return 0;
}

/* Rank 0 calls a, then b; rank 1 calls b, then a. */
TEST_RANK(groups_entered_in_another_order_are_named_at_the_time_out)
{
    static const int ranks[] = {0, 1};
    smp_group_config config = {.ranks = ranks,
                               .size = 2,
                               .id = 1,
                               .name = "a",
                               .timeout_ns = WORLD_DEADLINE_NS};
    smp_call         call = {.operation = SMP_BARRIER};
    int              failed;
    smp_group       *a;
    smp_group       *b;

    CHECK_STATUS(smp_group_create(w->comm, &config, &a, &failed), SMP_OK);
    config.id = 2;
    config.name = "b";
    CHECK_STATUS(smp_group_create(w->comm, &config, &b, &failed), SMP_OK);
    smp_group_rename(a, "first");
    smp_group_rename(b, "second");
    w->barrier(w); /* rank 1 does not sleep in the meeting any more */
    if (w->rank == 0) {
        while (!world_sleeps(w, 1)) {
            sched_yield();
        }
        call.hints.timeout_ns = SMP_NS_PER_MS;
        CHECK_STATUS(smp_group_run(a, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(a, "group 'first': barrier 1: timed out"));
        CHECK(says(a, "without rank 1; rank 1 waits in group 'second' for barrier 1"));
        call.hints.timeout_ns = 0;
        CHECK_STATUS(smp_group_run(b, &call), SMP_OK);
    } else {
        CHECK_STATUS(smp_group_run(b, &call), SMP_OK);
    }
    smp_group_destroy(a);
    smp_group_destroy(b);
    return 0;
}

/* Rank 1 has given up a call of b when rank 0 calls a. */
TEST_RANK(a_member_that_gave_up_elsewhere_is_named_with_that)
{
    int              ranks[] = {0, 1};
    smp_group_config config = {.ranks = ranks,
                               .size = 2,
                               .id = 1,
                               .name = "a",
                               .timeout_ns = WORLD_DEADLINE_NS};
    smp_call   call = {.operation = SMP_BARRIER, .hints.timeout_ns = SMP_NS_PER_MS};
    int        failed;
    smp_group *a;
    smp_group *b;

    CHECK_STATUS(smp_group_create(w->comm, &config, &a, &failed), SMP_OK);
    config.id = 2;
    config.name = "b";
    CHECK_STATUS(smp_group_create(w->comm, &config, &b, &failed), SMP_OK);
    if (w->rank == 1) {
        CHECK_STATUS(smp_group_run(b, &call), SMP_ERR_TIMED_OUT);
    }
    w->barrier(w);
    if (w->rank == 0) {
        CHECK_STATUS(smp_group_run(a, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(a, "without rank 1; rank 1 gave up in group 'b': barrier 1"));
    }
    w->barrier(w);
    smp_group_destroy(a);
    smp_group_destroy(b);
    return 0;
}

/* Rank 1 has begun barrier 1 and not looked whether it is over. */
TEST_RANK(a_member_that_has_not_seen_the_end_of_the_last_call_waits_nowhere_else)
{
    static const int ranks[] = {0, 1};
    smp_group_config config = {.ranks = ranks,
                               .size = 2,
                               .id = 1,
                               .name = "a",
                               .timeout_ns = WORLD_DEADLINE_NS};
    smp_call         call = {.operation = SMP_BARRIER};
    smp_status       status;
    int              failed;
    smp_group       *a;

    CHECK_STATUS(smp_group_create(w->comm, &config, &a, &failed), SMP_OK);
    if (w->rank == 1) {
        CHECK_STATUS(smp_group_start(a, &call), SMP_OK);
        w->barrier(w);
    } else {
        CHECK_STATUS(smp_group_run(a, &call), SMP_OK);
        call.hints.timeout_ns = SMP_NS_PER_MS;
        status = smp_group_run(a, &call);
        w->barrier(w);
        CHECK_STATUS(status, SMP_ERR_TIMED_OUT);
        CHECK(says(a, "barrier 2: timed out"));
        CHECK(says(a, "without rank 1"));
        CHECK(strstr(smp_group_error(a), "rank 1 waits") == NULL);
    }
    smp_group_destroy(a);
    return 0;
}

/* -------------------------------------------------------------------------- main */

typedef struct {
    world_test test;
    int        first; /* sizes of the world */
    int        last;
    int        times;   /* 0: once */
    bool       threads; /* also with ranks as threads */
} entry;

#define ENTRY(fn) .test = {.name = #fn, .rank = fn}
#define SOME(name, from, to)                                                           \
    {                                                                                  \
        ENTRY(name), .first = from, .last = to, .threads = true                        \
    }
#define ALL(name) SOME(name, 1, 5)
#define POOLED(fn, from, to)                                                           \
    {                                                                                  \
        .test = {.name = #fn, .rank = fn, .pool_bytes = (size_t)64 << 20},             \
        .first = from, .last = to, .threads = true                                     \
    }
#define FORKED(name, from, to)                                                         \
    {                                                                                  \
        ENTRY(name), .first = from, .last = to                                         \
    }
#define KILLED(name, size)                                                             \
    {                                                                                  \
        ENTRY(name), .first = size, .last = size, .times = 12                          \
    }

/* Those that need processes come first: a process that has had threads forks badly
 * under the sanitizers. */
static const entry list[] = {
    KILLED(a_killed_member_is_named_to_all_others, 3),
    KILLED(a_killed_member_is_named_by_those_who_use_slots, 3),
    FORKED(a_forked_child_is_no_member, 2, 2),
    ALL(nobody_leaves_a_barrier_before_all_have_come),
    ALL(every_operation_gives_the_right_result_by_memory),
    ALL(every_operation_gives_the_right_result_by_slots),
    POOLED(an_all_gather_between_pools_does_not_go_through_the_slots, 2, 3),
    POOLED(tensors_in_pools_are_used_where_they_are, 2, 4),
    SOME(every_dtype_is_moved_and_reduced, 2, 3),
    ALL(columns_go_from_their_rows_and_into_them),
    SOME(rows_that_do_not_fit_are_refused, 2, 3),
    ALL(any_sequence_of_calls_on_several_groups_is_right),
    ALL(a_part_of_the_ranks_in_any_order_is_a_group),
    SOME(groups_come_and_go, 3, 3),
    SOME(a_rank_is_in_at_most_so_many_groups, 2, 2),
    SOME(meetings_that_fail_take_no_group_away, 2, 3),
    SOME(an_operation_can_be_moved_on_from_outside, 2, 3),
    SOME(a_wait_that_ends_early_is_no_error, 1, 3),
    SOME(different_calls_are_an_error_on_all, 2, 4),
    SOME(what_makes_no_sense_is_refused_at_once, 1, 2),
    SOME(a_group_needs_one_list_of_ranks_on_all, 1, 3),
    SOME(a_time_out_names_group_operation_and_the_missing_ranks, 2, 3),
    SOME(who_gave_up_has_its_tensors_for_itself, 2, 3),
    POOLED(a_block_is_not_used_again_while_a_member_may_write_into_it, 2, 2),
    SOME(groups_entered_in_another_order_are_named_at_the_time_out, 2, 2),
    SOME(a_member_that_gave_up_elsewhere_is_named_with_that, 2, 2),
    SOME(a_member_that_has_not_seen_the_end_of_the_last_call_waits_nowhere_else, 2, 2),
    SOME(a_member_that_has_left_is_named, 2, 3),
    FORKED(members_read_where_that_is_faster, 2, 2),
    FORKED(members_do_not_read_where_one_finds_it_slow, 2, 2),
    FORKED(members_that_cannot_be_read_go_by_the_slots, 2, 3),
    FORKED(why_a_member_gave_up_is_cut_where_there_is_less_room, 2, 2),
    FORKED(a_member_that_is_not_seen_any_more_has_not_died, 2, 2),
    FORKED(a_member_that_died_is_lost_when_it_is_read, 2, 2),
    FORKED(who_gives_up_leaves_its_memory_to_those_who_use_it, 2, 2),
    FORKED(who_leaves_last_gives_its_control_block_back, 2, 2),
};
enum { LIST = sizeof(list) / sizeof(list[0]) };

int
main(int argc, char **argv)
{
    int failed = 0;
    int ran = 0;

    for (int threads = 0; threads < 2; threads++) {
        for (size_t i = 0; i < LIST; i++) {
            const world_test *test = &list[i].test;

            if ((argc > 1 && strstr(test->name, argv[1]) == NULL) ||
                !world_learns(threads != 0, list[i].threads)) {
                continue;
            }
            /* As threads, for the thread sanitizer: up to three are enough. */
            for (int size = list[i].first;
                 size <= list[i].last && (threads == 0 || size <= 3); size++) {
                for (int time = 0; time == 0 || time < world_times(list[i].times);
                     time++) {
                    int wrong = threads != 0 ? world_run_threads(test, "shm", size)
                                             : world_run_processes(test, "shm", size);

                    if (wrong != 0) {
                        printf("FAILED %s, %d ranks, %s\n", test->name, size,
                               threads != 0 ? "threads" : "processes");
                    }
                    failed += wrong != 0;
                    ran++;
                }
            }
        }
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
