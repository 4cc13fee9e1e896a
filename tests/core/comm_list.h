/* What every transport must do: one list of tests, run by comm_test.c over shared
 * memory and TCP, by mpi_comm.c over MPI and by ucx_comm.c over UCX.  Spec:
 * csrc/comm/messaging/comm.h. */
#ifndef SMP_TESTS_COMM_LIST_H
#define SMP_TESTS_COMM_LIST_H

#include "traffic.h"
#include "world.h"

TEST_RANK(messages_arrive_in_the_order_of_their_sends)
{
    enum { COUNT = 3000 };
    uint64_t     next[WORLD_RANKS] = {0};
    smp_message *message;

    for (uint64_t i = 0; i < COUNT; i++) {
        for (int j = 0; j < w->size - 1; j++) {
            uint8_t  bytes[8 + 700] = {0};
            uint64_t extra = i * 37 % 700;

            memcpy(bytes, &i, 8);
            CHECK_OK(smp_comm_send(w->comm, other(w, j), bytes, 8 + extra, NULL, 0));
        }
    }
    for (int i = 0; i < COUNT * (w->size - 1); i++) {
        uint64_t got;

        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
        memcpy(&got, message->bytes, 8);
        CHECK(got == next[message->source]);
        CHECK(message->nbytes == 8 + got * 37 % 700);
        next[message->source]++;
        smp_message_free(message);
    }
    CHECK_STATUS(smp_comm_receive(w->comm, 0, &message), SMP_ERR_TIMED_OUT);
    w->barrier(w); /* nobody leaves while others look for more */
}

TEST_RANK(every_size_arrives_whole)
{
    static const size_t sizes[] = {0,       1,          7,
                                   8,       63,         64,
                                   65,      1023,       1024,
                                   1025,    4095,       4096,
                                   4097,    16383,      16384,
                                   16385,   65535,      65536,
                                   65537,   1 << 20,    (1 << 20) + 1,
                                   5 << 20, WORLD_POOL, WORLD_POOL + 1};
    enum { COUNT = COUNT_OF(sizes) };
    smp_message *message;

    for (size_t i = 0; i < COUNT; i++) {
        size_t head = sizes[i] < 200000 ? sizes[i] : 100;

        CHECK_OK(send_filled(w, other(w, 0), i, head, &sizes[i], 1));
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
        CHECK(message->source == other(w, w->size - 2));
        CHECK(message_filled(message, i, head, &sizes[i], 1));
        smp_message_free(message);
    }
    CHECK_OK(send_filled(w, other(w, 0), 99, 10, sizes, COUNT));
    expect_filled(w, 99, 10, sizes, COUNT);
}

TEST_RANK(a_message_may_have_thousands_of_blocks)
{
    enum { COUNT = 5000 };
    size_t *sizes = malloc(COUNT * sizeof(*sizes));

    for (size_t i = 0; i < COUNT; i++) {
        sizes[i] = i * 13 % 2100;
    }
    CHECK_OK(send_filled(w, other(w, 0), 5, 11, sizes, COUNT));
    expect_filled(w, 5, 11, sizes, COUNT);
    free(sizes);
}

/* Both ways at once, and nobody reads until everything is sent: no call may wait for
 * the other side. */
TEST_RANK(a_full_queue_and_a_full_pool_make_nobody_wait, .pool_bytes = 1 << 20)
{
    enum { COUNT = 60 };
    static const size_t sizes[] = {100, 3 << 10, 200 << 10};
    smp_comm_stats      stats;
    uint64_t            sent;
    uint64_t            bytes;

    for (uint64_t i = 0; i < COUNT; i++) {
        CHECK_OK(send_filled(w, other(w, 0), i, 4000, sizes, 3));
    }
    w->barrier(w);
    for (uint64_t i = 0; i < COUNT; i++) {
        expect_filled(w, i, 4000, sizes, 3);
    }
    smp_comm_counters(w->comm, &stats);
    CHECK(stats.messages == COUNT);
    CHECK(stats.bytes == COUNT * (4000 + sizes[0] + sizes[1] + sizes[2]));
    CHECK(smp_comm_sent(w->comm) == COUNT);
    smp_comm_sent_to(w->comm, other(w, 0), &sent, &bytes);
    CHECK(sent == COUNT && bytes == stats.bytes);
    smp_comm_sent_to(w->comm, w->rank, &sent, &bytes);
    CHECK(sent == 0 && bytes == 0);
    CHECK(stats.pool_size == 1 << 20);
    CHECK(stats.pool_fallbacks > 0);
    CHECK(stats.pool_blocks > 0);
    CHECK(stats.pool_high <= stats.pool_size);
}

TEST_RANK(blocks_outlive_the_comm)
{
    enum { COUNT = 40 };
    static const size_t sizes[] = {500, 5000, 500000};
    smp_block          *kept[COUNT][3];
    smp_message        *message;

    for (uint64_t i = 0; i < COUNT; i++) {
        CHECK_OK(send_filled(w, other(w, 0), i, 100, sizes, 3));
    }
    for (uint64_t i = 0; i < COUNT; i++) {
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
        for (size_t j = 0; j < 3; j++) {
            kept[i][j] = smp_message_take_block(message, j);
        }
        smp_message_free(message);
    }
    smp_comm_destroy(w->comm);
    w->comm = NULL;
    w->barrier(w);
    for (uint64_t i = 0; i < COUNT; i++) {
        for (size_t j = 0; j < 3; j++) {
            CHECK(filled(smp_block_data(kept[i][j]), sizes[j], i + j + 1));
            smp_block_release(kept[i][j]);
        }
    }
}

TEST_RANK(released_blocks_return_to_the_pool, .pool_bytes = 2 << 20)
{
    static const size_t sizes[] = {300 << 10};
    smp_comm_stats      stats;
    smp_block          *unsent;
    int64_t             deadline = smp_clock_ns() + WORLD_DEADLINE_NS;

    for (uint64_t i = 0; i < 100; i++) { /* 30 MB through 2 MiB */
        CHECK_OK(send_filled(w, other(w, 0), i, 8, sizes, 1));
        expect_filled(w, i, 8, sizes, 1);
        w->barrier(w);
    }
    CHECK_OK(smp_comm_block(w->comm, other(w, 0), 5000, &unsent));
    smp_block_release(unsent);
    w->barrier(w);
    do { /* a transport may hold the last one until it knows that it has arrived */
        smp_comm_counters(w->comm, &stats);
        CHECK(smp_clock_ns() < deadline);
    } while (stats.pool_in_use != 0);
    CHECK(stats.pool_fallbacks == 0);
    CHECK(stats.pool_high >= sizes[0]);
}

static inline void *
wake_main(void *arg)
{
    smp_comm_wake(arg);
    return NULL;
}

TEST_RANK(wake_interrupts_one_receive)
{
    smp_message *message;
    pthread_t    waker;

    for (int i = 0; i < 200; i++) {
        CHECK(pthread_create(&waker, NULL, wake_main, w->comm) == 0);
        expect_end(w, SMP_ERR_INTERRUPTED);
        pthread_join(waker, NULL);
        CHECK_STATUS(smp_comm_receive(w->comm, 0, &message), SMP_ERR_TIMED_OUT);
    }
    w->barrier(w); /* nobody leaves while others are at it */
}

TEST_RANK(a_receive_ends_at_its_timeout)
{
    smp_message *message;
    int64_t      start = smp_clock_ns();

    CHECK_STATUS(smp_comm_receive(w->comm, 0, &message), SMP_ERR_TIMED_OUT);
    CHECK_STATUS(smp_comm_receive(w->comm, 5 * SMP_NS_PER_MS, &message),
                 SMP_ERR_TIMED_OUT);
    CHECK(smp_clock_ns() - start >= 5 * SMP_NS_PER_MS);
    w->barrier(w);
}

TEST_RANK(the_end_of_a_peer_is_not_its_loss)
{
    enum { COUNT = 300 }; /* more than a queue holds */
    static const size_t sizes[] = {2 << 20};
    smp_message        *message;
    smp_status          status;
    int                 received = 0;

    for (int i = 0; i < COUNT && w->rank != 0; i++) {
        CHECK_OK(send_filled(w, 0, 2, 1000, NULL, 0));
    }
    w->barrier(w);
    if (w->rank != 0) { /* what was sent before the end arrives */
        CHECK_OK(send_filled(w, 0, 1, 100, sizes, 1));
        return;
    }
    while ((status = smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message)) ==
           SMP_OK) {
        CHECK(message->nblocks == 0 ? message_filled(message, 2, 1000, NULL, 0)
                                    : message_filled(message, 1, 100, sizes, 1));
        smp_message_free(message);
        received++;
    }
    CHECK_STATUS(status, SMP_ERR_CLOSED);
    CHECK(received == (COUNT + 1) * (w->size - 1));
    CHECK(smp_comm_lost(w->comm) == -1);
    for (int r = 1; r < w->size; r++) {
        CHECK(smp_comm_left(w->comm, r));
        CHECK_STATUS(smp_comm_send(w->comm, r, "x", 1, NULL, 0), SMP_ERR_CLOSED);
    }
}

TEST_RANK(a_wrong_destination_is_refused_and_the_blocks_are_freed)
{
    int64_t        deadline = smp_clock_ns() + WORLD_DEADLINE_NS;
    smp_comm_stats stats;
    smp_block     *block;

    CHECK_STATUS(smp_comm_block(w->comm, w->size, 8, &block), SMP_ERR_INVALID);
    CHECK_STATUS(smp_comm_block(w->comm, w->rank, 8, &block), SMP_ERR_INVALID);
    CHECK_OK(smp_comm_block(w->comm, other(w, 0), 4000, &block));
    CHECK_STATUS(smp_comm_send(w->comm, -1, "x", 1, &block, 1), SMP_ERR_INVALID);
    do { /* but for what a transport holds for itself */
        smp_comm_counters(w->comm, &stats);
        CHECK(smp_clock_ns() < deadline);
    } while (stats.pool_in_use != 0);
    CHECK(stats.messages == 0 && stats.bytes == 0);
    w->barrier(w);
}

typedef struct {
    world *w;
    int    number;
    int    failed;
} sender;

enum { SENDERS = 4, SENDER_MESSAGES = 400 };

static inline void *
sender_main(void *arg)
{
    sender *s = arg;

    for (uint64_t i = 0; i < SENDER_MESSAGES; i++) {
        uint64_t   tag[2] = {(uint64_t)s->number, i};
        smp_block *block;

        if (smp_comm_block(s->w->comm, other(s->w, 0), i * 11 % 9000, &block) !=
            SMP_OK) {
            s->failed = 1;
            break;
        }
        fill(smp_block_data(block), i * 11 % 9000, i + tag[0]);
        if (smp_comm_send(s->w->comm, other(s->w, 0), tag, sizeof(tag), &block, 1) !=
            SMP_OK) {
            s->failed = 1;
            break;
        }
    }
    return NULL;
}

TEST_RANK(threads_may_send_at_once)
{
    pthread_t    threads[SENDERS];
    sender       senders[SENDERS];
    uint64_t     next[SENDERS] = {0};
    smp_message *message;

    for (int i = 0; i < SENDERS; i++) {
        senders[i] = (sender){w, i, 0};
        CHECK(pthread_create(&threads[i], NULL, sender_main, &senders[i]) == 0);
    }
    for (int i = 0; i < SENDERS * SENDER_MESSAGES; i++) {
        uint64_t tag[2];

        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
        CHECK(message->nbytes == sizeof(tag) && message->nblocks == 1);
        memcpy(tag, message->bytes, sizeof(tag));
        CHECK(tag[0] < SENDERS && tag[1] == next[tag[0]]);
        next[tag[0]]++;
        CHECK(smp_block_bytes(message->blocks[0]) == tag[1] * 11 % 9000);
        CHECK(filled(smp_block_data(message->blocks[0]), tag[1] * 11 % 9000,
                     tag[1] + tag[0]));
        smp_message_free(message);
    }
    for (int i = 0; i < SENDERS; i++) {
        pthread_join(threads[i], NULL);
        CHECK(senders[i].failed == 0);
    }
    w->barrier(w);
}

/* Random sizes to random peers; the receiver keeps some blocks for a while and, with
 * each message, checks bytes that only its sender and its number determine. */
TEST_RANK(all_to_all_with_random_sizes)
{
    enum { COUNT = 1500, KEPT = 64 };
    uint64_t     random = 88172645463325252u + (uint64_t)w->rank;
    uint64_t     sent[WORLD_RANKS] = {0};
    uint64_t     next[WORLD_RANKS] = {0};
    smp_message *kept[KEPT] = {NULL};
    int          done = 0;
    int          ended = 0;

    while (done < COUNT || ended < w->size - 1) {
        smp_message *message;
        smp_status   status;

        if (done < COUNT) {
            int dest = other(w, (int)(next_random(&random) % (uint64_t)(w->size - 1)));
            uint64_t seed = (uint64_t)w->rank << 32 | sent[dest]++;
            uint64_t dice = next_random(&random);
            size_t   sizes[3];

            for (int i = 0; i < 3; i++) {
                uint64_t top = (uint64_t)1 << next_random(&random) % 18;

                sizes[i] = next_random(&random) % top;
            }
            CHECK_OK(send_filled(w, dest, seed, 8 + sizes[0] / 8, sizes, dice % 4));
            done++;
            if (done == COUNT) {
                for (int i = 0; i < w->size - 1; i++) {
                    CHECK_OK(smp_comm_send(w->comm, other(w, i), "end", 3, NULL, 0));
                }
            }
        }
        if (ended == w->size - 1) {
            continue; /* nothing comes after the others' ends */
        }
        status =
            smp_comm_receive(w->comm, done < COUNT ? 0 : WORLD_DEADLINE_NS, &message);
        if (status == SMP_ERR_TIMED_OUT && done < COUNT) {
            continue;
        }
        CHECK_OK(status);
        if (message->nbytes == 3) {
            ended++;
        } else {
            uint64_t seed = (uint64_t)message->source << 32 | next[message->source]++;

            CHECK(filled(message->bytes, message->nbytes, seed));
            for (size_t i = 0; i < message->nblocks; i++) {
                CHECK(filled(smp_block_data(message->blocks[i]),
                             smp_block_bytes(message->blocks[i]), seed + i + 1));
            }
        }
        smp_message_free(kept[done % KEPT]);
        kept[done % KEPT] = message;
    }
    for (int i = 0; i < KEPT; i++) {
        smp_message_free(kept[i]);
    }
    w->barrier(w);
}

/* One that asks for so long that the others wait by then. */
static inline bool
gives_up_in_the_end(void *arg)
{
    int *asked = arg;

    return ++*asked > 5;
}

/* The last rank does not connect; the others would wait for it, for a minute. */
TEST_RANK(who_waits_for_a_rank_that_does_not_connect_may_give_up)
{
    int          asked = 0;
    int          failed = -1;
    char         path[64];
    smp_deadline deadline = {smp_clock_deadline(WORLD_DEADLINE_NS), gives_up_in_the_end,
                             &asked};
    world_end    end;
    smp_message *message;

    CHECK_OK(world_prepare(w, "with one missing", &end));
    if (w->rank != w->size - 1) {
        CHECK_STATUS(
            smp_comm_connect(end.comm, end.cards, end.card_bytes, &deadline, &failed),
            SMP_ERR_INTERRUPTED);
        CHECK(asked > 5);
    }
    w->barrier(w);
    if (w->rank == w->size - 1 && strstr(w->transports, "mpi") != NULL) {
        /* MPI cannot be told that we give up: it waits for the last in threads. */
        (void)smp_comm_connect(end.comm, end.cards, end.card_bytes, PATIENCE_MS(100),
                               &failed);
    }
    smp_comm_destroy(end.comm);
    CHECK(!world_socket_file(&end, w->rank, path) || access(path, F_OK) != 0);
    CHECK_OK(smp_comm_send(w->comm, other(w, 0), "on", 2, NULL, 0));
    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
    smp_message_free(message);
    w->barrier(w);
}

#endif
