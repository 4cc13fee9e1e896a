/* Peers that are stopped, or leave while they are talked to, as every transport over a
 * network sees them: run by tcp_test.c, ucx_comm.c and mpi_comm.c.  Spec:
 * csrc/comm/messaging/comm.h. */
#ifndef SMP_TESTS_PARTINGS_H
#define SMP_TESTS_PARTINGS_H

#include "traffic.h"

/* Its kernel still answers, and its buffers are full: it is stuck, not lost. */
TEST_RANK(a_stopped_peer_is_not_lost, .processes = "2")
{
    static const size_t sizes[] = {32 << 20};
    smp_message        *message;

    if (w->rank == 1) {
        kill(getpid(), SIGSTOP);
    } else {
        CHECK_OK(send_filled(w, 1, 1, 10, sizes, 1));
        CHECK_STATUS(smp_comm_receive(w->comm, 5 * SMP_NS_PER_S, &message),
                     SMP_ERR_TIMED_OUT);
        CHECK(smp_comm_lost(w->comm) == -1);
        CHECK(kill(w->shared->pids[1], SIGCONT) == 0);
    }
    if (w->rank == 1) {
        expect_filled(w, 1, 10, sizes, 1);
    }
    w->barrier(w);
}

/* What reaches a socket after its end makes the kernel forget what that had to say. */
TEST_RANK(what_a_leaving_peer_said_arrives_although_it_is_talked_to, .processes = "2",
          .times = 20)
{
    enum { COUNT = 50 };
    static const size_t sizes[] = {200000};
    smp_status          status = SMP_OK;
    smp_message        *message;
    uint64_t            count = 0;

    for (uint64_t i = 0; w->rank == 0 && i < COUNT; i++) {
        CHECK_OK(send_filled(w, 1, i, 100, sizes, 1));
    }
    while (w->rank == 1 && status != SMP_ERR_CLOSED) {
        status = send_filled(w, 0, 1, 1000, NULL, 0);
        CHECK(status == SMP_OK || status == SMP_ERR_CLOSED);
        status = smp_comm_receive(w->comm, 0, &message);
        if (status == SMP_OK) {
            CHECK(message_filled(message, count++, 100, sizes, 1));
            smp_message_free(message);
        } else {
            CHECK(status == SMP_ERR_TIMED_OUT || status == SMP_ERR_CLOSED);
        }
    }
    CHECK(w->rank == 0 || count == COUNT);
    CHECK(smp_comm_lost(w->comm) == -1);
}

#endif
