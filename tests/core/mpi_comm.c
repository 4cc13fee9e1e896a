/* The list of tests for transports and that for groups on several hosts, over MPI:
 * mpirun -np 4 mpi_comm [name]; those of peers that leave or are stopped are for two
 * ranks.
 *
 * SMP_TEST_TRANSPORTS=shm,mpi lets ranks that see the same /dev/shm use it; the last
 * line says by which transports the ranks were connected.  Without it, groups
 * are tested too, by both.
 *
 * One of the tests that kill a rank: mpirun --enable-recovery -np 3 mpi_comm killed
 * NAME. It is a job of its own, since MPI's calls that wait for all ranks are over
 * then. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <mpi.h>

#include "comm/transport/mpi/mpi.h"
#include "comm_list.h"
#include "deaths.h"
#include "hosts_list.h"
#include "partings.h"

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

TEST_RANK(remember_transports, .processes = "")
{
    used = transports_used(w);
    w->barrier(w);
}

/* What all ranks map, as those of world.h do: a file without a name of rank 0, which
 * the others reach through /proc, also where they have a /dev/shm of their own. */
static world_shared *
share(int rank, int size)
{
    int                   own[2] = {(int)getpid(), -1};
    int                   fd;
    char                  path[64];
    world_shared         *shared;
    pthread_barrierattr_t attributes;

    if (rank == 0) {
        own[1] = memfd_create("smp-test", MFD_CLOEXEC);
        if (own[1] < 0 || ftruncate(own[1], sizeof(*shared)) != 0) {
            abort();
        }
    }
    MPI_Bcast(own, 2, MPI_INT, 0, MPI_COMM_WORLD);
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", own[0], own[1]);
    fd = open(path, O_RDWR | O_CLOEXEC);
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || shared == MAP_FAILED) {
        abort();
    }
    if (rank == 0) {
        pthread_barrierattr_init(&attributes);
        pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(&shared->barrier, &attributes, (unsigned)size);
        pthread_barrierattr_destroy(&attributes);
    }
    shared->pids[rank] = getpid();
    MPI_Barrier(MPI_COMM_WORLD);
    close(fd);
    if (rank == 0) {
        close(own[1]);
    }
    return shared;
}

/* This rank's part of a test. */
static bool
run_here(world *w, const world_test *test)
{
    alarm(WORLD_SECONDS);
    w->test = test;
    w->pool_bytes = test->pool_bytes != 0 ? test->pool_bytes : WORLD_POOL;
    return world_run_rank(w);
}

/* It has failed if it did on any rank. */
static void
run(world *w, const world_test *test)
{
    int mine = run_here(w, test);
    int worst;

    MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    check_ran++;
    check_failed += worst;
    if (worst != 0 && w->rank == 0) {
        printf("FAILED %s, %d ranks, hosts %s, %s\n", test->name, w->size,
               test->hosts != NULL ? test->hosts : "as they are", w->transports);
    }
}

/* The end of this process. */
static void
run_death(world *w, const char *name)
{
    for (world_test *test = world_list; test != NULL; test = test->next) {
        if (strcmp(test->name, name) == 0) {
            bool    failed = run_here(w, test);
            int64_t took = atomic_load(&w->shared->scratch[1 + w->rank]);

            printf("rank %d, %s: %s", w->rank, name, failed ? "FAILED" : "passed");
            if (took != 0) {
                printf(", knew it after %.1f ms", (double)took / SMP_NS_PER_MS);
            }
            printf("\n");
            exit(failed);
        }
    }
    exit(1);
}

/* By its layouts of so many ranks, or by so many. */
static void
run_test(world *w, const world_test *test, const char *transports)
{
    world_test one = *test;

    for (int l = 0; l < WORLD_LAYOUTS && test->layouts[l] != NULL; l++) {
        if (transports == NULL && (int)strlen(test->layouts[l]) == w->size) {
            w->transports = "shm,mpi";
            one.hosts = test->layouts[l];
            run(w, &one);
        }
    }
    if (test->layouts[0] == NULL &&
        (test->processes == NULL || strchr(test->processes, '0' + w->size) != NULL)) {
        w->transports = transports != NULL ? transports : "mpi";
        run(w, test);
    }
}

int
main(int argc, char **argv)
{
    const char *transports = getenv("SMP_TEST_TRANSPORTS");
    world       w = {.transports = transports != NULL ? transports : "mpi",
                     .barrier = world_local_barrier,
                     .exchange = world_local_exchange};
    int         level = 0;

    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &w.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &w.size);
    w.shared = share(w.rank, w.size);
    if (smp_transport_register(&smp_transport_mpi) != SMP_OK || w.size > WORLD_RANKS) {
        return 1;
    }
    if (argc > 2 && strcmp(argv[1], "killed") == 0) {
        run_death(&w, argv[2]);
    }
    check_only = argc > 1 ? argv[1] : "";
    run(&w, &world_remember_transports);
    for (world_test *test = world_list; test != NULL; test = test->next) {
        if (check_chosen(test->name) && !test->forks) {
            run_test(&w, test, transports);
        }
    }
    MPI_Allreduce(MPI_IN_PLACE, &used, 1, MPI_INT, MPI_BOR, MPI_COMM_WORLD);
    MPI_Finalize();
    if (w.rank == 0) {
        printf("over%s%s: ", used & 1 ? " shm" : "", used & 2 ? " mpi" : "");
        return tests_are_over();
    }
    return check_failed != 0;
}
