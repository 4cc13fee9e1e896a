/* Operations of groups, on ranks that are processes and threads.
 * Spec: csrc/comm/group.h, csrc/comm/reduce.h. */
#define _GNU_SOURCE
#include "comm/collective.h"
#include "comm/group.h"
#include "reference.h"
#include "world.h"

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

/* -------------------------------------------------------------------------- main */

static const world_test list[] = {
    {.name = "nobody_leaves_a_barrier_before_all_have_come",
     .rank = nobody_leaves_a_barrier_before_all_have_come},
    {.name = "every_operation_gives_the_right_result_by_memory",
     .rank = every_operation_gives_the_right_result_by_memory},
    {.name = "every_operation_gives_the_right_result_by_shelves",
     .rank = every_operation_gives_the_right_result_by_shelves},
};
enum { LIST = sizeof(list) / sizeof(list[0]) };

int
main(int argc, char **argv)
{
    int failed = 0;
    int ran = 0;

    for (size_t i = 0; i < LIST; i++) {
        if (argc > 1 && strstr(list[i].name, argv[1]) == NULL) {
            continue;
        }
        for (int size = 1; size <= 5; size++) {
            int processes = world_run_processes(&list[i], "shm", size);
            int threads = world_run_threads(&list[i], "shm", size);

            if (processes != 0 || threads != 0) {
                printf("FAILED %s, %d ranks, %s\n", list[i].name, size,
                       processes != 0 ? "processes" : "threads");
            }
            failed += (processes != 0) + (threads != 0);
            ran += 2;
        }
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
