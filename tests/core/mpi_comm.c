/* The list of tests for transports, over MPI: mpirun -np 4 mpi_comm [name].
 *
 * SMP_TEST_TRANSPORTS=shm,mpi lets ranks that see the same /dev/shm use it; the last
 * line says by which transports the ranks were connected. */
#define _GNU_SOURCE
#include <mpi.h>

#include "comm/mpi/mpi.h"
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

/* A name of `names` for each peer, as a set of bits. */
static int
transports_used(const world *w)
{
    static const char *const names[] = {"shm", "mpi"};
    int                      used = 0;

    for (int r = 0; r < w->size; r++) {
        for (int i = 0; i < 2 && r != w->rank; i++) {
            used |= (strcmp(smp_comm_transport(w->comm, r), names[i]) == 0) << i;
        }
    }
    return used;
}

static int used;

TEST_RANK(remember_transports)
{
    used = transports_used(w);
    w->barrier(w);
    return 0;
}

int
main(int argc, char **argv)
{
    static const world_test first = LISTED(remember_transports, 0);
    const char             *transports = getenv("SMP_TEST_TRANSPORTS");

    world w = {.transports = transports != NULL ? transports : "mpi",
               .barrier = mpi_barrier,
               .exchange = mpi_exchange};
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
    w.test = &first;
    w.pool_bytes = WORLD_POOL;
    failed = world_run_rank(&w) != 0;
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
    MPI_Allreduce(MPI_IN_PLACE, &used, 1, MPI_INT, MPI_BOR, MPI_COMM_WORLD);
    if (w.rank == 0) {
        printf("over%s%s: ", used & 1 ? " shm" : "", used & 2 ? " mpi" : "");
        printf("%d passed, %d failed\n", ran - failed, failed);
    }
    MPI_Finalize();
    return failed != 0 || ran == 0;
}
