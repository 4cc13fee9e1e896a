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

static const world_test partings[] = {
    LISTED(a_forked_child_can_do_nothing_and_breaks_nothing, 0),
    LISTED(a_stopped_peer_is_not_lost, 0),
    LISTED(what_a_leaving_peer_said_arrives_although_it_is_talked_to, 0),
};

static const world_test deaths[] = {
    LISTED(a_killed_peer_is_named_to_all_others, 1 << 20),
    LISTED(a_killed_peer_is_noticed_although_its_child_lives, 0),
    LISTED(a_rank_that_dies_before_it_connects_is_named, 0),
};

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))

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
static int
run_here(world *w, const world_test *test)
{
    alarm(WORLD_SECONDS);
    w->test = test;
    w->pool_bytes = test->pool_bytes != 0 ? test->pool_bytes : WORLD_POOL;
    return world_run_rank(w);
}

/* Whether it failed on any rank. */
static bool
run(world *w, const world_test *test)
{
    int mine = run_here(w, test);
    int worst;

    MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    if (worst != 0 && w->rank == 0) {
        printf("FAILED %s, %d ranks, hosts %s, %s\n", test->name, w->size,
               test->hosts != NULL ? test->hosts : "as they are", w->transports);
    }
    return worst != 0;
}

/* The end of this process. */
static void
run_death(world *w, const char *name)
{
    for (size_t i = 0; i < COUNT_OF(deaths); i++) {
        if (strcmp(deaths[i].name, name) == 0) {
            int     failed = run_here(w, &deaths[i]);
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

int
main(int argc, char **argv)
{
    static const world_test first = LISTED(remember_transports, 0);
    const char             *transports = getenv("SMP_TEST_TRANSPORTS");
    bool                    kills = argc > 2 && strcmp(argv[1], "killed") == 0;
    const char             *only = argc > 1 ? argv[1] : "";

    world w = {.transports = transports != NULL ? transports : "mpi",
               .barrier = world_local_barrier,
               .exchange = world_local_exchange};
    int   level = 0;
    int   ran = 0;
    int   failed = 0;

    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &w.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &w.size);
    w.shared = share(w.rank, w.size);
    if (smp_transport_register(&smp_transport_mpi) != SMP_OK || w.size > WORLD_RANKS) {
        return 1;
    }
    if (kills) {
        run_death(&w, argv[2]);
    }
    failed += run(&w, &first);
    for (size_t i = 0; i < COUNT_OF(partings) && w.size == 2; i++) {
        if (strstr(partings[i].name, only) != NULL) {
            failed += run(&w, &partings[i]);
            ran++;
        }
    }
    for (size_t i = 0; i < COMM_LIST_COUNT; i++) {
        if (strstr(comm_list[i].name, only) != NULL) {
            failed += run(&w, &comm_list[i]);
            ran++;
        }
    }
    w.transports = "shm,mpi";
    for (size_t i = 0; i < HOSTS_LIST && transports == NULL; i++) {
        const hosts_entry *listed = &hosts_list[i];

        if (strstr(listed->test.name, only) == NULL || listed->forks) {
            continue;
        }
        for (int l = 0; l < LAYOUTS && listed->hosts[l] != NULL; l++) {
            world_test test = listed->test;

            test.hosts = listed->hosts[l];
            if ((int)strlen(test.hosts) == w.size) {
                failed += run(&w, &test);
                ran++;
            }
        }
    }
    MPI_Allreduce(MPI_IN_PLACE, &used, 1, MPI_INT, MPI_BOR, MPI_COMM_WORLD);
    if (w.rank == 0) {
        printf("over%s%s: ", used & 1 ? " shm" : "", used & 2 ? " mpi" : "");
        printf("%d passed, %d failed\n", ran - failed, failed);
    }
    MPI_Finalize();
    return failed != 0 || ran == 0;
}
