/* Messages with one block each, one way between two hosts: seconds for each.
 *
 *     stream TRANSPORT BYTES COUNT HOST HOST     (by benchmarks/network.py)
 *
 * HOST is the path of a network namespace, in which one of two processes runs.  Rank 1
 * answers each message; rank 0 has up to IN_FLIGHT without an answer.  TRANSPORT
 * "plain" is the yardstick: send() and recv() on a blocking socket, from and into so
 * many buffers in turn, with nothing around them.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/messaging/comm.h"
#include "comm/transport/card.h"
#include "common/clock.h"

#define IN_FLIGHT 4
#define WARM_UP 16

typedef struct {
    _Alignas(8) uint8_t cards[2][SMP_CARD_BYTES];
    size_t      bytes[2];
    _Atomic int ready;
} shared_cards;

static void
check(smp_status status, const char *doing)
{
    if (status != SMP_OK) {
        fprintf(stderr, "%s: %s\n", doing, smp_status_text(status));
        exit(1);
    }
}

static smp_comm *
connect_pair(shared_cards *shared, const char *transport, int rank)
{
    smp_comm_config config = {.rank = rank,
                              .size = 2,
                              .pool_bytes = (size_t)512 << 20,
                              .spin_us = -1,
                              .transports = transport,
                              .job = "stream"};
    const void     *cards[2] = {shared->cards[0], shared->cards[1]};
    smp_comm       *comm;
    const void     *card;
    int             failed;

    check(smp_comm_create(&config, &comm), "create");
    card = smp_comm_card(comm, &shared->bytes[rank]);
    memcpy(shared->cards[rank], card, shared->bytes[rank]);
    atomic_fetch_add(&shared->ready, 1);
    while (atomic_load(&shared->ready) != 2) {
        sched_yield();
    }
    check(smp_comm_connect(
              comm, cards, shared->bytes,
              &(smp_deadline){.at_ns = smp_clock_deadline(20000 * SMP_NS_PER_MS)},
              &failed),
          "connect");
    return comm;
}

static void
receive(smp_comm *comm)
{
    smp_message *message;

    check(smp_comm_receive(comm, -1, &message), "receive");
    smp_message_free(message);
}

static void
send_all(smp_comm *comm, size_t bytes, int count)
{
    int answered = 0;

    for (int i = 0; i < count; i++) {
        smp_block *block;

        if (i - answered == IN_FLIGHT) {
            receive(comm);
            answered++;
        }
        check(smp_comm_block(comm, 1, bytes, &block), "block");
        check(smp_comm_send(comm, 1, "block", 5, &block, 1), "send");
    }
    for (; answered < count; answered++) {
        receive(comm);
    }
}

static void
answer_all(smp_comm *comm, int count)
{
    for (int i = 0; i < count; i++) {
        receive(comm);
        check(smp_comm_send(comm, 0, "answer", 6, NULL, 0), "send");
    }
}

/* UCX looks for interfaces in /sys, which shows those of whoever mounted it. */
static void
enter_host(const char *path)
{
    int space = open(path, O_RDONLY | O_CLOEXEC);

    if (space < 0 || setns(space, CLONE_NEWNET) != 0 || unshare(CLONE_NEWNS) != 0 ||
        mount("", "/", "none", MS_SLAVE | MS_REC, NULL) != 0 ||
        umount2("/sys", MNT_DETACH) != 0 ||
        mount("sysfs", "/sys", "sysfs", 0, NULL) != 0) {
        perror(path);
        exit(1);
    }
    close(space);
}

/* ------------------------------------------------------------------- the yardstick */

static void
fail(const char *doing)
{
    perror(doing);
    exit(1);
}

/* A connection between the ranks; 10.78.0.2 is rank 1's address. */
static int
connect_plain(shared_cards *shared, int rank)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7878)};
    int                fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int                yes = 1;

    inet_pton(AF_INET, "10.78.0.2", &at.sin_addr);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (rank == 1) {
        if (bind(fd, (struct sockaddr *)&at, sizeof(at)) != 0 || listen(fd, 1) != 0) {
            fail("listen");
        }
        atomic_store(&shared->ready, 1);
        fd = accept(fd, NULL, NULL);
    } else {
        while (atomic_load(&shared->ready) == 0) {
            sched_yield();
        }
        if (connect(fd, (struct sockaddr *)&at, sizeof(at)) != 0) {
            fail("connect");
        }
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    return fd;
}

static void
move_all(int fd, uint8_t *at, size_t bytes, bool out)
{
    while (bytes != 0) {
        ssize_t n = out ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);

        if (n <= 0) {
            fail("move");
        }
        at += n;
        bytes -= (size_t)n;
    }
}

static void
run_plain(shared_cards *shared, int rank, size_t bytes, int count)
{
    int      fd = connect_plain(shared, rank);
    int64_t  start = 0;
    uint8_t *buffers = malloc(IN_FLIGHT * bytes);
    uint8_t  answer = 0;

    memset(buffers, 1, IN_FLIGHT * bytes);
    for (int i = 0; i < WARM_UP + count; i++) {
        if (i == WARM_UP) {
            start = smp_clock_ns();
        }
        if (rank == 0 && i >= IN_FLIGHT) {
            move_all(fd, &answer, 1, false);
        }
        move_all(fd, buffers + (size_t)(i % IN_FLIGHT) * bytes, bytes, rank == 0);
        if (rank == 1) {
            move_all(fd, &answer, 1, true);
        }
    }
    for (int i = 0; i < IN_FLIGHT && rank == 0; i++) {
        move_all(fd, &answer, 1, false);
    }
    if (rank == 0) {
        printf("%.9f\n", (double)(smp_clock_ns() - start) / 1e9 / count);
    }
    free(buffers);
    close(fd);
}

static void
run_rank(shared_cards *shared, int rank, char **argv)
{
    size_t    bytes = strtoull(argv[2], NULL, 10);
    int       count = (int)strtol(argv[3], NULL, 10);
    smp_comm *comm;

    enter_host(argv[4 + rank]);
    if (strcmp(argv[1], "plain") == 0) {
        run_plain(shared, rank, bytes, count);
        return;
    }
    comm = connect_pair(shared, argv[1], rank);
    if (rank == 0) {
        int64_t start;

        send_all(comm, bytes, WARM_UP);
        start = smp_clock_ns();
        send_all(comm, bytes, count);
        printf("%.9f\n", (double)(smp_clock_ns() - start) / 1e9 / count);
    } else {
        answer_all(comm, WARM_UP + count);
    }
    smp_comm_destroy(comm);
}

int
main(int argc, char **argv)
{
    shared_cards *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t         child;
    int           how;

    if (argc != 6 || shared == MAP_FAILED) {
        fprintf(stderr, "stream TRANSPORT BYTES COUNT HOST HOST\n");
        return 1;
    }
    child = fork();
    if (child == 0) {
        run_rank(shared, 1, argv);
        return 0;
    }
    run_rank(shared, 0, argv);
    waitpid(child, &how, 0);
    return WIFEXITED(how) ? WEXITSTATUS(how) : 1;
}
