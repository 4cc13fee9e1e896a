/* Groups of the ranks of a world, calls whose results are known, and what every group
 * must do: run by collective_test.c on one host, and by hosts_test.c on several. */
#ifndef SMP_TESTS_GROUPS_H
#define SMP_TESTS_GROUPS_H

#include <sched.h>

#include "comm/collective/checks/agreement.h"
#include "comm/collective/group.h"
#include "comm/memory/control_block.h"
#include "reference.h"
#include "traffic.h"
#include "world.h"

/* Two hosts, whose ranks are neighbours in the tree of sums or are not; one rank on
 * each; hosts of several sizes. */
#define ON_ALL_LAYOUTS .layouts = {"ab", "aba", "aabb", "abab", "abbc", "cbbac"}
#define ON_TWO_HOSTS .layouts = {"ab", "aba"}

static inline smp_status
make_group(world *w, const int *ranks, int size, uint64_t id, bool only_slots,
           smp_group **out)
{
    smp_group_config config = {.ranks = ranks,
                               .size = size,
                               .id = id,
                               .name = "test",
                               .timeout_ns = WORLD_DEADLINE_NS,
                               .reading =
                                   only_slots ? SMP_READ_NEVER : SMP_READ_ALWAYS};
    int              failed;

    return smp_group_create(w->comm, &config, out, &failed);
}

/* Of all ranks, in order. */
static inline smp_group *
world_group(world *w, uint64_t id, bool only_slots)
{
    static const int ranks[WORLD_RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    smp_group       *group = NULL;

    CHECK_OK(make_group(w, ranks, w->size, id, only_slots, &group));
    return group;
}

/* Around everything at which the way changes, in elements of 4 bytes. */
static const size_t counts[] = {0, 1, 3, 1000, 2048, 4097, 16384, 16385, 33000, 70001};
enum { COUNTS = COUNT_OF(counts) };

static inline void
all_operations(world *w, smp_group *group, smp_dtype dtype, size_t count, uint64_t seed)
{
    for (smp_operation o = SMP_BARRIER; o < SMP_OPERATIONS; o++) {
        for (int uneven = 0; uneven < 2; uneven++) {
            reference_call r;

            if (!reference_make(&r, group, o, dtype, count, uneven != 0, seed)) {
                continue;
            }
            CHECK_OK(smp_group_run(group, &r.call));
            if (!reference_right(&r)) {
                fprintf(stderr, "rank %d: %s of %zu %s, uneven %d, reduction %s\n",
                        w->rank, smp_operation_name(o), count, smp_dtype_name(dtype),
                        uneven, smp_reduction_name(r.call.reduction));
                check_fail();
            }
            reference_free(&r);
            seed += 17;
        }
    }
}

/* Every member of a group draws the same calls. */
static inline void
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
            CHECK_OK(smp_group_run(group, &r.call));
            if (!reference_right(&r)) {
                fprintf(stderr, "rank %d: call %d: %s of %zu %s\n", w->rank, i,
                        smp_operation_name(o), elements, smp_dtype_name(dtype));
                check_fail();
            }
            reference_free(&r);
        }
    }
}

static inline void
refuse(world *w, smp_group *group, const smp_call *call, const char *one,
       const char *other)
{
    const char *error = smp_group_error(group);

    (void)w;
    CHECK_STATUS(smp_group_run(group, call), SMP_ERR_MISMATCH);
    if (strstr(error, one) == NULL || strstr(error, other) == NULL) {
        fprintf(stderr, "'%s' lacks '%s' or '%s'\n", error, one, other);
        check_fail();
    }
}

static inline int
says(const smp_group *group, const char *what)
{
    if (strstr(smp_group_error(group), what) == NULL) {
        fprintf(stderr, "'%s' lacks '%s'\n", smp_group_error(group), what);
        return 0;
    }
    return 1;
}

TEST_RANK(nobody_leaves_a_barrier_before_all_have_come, .processes = "12345",
          .threads = "123", ON_TWO_HOSTS)
{
    enum { COUNT = 300 };
    smp_call   barrier = {.operation = SMP_BARRIER};
    smp_group *group = world_group(w, 7, false);

    for (int i = 1; i <= COUNT; i++) {
        atomic_store(&w->shared->scratch[w->rank], i);
        CHECK_OK(smp_group_run(group, &barrier));
        for (int r = 0; r < w->size; r++) {
            CHECK(atomic_load(&w->shared->scratch[r]) >= i);
        }
    }
    CHECK(smp_group_sequence(group) == COUNT);
    smp_group_destroy(group);
}

TEST_RANK(any_sequence_of_calls_on_several_groups_is_right, .processes = "12345",
          .threads = "123", ON_ALL_LAYOUTS)
{
    smp_group *groups[3];

    for (int i = 0; i < 3; i++) {
        groups[i] = world_group(w, 20 + (uint64_t)i, i == 1);
    }
    random_calls(w, groups, 3, 300, 4711);
    for (int i = 0; i < 3; i++) {
        smp_group_destroy(groups[i]);
    }
}

TEST_RANK(a_part_of_the_ranks_in_any_order_is_a_group, .processes = "12345",
          .threads = "123", ON_ALL_LAYOUTS, .sample = "aabb")
{
    int        ranks[WORLD_RANKS];
    int        n = 0;
    smp_group *mine;  /* those with ranks as odd, or even, as this one */
    smp_group *world; /* all, from the last to the first */

    for (int r = w->size; r-- > 0;) {
        ranks[n++] = r;
    }
    CHECK_OK(make_group(w, ranks, n, 1, false, &world));
    CHECK(smp_group_member(world) == w->size - 1 - w->rank);
    n = 0;
    for (int r = w->rank % 2; r < w->size; r += 2) {
        ranks[n++] = r;
    }
    CHECK_OK(make_group(w, ranks, n, 2 + (uint64_t)(w->rank % 2), false, &mine));
    CHECK(smp_group_size(mine) == n);
    for (uint64_t i = 0; i < 10; i++) {
        random_calls(w, &mine, 1, 10, 100 + i + (uint64_t)(w->rank % 2));
        random_calls(w, &world, 1, 10, 200 + i);
    }
    smp_group_destroy(mine);
    smp_group_destroy(world);
}

/* More groups than a rank can be in at once, one after the other, with one id: no
 * member takes another's last group for the next one. */
TEST_RANK(groups_come_and_go, .processes = "3", .threads = "3", ON_TWO_HOSTS)
{
    for (uint64_t i = 0; i < SMP_CONTROL_BLOCKS + 10; i++) {
        smp_group *group;

        group = world_group(w, 5, i % 2 == 0);
        random_calls(w, &group, 1, 3, i);
        smp_group_destroy(group);
    }
}

/* Nobody waits in C: all is done by calls that return at once. */
TEST_RANK(an_operation_can_be_moved_on_from_outside, .processes = "23", .threads = "23",
          ON_TWO_HOSTS)
{
    smp_group *group = world_group(w, 3, w->size % 2 == 0);

    for (smp_operation o = 0; o < SMP_OPERATIONS; o++) {
        reference_call r;
        bool           over = false;

        CHECK(reference_make(&r, group, o, SMP_BF16, 200000, false, 77));
        CHECK_OK(smp_group_start(group, &r.call));
        while (!over) {
            CHECK_OK(smp_group_wait(group, 0, &over));
            sched_yield();
        }
        CHECK(reference_right(&r));
        reference_free(&r);
    }
    smp_group_destroy(group);
}

/* Waiting may be cut into pieces. */
TEST_RANK(a_wait_that_ends_early_is_no_error, .processes = "123", .threads = "123",
          ON_TWO_HOSTS)
{
    smp_call   barrier = {.operation = SMP_BARRIER};
    bool       over = false;
    smp_group *group = world_group(w, 3, false);

    if (w->rank == 0 && w->size > 1) {
        CHECK_OK(smp_group_start(group, &barrier));
        CHECK_OK(smp_group_wait(group, smp_clock_ns(), &over));
        CHECK_OK(smp_group_wait(group, smp_clock_ns() + 1000000, &over));
        CHECK(!over);
        CHECK(smp_group_waited_ns(group) > 0);
        w->barrier(w);
        while (!over) {
            CHECK_OK(smp_group_wait(group, smp_clock_ns() + 1000000, &over));
        }
    } else {
        w->barrier(w); /* rank 0 has found out that nobody else comes */
        CHECK_OK(smp_group_run(group, &barrier));
    }
    /* The time of the next one is its own. */
    CHECK_OK(smp_group_start(group, &barrier));
    CHECK(smp_group_waited_ns(group) == 0);
    CHECK_OK(smp_group_wait(group, SMP_NEVER, &over));
    CHECK(over && smp_group_waited_ns(group) == 0);
    smp_group_destroy(group);
}

/* The last rank calls something else; all are told both sides, and go on. */
TEST_RANK(different_calls_are_an_error_on_all, .processes = "234", .threads = "23",
          ON_TWO_HOSTS, .sample = "aba")
{
    enum { LARGE = 1 << 18 };
    static float   large[LARGE];
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
    uint32_t       keys[2];

    if (w->size == 1) {
        return;
    }
    group = world_group(w, 3, false);
    snprintf(odd_rank, sizeof(odd_rank), "rank %d calls", w->size - 1);
    call = usual;
    call.operation = odd ? SMP_ALL_GATHER : SMP_ALL_REDUCE;
    refuse(w, group, &call, "rank 0 calls all-reduce 1 (sum) of 8 float32",
           "calls all-gather 1 of 8 float32");
    call = usual;
    call.count = odd ? 7 : 8;
    refuse(w, group, &call, "of 8 float32", "of 7 float32");
    call.count = odd ? 0 : 8;
    refuse(w, group, &call, odd_rank, "of 0 float32");
    call.count = odd ? LARGE : 8; /* large ones go another way */
    call.in = odd ? large : in;
    call.out = odd ? large : out;
    refuse(w, group, &call, odd_rank, "of 8 float32");
    call = usual;
    call.dtype = odd ? SMP_I32 : SMP_F32;
    refuse(w, group, &call, "float32", "int32");
    call = usual;
    call.operation = SMP_BROADCAST; /* what the core moves as bytes, or as two reals */
    call.dtype = SMP_U8;
    call.kind = odd ? 0 : smp_kind_of(0, 16, 1);
    refuse(w, group, &call, "of 4 int16", "of 8 uint8");
    call.kind = smp_kind_of(odd ? 11 : 13, 8, 1);
    refuse(w, group, &call, "of 8 float8_e5m2fnuz", "of 8 float8_e4m3fnuz");
    call = usual;
    call.kind = odd ? 0 : smp_kind_of(5, 64, 1);
    refuse(w, group, &call, "(sum) of 4 complex64", "(sum) of 8 float32");
    call = usual;
    call.reduction = odd ? SMP_MAX : SMP_SUM;
    refuse(w, group, &call, "(sum)", "(max)");
    call = usual;
    call.operation = SMP_BROADCAST;
    call.root = odd ? 1 : 0;
    refuse(w, group, &call, "with root 0", "with root 1");
    call = usual;
    call.operation = odd ? SMP_BARRIER : SMP_ALL_REDUCE;
    refuse(w, group, &call, odd_rank, "calls barrier");
    call = usual;
    call.operation = SMP_ALL_GATHER;
    call.counts = odd ? others : splits;
    refuse(w, group, &call, "split size 0 is 1 on rank 0", "and 2 on rank");
    call.counts = splits;
    call.kind = smp_kind_of(odd ? 5 : 4, 64, 1);
    refuse(w, group, &call, "of bfloat64 with", "of complex64 with");
    call.kind = 0;
    call.counts = odd ? NULL : splits;
    refuse(w, group, &call, "with split sizes", "of 8 float32");
    call.hints.assumed = odd ? 2 : 1; /* which counts before all that differs */
    CHECK_STATUS(smp_group_run(group, &call), SMP_ERR_SIZES);
    CHECK(says(group, "assume other sizes"));
    call.hints.assumed = odd ? 0 : 1;
    call.counts = odd ? splits : NULL; /* who knows the sizes calls something else */
    refuse(w, group, &call, "with assumed sizes", "with split sizes");
    call.hints.assumed = odd ? 2 : 1;
    call.hints.key = odd ? 0xabc : 0x12345678; /* what it is for before that */
    refuse(w, group, &call, "assumed sizes with key 12345678",
           "assumed sizes with key 00000abc");
    smp_group_keys(group, keys);
    CHECK(keys[0] == 0x12345678 && keys[1] == 0xabc);
    call = usual;
    call.hints.key = odd ? 0 : 0xabc;
    refuse(w, group, &call, "rank 0 calls all-reduce", "with key 00000abc");
    CHECK(strstr(smp_group_error(group), "with key 00000000") == NULL);
    smp_group_keys(group, keys);
    CHECK(keys[0] == 0xabc && keys[1] == 0);
    call.hints.key = 0xabc; /* the same says nothing */
    call.count = odd ? 7 : 8;
    refuse(w, group, &call, "of 8 float32", "of 7 float32");
    CHECK(strstr(smp_group_error(group), "key") == NULL);
    smp_group_keys(group, keys);
    CHECK(keys[0] == 0 && keys[1] == 0);
    call.count = 8;
    call.operation = SMP_BROADCAST; /* has a root in its place */
    call.root = 1;
    call.hints.key = odd ? 1 : 2;
    CHECK_OK(smp_group_run(group, &call));
    memset(out, 0, sizeof(out));
    call = usual;
    call.operation = SMP_ALL_TO_ALL;
    call.counts = odd ? others : splits;
    call.out_counts = splits;
    refuse(w, group, &call, "sends 2 elements to rank 0", "which expects 1");
    for (int i = 0; i < 512; i++) {
        CHECK(out[i] == 0); /* nothing was written */
    }
    random_calls(w, &group, 1, 20, 8);
    smp_group_destroy(group);
}

TEST_RANK(what_makes_no_sense_is_refused_at_once, .processes = "12", .threads = "12",
          ON_TWO_HOSTS)
{
    float      data[8] = {0};
    size_t     counts[WORLD_RANKS] = {1, 1, 1, 1, 1, 1, 1, 1};
    smp_call   call = {.dtype = SMP_F32, .count = 1, .in = data, .out = data};
    smp_group *group = world_group(w, 3, false);

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
    random_calls(w, &group, 1, 5, 8);
    smp_group_destroy(group);
}

TEST_RANK(a_member_that_has_left_is_named, .processes = "23", .threads = "23",
          ON_TWO_HOSTS, .sample = "aba")
{
    smp_call   call = {.operation = SMP_BARRIER};
    smp_group *group;
    smp_status status;

    group = world_group(w, 3, false);
    CHECK_OK(smp_group_run(group, &call));
    if (w->rank != 0) {
        status = smp_group_run(group, &call);
        CHECK_STATUS(status, SMP_ERR_CLOSED);
        CHECK(says(group, "rank 0"));
    }
    smp_group_destroy(group);
}

TEST_RANK(a_forked_child_is_no_member, .processes = "2", .layouts = {"ab", "aab"},
          .forks = true)
{
    smp_call   call = {.operation = SMP_BARRIER};
    int        how;
    pid_t      pid;
    smp_group *group = world_group(w, 3, false);

    pid = fork();
    if (pid == 0) {
        int closed = smp_group_run(group, &call) == SMP_ERR_CLOSED;

        smp_group_destroy(group);
        _exit(closed ? 0 : 1);
    }
    CHECK(waitpid(pid, &how, 0) == pid && how == 0);
    random_calls(w, &group, 1, 10, 5);
    smp_group_destroy(group);
}

/* Sizes of 5 bytes to 300 KB, every dtype, whatever reduction and root come up. */
TEST_RANK(every_dtype_is_moved_and_reduced, .processes = "23", .threads = "23",
          .layouts = {"aab", "abab"})
{
    static const size_t sizes[] = {5, 3001, 37000};
    smp_group          *group;

    /* The largest goes the same ways as the tests' larger float32. */
    group = world_group(w, 9, false);
    for (smp_dtype d = 0; d < SMP_DTYPES; d++) {
        for (size_t i = 0; i < (WORLD_SANITIZED ? 2 : 3); i++) {
            all_operations(w, group, d, sizes[i], 1000 + d * 10 + i);
        }
    }
    smp_group_destroy(group);
}

/* Everybody calls what comes up; then, at any moment, rank 1 is dead. */
static inline void
run_until_rank_1_dies(world *w, bool only_slots)
{
    uint64_t   seed = 99;
    smp_status status = SMP_OK;
    smp_group *group = world_group(w, 3, only_slots);

    w->barrier(w); /* a transport may lose what it has not sent when its process dies */
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
    CHECK_STATUS(status, SMP_ERR_PEER_LOST);
    CHECK(says(group, "rank 1 is lost"));
    atomic_store(&w->shared->scratch[1 + w->rank], 1);
    for (int r = 0; r < w->size; r++) { /* the others know it before anyone leaves */
        while (r != 1 && atomic_load(&w->shared->scratch[1 + r]) == 0) {
            sched_yield();
        }
    }
    smp_group_destroy(group);
}

TEST_RANK(a_killed_member_is_named_to_all_others, .processes = "3", .times = 12,
          .layouts = {"abb", "aab", "abc"}, .sample = "abb", .forks = true)
{
    run_until_rank_1_dies(w, false);
}

TEST_RANK(a_killed_member_is_named_by_those_who_use_slots, .processes = "3",
          .times = 12, .layouts = {"aba"}, .forks = true)
{
    run_until_rank_1_dies(w, true);
}

#endif
