/* Operations of groups, on ranks that are processes and threads.
 * Spec: csrc/comm/collective/group.h, csrc/comm/collective/reduce.h. */
#define _GNU_SOURCE
#include <sched.h>

#include "comm/collective/group.h"
#include "comm/neighbour.h"
#include "comm/shm/shelf.h"
#include "reference.h"
#include "traffic.h"
#include "world.h"

/* ----------------------------------------------------------------------- deaths */

static void *
die_soon(void *arg)
{
    world   *w = arg;
    uint64_t seed = (uint64_t)smp_clock_ns() | 1;
    int64_t  when = smp_clock_ns() + (int64_t)(next_random(&seed) % 3000000);

    while (smp_clock_ns() < when) {
    }
    atomic_store(&w->shared->scratch[0], smp_clock_ns());
    kill(getpid(), SIGKILL);
    return NULL;
}

/* ----------------------------------------------------------------------- groups */

static smp_status
make_group(world *w, const int *ranks, int size, uint64_t id, bool only_shelves,
           smp_group **out)
{
    smp_group_config config = {.ranks = ranks,
                               .size = size,
                               .id = id,
                               .name = "test",
                               .timeout_ns = WORLD_PATIENCE_NS,
                               .only_shelves = only_shelves};
    int              failed;

    return smp_group_create(w->comm, &config, out, &failed);
}

/* Of all ranks, in order. */
static smp_status
make_world_group(world *w, uint64_t id, bool only_shelves, smp_group **out)
{
    int ranks[WORLD_RANKS];

    for (int r = 0; r < w->size; r++) {
        ranks[r] = r;
    }
    return make_group(w, ranks, w->size, id, only_shelves, out);
}

TEST_RANK(nobody_leaves_a_barrier_before_all_have_come)
{
    enum { COUNT = 300 };
    smp_call   barrier = {.operation = SMP_BARRIER};
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 7, false, &group), SMP_OK);
    for (int i = 1; i <= COUNT; i++) {
        atomic_store(&w->shared->scratch[w->rank], i);
        CHECK_STATUS(smp_group_run(group, &barrier), SMP_OK);
        for (int r = 0; r < w->size; r++) {
            CHECK(atomic_load(&w->shared->scratch[r]) >= i);
        }
    }
    CHECK(smp_group_sequence(group) == COUNT);
    smp_group_destroy(group);
    return 0;
}

/* ------------------------------------------------------------------------ results */

/* Around everything at which the way changes, in elements of 4 bytes. */
static const size_t counts[] = {0, 1, 3, 1000, 2048, 4097, 16384, 16385, 33000, 70001};
enum { COUNTS = sizeof(counts) / sizeof(counts[0]) };

static int
all_operations(world *w, smp_group *group, smp_dtype dtype, size_t count, uint64_t seed)
{
    for (smp_operation o = SMP_BARRIER; o < SMP_OPERATIONS; o++) {
        for (int uneven = 0; uneven < 2; uneven++) {
            reference_call r;

            if (!reference_make(&r, group, o, dtype, count, uneven != 0, seed)) {
                continue;
            }
            CHECK_STATUS(smp_group_run(group, &r.call), SMP_OK);
            if (!reference_right(&r)) {
                fprintf(stderr, "rank %d: %s of %zu %s, uneven %d, reduction %s\n",
                        w->rank, smp_operation_name(o), count, smp_dtype_name(dtype),
                        uneven, smp_reduction_name(r.call.reduction));
                return 1;
            }
            reference_free(&r);
            seed += 17;
        }
    }
    return 0;
}

static int
every_operation(world *w, bool only_shelves)
{
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 9, only_shelves, &group), SMP_OK);
    CHECK(smp_group_reads_memory(group) == !only_shelves);
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

TEST_RANK(every_operation_gives_the_right_result_by_shelves)
{
    return every_operation(w, true);
}

/* Sizes of 5 bytes to 300 KB, every dtype, whatever reduction and root come up. */
TEST_RANK(every_dtype_is_moved_and_reduced)
{
    static const size_t sizes[] = {5, 3001, 37000};
    smp_group          *group;

    CHECK_STATUS(make_world_group(w, 9, false, &group), SMP_OK);
    for (smp_dtype d = 0; d < SMP_DTYPES; d++) {
        for (size_t i = 0; i < 3; i++) {
            CHECK(all_operations(w, group, d, sizes[i], 1000 + d * 10 + i) == 0);
        }
    }
    smp_group_destroy(group);
    return 0;
}

/* Every member of a group draws the same calls. */
static int
random_calls(world *w, smp_group **groups, int ngroups, int count, uint64_t seed)
{
    for (int i = 0; i < count; i++) {
        smp_operation  o = (smp_operation)(next_random(&seed) % SMP_OPERATIONS);
        smp_dtype      dtype = (smp_dtype)(next_random(&seed) % SMP_DTYPES);
        size_t         n = next_random(&seed) % 3 == 0 ? 30000 : 300;
        size_t         elements = next_random(&seed) % n;
        bool           uneven = next_random(&seed) % 2 == 0;
        smp_group     *group = groups[next_random(&seed) % (unsigned)ngroups];
        uint64_t       content = next_random(&seed);
        reference_call r;

        if (reference_make(&r, group, o, dtype, elements, uneven, content)) {
            CHECK_STATUS(smp_group_run(group, &r.call), SMP_OK);
            if (!reference_right(&r)) {
                fprintf(stderr, "rank %d: call %d: %s of %zu %s\n", w->rank, i,
                        smp_operation_name(o), elements, smp_dtype_name(dtype));
                return 1;
            }
            reference_free(&r);
        }
    }
    return 0;
}

TEST_RANK(any_sequence_of_calls_on_several_groups_is_right)
{
    smp_group *groups[3];

    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(make_world_group(w, 20 + (uint64_t)i, i == 1, &groups[i]), SMP_OK);
    }
    CHECK(random_calls(w, groups, 3, 300, 4711) == 0);
    for (int i = 0; i < 3; i++) {
        smp_group_destroy(groups[i]);
    }
    return 0;
}

TEST_RANK(a_part_of_the_ranks_in_any_order_is_a_group)
{
    int        ranks[WORLD_RANKS];
    int        n = 0;
    smp_group *mine;  /* those with ranks as odd, or even, as this one */
    smp_group *world; /* all, from the last to the first */

    for (int r = w->size; r-- > 0;) {
        ranks[n++] = r;
    }
    CHECK_STATUS(make_group(w, ranks, n, 1, false, &world), SMP_OK);
    CHECK(smp_group_member(world) == w->size - 1 - w->rank);
    n = 0;
    for (int r = w->rank % 2; r < w->size; r += 2) {
        ranks[n++] = r;
    }
    CHECK_STATUS(make_group(w, ranks, n, 2 + (uint64_t)(w->rank % 2), false, &mine),
                 SMP_OK);
    CHECK(smp_group_size(mine) == n);
    for (uint64_t i = 0; i < 10; i++) {
        CHECK(random_calls(w, &mine, 1, 10, 100 + i + (uint64_t)(w->rank % 2)) == 0);
        CHECK(random_calls(w, &world, 1, 10, 200 + i) == 0);
    }
    smp_group_destroy(mine);
    smp_group_destroy(world);
    return 0;
}

/* More groups than a rank can be in at once, one after the other, with one id: no
 * member takes another's last group for the next one. */
TEST_RANK(groups_come_and_go)
{
    for (uint64_t i = 0; i < SMP_SHELVES + 10; i++) {
        smp_group *group;

        CHECK_STATUS(make_world_group(w, 5, i % 2 == 0, &group), SMP_OK);
        CHECK(random_calls(w, &group, 1, 3, i) == 0);
        smp_group_destroy(group);
    }
    return 0;
}

TEST_RANK(a_rank_is_in_at_most_so_many_groups)
{
    static smp_group *groups[WORLD_RANKS][SMP_SHELVES];
    smp_group       **mine = groups[w->rank];
    smp_group        *more;

    for (uint64_t i = 0; i < SMP_SHELVES; i++) {
        CHECK_STATUS(make_world_group(w, 1 + i, true, &mine[i]), SMP_OK);
    }
    CHECK_STATUS(make_world_group(w, 1000, true, &more), SMP_ERR_NO_MEMORY);
    CHECK(random_calls(w, mine, SMP_SHELVES, 100, 3) == 0);
    for (int i = 0; i < SMP_SHELVES; i++) {
        smp_group_destroy(mine[i]);
    }
    return 0;
}

/* Nobody waits in C: all is done by calls that return at once. */
TEST_RANK(an_operation_can_be_moved_on_from_outside)
{
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 3, w->size % 2 == 0, &group), SMP_OK);
    for (smp_operation o = 0; o < SMP_OPERATIONS; o++) {
        reference_call r;
        bool           over = false;

        CHECK(reference_make(&r, group, o, SMP_BF16, 200000, false, 77));
        CHECK_STATUS(smp_group_start(group, &r.call), SMP_OK);
        while (!over) {
            CHECK_STATUS(smp_group_progress(group, &over), SMP_OK);
            sched_yield();
        }
        CHECK(reference_right(&r));
        reference_free(&r);
    }
    smp_group_destroy(group);
    return 0;
}

/* Waiting may be cut into pieces. */
TEST_RANK(a_wait_that_ends_early_is_no_error)
{
    smp_call   barrier = {.operation = SMP_BARRIER};
    bool       over = false;
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    if (w->rank == 0 && w->size > 1) {
        CHECK_STATUS(smp_group_start(group, &barrier), SMP_OK);
        CHECK_STATUS(smp_group_wait(group, smp_clock_ns(), &over), SMP_OK);
        CHECK_STATUS(smp_group_wait(group, smp_clock_ns() + 1000000, &over), SMP_OK);
        CHECK(!over);
        w->barrier(w);
        while (!over) {
            CHECK_STATUS(smp_group_wait(group, smp_clock_ns() + 1000000, &over),
                         SMP_OK);
        }
    } else {
        w->barrier(w); /* rank 0 has found out that nobody else comes */
        CHECK_STATUS(smp_group_run(group, &barrier), SMP_OK);
    }
    smp_group_destroy(group);
    return 0;
}

/* ------------------------------------------------------------------ disagreements */

static int
refuse(world *w, smp_group *group, const smp_call *call, const char *one,
       const char *other)
{
    const char *error = smp_group_error(group);

    (void)w;
    CHECK_STATUS(smp_group_run(group, call), SMP_ERR_MISMATCH);
    if (strstr(error, one) == NULL || strstr(error, other) == NULL) {
        fprintf(stderr, "'%s' lacks '%s' or '%s'\n", error, one, other);
        return 1;
    }
    return 0;
}

/* The last rank calls something else; all are told both sides, and go on. */
TEST_RANK(different_calls_are_an_error_on_all)
{
    float          in[64] = {1, 2};
    float          out[512] = {0};
    size_t         splits[WORLD_RANKS] = {1, 1, 1, 1, 1, 1, 1, 1};
    size_t         others[WORLD_RANKS] = {2, 1, 1, 1, 1, 1, 1, 1};
    bool           odd = w->rank == w->size - 1;
    const smp_call usual = {.operation = SMP_ALL_REDUCE,
                            .dtype = SMP_F32,
                            .count = 8,
                            .in = in,
                            .out = out};
    smp_call       call;
    char           odd_rank[32];
    smp_group     *group;

    if (w->size == 1) {
        return 0;
    }
    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    snprintf(odd_rank, sizeof(odd_rank), "rank %d calls", w->size - 1);
    call = usual;
    call.operation = odd ? SMP_ALL_GATHER : SMP_ALL_REDUCE;
    CHECK(refuse(w, group, &call, "rank 0 calls all-reduce 1 (sum) of 8 float32",
                 "calls all-gather 1 of 8 float32") == 0);
    call = usual;
    call.count = odd ? 7 : 8;
    CHECK(refuse(w, group, &call, "of 8 float32", "of 7 float32") == 0);
    call.count = odd ? 0 : 8;
    CHECK(refuse(w, group, &call, odd_rank, "of 0 float32") == 0);
    call.count = odd ? SIZE_MAX / 1024 : 8; /* large ones go another way */
    CHECK(refuse(w, group, &call, odd_rank, "of 8 float32") == 0);
    call = usual;
    call.dtype = odd ? SMP_I32 : SMP_F32;
    CHECK(refuse(w, group, &call, "float32", "int32") == 0);
    call = usual;
    call.reduction = odd ? SMP_MAX : SMP_SUM;
    CHECK(refuse(w, group, &call, "(sum)", "(max)") == 0);
    call = usual;
    call.operation = SMP_BROADCAST;
    call.root = odd ? 1 : 0;
    CHECK(refuse(w, group, &call, "with root 0", "with root 1") == 0);
    call = usual;
    call.operation = odd ? SMP_BARRIER : SMP_ALL_REDUCE;
    CHECK(refuse(w, group, &call, odd_rank, "calls barrier") == 0);
    call = usual;
    call.operation = SMP_ALL_GATHER;
    call.counts = odd ? others : splits;
    CHECK(refuse(w, group, &call, "split size 0 is 1 on rank 0", "and 2 on rank") == 0);
    call.counts = odd ? NULL : splits;
    CHECK(refuse(w, group, &call, "with split sizes", "of 8 float32") == 0);
    call.operation = SMP_ALL_TO_ALL;
    call.counts = odd ? others : splits;
    call.out_counts = splits;
    CHECK(refuse(w, group, &call, "sends 2 elements to rank 0", "which expects 1") ==
          0);
    for (int i = 0; i < 512; i++) {
        CHECK(out[i] == 0); /* nothing was written */
    }
    CHECK(random_calls(w, &group, 1, 20, 8) == 0);
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(what_makes_no_sense_is_refused_at_once)
{
    float      data[8] = {0};
    size_t     counts[WORLD_RANKS] = {1, 1, 1, 1, 1, 1, 1, 1};
    smp_call   call = {.dtype = SMP_F32, .count = 1, .in = data, .out = data};
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    call.operation = SMP_OPERATIONS;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.operation = SMP_ALL_REDUCE;
    call.reduction = SMP_BXOR;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.reduction = SMP_SUM;
    call.count = SIZE_MAX / 4;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.count = 1;
    call.operation = SMP_GATHER;
    call.root = w->size;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    call.root = 0;
    call.operation = SMP_ALL_TO_ALL;
    call.counts = counts;
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_INVALID);
    CHECK(smp_group_sequence(group) == 0);
    CHECK(random_calls(w, &group, 1, 5, 8) == 0);
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(a_group_needs_one_list_of_ranks_on_all)
{
    int              ranks[WORLD_RANKS];
    smp_group_config config = {.ranks = ranks,
                               .size = w->size,
                               .id = 3,
                               .name = "test",
                               .timeout_ns = WORLD_PATIENCE_NS};
    int              failed;
    smp_group       *group;

    for (int r = 0; r < w->size; r++) {
        ranks[r] = w->rank == 1 ? w->size - 1 - r : r;
    }
    if (w->size > 1) {
        CHECK_STATUS(smp_group_create(w->comm, &config, &group, &failed),
                     SMP_ERR_MISMATCH);
    }
    ranks[0] = w->size;
    CHECK_STATUS(smp_group_create(w->comm, &config, &group, &failed), SMP_ERR_INVALID);
    CHECK(failed == w->size);
    ranks[0] = w->rank;
    config.size = 1;
    config.id = 0;
    CHECK_STATUS(smp_group_create(w->comm, &config, &group, &failed), SMP_ERR_INVALID);
    w->barrier(w); /* nobody leaves while others meet */
    return 0;
}

/* Over TCP alone nobody sees another's memory. */
TEST_RANK(a_rank_of_another_host_is_unreachable)
{
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_ERR_UNREACHABLE);
    return 0;
}

/* ------------------------------------------------------------------------ trouble */

static int
says(const smp_group *group, const char *what)
{
    if (strstr(smp_group_error(group), what) == NULL) {
        fprintf(stderr, "'%s' lacks '%s'\n", smp_group_error(group), what);
        return 0;
    }
    return 1;
}

/* The last rank does not come. */
TEST_RANK(a_time_out_names_group_operation_and_the_missing_ranks)
{
    smp_call   call = {.operation = SMP_BARRIER};
    char       missing[32];
    smp_group *group;

    if (w->size == 1) {
        return 0;
    }
    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    CHECK_STATUS(smp_group_run(group, &call), SMP_OK);
    if (w->rank != w->size - 1) {
        smp_status status;

        call.timeout_ns = 20 * SMP_NS_PER_MS;
        status = smp_group_run(group, &call);
        CHECK_STATUS(status, SMP_ERR_TIMED_OUT);
        snprintf(missing, sizeof(missing), "rank %d", w->size - 1);
        CHECK(says(group, "group 'test': barrier 2: "));
        CHECK(says(group, "timed out after 0.0"));
        CHECK(says(group, missing));
        CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_TIMED_OUT);
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

/* Whether a rank sleeps in some group. */
static bool
sleeps(world *w, int rank)
{
    smp_neighbour neighbour;

    if (!smp_comm_neighbour(w->comm, rank, &neighbour)) {
        abort();
    }
    for (int i = 0; i < SMP_SHELVES; i++) {
        if (atomic_load(&neighbour.segment->shelves[i].waits) != 0) {
            return true;
        }
    }
    return false;
}

/* Rank 0 calls a, then b; rank 1 calls b, then a. */
TEST_RANK(groups_entered_in_another_order_are_named_at_the_time_out)
{
    static const int ranks[] = {0, 1};
    smp_group_config config = {.ranks = ranks,
                               .size = 2,
                               .id = 1,
                               .name = "a",
                               .timeout_ns = WORLD_PATIENCE_NS};
    smp_call         call = {.operation = SMP_BARRIER};
    int              failed;
    smp_group       *a;
    smp_group       *b;

    CHECK_STATUS(smp_group_create(w->comm, &config, &a, &failed), SMP_OK);
    config.id = 2;
    config.name = "b";
    CHECK_STATUS(smp_group_create(w->comm, &config, &b, &failed), SMP_OK);
    if (w->rank == 0) {
        while (!sleeps(w, 1)) {
            sched_yield();
        }
        call.timeout_ns = SMP_NS_PER_MS;
        CHECK_STATUS(smp_group_run(a, &call), SMP_ERR_TIMED_OUT);
        CHECK(says(a, "group 'a': barrier 1: timed out"));
        CHECK(says(a, "without rank 1; rank 1 waits in group 'b' for barrier 1"));
        call.timeout_ns = 0;
        CHECK_STATUS(smp_group_run(b, &call), SMP_OK);
    } else {
        CHECK_STATUS(smp_group_run(b, &call), SMP_OK);
    }
    smp_group_destroy(a);
    smp_group_destroy(b);
    return 0;
}

TEST_RANK(a_member_that_has_left_is_named)
{
    smp_call   call = {.operation = SMP_BARRIER};
    smp_group *group;
    smp_status status;

    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    CHECK_STATUS(smp_group_run(group, &call), SMP_OK);
    if (w->rank != 0) {
        status = smp_group_run(group, &call);
        CHECK_STATUS(status, SMP_ERR_CLOSED);
        CHECK(says(group, "rank 0"));
    }
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(a_forked_child_is_no_member)
{
    smp_call   call = {.operation = SMP_BARRIER};
    int        how;
    pid_t      pid;
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 3, false, &group), SMP_OK);
    pid = fork();
    if (pid == 0) {
        int closed = smp_group_run(group, &call) == SMP_ERR_CLOSED;

        smp_group_destroy(group);
        _exit(closed ? 0 : 1);
    }
    CHECK(waitpid(pid, &how, 0) == pid && how == 0);
    CHECK(random_calls(w, &group, 1, 10, 5) == 0);
    smp_group_destroy(group);
    return 0;
}

/* Everybody calls what comes up; then, at any moment, rank 1 is dead. */
static int
run_until_rank_1_dies(world *w, bool only_shelves)
{
    uint64_t   seed = 99;
    int64_t    noticed;
    smp_status status = SMP_OK;
    smp_group *group;

    CHECK_STATUS(make_world_group(w, 3, only_shelves, &group), SMP_OK);
    if (w->rank == 1) {
        pthread_t killer;

        CHECK(pthread_create(&killer, NULL, die_soon, w) == 0);
    }
    while (status == SMP_OK) {
        smp_operation  o = (smp_operation)(next_random(&seed) % SMP_OPERATIONS);
        size_t         count = next_random(&seed) % 3 == 0 ? 400000 : 100;
        reference_call r;

        CHECK(reference_make(&r, group, o, SMP_F32, count, false, 5));
        status = smp_group_run(group, &r.call);
        reference_free(&r);
    }
    noticed = smp_clock_ns() - atomic_load(&w->shared->scratch[0]);
    CHECK_STATUS(status, SMP_ERR_PEER_LOST);
    CHECK(says(group, "rank 1 is lost"));
    atomic_store(&w->shared->scratch[1 + w->rank], noticed);
    for (int r = 0; r < w->size; r++) { /* the others know it before anyone leaves */
        while (r != 1 && atomic_load(&w->shared->scratch[1 + r]) == 0) {
            sched_yield();
        }
    }
    if (getenv("SMP_TEST_TIMES") != NULL) {
        fprintf(stderr, "rank %d noticed after %.2f ms\n", w->rank,
                (double)noticed / 1e6);
    }
    smp_group_destroy(group);
    return 0;
}

TEST_RANK(a_killed_member_is_named_to_all_others)
{
    return run_until_rank_1_dies(w, false);
}

TEST_RANK(a_killed_member_is_named_by_those_who_use_shelves)
{
    return run_until_rank_1_dies(w, true);
}

/* -------------------------------------------------------------------------- main */

typedef struct {
    world_test test;
    int        first; /* sizes of the world */
    int        last;
    int        times;   /* 0: once */
    bool       threads; /* also with ranks as threads */
    bool       tcp;     /* not through shared memory */
} entry;

#define ENTRY(name) .test = {#name, name, 0}
#define SOME(name, from, to)                                                           \
    {                                                                                  \
        ENTRY(name), .first = from, .last = to, .threads = true                        \
    }
#define ALL(name) SOME(name, 1, 5)
#define KILLED(name, size)                                                             \
    {                                                                                  \
        ENTRY(name), .first = size, .last = size, .times = 12                          \
    }

/* Those that need processes come first: a process that has had threads forks badly
 * under the sanitizers. */
static const entry list[] = {
    KILLED(a_killed_member_is_named_to_all_others, 3),
    KILLED(a_killed_member_is_named_by_those_who_use_shelves, 3),
    {ENTRY(a_forked_child_is_no_member), .first = 2, .last = 2},
    {ENTRY(a_rank_of_another_host_is_unreachable), .first = 2, .last = 2, .tcp = true},
    ALL(nobody_leaves_a_barrier_before_all_have_come),
    ALL(every_operation_gives_the_right_result_by_memory),
    ALL(every_operation_gives_the_right_result_by_shelves),
    SOME(every_dtype_is_moved_and_reduced, 2, 3),
    ALL(any_sequence_of_calls_on_several_groups_is_right),
    ALL(a_part_of_the_ranks_in_any_order_is_a_group),
    SOME(groups_come_and_go, 3, 3),
    SOME(a_rank_is_in_at_most_so_many_groups, 2, 2),
    SOME(an_operation_can_be_moved_on_from_outside, 2, 3),
    SOME(a_wait_that_ends_early_is_no_error, 1, 3),
    SOME(different_calls_are_an_error_on_all, 2, 4),
    SOME(what_makes_no_sense_is_refused_at_once, 1, 2),
    SOME(a_group_needs_one_list_of_ranks_on_all, 1, 3),
    SOME(a_time_out_names_group_operation_and_the_missing_ranks, 2, 3),
    SOME(groups_entered_in_another_order_are_named_at_the_time_out, 2, 2),
    SOME(a_member_that_has_left_is_named, 2, 3),
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
                (threads != 0 && !list[i].threads)) {
                continue;
            }
            /* As threads, for the thread sanitizer: up to three are enough. */
            for (int size = list[i].first;
                 size <= list[i].last && (threads == 0 || size <= 3); size++) {
                for (int time = 0; time == 0 || time < list[i].times; time++) {
                    const char *by = list[i].tcp ? "tcp" : "shm";
                    int         wrong = threads != 0 ? world_run_threads(test, by, size)
                                                     : world_run_processes(test, by, size);

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
