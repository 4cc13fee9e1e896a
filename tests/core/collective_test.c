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

static void
every_operation(world *w, bool only_slots)
{
    smp_group *group = world_group(w, 9, only_slots);

    CHECK(smp_group_reads_memory(group) == !only_slots);
    for (int i = 0; i < COUNTS; i++) {
        all_operations(w, group, SMP_F32, counts[i], (uint64_t)i);
    }
    smp_group_destroy(group);
}

TEST_RANK(every_operation_gives_the_right_result_by_memory, .processes = "12345",
          .threads = "123")
{
    every_operation(w, false);
}

TEST_RANK(every_operation_gives_the_right_result_by_slots, .processes = "12345",
          .threads = "123")
{
    every_operation(w, true);
}

/* Runs a call with its tensors in blocks of this rank's pool. */
static void
run_in_pool(world *w, smp_group *group, reference_call *r)
{
    size_t     element = smp_dtype_bytes(r->call.dtype);
    size_t     in_bytes = r->in_elements * element;
    size_t     out_bytes = r->out_elements * element;
    void      *result = r->call.out;
    smp_block *in;
    smp_block *out;

    CHECK_OK(smp_comm_block(w->comm, (w->rank + 1) % w->size, in_bytes, &in));
    CHECK_OK(smp_comm_block(w->comm, (w->rank + 1) % w->size, out_bytes, &out));
    memcpy(smp_block_data(in), r->call.in, in_bytes);
    r->call.in = smp_block_data(in);
    r->call.out = r->out == NULL ? smp_block_data(in) : smp_block_data(out);
    CHECK_OK(smp_group_run(group, &r->call));
    memcpy(result, r->call.out, out_bytes);
    r->call.out = result;
    smp_block_release(in);
    smp_block_release(out);
}

/* Of all members, and of some. */
TEST_RANK(tensors_in_pools_are_used_where_they_are, .processes = "234", .threads = "23",
          .pool_bytes = (size_t)64 << 20)
{
    static const size_t sizes[] = {40000, 600001};
    smp_group          *group = world_group(w, 9, false);

    for (uint64_t seed = 0; seed < 16; seed++) {
        smp_operation  o = SMP_ALL_REDUCE + (smp_operation)(seed % 8);
        bool           uneven = seed % 5 == 0;
        reference_call r;

        if (!reference_make(&r, group, o, SMP_F32, sizes[seed / 8 % 2], uneven, seed)) {
            continue;
        }
        if (seed % 3 != 0 || w->rank % 2 == 0) {
            run_in_pool(w, group, &r);
        } else {
            CHECK_OK(smp_group_run(group, &r.call));
        }
        if (!reference_right(&r)) {
            fprintf(stderr, "rank %d: wrong %s, uneven %d, seed %d\n", w->rank,
                    smp_operation_name(o), uneven, (int)seed);
            check_fail();
        }
        reference_free(&r);
    }
    smp_group_destroy(group);
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
static void
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
    CHECK_OK(smp_group_run(group, &r.call));
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
        check_fail();
    }
    free(in);
    free(out);
    reference_free(&r);
}

TEST_RANK(columns_go_from_their_rows_and_into_them, .processes = "12345",
          .threads = "123")
{
    static const smp_operation operations[] = {SMP_ALL_GATHER, SMP_REDUCE_SCATTER,
                                               SMP_ALL_TO_ALL};
    /* Multiples of 4 times the rows, so that uneven ones can be cut, too. */
    static const size_t sizes[] = {0, 40, 1000, 16400, 70000};
    smp_group          *group;
    uint64_t            seed = 100;

    group = world_group(w, 9, false);
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        for (int o = 0; o < 3; o++) {
            for (int uneven = 0; uneven < 2; uneven++) {
                run_columns(w, group, operations[o], SMP_F32, sizes[i], uneven != 0,
                            seed++);
                run_columns(w, group, operations[o], SMP_BF16, sizes[i], uneven != 0,
                            seed++);
            }
        }
    }
    smp_group_destroy(group);
}

TEST_RANK(rows_that_do_not_fit_are_refused, .processes = "23", .threads = "23")
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
    smp_group *group = world_group(w, 3, false);

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
    refuse(w, group, &call, "calls all-to-all 1 of 4 float32 in columns, rank",
           "calls all-to-all 1 of 4 float32");
    random_calls(w, &group, 1, 5, 8);
    smp_group_destroy(group);
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
static void
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
    CHECK_OK(smp_group_create(w->comm, &config, &group, &failed));
    CHECK(smp_group_reads_memory(group) == want);
    for (int i = 0; i < COUNTS; i++) {
        all_operations(w, group, SMP_F32, counts[i], (uint64_t)i);
    }
    smp_group_destroy(group);
}

TEST_RANK(members_read_where_that_is_faster, .processes = "2")
{
    make_group_that_chooses(w, FAST, smp_comm_spins(w->comm));
}

TEST_RANK(members_do_not_read_where_one_finds_it_slow, .processes = "2")
{
    make_group_that_chooses(w, SLOW, false);
}

/* The last rank alone cannot read; all agree on it, and nobody counts as lost. */
TEST_RANK(members_that_cannot_be_read_go_by_the_slots, .processes = "23")
{
    for (answer a = READS; a <= ANOTHER; a++) {
        smp_group *group;

        planned = w->rank == w->size - 1 ? a : READS;
        group = world_group(w, 10 + (uint64_t)a, false);
        CHECK(smp_group_reads_memory(group) == (a == READS));
        for (int i = 0; i < COUNTS; i++) {
            all_operations(w, group, SMP_F32, counts[i], (uint64_t)i);
        }
        CHECK(smp_comm_lost(w->comm) < 0);
        smp_group_destroy(group);
    }
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
TEST_RANK(why_a_member_gave_up_is_cut_where_there_is_less_room, .processes = "2")
{
    char              long_one[2 * SMP_WHY_BYTES];
    char              why[2 * SMP_WHY_BYTES];
    smp_epoch_barrier barrier;

    memset(long_one, 'x', sizeof(long_one));
    long_one[sizeof(long_one) - 1] = '\0';
    CHECK_OK(step_with_the_other(w, 6, &barrier));
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
}

/* Once it could be read: what the system says of the number alone kills nobody. */
TEST_RANK(a_member_that_is_not_seen_any_more_has_not_died, .processes = "2")
{
    uint64_t          mine = 4711;
    uint64_t          its = 0;
    smp_epoch_barrier barrier;

    CHECK_OK(step_with_the_other(w, 5, &barrier));
    CHECK(barrier.reads);
    atomic_store(&w->shared->scratch[w->rank], (int64_t)(uintptr_t)&mine);
    w->barrier(w);
    for (answer a = REFUSED; a <= UNSEEN; a++) {
        uint64_t from = (uint64_t)atomic_load(&w->shared->scratch[1 - w->rank]);

        planned = READS;
        CHECK_OK(
            smp_epoch_barrier_copy(&barrier, 1 - w->rank, &its, from, sizeof(its)));
        CHECK(its == 4711);
        planned = a;
        CHECK_STATUS(
            smp_epoch_barrier_copy(&barrier, 1 - w->rank, &its, from, sizeof(its)),
            SMP_ERR_SYSTEM);
    }
    CHECK(smp_comm_lost(w->comm) < 0);
    w->barrier(w); /* nobody reads any more */
    smp_epoch_barrier_fini(&barrier);
}

/* ... and one that has died is named by what watches it. */
TEST_RANK(a_member_that_died_is_lost_when_it_is_read, .processes = "2")
{
    uint64_t          its = 0;
    smp_epoch_barrier barrier;

    CHECK_OK(step_with_the_other(w, 5, &barrier));
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
static void
retreat(world *w, its_end end)
{
    _Atomic int64_t  *asks = &w->shared->scratch[2 * end];
    _Atomic int64_t  *has = &w->shared->scratch[2 * end + 1];
    uint64_t          last;
    int64_t           ran;
    smp_epoch_barrier barrier;

    CHECK_OK(step_with_the_other(w, 20 + (uint64_t)end, &barrier));
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
}

TEST_RANK(who_gives_up_leaves_its_memory_to_those_who_use_it, .processes = "2")
{
    for (its_end end = 0; end < ENDS; end++) {
        retreat(w, end);
    }
}

/* It waits for nobody's reading, and its control block is another group's then. */
TEST_RANK(who_leaves_last_gives_its_control_block_back, .processes = "2")
{
    smp_epoch_barrier        barrier;
    const smp_control_block *control;

    CHECK_OK(step_with_the_other(w, 30, &barrier));
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
TEST_RANK(an_all_gather_between_pools_does_not_go_through_the_slots, .processes = "23",
          .threads = "23", .pool_bytes = (size_t)64 << 20)
{
    enum { ID = 9, COUNT = 300000 };
    smp_group *group = world_group(w, ID, true);

    for (int pooled = 0; pooled < 2; pooled++) {
        uint64_t       before = own_step(w, ID);
        reference_call r;

        CHECK(reference_make(&r, group, SMP_ALL_GATHER, SMP_F32, COUNT, false, 3));
        if (pooled != 0) {
            run_in_pool(w, group, &r);
            CHECK(own_step(w, ID) - before == 2);
        } else {
            CHECK_OK(smp_group_run(group, &r.call));
            CHECK(own_step(w, ID) - before > 10);
        }
        CHECK(reference_right(&r));
        reference_free(&r);
    }
    smp_group_destroy(group);
}

TEST_RANK(a_rank_is_in_at_most_so_many_groups, .processes = "2", .threads = "2")
{
    static smp_group *groups[WORLD_RANKS][SMP_CONTROL_BLOCKS];
    smp_group       **mine = groups[w->rank];
    smp_group        *more;

    for (uint64_t i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        mine[i] = world_group(w, 1 + i, true);
    }
    CHECK_STATUS(make_group(w, (int[]){0, 1}, 2, 1000, true, &more), SMP_ERR_LIMIT);
    random_calls(w, mine, SMP_CONTROL_BLOCKS, 100, 3);
    for (int i = 0; i < SMP_CONTROL_BLOCKS; i++) {
        smp_group_destroy(mine[i]);
    }
}

/* The last rank does not come, more often than a rank can be in groups; then it does.
 */
TEST_RANK(meetings_that_fail_take_no_group_away, .processes = "23", .threads = "23")
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
    group = world_group(w, 3, true);
    random_calls(w, &group, 1, 10, 3);
    smp_group_destroy(group);
}

/* ------------------------------------------------------------------ disagreements */

/* Whether no group is made, and what is said of it. */
static void
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
        check_fail();
    }
}

TEST_RANK(a_group_needs_one_list_of_ranks_on_all, .processes = "123", .threads = "123")
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
        is_no_group(w, config, SMP_ERR_MISMATCH, 0, " has another list of ranks");
    }
    ranks[0] = w->size;
    is_no_group(w, config, SMP_ERR_INVALID, w->size, none);
    ranks[0] = -1;
    is_no_group(w, config, SMP_ERR_INVALID, -1, ": rank -1 ");
    ranks[0] = ranks[1] = w->rank;
    config.size = 2;
    is_no_group(w, config, SMP_ERR_INVALID, w->rank, own);
    config.size = 1;
    if (w->size > 1) {
        ranks[0] = other(w, 0); /* without this one */
        is_no_group(w, config, SMP_ERR_INVALID, w->rank, own);
        ranks[0] = w->rank;
    }
    config.id = 0;
    is_no_group(w, config, SMP_ERR_INVALID, w->rank, own);
    config.id = 3;
    config.size = 0;
    is_no_group(w, config, SMP_ERR_INVALID, w->rank, own);
    config.size = SMP_GROUP_MEMBERS + 1;
    is_no_group(w, config, SMP_ERR_INVALID, w->rank, own);
    w->barrier(w); /* nobody leaves while others meet */
}

/* ------------------------------------------------------------------------ trouble */

/* The last rank does not come. */
TEST_RANK(a_time_out_names_group_operation_and_the_missing_ranks, .processes = "23",
          .threads = "23")
{
    smp_call   call = {.operation = SMP_BARRIER};
    smp_call   reduce = {.operation = SMP_ALL_REDUCE, .dtype = SMP_F32};
    char       missing[32];
    smp_group *group;

    if (w->size == 1) {
        return;
    }
    group = world_group(w, 3, false);
    CHECK_OK(smp_group_run(group, &call));
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
        CHECK_OK(smp_group_run(group, &call));
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(group, "rank 0 gave up: barrier 2: timed out"));
    }
    smp_group_destroy(group);
}

/* All but the last rank give up an operation on tensors in their pools and use them for
 * something else; then the last one comes. */
static void
come_too_late(world *w, smp_operation operation, uint64_t id)
{
    enum { COUNT = 50000 };
    size_t     bytes = (size_t)w->size * COUNT * sizeof(float);
    bool       is_late = w->rank == w->size - 1;
    smp_call   call = {.operation = operation, .dtype = SMP_F32, .count = COUNT};
    smp_block *in;
    smp_block *out;
    smp_group *group = world_group(w, id, false);

    CHECK_OK(smp_comm_block(w->comm, (w->rank + 1) % w->size, bytes, &in));
    CHECK_OK(smp_comm_block(w->comm, (w->rank + 1) % w->size, bytes, &out));
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
}

TEST_RANK(who_gave_up_has_its_tensors_for_itself, .processes = "23", .threads = "23")
{
    come_too_late(w, SMP_ALL_GATHER, 3);
    come_too_late(w, SMP_REDUCE_SCATTER, 4);
    come_too_late(w, SMP_ALL_REDUCE, 5);
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
TEST_RANK(a_block_is_not_used_again_while_a_member_may_write_into_it, .processes = "2",
          .threads = "2", .pool_bytes = (size_t)64 << 20)
{
    enum { COUNT = 50000 };
    smp_call   call = {.operation = SMP_ALL_GATHER, .dtype = SMP_F32, .count = COUNT};
    size_t     bytes = 2 * COUNT * sizeof(float);
    bool       over = false;
    smp_block *in;
    smp_block *out;
    smp_group *group = world_group(w, 3, false);

    CHECK_OK(smp_comm_block(w->comm, 1 - w->rank, bytes / 2, &in));
    CHECK_OK(smp_comm_block(w->comm, 1 - w->rank, bytes, &out));
    memset(smp_block_data(in), 0, bytes / 2);
    call.in = smp_block_data(in);
    call.out = smp_block_data(out);
    call.hints.timeout_ns = w->rank == 0 ? SMP_NS_PER_MS : 0;
    CHECK_OK(smp_group_start(group, &call));
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
}

/* Rank 0 calls a, then b; rank 1 calls b, then a. */
TEST_RANK(groups_entered_in_another_order_are_named_at_the_time_out, .processes = "2",
          .threads = "2")
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

    CHECK_OK(smp_group_create(w->comm, &config, &a, &failed));
    config.id = 2;
    config.name = "b";
    CHECK_OK(smp_group_create(w->comm, &config, &b, &failed));
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
        CHECK_OK(smp_group_run(b, &call));
    } else {
        CHECK_OK(smp_group_run(b, &call));
    }
    smp_group_destroy(a);
    smp_group_destroy(b);
}

/* Rank 1 has given up a call of b when rank 0 calls a. */
TEST_RANK(a_member_that_gave_up_elsewhere_is_named_with_that, .processes = "2",
          .threads = "2")
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

    CHECK_OK(smp_group_create(w->comm, &config, &a, &failed));
    config.id = 2;
    config.name = "b";
    CHECK_OK(smp_group_create(w->comm, &config, &b, &failed));
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
}

/* Rank 1 has begun barrier 1 and not looked whether it is over. */
TEST_RANK(a_member_that_has_not_seen_the_end_of_the_last_call_waits_nowhere_else,
          .processes = "2", .threads = "2")
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

    CHECK_OK(smp_group_create(w->comm, &config, &a, &failed));
    if (w->rank == 1) {
        CHECK_OK(smp_group_start(a, &call));
        w->barrier(w);
    } else {
        CHECK_OK(smp_group_run(a, &call));
        call.hints.timeout_ns = SMP_NS_PER_MS;
        status = smp_group_run(a, &call);
        w->barrier(w);
        CHECK_STATUS(status, SMP_ERR_TIMED_OUT);
        CHECK(says(a, "barrier 2: timed out"));
        CHECK(says(a, "without rank 1"));
        CHECK(strstr(smp_group_error(a), "rank 1 waits") == NULL);
    }
    smp_group_destroy(a);
}

RUN_WORLDS(.transports = "shm")
