/* Spec: csrc/comm/device/port.h, over the stand-in of the driver (stand_in.c): no GPU.
 */
#define _GNU_SOURCE
#include "comm/device/port.h"

#include <sched.h>
#include <sys/wait.h>

#include "comm/device/pinned.h"
#include "comm/device/pool.h"
#include "comm/memory/device_card.h"
#include "comm/messaging/neighbour.h"
#include "common/log.h"
#include "device_messages.h"

#define POOL ((size_t)1 << 20)
#define ROUNDS 60
#define LARGEST USER_BYTES
#define USELESS "no rank of this host can open it"

/* Further calls than these are repetitions. */
#define MOST_CALLS 80

/* ----------------------------------------------------------------------- a pool */

/* On the card of rank 1, which has no tensors of its own; rank 1 is its reader, too. */
static smp_device_pool *
pool_on(user *u, const smp_neighbour *its)
{
    char             why[SMP_DRIVER_TEXT];
    int              device;
    smp_device_pool *pool = NULL;

    if (u->driver->device_get(&device, 0) == 0) {
        pool = smp_device_pool_create(u->driver, device, u->stream, 100, 0,
                                      its->segment, why);
    }
    return pool;
}

static smp_device_reader *
reader_of_pool(const smp_neighbour *its, pid_t pid)
{
    smp_device_reader *reader = calloc(1, sizeof(*reader));

    if (reader != NULL) {
        *reader = (smp_device_reader){its->segment, pid};
        smp_segment_ref(its->segment);
    }
    return reader;
}

/* Memory and the event of its pattern, until no reader has it. */
DEVICE_TEST(a_pool_is_kept_while_a_reader_may_touch_it, .processes = "2")
{
    char             why[SMP_DRIVER_TEXT];
    bool             fault;
    smp_device_span  span;
    smp_neighbour    its;
    smp_device_card *card;
    smp_device_pool *pool;
    int              before;
    pid_t            dead = 0;

    CHECK(smp_comm_neighbour(w->comm, 1, &its));
    card = its.segment->device;
    before = u->stand_in->alive();
    for (uint32_t state = SMP_READER_NONE; w->rank == 0 && state <= SMP_READER_CLOSED;
         state++) {
        bool kept = state == SMP_READER_OPENING || state == SMP_READER_OPEN;

        for (int lives = 1; lives >= 0; lives--) {
            pool = pool_on(u, &its);
            CHECK(pool != NULL && u->stand_in->alive() > before);
            CHECK(card->bytes == 128 && atomic_load(&card->shown) == SMP_POOL_SHOWN);
            atomic_store(&card->pools[0], state);
            if (lives == 0 && dead == 0) {
                dead = fork();
                if (dead == 0) {
                    _exit(0);
                }
                CHECK(waitpid(dead, NULL, 0) == dead);
            }
            smp_device_pool_retire(pool, reader_of_pool(&its, lives ? its.pid : dead),
                                   1, false);
            CHECK(atomic_load(&card->shown) == SMP_POOL_WITHDRAWN);
            CHECK((u->stand_in->alive() > before) == (kept && lives != 0));
            atomic_store(&card->pools[0], SMP_READER_CLOSED); /* the next looks */
        }
    }
    if (w->rank == 0) {
        pool = pool_on(u, &its);
        CHECK(pool != NULL && u->stand_in->alive() > before);
        smp_device_pool_withdraw(pool);
        smp_device_pool_withdraw(pool);
        CHECK(atomic_load(&card->shown) == SMP_POOL_WITHDRAWN);
        CHECK(u->stand_in->alive() == before);
        CHECK(!smp_device_pool_take(pool, 64, 1, &span, &fault, why) && !fault);
        smp_device_pool_retire(pool, NULL, 0, false);
        CHECK(u->stand_in->alive() == before);
    }
    if (w->rank == 0 && !WORLD_SANITIZED) { /* which takes it for a leak */
        pool = pool_on(u, &its);
        CHECK(pool != NULL);
        smp_device_pool_retire(pool, NULL, 0, true); /* left to the process's end */
        CHECK(u->stand_in->alive() > before);
    }
    w->barrier(w);
}

/* ---------------------------------------------------------------------- tests */

/* Another thread of each rank captures a graph while the pools are made and opened, and
 * while tensors go back and forth. */
TEST_RANK(a_capture_in_another_thread_stays_whole, .processes = "2")
{
    int  mode = 0;
    bool taken;
    user u;

    begin(w, &u);
    u.stand_in->begin_capture(NULL);
    shake_hands(w, &u);
    for (uint64_t i = 0; i < 20; i++) {
        send_x(w, &u, 1 - w->rank, i, 5000, NULL);
        receive_y(w, &u);
        smp_device_sweep(u.port);
    }
    CHECK(u.stand_in->end_capture());
    u.stand_in->begin_capture(u.stream); /* its copy would be made later, or never */
    send_x(w, &u, 1 - w->rank, 20, 5000, &taken);
    CHECK(!taken);
    receive_y(w, &u);
    CHECK(u.stand_in->end_capture());
    CHECK(u.driver->capture_exchange(&mode) == 0 && mode == 0); /* as it was before */
    end(&u);
    CHECK(u.right != 0);
    w->barrier(w);
}

/* The capture stays whole, too, and later tensors go between the devices. */
DEVICE_TEST(a_read_by_a_captured_stream_is_refused, .processes = "2")
{
    char           why[SMP_DRIVER_TEXT];
    smp_message   *message;
    letter         l;
    bool           taken;
    smp_device_use use;

    shake_hands(w, u);
    settle(u);
    w->barrier(w);
    if (w->rank == 0) {
        send_x(w, u, 1, 8, 5000, &taken);
        CHECK(taken);
        send_x(w, u, 1, 9, 5000, &taken);
        CHECK(taken);
    } else {
        receive(w, &message, &l);
        u->stand_in->begin_capture(u->stream);
        CHECK_STATUS(read_y(u, message, &l, why), SMP_ERR_SYSTEM);
        CHECK(strstr(why, "captured") != NULL && u->stand_in->end_capture());
        u->right = 0;
        receive_y(w, u);
        settle(u);
        CHECK(u->right == 1);
    }
    smp_device_measure(u->port, &use);
    CHECK_TEXT(use.why, "");
}

DEVICE_TEST(a_tensor_is_what_it_was_when_it_was_sent, .processes = "2", .threads = "3")
{
    uint64_t       random = (uint64_t)w->rank + 5;
    smp_device_use use;

    for (int i = 0; i < ROUNDS; i++) {
        size_t bytes = 1 + next_random(&random) % LARGEST;

        for (int other = 0; other < w->size; other++) {
            if (other != w->rank) {
                send_x(w, u, other, (uint64_t)(i * 8 + w->rank), bytes, NULL);
            }
        }
        for (int other = 0; other < w->size - 1; other++) {
            receive_y(w, u);
        }
        if (i % 4 == 0) { /* or the thread is far ahead, and the pool full */
            settle(u);
        }
    }
    settle(u);
    smp_device_measure(u->port, &use);
    CHECK_TEXT(use.why, "");
    CHECK(use.tensors + use.fallbacks == (uint64_t)(ROUNDS * (w->size - 1)));
    CHECK(use.tensors >= ROUNDS / 2);
    CHECK(use.high <= use.size && use.size == POOL && use.bytes > use.high);
    CHECK(u->right > 0);
    smp_device_sweep(u->port);
    w->barrier(w); /* all have given back what they had */
    smp_device_measure(u->port, &use);
    CHECK(use.in_use == 0);
}

/* The receiver has the message, and has told its stream what to do with it, before the
 * sender's device has done anything. */
DEVICE_TEST(a_message_does_not_wait_for_the_device, .processes = "2")
{
    shake_hands(w, u);
    settle(u);
    w->barrier(w);
    if (w->rank == 0) {
        u->stand_in->hold(true);
        send_x(w, u, 1, 77, 5000, NULL);
        w->barrier(w);
        u->stand_in->hold(false);
    } else {
        u->right = 0;
        receive_y(w, u);
        CHECK(u->driver->stream_query(u->stream) == SMP_DRIVER_NOT_READY);
        CHECK(u->right == 0);
        w->barrier(w);
        settle(u);
        CHECK(u->right == 1);
    }
}

DEVICE_TEST(a_full_pool_is_counted_and_empties_again, .processes = "2", .threads = "2")
{
    smp_message   *messages[8];
    letter         l;
    char           why[SMP_DRIVER_TEXT];
    smp_device_use before;
    smp_device_use use;
    bool           taken;

    shake_hands(w, u);
    if (w->rank == 0) {
        w->barrier(w); /* rank 1 has read the last tensor */
        expect_empty(u);
        smp_device_measure(u->port, &before);
        for (int i = 0; i < 8; i++) { /* 5 of 200,000 bytes fit into 1 MiB */
            send_x(w, u, 1, (uint64_t)i, LARGEST, &taken);
            CHECK(taken == (i < 5));
        }
        smp_device_measure(u->port, &use);
        CHECK(use.fallbacks == before.fallbacks + 3);
        CHECK(use.tensors == before.tensors + 5);
        CHECK(use.in_use > POOL - LARGEST && use.high >= use.in_use);
        w->barrier(w);
        expect_empty(u);
        send_x(w, u, 1, 9, LARGEST, &taken);
        CHECK(taken);
    } else {
        settle(u);
        smp_device_sweep(u->port);
        w->barrier(w);
        for (int i = 0; i < 8; i++) {
            receive(w, &messages[i], &l);
        }
        for (int i = 0; i < 8; i++) {
            memcpy(&l, messages[i]->bytes, sizeof(l));
            if (i % 2 == 0) {
                CHECK_OK(read_y(u, messages[i], &l, why));
            } else { /* as after a step that failed: nobody reads it */
                smp_message_free(messages[i]);
            }
        }
        settle(u);
        smp_device_sweep(u->port);
        w->barrier(w);
        receive_y(w, u);
    }
}

DEVICE_TEST(what_a_dead_rank_had_comes_back, .processes = "3")
{
    smp_device_use use;
    smp_message   *message;
    letter         l = {0};
    smp_block     *packed;
    bool           taken;

    if (w->rank == 0) {
        for (int r = 1; r < 3; r++) { /* two tensors: they have opened the pool */
            send_x(w, u, r, 1, 100, NULL);
            receive_y(w, u);
        }
        for (int i = 0; i < 4; i++) {
            send_x(w, u, 1, 1, LARGEST, &taken);
            CHECK(taken);
        }
        packed = smp_device_put(u->port, 1, 0, u->x, LARGEST, u->stream);
        CHECK(packed != NULL);
        send_x(w, u, 2, 1, LARGEST, &taken);
        CHECK(!taken);
        CHECK(kill(w->shared->pids[1], SIGKILL) == 0);
        expect_end(w, SMP_ERR_PEER_LOST);
        CHECK(smp_device_put(u->port, 1, 0, u->x, 100, u->stream) == NULL);
        for (int i = 0; i < 6; i++) { /* what was not sent comes back from its packer */
            if (i == 5) {
                CHECK_STATUS(smp_comm_send(w->comm, 1, &l, sizeof(l), &packed, 1),
                             SMP_ERR_PEER_LOST);
            }
            send_x(w, u, 2, 1, LARGEST, &taken);
            CHECK(taken == (i != 4));
        }
        smp_device_measure(u->port, &use);
        CHECK(use.in_use < POOL);
        atomic_store(&w->shared->scratch[0], 1);
        return;
    }
    receive_y(w, u);
    send_x(w, u, 0, 1, 100, NULL);
    while (w->rank == 1) {
        receive(w, &message, &l); /* and keeps it */
    }
    while (atomic_load(&w->shared->scratch[0]) == 0) {
        sched_yield();
    }
}

DEVICE_TEST(a_pool_that_nobody_can_open_has_no_memory, .processes = "3")
{
    smp_device_use use;

    if (w->rank != 0) {
        u->stand_in->fail("cuIpcOpenMemHandle_v2", 1, 2);
    }
    for (int i = 0; i < 4; i++) {
        for (int other = 1; other < w->size; other++) {
            int before = u->stand_in->alive();

            if (w->rank == 0) {
                send_x(w, u, other, 1, 100, NULL);
                CHECK((u->stand_in->alive() < before) == (i == 1 && other == 1));
            } else if (w->rank == other) {
                receive_y(w, u);
            }
        }
        w->barrier(w);
    }
    smp_device_measure(u->port, &use);
    if (w->rank == 0) {
        CHECK(use.size == 0 && use.tensors == 0 && use.fallbacks == 8);
        CHECK_TEXT(use.why, USELESS);
    }
}

DEVICE_TEST(another_device_of_the_rank_is_not_served, .processes = "2")
{
    smp_device_use before;
    smp_device_use use;

    CHECK(smp_device_number(u->port) == -1);
    watch_exports(u);
    shake_hands(w, u);
    CHECK(shown_bytes > POOL && shown_bytes % SMP_DRIVER_BLOCK == 0); /* ours alone */
    CHECK(smp_device_number(u->port) == 0);
    smp_device_measure(u->port, &before);
    CHECK(smp_device_put(u->port, 1 - w->rank, 1, u->x, 100, u->stream) == NULL);
    smp_device_measure(u->port, &use);
    CHECK(use.fallbacks == before.fallbacks + 1);
    CHECK_TEXT(use.why, "");
    w->barrier(w);
}

DEVICE_TEST(a_rank_of_another_host_is_not_served, .processes = "2", .hosts = "ab")
{
    smp_device_use use;

    for (int i = 0; i < 3; i++) {
        send_x(w, u, 1 - w->rank, 1, 100, NULL);
        receive_y(w, u);
    }
    smp_device_measure(u->port, &use);
    CHECK(use.tensors == 0 && use.fallbacks == 0 && use.size == 0);
}

TEST_RANK(without_a_driver_the_report_says_why, .processes = "")
{
    const char    *wanted = getenv("SMP_TEST_WHY");
    uint64_t       memory[4] = {0};
    smp_device_use use;

    for (int i = 0; i < 3; i++) {
        CHECK(smp_device_put(smp_comm_device(w->comm), 1 - w->rank, 0,
                             (uint64_t)(uintptr_t)memory, sizeof(memory),
                             NULL) == NULL);
    }
    smp_device_measure(smp_comm_device(w->comm), &use);
    CHECK_HAS(use.why, wanted);
    CHECK(use.fallbacks == 3 && use.size == 0);
    w->barrier(w);
}

TEST_RANK(a_pool_of_no_bytes_is_no_pool, .processes = "2", .no_device_pool = true)
{
    smp_device_use use;

    CHECK(smp_device_put(smp_comm_device(w->comm), 1 - w->rank, 0, 64, 64, NULL) ==
          NULL);
    smp_device_measure(smp_comm_device(w->comm), &use);
    CHECK(use.fallbacks == 0 && strcmp(use.why, "") == 0);
    w->barrier(w);
}

/* Whatever fails: what arrives is right, nobody waits for ever, and a get() that cannot
 * be done says why. */
DEVICE_TEST(every_failure_is_survived, .processes = "")
{
    char           why[SMP_DRIVER_TEXT] = "";
    smp_message   *message;
    letter         l;
    smp_status     status;
    smp_device_use use;
    int            lost = 0;

    if (w->rank == unlucky_rank) {
        u->stand_in->fail(NULL, unlucky_call, 2);
    }
    for (int i = 0; i < 6; i++) {
        for (int turn = 0; turn < 2; turn++) {
            if (turn == w->rank) {
                send_x(w, u, 1 - w->rank, (uint64_t)i, 30000, NULL);
            } else {
                receive(w, &message, &l);
                status = read_y(u, message, &l, why);
                CHECK(status == SMP_OK || status == SMP_ERR_SYSTEM);
                CHECK(status == SMP_OK ||
                      strstr(why, "CUDA_ERROR_OUT_OF_MEMORY") != NULL);
                lost += status != SMP_OK;
            }
        }
    }
    smp_device_measure(u->port, &use);
    if (w->rank == unlucky_rank) {
        atomic_store(unlucky, u->stand_in->failed());
        u->stand_in->fail(NULL, 0, 0);
        CHECK(lost <= 1);
    } else {
        CHECK(lost == 0);
        CHECK(strcmp(use.why, "") == 0 || strcmp(use.why, USELESS) == 0 ||
              strstr(use.why, "a trial failed on rank ") == use.why);
    }
    w->barrier(w);
}

/* ----------------------------------------------------- a path not to be relied on */

/* All tell all others something, and hear it, whichever way it goes: how many
 * went by the pool. */
static int
tell_all(world *w, user *u, uint64_t seed)
{
    int taken = 0;

    for (int from = 0; from < w->size; from++) {
        for (int other = 0; other < w->size; other++) {
            bool by_pool = false;

            if (other == from) {
                continue;
            }
            if (w->rank == from) {
                send_x(w, u, other, seed, 5000, &by_pool);
                taken += by_pool;
            } else if (w->rank == other) {
                receive_y(w, u);
            }
        }
    }
    settle(u);
    return taken;
}

/* Of this rank; *all counts those of all ranks. */
static void
count_warnings(world *w, const char *of, uint64_t *all)
{
    char text[SMP_WARNING_BYTES];

    if (smp_warning_take(text)) {
        CHECK_HAS(text, of);
        CHECK_HAS(text, "go through host memory");
        atomic_fetch_add(&w->shared->scratch[1], 1);
    }
    CHECK(!smp_warning_take(text));
    w->barrier(w);
    *all = (uint64_t)atomic_load(&w->shared->scratch[1]);
}

/* Why this rank uses no pool any more ("": it does); rank 1 is the one to blame.  One
 * rank of the host has warned, if any. */
static void
expect_pools(world *w, user *u, const char *why_of_1, const char *warning)
{
    bool           off = *why_of_1 != '\0';
    smp_device_use use;
    uint64_t       warnings;

    smp_device_measure(u->port, &use);
    CHECK_HAS(use.why, w->rank == 1 || !off ? why_of_1 : "a trial failed on rank 1");
    CHECK(off || strcmp(use.why, "") == 0);
    count_warnings(w, warning, &warnings);
    CHECK(warnings == (off ? 1 : 0));
    w->barrier(w);
}

/* Rank 1's copies change bytes: nobody of the host uses a pool, and one has warned. */
DEVICE_TEST(other_bytes_turn_the_pools_off, .processes = "3")
{

    u->stand_in->misbehave(w->rank == 1 ? STAND_IN_SPOILS_BYTES : STAND_IN_IS_SOUND);
    for (uint64_t i = 0; i < 4; i++) {
        CHECK(tell_all(w, u, i) == 0 || w->rank != 1);
    }
    u->stand_in->misbehave(STAND_IN_IS_SOUND);
    CHECK(tell_all(w, u, 4) == 0); /* off for good */
    expect_pools(w, u, "other bytes than", "to rank 1 was tried and cannot");
}

/* The first copy that rank 1 makes is that of rank 0's pattern. */
DEVICE_TEST(an_error_turns_the_pools_off, .processes = "2")
{
    smp_neighbour its;

    if (w->rank == 1) {
        u->stand_in->fail("cuMemcpyDtoDAsync_v2", 1, 2);
    }
    for (uint64_t i = 0; i < 3; i++) {
        CHECK(tell_all(w, u, i) == 0);
    }
    expect_pools(w, u, "cuMemcpyDtoDAsync: CUDA_ERROR_OUT_OF_MEMORY",
                 "cuMemcpyDtoDAsync: CUDA_ERROR");
    CHECK(smp_comm_neighbour(w->comm, 1, &its)); /* which still has the memory */
    CHECK(atomic_load(&its.segment->device->pools[0]) == SMP_READER_OPENING);
    w->barrier(w);
}

static int (*real_copy)(uint64_t to, uint64_t from, size_t bytes, void *stream);
static int copies;

/* The second one goes nowhere: that of a trial which writes. */
static int
lost_copy(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    return ++copies == 2 ? 0 : real_copy(to, from, bytes, stream);
}

/* Rank 1 reads what rank 0 has written, and cannot write there. */
DEVICE_TEST(a_lost_write_turns_the_pools_off, .processes = "2")
{
    if (w->rank == 1) {
        smp_driver *table = (smp_driver *)(uintptr_t)u->driver;

        real_copy = table->copy;
        table->copy = lost_copy;
    }
    for (uint64_t i = 0; i < 3; i++) {
        CHECK(tell_all(w, u, i) == 0 || w->rank != 1);
    }
    expect_pools(w, u, "other bytes than", "to rank 1 was tried and cannot");
}

/* Rank 0's pattern is never there. */
DEVICE_TEST(a_trial_without_an_end_turns_the_pools_off, .processes = "2")
{

    if (w->rank == 0) {
        u->stand_in->misbehave(STAND_IN_LATE_EVENTS);
        send_x(w, u, 1, 1, 5000, NULL);
    } else {
        hurries = true;
        receive_y(w, u);
        hurries = false;
    }
    w->barrier(w);
    u->stand_in->misbehave(STAND_IN_IS_SOUND);
    for (uint64_t i = 0; i < 2; i++) {
        CHECK(tell_all(w, u, i) == 0);
    }
    expect_pools(w, u, "did not come", "did not come");
}

/* Rank 0's pattern is there only after rank 1 has begun to look. */
DEVICE_TEST(a_trial_waits_for_a_device_that_is_late, .processes = "2")
{
    smp_neighbour its;
    bool          taken;

    if (w->rank == 0) {
        CHECK(smp_comm_neighbour(w->comm, 1, &its));
        u->stand_in->misbehave(STAND_IN_LATE_EVENTS);
        send_x(w, u, 1, 1, 5000, NULL);
        while (atomic_load(&its.segment->device->pools[0]) == SMP_READER_NONE) {
            sched_yield();
        }
        u->stand_in->misbehave(STAND_IN_IS_SOUND);
        w->barrier(w);
        send_x(w, u, 1, 2, 5000, &taken);
        CHECK(taken);
    } else {
        receive_y(w, u);
        w->barrier(w);
        receive_y(w, u);
    }
    expect_pools(w, u, "", "");
}

/* ---------------------------------------------------------- through host memory */

#define HELD 24

static smp_block *
host_block(world *w, user *u, size_t bytes, stand_in_registered want)
{
    smp_block *block;

    CHECK_OK(smp_comm_block_for_device(w->comm, 1 - w->rank, 0, bytes, &block));
    CHECK(u->stand_in->registered(smp_block_data(block), bytes) == want);
    return block;
}

/* x goes to the other rank through pinned memory, or pageable where it is refused here
 * (`own`) or there (`theirs`). */
static void
send_through_host(world *w, user *u, uint64_t seed, size_t bytes,
                  stand_in_registered own)
{
    smp_block *block = host_block(w, u, bytes, own);
    letter     l = {seed, bytes, 1};

    launch(u, fill_kernel, u->x, bytes, seed);
    CHECK(u->driver->copy_to_host(smp_block_data(block), u->x, bytes, u->stream) == 0);
    CHECK_OK(smp_comm_send(w->comm, 1 - w->rank, &l, sizeof(l), &block, 1));
}

static void
receive_through_host(world *w, user *u, stand_in_registered theirs)
{
    smp_message *message;
    smp_block   *block;
    letter       l;

    receive(w, &message, &l);
    block = smp_message_take_block(message, 0);
    smp_message_free(message);
    smp_pinned_use_device(smp_comm_pinned(w->comm), 0);
    smp_pinned_open(smp_comm_pinned(w->comm), block);
    CHECK(u->stand_in->registered(smp_block_data(block), l.bytes) == theirs);
    CHECK(u->driver->copy_from_host(u->y, smp_block_data(block), l.bytes, u->stream) ==
          0);
    launch(u, check_kernel, u->y, l.bytes, l.seed);
    settle(u);
    smp_block_release(block);
}

/* Blocks of all sizes, held until the slabs are as large as they may be. */
DEVICE_TEST(host_memory_of_devices_is_pinned, .processes = "2", .threads = "2")
{
    uint64_t       random = (uint64_t)w->rank + 3;
    size_t         bytes;
    smp_block     *held[HELD];
    smp_block     *others;
    smp_comm_stats stats;
    smp_pinned_use use;

    for (int i = 0; i < ROUNDS; i++) {
        bytes = SMP_PINNED_LEAST + next_random(&random) % (LARGEST - SMP_PINNED_LEAST);
        send_through_host(w, u, (uint64_t)i, bytes, STAND_IN_PINNED);
        receive_through_host(w, u, STAND_IN_PINNED);
        CHECK_OK(smp_comm_block(w->comm, 1 - w->rank, bytes, &others));
        CHECK(u->stand_in->registered(smp_block_data(others), bytes) ==
              STAND_IN_PAGEABLE);
        smp_block_release(others);
    }
    w->barrier(w); /* all have given back what they had */
    smp_block_release(host_block(w, u, SMP_PINNED_LEAST - 1, STAND_IN_PAGEABLE));
    for (int i = 0; i < HELD; i++) {
        held[i] =
            host_block(w, u, LARGEST, i < 20 ? STAND_IN_PINNED : STAND_IN_PAGEABLE);
    }
    smp_pinned_measure(smp_comm_pinned(w->comm), &use);
    CHECK(use.bytes == WORLD_POOL / 2 && use.in_use == 20 * LARGEST);
    CHECK_TEXT(use.why, "");
    for (int i = 0; i < HELD; i++) {
        smp_block_release(held[i]);
    }
    smp_comm_counters(w->comm, &stats);
    CHECK(stats.pool_in_use == 0);
    CHECK(u->right == ROUNDS);
    w->barrier(w);
}

/* They arrive in pinned memory of the receiver's. */
DEVICE_TEST(tensors_of_another_host_are_pinned, .processes = "2", .hosts = "ab")
{
    smp_block *held[20]; /* all slabs: no thread finds another one adding one */

    for (int i = 0; i < 20; i++) {
        held[i] = host_block(w, u, LARGEST, STAND_IN_PINNED);
    }
    for (int i = 0; i < 20; i++) {
        smp_block_release(held[i]);
    }
    w->barrier(w);
    for (int i = 0; i < ROUNDS; i++) {
        send_through_host(w, u, (uint64_t)i, LARGEST, STAND_IN_PINNED);
        receive_through_host(w, u, STAND_IN_PINNED);
    }
    CHECK(u->right == ROUNDS);
    w->barrier(w);
}

/* Rank 0 cannot register its own memory, rank 1 not that of rank 0. */
DEVICE_TEST(memory_that_cannot_be_pinned_serves_all_the_same, .processes = "2")
{
    smp_pinned_use use;

    for (int from = 0; from < 2; from++) {
        for (int i = 0; i < 3; i++) {
            if (i == 0 && w->rank == 0) {
                u->stand_in->fail("cuMemHostRegister_v2", 1, 2);
            }
            if (w->rank == from) {
                send_through_host(w, u, (uint64_t)i, LARGEST,
                                  from == 0 ? STAND_IN_PAGEABLE : STAND_IN_PINNED);
            } else {
                receive_through_host(w, u, STAND_IN_PAGEABLE);
            }
        }
    }
    smp_pinned_measure(smp_comm_pinned(w->comm), &use);
    CHECK_TEXT(use.why,
               w->rank == 0 ? "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (2)" : "");
    u->stand_in->fail(NULL, 0, 0);
    w->barrier(w);
}

/* --------------------------------------------------------------- one process */

/* A comm ends while another one has its pool open: the pool ends with the last of both.
 */
TEST_RANK(a_pool_outlives_its_comm_while_it_is_open, .threads = "2")
{
    user u;

    begin(w, &u);
    shake_hands(w, &u);
    settle(&u);
    end(&u);
    w->barrier(w);
    if (w->rank == 0) {
        smp_comm_destroy(w->comm);
        w->comm = NULL;
        CHECK(alive() > 0);
    }
    w->barrier(w);
}

/* Memory that a device may still use stays, and its segments are left behind. */
TEST_RANK(a_comm_ends_beside_work_without_end, .processes = "2")
{
    static smp_neighbour other; /* of sanitizers, like own: reachable */
    static smp_segment  *own;
    smp_block           *block;
    user                 u;
    void                *stuck;

    if (__lsan_disable != NULL) {
        __lsan_disable();
    }
    begin(w, &u);
    shake_hands(w, &u);
    if (w->rank == 0) {
        send_through_host(w, &u, 1, LARGEST, STAND_IN_PINNED);
    } else {
        receive_through_host(w, &u, STAND_IN_PINNED);
    }
    CHECK(smp_comm_neighbour(w->comm, 1 - w->rank, &other));
    block = host_block(w, &u, LARGEST, STAND_IN_PINNED);
    own = block->segment;
    smp_block_release(block);
    CHECK(own != other.segment);
    settle(&u);
    w->barrier(w);
    stuck = begin_stuck(&u);
    smp_comm_destroy(w->comm);
    w->comm = NULL;
    end_stuck(&u, stuck);
    w->barrier(w);
    end(&u);
}

/* ----------------------------------------------------------------------- main */

static const world_plan plan = {
    .transports = "shm,tcp", .device_pool_bytes = POOL, .after = none_alive};

/* What stands in for the driver, and what the report then says. */
TEST(without_a_driver_all_goes_as_bytes)
{
    static const char *const cases[][2] = {
        {"/nowhere/libcuda.so", "there is no /nowhere/libcuda.so"},
        {"libc.so.6", "libc.so.6 has no cuInit"},
    };

    for (size_t i = 0; i < 2; i++) {
        setenv("SMP_CUDA_LIBRARY", cases[i][0], 1);
        setenv("SMP_TEST_WHY", cases[i][1], 1);
        CHECK(!world_fails(&world_without_a_driver_the_report_says_why, &plan, 2, NULL,
                           false));
    }
    setenv("SMP_CUDA_LIBRARY", library, 1);
}

TEST(no_failure_is_fatal)
{
    fail_each_call(&world_every_failure_is_survived, &plan, 30, MOST_CALLS);
}

int
main(int argc, char **argv)
{
    find_library();
    return run_worlds(argc, argv, &plan);
}
