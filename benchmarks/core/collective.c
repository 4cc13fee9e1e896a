/* Collectives of one host: a group's against the same of MPI.
 *
 *     make -C benchmarks/core collective                     2 ranks, a core for each
 *     make -C benchmarks/core collective RANKS=4 BIND=none   more ranks than cores
 *
 * One run, both sides in turn.  Inputs are written before every call, all-reduce is in
 * place, what arrives is read inside the timed part.  "slots": members do not
 * read each other's memory; "pool": tensors lie in the ranks' pools.  A time is that of
 * the slowest rank; the table has the best and the median of the rounds.
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "comm/collective/group.h"
#include "comm/messaging/comm.h"
#include "comm/transport/card.h"
#include "common/clock.h"

#define ROUNDS 15
#define SIDES 5
#define LARGE ((size_t)16 << 20)

static int        rank;
static int        size;
static smp_group *usual; /* as members choose */
static smp_group *by_reading;
static smp_group *by_slots;
static float     *own[2]; /* in, out: private */
static float     *pool[2];
static float     *in; /* of the side whose turn it is */
static float     *out;
static float      sink;

static void
check(smp_status status, const char *doing)
{
    if (status != SMP_OK) {
        fprintf(stderr, "%s: %s\n", doing, smp_status_text(status));
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static smp_comm *
connect_all(void)
{
    smp_comm_config config = {.rank = rank,
                              .size = size,
                              .spin_us = -1,
                              .transports = "shm",
                              .job = "collective",
                              .pool_bytes = LARGE * (size_t)(size + 2)};
    uint64_t       *cards = calloc((size_t)size, SMP_CARD_BYTES);
    uint64_t        own[SMP_CARD_BYTES / 8] = {0};
    const void    **list = calloc((size_t)size, sizeof(void *));
    size_t         *bytes = calloc((size_t)size, sizeof(size_t));
    smp_comm       *comm;
    size_t          n;
    int             failed;
    const void     *card;

    check(smp_comm_create(&config, &comm), "create");
    card = smp_comm_card(comm, &n);
    memcpy(own, card, n);
    MPI_Allgather(own, SMP_CARD_BYTES, MPI_BYTE, cards, SMP_CARD_BYTES, MPI_BYTE,
                  MPI_COMM_WORLD);
    for (int r = 0; r < size; r++) {
        list[r] = cards + (size_t)r * SMP_CARD_BYTES / 8;
        bytes[r] = ((const smp_card *)list[r])->bytes;
    }
    check(smp_comm_connect(
              comm, list, bytes,
              &(smp_deadline){.at_ns = smp_clock_deadline(10000 * SMP_NS_PER_MS)},
              &failed),
          "connect");
    free((void *)list);
    free(bytes);
    free(cards);
    return comm;
}

static smp_group *
make_group(smp_comm *comm, uint64_t id, smp_reading reading)
{
    int             *ranks = calloc((size_t)size, sizeof(int));
    smp_group_config config = {.ranks = ranks,
                               .size = size,
                               .id = id,
                               .name = "benchmark",
                               .timeout_ns = 60 * SMP_NS_PER_S,
                               .reading = reading};
    smp_group       *group;
    int              failed;

    for (int r = 0; r < size; r++) {
        ranks[r] = r;
    }
    check(smp_group_create(comm, &config, &group, &failed), "group");
    free(ranks);
    return group;
}

/* bytes: of the input, or for the reduce-scatter and all-gather likewise. */
static void
run_ours(smp_group *group, smp_operation operation, size_t bytes)
{
    smp_call call = {.operation = operation,
                     .dtype = SMP_F32,
                     .count = bytes / sizeof(float),
                     .in = in,
                     .out = operation == SMP_ALL_REDUCE ? in : out};

    if (operation == SMP_REDUCE_SCATTER) {
        call.count /= (size_t)size;
    }
    check(smp_group_run(group, &call), "run");
}

static void
run_mpi(smp_operation operation, size_t bytes)
{
    int count = (int)(bytes / sizeof(float));

    if (operation == SMP_ALL_REDUCE) {
        MPI_Allreduce(MPI_IN_PLACE, in, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (operation == SMP_ALL_GATHER) {
        MPI_Allgather(in, count, MPI_FLOAT, out, count, MPI_FLOAT, MPI_COMM_WORLD);
    } else {
        MPI_Reduce_scatter_block(in, out, count / size, MPI_FLOAT, MPI_SUM,
                                 MPI_COMM_WORLD);
    }
}

static void
read_all(const float *data, size_t bytes)
{
    float sums[16] = {0};

    for (size_t i = 0; i + 16 <= bytes / sizeof(float); i += 16) {
        for (size_t j = 0; j < 16; j++) {
            sums[j] += data[i + j];
        }
    }
    for (size_t i = bytes / sizeof(float) / 16 * 16; i < bytes / sizeof(float); i++) {
        sums[0] += data[i];
    }
    sink += sums[0] + sums[15];
}

static size_t
output_bytes(smp_operation operation, size_t bytes)
{
    return operation == SMP_ALL_GATHER       ? bytes * (size_t)size
           : operation == SMP_REDUCE_SCATTER ? bytes / (size_t)size
                                             : bytes;
}

/* us per call of the slowest rank. */
static double
round_of(int side, smp_operation operation, size_t bytes, int calls)
{
    const float *result;
    double       mine = 0;
    double       all;

    in = side == 4 ? pool[0] : own[0];
    out = side == 4 ? pool[1] : own[1];
    result = operation == SMP_ALL_REDUCE ? in : out;
    for (int i = 0; i < calls; i++) {
        int64_t start;

        for (size_t j = 0; j < bytes / sizeof(float); j++) {
            in[j] = (float)(rank + i);
        }
        if (calls == 1) {
            MPI_Barrier(MPI_COMM_WORLD);
        }
        start = smp_clock_ns();
        if (side == 0) {
            run_mpi(operation, bytes);
        } else {
            run_ours(side == 2   ? by_reading
                     : side == 3 ? by_slots
                                 : usual,
                     operation, bytes);
        }
        read_all(result, output_bytes(operation, bytes));
        mine += (double)(smp_clock_ns() - start) / 1e3;
    }
    mine /= calls;
    MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return all;
}

static int
by_value(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The same answer on both sides, before anything is timed. */
static void
check_answer(smp_operation operation, size_t bytes)
{
    size_t n = output_bytes(operation, bytes);
    float *want = malloc(n);

    for (int side = 0; side < SIDES; side++) {
        float *result;

        round_of(side, operation, bytes, 1);
        result = operation == SMP_ALL_REDUCE ? in : out;
        if (side == 0) {
            memcpy(want, result, n);
        } else if (memcmp(want, result, n) !=
                   0) { /* small whole numbers: no rounding */
            fprintf(stderr, "rank %d: wrong %s\n", rank, smp_operation_name(operation));
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        memset(out, 0, n);
    }
    free(want);
}

static void
compare(smp_operation operation, size_t bytes, const char *shown)
{
    double times[SIDES][ROUNDS];
    int    calls = bytes >= LARGE / 16 ? 1 : 2000;

    check_answer(operation, bytes);
    for (int i = 0; i < ROUNDS; i++) {
        for (int side = 0; side < SIDES; side++) {
            times[side][i] = round_of(side, operation, bytes, calls);
        }
    }
    if (rank != 0) {
        return;
    }
    printf("%-15s%8s", smp_operation_name(operation), shown);
    for (int side = 0; side < SIDES; side++) {
        qsort(times[side], ROUNDS, sizeof(double), by_value);
        printf("%12.2f%11.2f", times[side][0], times[side][ROUNDS / 2]);
    }
    printf("%9.2fx%9.2fx\n", times[0][0] / times[1][0],
           times[0][ROUNDS / 2] / times[1][ROUNDS / 2]);
    fflush(stdout);
}

int
main(int argc, char **argv)
{
    static const struct {
        size_t      bytes;
        const char *shown;
    } sizes[] = {{8, "8 B"},         {4096, "4 KiB"},    {64 << 10, "64 KiB"},
                 {1 << 20, "1 MiB"}, {4 << 20, "4 MiB"}, {LARGE, "16 MiB"}};
    struct utsname machine;
    smp_block     *blocks[2];
    smp_comm      *comm;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    comm = connect_all();
    usual = make_group(comm, 1, SMP_READ_WHERE_FASTER);
    by_reading = make_group(comm, 2, SMP_READ_ALWAYS);
    by_slots = make_group(comm, 3, SMP_READ_NEVER);
    for (int i = 0; i < 2; i++) {
        size_t bytes = i == 0 ? LARGE : LARGE * (size_t)size;

        own[i] = aligned_alloc(4096, bytes);
        check(smp_comm_block(comm, (rank + 1) % size, bytes, &blocks[i]), "block");
        pool[i] = smp_block_data(blocks[i]);
        memset(own[i], 0, bytes);
        memset(pool[i], 0, bytes);
    }
    uname(&machine);
    if (rank == 0) {
        printf("%d ranks, %ld cores, %s, members' memory %s, us per call\n", size,
               sysconf(_SC_NPROCESSORS_ONLN), machine.machine,
               smp_group_reads_memory(usual) ? "read" : "not read");
        printf("%-23s%12s%11s%12s%11s%12s%11s%12s%11s%12s%11s%10s%10s\n", "",
               "MPI best", "median", "ours best", "median", "reading", "median",
               "slots", "median", "pool", "median", "best", "median");
    }
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        if (sizes[i].bytes / sizeof(float) >= (size_t)size) {
            compare(SMP_REDUCE_SCATTER, sizes[i].bytes, sizes[i].shown);
        }
        compare(SMP_ALL_GATHER, sizes[i].bytes, sizes[i].shown);
        compare(SMP_ALL_REDUCE, sizes[i].bytes, sizes[i].shown);
    }
    smp_group_destroy(usual);
    smp_group_destroy(by_reading);
    smp_group_destroy(by_slots);
    for (int i = 0; i < 2; i++) {
        smp_block_release(blocks[i]);
        free(own[i]);
    }
    smp_comm_destroy(comm);
    MPI_Finalize();
    return sink == 0.123f;
}
