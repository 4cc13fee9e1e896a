/* Two processes on one host: a small message there and back, blocks one way, and blocks
 * given away as they are, which tells the other one and moves no byte.
 *
 *     make -C benchmarks/core ping              over shared memory, then over TCP
 *     make -C benchmarks/core ping-mpi          over MPI, with mpirun's FLAGS
 *
 * The baseline of the hand-over (allocate, memcpy in, send, the receiver reads every
 * byte) is the work that cannot be avoided: one memcpy into warm memory and one
 * reading of it.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/messaging/comm.h"
#include "comm/transport/card.h"
#include "common/clock.h"

#ifdef SMP_PING_MPI
#    include <mpi.h>

#    include "comm/transport/mpi/mpi.h"
#endif

#define PINGS 20000
#define HANDOVERS 40
#define SMALL_HANDOVERS 2000
#define BLOCK ((size_t)16 << 20)
#define SMALL 64
#define TENSOR 256
#define MAX_SAMPLES PINGS

/* What the receiver does with a block: at byte ASK of the message. */
#define ASK 8
enum { ASK_SUM, ASK_NOTHING, ASK_NS_OF_SUM };

typedef struct {
    _Alignas(8) uint8_t cards[2][SMP_CARD_BYTES];
    size_t       bytes[2];
    volatile int ready[2];
} shared_cards;

static double            samples[MAX_SAMPLES];
static volatile uint64_t seen; /* so that a pass is not left out */

static int
by_value(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;

    return (x > y) - (x < y);
}

static void
print_row(const char *what, int n, const char *baseline)
{
    qsort(samples, (size_t)n, sizeof(samples[0]), by_value);
    printf("%-46s%12.2f%12.2f   %s\n", what, samples[0], samples[n / 2], baseline);
}

static void
check(smp_status status, const char *doing)
{
    if (status != SMP_OK) {
        fprintf(stderr, "%s: %s\n", doing, smp_status_text(status));
        exit(1);
    }
}

#ifdef SMP_PING_MPI
static void
exchange_cards(shared_cards *shared, int rank)
{
    uint64_t sizes[2] = {shared->bytes[0], shared->bytes[1]};

    MPI_Bcast(shared->cards[0], SMP_CARD_BYTES, MPI_BYTE, 0, MPI_COMM_WORLD);
    MPI_Bcast(shared->cards[1], SMP_CARD_BYTES, MPI_BYTE, 1, MPI_COMM_WORLD);
    MPI_Bcast(&sizes[0], 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    MPI_Bcast(&sizes[1], 1, MPI_UINT64_T, 1, MPI_COMM_WORLD);
    shared->bytes[1 - rank] = sizes[1 - rank];
}
#else
static void
exchange_cards(shared_cards *shared, int rank)
{
    __sync_synchronize();
    shared->ready[rank] = 1;
    while (!shared->ready[1 - rank]) {
        usleep(100);
    }
    __sync_synchronize();
}
#endif

static smp_comm *
connect_pair(shared_cards *shared, const char *transport, int rank)
{
    smp_comm_config config = {
        .rank = rank, .size = 2, .spin_us = -1, .transports = transport, .job = "ping"};
    const void *cards[2] = {shared->cards[0], shared->cards[1]};
    smp_comm   *comm;
    const void *card;
    int         failed;

    check(smp_comm_create(&config, &comm), "create");
    card = smp_comm_card(comm, &shared->bytes[rank]);
    memcpy(shared->cards[rank], card, shared->bytes[rank]);
    exchange_cards(shared, rank);
    check(smp_comm_connect(
              comm, cards, shared->bytes,
              &(smp_deadline){.at_ns = smp_clock_deadline(10000 * SMP_NS_PER_MS)},
              &failed),
          "connect");
    return comm;
}

static uint64_t
sum(const void *data, size_t bytes)
{
    const uint64_t *words = data;
    uint64_t        total = 0;

    for (size_t i = 0; i < bytes / 8; i++) {
        total += words[i];
    }
    return total;
}

/* What a block is answered with. */
static uint64_t
answer_to(const smp_message *message)
{
    int64_t  start = smp_clock_ns();
    uint64_t total = 0;

    if (message->bytes[ASK] != ASK_NOTHING) {
        total = sum(smp_block_data(message->blocks[0]),
                    smp_block_bytes(message->blocks[0]));
    }
    if (message->bytes[ASK] == ASK_NS_OF_SUM) {
        seen = total;
        total = (uint64_t)(smp_clock_ns() - start);
    }
    return total;
}

/* Sends back what it gets (an answer instead of a block) until an empty message. */
static void
answer(smp_comm *comm)
{
    smp_message *message;
    size_t       nbytes;

    do {
        uint64_t   total = 0;
        smp_block *block = NULL;

        check(smp_comm_receive(comm, -1, &message), "receive");
        nbytes = message->nbytes;
        if (message->nblocks == 1 && smp_block_bytes(message->blocks[0]) == TENSOR) {
            block = smp_message_take_block(message, 0);
            smp_block_release(block);
            check(smp_comm_block(comm, 0, TENSOR, &block), "block");
        } else if (message->nblocks == 1) {
            total = answer_to(message);
        }
        memcpy(message->bytes, &total, nbytes < 8 ? nbytes : 8);
        check(smp_comm_send(comm, 0, message->bytes, nbytes, &block, block != NULL),
              "send");
        smp_message_free(message);
    } while (nbytes != 0);
}

static double
exchange(smp_comm *comm, const void *bytes, size_t nbytes, smp_block *block,
         uint64_t *total)
{
    int64_t      start = smp_clock_ns();
    smp_message *message;

    check(smp_comm_send(comm, 1, bytes, nbytes, &block, block != NULL), "send");
    check(smp_comm_receive(comm, -1, &message), "receive");
    memcpy(total, message->bytes, nbytes < 8 ? nbytes : 8);
    smp_message_free(message);
    return (double)(smp_clock_ns() - start) / 1e3;
}

/* Blocks that lie in the pool already, written, and that the sender gives up. */
static void
give_away(smp_comm *comm)
{
    uint8_t    small[SMALL] = {0};
    smp_block *block;
    uint64_t   ns;
    char       what[64];

    for (size_t bytes = (size_t)64 << 10; bytes <= BLOCK; bytes *= 16) {
        for (int ask = ASK_NOTHING; ask <= ASK_NS_OF_SUM; ask++) {
            small[ASK] = (uint8_t)ask;
            for (int i = 0; i < HANDOVERS; i++) {
                double us;

                check(smp_comm_block(comm, 1, bytes, &block), "block");
                memset(smp_block_data(block), i, bytes);
                exchange(comm, small, SMALL, NULL, &ns); /* who waited long, slept */
                us = exchange(comm, small, SMALL, block, &ns);
                samples[i] = ask == ASK_NOTHING ? us / 2 : (double)ns / 1e3;
            }
            snprintf(what, sizeof(what),
                     ask == ASK_NOTHING ? "give away %zu KiB, half of there and back"
                                        : "... the receiver's first pass over %zu KiB",
                     bytes >> 10);
            print_row(what, HANDOVERS, "");
        }
    }
}

static void
measure(smp_comm *comm)
{
    uint8_t        small[SMALL] = {0};
    uint8_t       *source = malloc(BLOCK);
    uint8_t       *copy = malloc(BLOCK);
    struct utsname machine;
    uint64_t       total;
    uint64_t       want;
    smp_block     *block;

    uname(&machine);
    printf("%ld cores, %s, us per operation\n", sysconf(_SC_NPROCESSORS_ONLN),
           machine.machine);
    printf("%-46s%12s%12s\n", "", "best", "median");
    for (int i = 0; i < PINGS; i++) {
        samples[i] = exchange(comm, small, SMALL, NULL, &total);
    }
    print_row("64 B there and back", PINGS, "");
    for (int i = 0; i < PINGS; i++) {
        check(smp_comm_block(comm, 1, TENSOR, &block), "block");
        memset(smp_block_data(block), i, TENSOR);
        samples[i] = exchange(comm, small, SMALL, block, &total);
    }
    print_row("64 B and a block of 256 B there and back", PINGS, "");
    for (int i = 0; i < PINGS; i++) {
        int64_t start = smp_clock_ns();

        check(smp_comm_block(comm, 1, 8192, &block), "block");
        smp_block_release(block);
        samples[i] = (double)(smp_clock_ns() - start) / 1e3;
    }
    print_row("allocate and release 8 KiB", PINGS, "");

    for (size_t i = 0; i < BLOCK; i++) {
        source[i] = (uint8_t)(i * 7);
    }
    memset(copy, 1, BLOCK);
    want = sum(source, BLOCK);
    for (int i = 0; i < HANDOVERS; i++) {
        int64_t start = smp_clock_ns();

        memcpy(copy, source, BLOCK);
        samples[i] = (double)(smp_clock_ns() - start) / 1e3;
    }
    print_row("memcpy 16 MiB, warm", HANDOVERS, "");
    for (int i = 0; i < HANDOVERS; i++) {
        int64_t start = smp_clock_ns();

        memcpy(copy, source, BLOCK);
        if (sum(copy, BLOCK) != want) {
            exit(1);
        }
        samples[i] = (double)(smp_clock_ns() - start) / 1e3;
    }
    print_row("memcpy 16 MiB and read it, one process", HANDOVERS, "baseline");
    for (size_t bytes = 512; bytes <= BLOCK; bytes *= 8) {
        char what[64];
        int  n = bytes < (1 << 20) ? SMALL_HANDOVERS : HANDOVERS;

        want = sum(source, bytes);
        for (int i = 0; i < n; i++) {
            int64_t start = smp_clock_ns();

            check(smp_comm_block(comm, 1, bytes, &block), "block");
            memcpy(smp_block_data(block), source, bytes);
            exchange(comm, small, SMALL, block, &total);
            samples[i] = (double)(smp_clock_ns() - start) / 1e3;
            if (total != want) {
                exit(1);
            }
        }
        snprintf(what, sizeof(what), "hand over %zu %s, read it, answer",
                 bytes < (1 << 20) ? bytes : bytes >> 20,
                 bytes < (1 << 20) ? "B" : "MiB");
        print_row(what, n, "");
    }
    give_away(comm);
    exchange(comm, small, 0, NULL, &total);
    free(source);
    free(copy);
}

static void
run_rank(shared_cards *shared, const char *transport, int rank)
{
    smp_comm *comm = connect_pair(shared, transport, rank);

    if (rank == 1) {
        answer(comm);
    } else {
        printf("over %s: ", smp_comm_transport(comm, 1));
        measure(comm);
    }
    smp_comm_destroy(comm);
}

#ifdef SMP_PING_MPI
int
main(int argc, char **argv)
{
    static shared_cards cards;
    int                 level;
    int                 rank;

    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    check(smp_transport_register(&smp_transport_mpi), "register");
    run_rank(&cards, argc > 1 ? argv[1] : "mpi", rank);
    MPI_Finalize();
    return 0;
}
#else
static int
run_pair(const char *transport)
{
    shared_cards *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t         pid = shared == MAP_FAILED ? -1 : fork();
    int           how = 1;

    if (pid < 0) {
        return 1;
    }
    run_rank(shared, transport, pid == 0);
    if (pid == 0) {
        exit(0);
    }
    waitpid(pid, &how, 0);
    munmap(shared, sizeof(*shared));
    return how != 0;
}

int
main(int argc, char **argv)
{
    int failed = 0;

    for (int i = 1; i < argc; i++) {
        failed = run_pair(argv[i]) || failed;
        fflush(stdout);
    }
    return failed;
}
#endif
