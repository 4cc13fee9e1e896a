/* The list of tests for transports, over those that are always registered: ranks as
 * processes and as threads.  UCX, which needs a library, has ucx_comm.c. */
#define _GNU_SOURCE
#include <fcntl.h>

#include "comm/transport/transport.h"
#include "comm_list.h"

/* ... of a comm that is made here.  Ranks are processes: one that is closed just now,
 * by another thread, may look as if it were inherited. */
TEST_RANK(a_program_that_is_started_inherits_no_descriptor)
{
    enum { FDS = 256 };
    bool      before[FDS];
    int       added = 0;
    int       failed_rank;
    world_end end;

    for (int fd = 0; fd < FDS; fd++) {
        before[fd] = fcntl(fd, F_GETFD) >= 0;
    }
    CHECK_STATUS(world_prepare(w, "another", &end), SMP_OK);
    CHECK_STATUS(smp_comm_connect(end.comm, end.cards, end.card_bytes,
                                  PATIENCE_MS(60000), &failed_rank),
                 SMP_OK);
    for (int fd = 0; fd < FDS; fd++) {
        int flags = fcntl(fd, F_GETFD);

        CHECK(before[fd] || flags < 0 || (flags & FD_CLOEXEC) != 0);
        added += !before[fd] && flags >= 0;
    }
    CHECK(added >= 3); /* epoll, the kick, one for each peer */
    w->barrier(w);
    smp_comm_destroy(end.comm);
    return 0;
}

/* Rank 0 does not connect; whoever else is late, it is the first. */
TEST_RANK(the_first_rank_that_does_not_connect_in_time_is_named)
{
    bool       is_shm = strcmp(w->transports, "shm") == 0;
    int        failed_rank = -1;
    smp_status status = SMP_OK;
    world_end  end;

    CHECK_STATUS(world_prepare(w, "another", &end), SMP_OK);
    if (w->rank != 0) {
        status = smp_comm_connect(end.comm, end.cards, end.card_bytes, PATIENCE_MS(200),
                                  &failed_rank);
    }
    w->barrier(w);
    smp_comm_destroy(end.comm);
    if (w->rank != 0) {
        CHECK_STATUS(status, is_shm ? SMP_ERR_TIMED_OUT : SMP_ERR_UNREACHABLE);
        CHECK(failed_rank == 0);
    }
    return 0;
}

/* UCX and MPI open what they like. */
static const world_test own_list[] = {
    LISTED(a_program_that_is_started_inherits_no_descriptor, 0),
    LISTED(the_first_rank_that_does_not_connect_in_time_is_named, 0),
};

static int failed;
static int ran;

static void
run(const world_test *test, const char *transport, int size, bool as_threads)
{
    if (!world_learns(as_threads, true)) {
        return;
    }
    ran++;
    if ((as_threads ? world_run_threads : world_run_processes)(test, transport, size) !=
        0) {
        failed++;
        printf("FAILED %s, %s, %d ranks, %s\n", test->name, transport, size,
               as_threads ? "threads" : "processes");
    }
}

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))

/* Over each transport, with two and four ranks; as threads, too, where it may be. */
static void
run_everywhere(const world_test *test, bool as_threads)
{
    const smp_transport *transports[SMP_TRANSPORTS];
    int                  ntransports = smp_transport_all(transports);

    for (int t = 0; t < ntransports; t++) {
        for (int size = 2; size <= 4; size += 2) {
            if (transports[t] != &smp_transport_ucx) {
                run(test, transports[t]->name, size, false);
                if (as_threads) {
                    run(test, transports[t]->name, size, true);
                }
            }
        }
    }
}

int
main(int argc, char **argv)
{
    for (size_t i = 0; i < COMM_LIST_COUNT + COUNT_OF(own_list); i++) {
        const world_test *test =
            i < COMM_LIST_COUNT ? &comm_list[i] : &own_list[i - COMM_LIST_COUNT];

        if (argc == 1 || strstr(test->name, argv[1]) != NULL) {
            run_everywhere(test, i < COMM_LIST_COUNT);
        }
    }
    printf("%d passed, %d failed\n", ran - failed, failed);
    return failed != 0 || ran == 0;
}
