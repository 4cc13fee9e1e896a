/* The list of tests for transports, over MPI: mpirun -np 4 mpi_comm [name] */
#define _GNU_SOURCE
#include <mpi.h>

#include "comm/mpi.h"
#include "comm_list.h"

static void
mpi_barrier(world *w)
{
    (void)w;
    MPI_Barrier(MPI_COMM_WORLD);
}

static void
mpi_exchange(world *w, const void *card, size_t bytes)
{
    static uint8_t mine[SMP_CARD_BYTES];
    uint64_t       size = bytes;
    uint64_t       sizes[WORLD_RANKS];

    memcpy(mine, card, bytes);
    MPI_Allgather(mine, SMP_CARD_BYTES, MPI_BYTE, w->shared->cards, SMP_CARD_BYTES,
                  MPI_BYTE, MPI_COMM_WORLD);
    MPI_Allgather(&size, 1, MPI_UINT64_T, sizes, 1, MPI_UINT64_T, MPI_COMM_WORLD);
    for (int r = 0; r < w->size; r++) {
        w->shared->card_bytes[r] = sizes[r];
    }
}

int
main(int argc, char **argv)
{
    world w = {.transports = "mpi", .barrier = mpi_barrier, .exchange = mpi_exchange};
    int   level = 0;
    int   ran = 0;
    int   failed = 0;

    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &w.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &w.size);
    w.shared = world_share(w.size);
    if (smp_transport_register(&smp_transport_mpi) != SMP_OK || w.size > WORLD_RANKS) {
        return 1;
    }
    for (size_t i = 0; i < COMM_LIST_COUNT; i++) {
        int mine;
        int worst;

        if (argc > 1 && strstr(comm_list[i].name, argv[1]) == NULL) {
            continue;
        }
        alarm(WORLD_SECONDS);
        w.test = &comm_list[i];
        w.pool_bytes = w.test->pool_bytes ? w.test->pool_bytes : WORLD_POOL;
        mine = world_run_rank(&w);
        MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
        if (worst != 0 && w.rank == 0) {
            printf("FAILED %s, %d ranks, mpi\n", w.test->name, w.size);
        }
        failed += worst != 0;
        ran++;
    }
    if (w.rank == 0) {
        printf("%d passed, %d failed\n", ran - failed, failed);
    }
    MPI_Finalize();
    return failed != 0 || ran == 0;
}
