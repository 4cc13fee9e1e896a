/* Deaths and forks as every transport sees them that notices a death by itself: run by
 * shm_test.c, tcp_test.c, ucx_comm.c and mpi_comm.c.  Spec: csrc/comm/messaging/comm.h,
 * csrc/common/fork.h. */
#ifndef SMP_TESTS_DEATHS_H
#define SMP_TESTS_DEATHS_H

#include <dirent.h>
#include <sched.h>

#include "comm/messaging/neighbour.h"
#include "traffic.h"

/* Everybody talks to everybody, with blocks of all kinds; then rank 1 is gone. */
TEST_RANK(a_killed_peer_is_named_to_all_others, .processes = "3", .times = 40,
          .pool_bytes = 1 << 20, .forks = true)
{
    static const size_t sizes[] = {100, 10000, 3 << 20};
    pthread_t           killer;
    smp_status          status = SMP_OK;
    smp_message        *message;

    w->barrier(w); /* who dies while others still connect is named by connect */
    if (w->rank == 1) {
        CHECK(pthread_create(&killer, NULL, die_soon, w) == 0);
    }
    for (uint64_t i = 0; status == SMP_OK; i++) {
        for (int j = 0; j < w->size - 1 && status == SMP_OK; j++) {
            status = send_filled(w, other(w, j), i, 50, sizes, i % 16 == 0 ? 3 : i % 3);
        }
        while (status == SMP_OK) {
            status = smp_comm_receive(w->comm, 0, &message);
            if (status == SMP_OK) {
                smp_message_free(message);
            }
        }
        if (status == SMP_ERR_TIMED_OUT) {
            status = SMP_OK;
        }
    }
    CHECK(w->rank != 1);
    CHECK_STATUS(status, SMP_ERR_PEER_LOST);
    CHECK(smp_comm_lost(w->comm) == 1);
    atomic_store(&w->shared->scratch[1 + w->rank],
                 smp_clock_ns() - atomic_load(&w->shared->scratch[0]));
    for (int j = 0; j < w->size - 1;
         j++) { /* the others know it before anyone leaves */
        if (other(w, j) != 1) {
            while (atomic_load(&w->shared->scratch[1 + other(w, j)]) == 0) {
                sched_yield();
            }
        }
    }
}

/* Lives until the others have seen that its parent is gone. */
static inline void
child_main(world *w)
{
    alarm(WORLD_SECONDS); /* its parent's is not its own */
    while (atomic_load(&w->shared->scratch[0]) == 0) {
        sched_yield();
    }
    _exit(0);
}

static inline void
await_loss_of_rank_1(world *w)
{

    expect_end(w, SMP_ERR_PEER_LOST);
    CHECK(smp_comm_lost(w->comm) == 1);
    CHECK_STATUS(smp_comm_send(w->comm, 1, "x", 1, NULL, 0), SMP_ERR_PEER_LOST);
    atomic_store(&w->shared->scratch[0], 1);
}

TEST_RANK(a_killed_peer_is_noticed_although_its_child_lives, .processes = "2",
          .forks = true)
{
    w->barrier(w);
    if (w->rank == 1) {
        if (fork() == 0) {
            child_main(w);
        }
        kill(getpid(), SIGKILL);
    }
    await_loss_of_rank_1(w);
}

static inline int
open_fds(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int  count = 0;

    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return count;
}

/* Rank 1 is dead when the others connect: whoever shares its memory is told at once,
 * others when it has not come by half of their time, in which they have met one
 * another.  Nothing of it is left, nor of whom they have met. */
TEST_RANK(a_rank_that_dies_before_it_connects_is_named, .processes = "3", .forks = true)
{
    bool       is_shm = strcmp(w->transports, "shm") == 0;
    int64_t    patience_ms = is_shm ? 60000 : WORLD_SANITIZED ? 20000 : 4000;
    int        failed = -1;
    int        before = open_fds();
    int        own; /* of the comm that does not come to be */
    int        most;
    bool       is_there;
    char       path[64];
    world_end  end;
    smp_status status;

    CHECK_OK(world_prepare(w, "with one dead", &end));
    own = open_fds() - before;
    if (is_shm) {
        w->barrier(w);
    }
    if (w->rank == 1) {
        kill(getpid(), SIGKILL);
    }
    while (!smp_comm_gone(w->comm, 1)) {
        sched_yield();
    }
    most = open_fds() - own; /* the dead one's may go yet */
    /* A job that starts meanwhile removes the dead one's file. */
    is_there = world_socket_file(&end, 1, path) && access(path, F_OK) == 0;
    status = smp_comm_connect(end.comm, end.cards, end.card_bytes,
                              PATIENCE_MS(patience_ms), &failed);
    /* Who leaves is not to be reached either by one that takes longer. */
    atomic_fetch_add(&w->shared->scratch[0], 1);
    while (atomic_load(&w->shared->scratch[0]) < w->size - 1) {
        sched_yield();
    }
    CHECK_STATUS(status, is_shm && is_there ? SMP_ERR_PEER_LOST : SMP_ERR_UNREACHABLE);
    CHECK(failed == 1);
    smp_comm_destroy(end.comm);
    CHECK(!is_shm || open_fds() <= most);
    for (int r = 0; r <= 1; r++) {
        CHECK(!world_socket_file(&end, r == 0 ? 1 : w->rank, path) ||
              access(path, F_OK) != 0);
    }
}

TEST_RANK(a_forked_child_can_do_nothing_and_breaks_nothing, .processes = "2")
{
    static const size_t sizes[] = {5000};
    smp_message        *message;
    smp_block          *unsent;
    pid_t               pid;
    int                 fds;

    CHECK_OK(send_filled(w, other(w, 0), 4, 10, sizes, 1));
    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
    CHECK_OK(smp_comm_block(w->comm, other(w, 0), 5000, &unsent));
    memset(smp_block_data(unsent), 7, 5000);
    fds = open_fds();
    pid = fork();
    if (pid == 0) {
        smp_block   *block;
        smp_message *none;
        int          bad = !message_filled(message, 4, 10, sizes, 1);

        bad |= open_fds() >= fds;
        bad |= smp_comm_send(w->comm, other(w, 0), "x", 1, NULL, 0) != SMP_ERR_CLOSED;
        bad |= smp_comm_receive(w->comm, -1, &none) != SMP_ERR_CLOSED;
        bad |= smp_comm_block(w->comm, other(w, 0), 8, &block) != SMP_ERR_CLOSED;
        smp_comm_wake(w->comm);
        smp_message_free(message);
        smp_block_release(unsent);
        smp_comm_destroy(w->comm);
        _exit(bad);
    }
    expect_well(pid);
    w->barrier(w);
    for (uint64_t i = 0; i < 8; i++) { /* would lie where the child's copies lay */
        CHECK_OK(send_filled(w, other(w, 0), 50 + i, 10, sizes, 1));
    }
    w->barrier(w);
    CHECK(message_filled(message, 4, 10, sizes, 1));
    smp_message_free(message);
    CHECK_OK(smp_comm_send(w->comm, other(w, 0), "y", 1, &unsent, 1));
    for (uint64_t i = 0; i < 8; i++) {
        expect_filled(w, 50 + i, 10, sizes, 1);
    }
    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
    CHECK(((uint8_t *)smp_block_data(message->blocks[0]))[4999] == 7);
    smp_message_free(message);
    w->barrier(w);
}

#endif
