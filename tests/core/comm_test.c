/* The list of tests for transports, over those that are always registered: ranks as
 * processes and as threads.  UCX, which needs a library, has ucx_comm.c. */
#define _GNU_SOURCE
#include <fcntl.h>

#include "comm/transport/transport.h"
#include "comm_list.h"

/* UCX and MPI open what they like.  A comm is made here.  Ranks are processes: one that
 * is closed just now, by another thread, may look as if it were inherited. */
TEST_RANK(a_program_that_is_started_inherits_no_descriptor, .processes = "24")
{
    enum { FDS = 256 };
    bool      before[FDS];
    int       added = 0;
    int       failed_rank;
    world_end end;

    for (int fd = 0; fd < FDS; fd++) {
        before[fd] = fcntl(fd, F_GETFD) >= 0;
    }
    CHECK_OK(world_prepare(w, "another", &end));
    CHECK_OK(smp_comm_connect(end.comm, end.cards, end.card_bytes, PATIENCE_MS(60000),
                              &failed_rank));
    for (int fd = 0; fd < FDS; fd++) {
        int flags = fcntl(fd, F_GETFD);

        CHECK(before[fd] || flags < 0 || (flags & FD_CLOEXEC) != 0);
        added += !before[fd] && flags >= 0;
    }
    CHECK(added >= 3); /* epoll, the kick, one for each peer */
    w->barrier(w);
    smp_comm_destroy(end.comm);
}

/* Rank 0 does not connect; whoever else is late, it is the first. */
TEST_RANK(the_first_rank_that_does_not_connect_in_time_is_named, .processes = "24")
{
    bool       is_shm = strcmp(w->transports, "shm") == 0;
    int        failed_rank = -1;
    smp_status status = SMP_OK;
    world_end  end;

    CHECK_OK(world_prepare(w, "another", &end));
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
}

/* Over each transport but UCX, as processes and as threads. */
int
main(int argc, char **argv)
{
    const smp_transport *transports[SMP_TRANSPORTS];
    int                  ntransports = smp_transport_all(transports);

    for (int t = 0; t < ntransports; t++) {
        if (transports[t] != &smp_transport_ucx) {
            for (int as_threads = 0; as_threads < 2; as_threads++) {
                run_worlds_as(argc, argv,
                              &(world_plan){.transports = transports[t]->name,
                                            .processes = "24",
                                            .threads = "24"},
                              as_threads != 0);
            }
        }
    }
    return tests_are_over();
}
