/* Spec: csrc/comm/device/landings.h, by the port, over the stand-in of the driver. */
#define _GNU_SOURCE
#include "comm/device/landings.h"

#include "device_messages.h"

#define POOL ((size_t)1 << 20)
#define ROUNDS 60
#define BIG SMP_LANDINGS_LEAST

/* Further calls than these are repetitions. */
#define MOST_CALLS 120

/* ------------------------------------------------------- what PyTorch's allocator is
 */

/* Memory of one stream: free as soon as the thread has no use for it, and in use by the
 * stream until its work is done. */
typedef struct {
    uint64_t at; /* 0: not allocated yet */
    bool     used;
} slab;

#define SLABS 80

static _Thread_local slab slabs[SLABS];
static _Thread_local bool withheld; /* they cannot be exported */

static slab *
take_slab(user *u)
{
    slab *s = slabs;

    while (s->used) {
        s++;
        CHECK(s < slabs + SLABS);
    }
    if (s->at == 0) {
        CHECK(u->driver->alloc(&s->at, SMP_DRIVER_BLOCK) == 0);
        if (withheld) {
            u->stand_in->withhold(s->at);
        }
    }
    s->used = true;
    launch(u, fill_kernel, s->at, BIG, 9); /* what was there before */
    return s;
}

static void
give_slab(void *memory)
{
    ((slab *)memory)->used = false;
}

static int
used_slabs(void)
{
    int used = 0;

    for (int i = 0; i < SLABS; i++) {
        used += slabs[i].used;
    }
    return used;
}

static void
free_slabs(user *u)
{
    settle(u);
    for (int i = 0; i < SLABS; i++) {
        if (slabs[i].at != 0) {
            CHECK(u->driver->free(slabs[i].at) == 0);
        }
        slabs[i] = (slab){0};
    }
}

/* ------------------------------------------------------------------- messages */

/* Reads a tensor as the codec does; *landed: it needed no copy.  SMP_OK, or what get()
 * says. */
static smp_status
read_big(user *u, smp_message *message, const letter *l, bool offers, bool *landed,
         char why[SMP_DRIVER_TEXT])
{
    int        source = message->source;
    smp_status status;
    smp_block *block;
    uint64_t   at;
    void      *stream;
    slab      *s;

    *landed = false;
    if (!l->on_device) {
        smp_device_meet(u->port, source, ordinal);
        smp_message_free(message);
        return SMP_OK;
    }
    block = smp_message_take_block(message, 0);
    smp_message_free(message);
    s = smp_device_landing(u->port, block, &at, &stream);
    *landed = s != NULL && stream == u->stream;
    if (!*landed) {
        s = take_slab(u);
        at = s->at;
    }
    status = smp_device_get(u->port, source, block, at, u->stream, why);
    if (status == SMP_OK) {
        launch(u, check_kernel, at, l->bytes, l->seed);
        launch(u, fill_kernel, at, l->bytes, 8);
    }
    if (status == SMP_OK || !*landed) {
        give_slab(s);
    }
    if (status == SMP_OK && offers &&
        smp_device_wants_landing(u->port, source, l->bytes)) {
        s = take_slab(u);
        if (!smp_device_offer_landing(u->port, source, s->at, l->bytes, u->stream, s,
                                      give_slab)) {
            give_slab(s);
        }
    }
    return status;
}

/* Whether it needed no copy. */
static bool
receive_big(world *w, user *u, bool offers)
{
    char         why[SMP_DRIVER_TEXT];
    smp_message *message;
    letter       l;
    bool         landed;

    receive(w, &message, &l);
    CHECK_OK(read_big(u, message, &l, offers, &landed, why));
    return landed;
}

static uint64_t
landed_so_far(user *u)
{
    smp_device_use use;

    smp_device_measure(u->port, &use);
    return use.landed;
}

/* Rank 0 has sent rank 1 two tensors of BIG bytes, and rank 1 shows memory for the next
 * one, unless `held`: then its device is not done with this memory. */
static void
begin_landings(world *w, user *u, bool held)
{
    shake_hands(w, u);
    settle(u);
    w->barrier(w);
    for (int i = 0; i < 2; i++) {
        if (w->rank == 0) {
            send_x(w, u, 1, (uint64_t)i, BIG, NULL);
        } else {
            u->stand_in->hold(held && i == 1);
            CHECK(!receive_big(w, u, true));
        }
    }
    if (!held) {
        settle(u);
    }
    smp_device_sweep(u->port);
    w->barrier(w);
}

/* ---------------------------------------------------------------------- tests */

/* Sizes come and go; memory that is free again is used again at once. */
DEVICE_TEST(a_tensor_lands_as_it_was_sent, .processes = "2", .threads = "3")
{
    uint64_t       random = (uint64_t)w->rank + 5;
    smp_device_use use;

    for (int i = 0; i < ROUNDS; i++) {
        for (int other = 0; other < w->size; other++) {
            if (other != w->rank) {
                size_t bytes = BIG + 1000 * (next_random(&random) % 3);

                send_x(w, u, other, (uint64_t)i * 8 + (uint64_t)w->rank, bytes, NULL);
            }
        }
        for (int other = 0; other < w->size - 1; other++) {
            receive_big(w, u, true);
        }
        if (i % 3 == 0) { /* or the thread is far ahead */
            settle(u);
        }
        if (i % 16 == 0) {
            smp_device_end_step(u->port);
        }
    }
    settle(u);
    smp_device_measure(u->port, &use);
    CHECK_TEXT(use.why, "");
    CHECK(use.landed > ROUNDS / 8 && use.landed < use.tensors);
    CHECK(u->right > 0);
    w->barrier(w);
    for (int i = 0; i < 3; i++) {
        smp_device_end_step(u->port);
    }
    CHECK(used_slabs() == 0);
    w->barrier(w); /* all have given back what they had */
    smp_device_measure(u->port, &use);
    CHECK(use.in_use == 0);
    free_slabs(u);
}

/* A sender's stream never waits for a receiver's: the pool serves meanwhile. */
DEVICE_TEST(memory_still_in_use_is_no_landing, .processes = "2")
{
    begin_landings(w, u, true);
    for (int i = 0; i < 2; i++) { /* then it is done */
        if (w->rank == 0) {
            send_x(w, u, 1, 5, BIG, NULL);
            settle(u);
            CHECK(landed_so_far(u) == (uint64_t)i);
        } else {
            CHECK(receive_big(w, u, false) == (i == 1));
            u->stand_in->hold(false);
            settle(u);
            smp_device_sweep(u->port);
        }
        w->barrier(w);
    }
    CHECK(w->rank == 0 || u->right == 5);
    free_slabs(u);
}

DEVICE_TEST(what_nobody_wants_for_a_step_is_taken_back, .processes = "2")
{
    begin_landings(w, u, false);
    if (w->rank == 1) {
        CHECK(used_slabs() == 1);
        smp_device_end_step(u->port); /* of the offer */
        CHECK(used_slabs() == 1);
        smp_device_end_step(u->port);
        CHECK(used_slabs() == 0);
    }
    w->barrier(w);
    for (int i = 0; i < 2; i++) { /* by the pool, and it is offered again */
        if (w->rank == 0) {
            send_x(w, u, 1, 6, BIG, NULL);
        } else {
            CHECK(receive_big(w, u, true) == (i == 1));
            settle(u);
            smp_device_sweep(u->port);
        }
        w->barrier(w);
    }
    free_slabs(u);
}

/* By the sender, which closes it in the step after the last one with a use. */
DEVICE_TEST(an_allocation_is_open_while_it_is_of_use, .processes = "2")
{
    int before = 0;

    begin_landings(w, u, false);
    for (int step = 0; step < 3; step++) {
        smp_device_begin_step(u->port);
        if (w->rank == 0) {
            send_x(w, u, 1, 6, step == 0 ? BIG : 100, NULL);
            CHECK(landed_so_far(u) == 1);
            before = step == 0 ? u->stand_in->alive() : before;
            CHECK(u->stand_in->alive() == before - (step == 2));
            settle(u);
            smp_device_end_step(u->port);
        } else {
            CHECK(receive_big(w, u, false) == (step == 0));
            settle(u);
        }
        w->barrier(w);
    }
    free_slabs(u);
}

/* All memory is let go, once the devices have done what they were told. */
static void
expect_let_go(user *u)
{
    int64_t until = smp_clock_ns() + WORLD_DEADLINE_NS;

    do {
        CHECK(smp_clock_ns() < until);
        sched_yield();
        smp_device_end_step(u->port);
    } while (used_slabs() != 0);
}

/* As after a step that failed; the sender's copy is not done, at first. */
DEVICE_TEST(a_dropped_message_leaves_its_landing, .processes = "2")
{
    smp_message *message;
    letter       l;

    begin_landings(w, u, false);
    if (w->rank == 0) {
        u->stand_in->hold(true);
        send_x(w, u, 1, 6, BIG, NULL);
        CHECK(landed_so_far(u) == 1);
    } else {
        receive(w, &message, &l);
        CHECK(message->blocks[0]->lands);
        smp_message_free(message);
        for (int i = 0; i < 3; i++) {
            smp_device_end_step(u->port);
            CHECK(used_slabs() == 1);
        }
    }
    w->barrier(w);
    u->stand_in->hold(false);
    settle(u);
    if (w->rank == 1) {
        expect_let_go(u);
    }
    w->barrier(w);
    free_slabs(u);
}

/* Of a port that its device has failed, too. */
DEVICE_TEST(a_shut_port_takes_its_memory_back, .processes = "2")
{
    begin_landings(w, u, false);
    if (w->rank == 1) {
        u->stand_in->fail("cuEventRecord", 1, 2);
        CHECK(smp_device_put(u->port, 0, 0, u->x, 100, u->stream) == NULL);
        CHECK(used_slabs() == 1);
        expect_let_go(u);
    }
    w->barrier(w);
    free_slabs(u);
}

/* How a comm of rank 1 ends that rank 0 has sent a tensor. */
typedef enum { UNREAD, DROPPED, IDLE } message_end;

static void
end_comm(world *w, message_end how)
{
    smp_message *message;
    letter       l;
    user         u;

    begin(w, &u);
    begin_landings(w, &u, false);
    if (w->rank == 0 && how != IDLE) {
        send_x(w, &u, 1, 6, BIG, NULL);
        CHECK(landed_so_far(&u) == 1);
    } else if (w->rank == 1 && how == DROPPED) {
        receive(w, &message, &l);
        smp_message_free(message);
    }
    settle(&u);
    w->barrier(w);
    if (w->rank == 1) {
        CHECK(used_slabs() == 1);
        smp_comm_destroy(w->comm);
        w->comm = NULL;
        CHECK(used_slabs() == 0);
    }
    w->barrier(w);
    free_slabs(&u);
    end(&u);
}

TEST_RANK(the_end_lets_go_of_an_offer, .processes = "2")
{
    end_comm(w, IDLE);
}

TEST_RANK(the_end_lets_go_of_a_dropped_tensor, .processes = "2")
{
    end_comm(w, DROPPED);
}

TEST_RANK(the_end_lets_go_of_an_unread_tensor, .processes = "2")
{
    end_comm(w, UNREAD);
}

/* Its event stays for the reader. */
TEST_RANK(a_tensor_outlives_its_senders_comm, .processes = "2")
{
    user u;

    begin(w, &u);
    begin_landings(w, &u, false);
    if (w->rank == 0) {
        send_x(w, &u, 1, 6, BIG, NULL);
        CHECK(landed_so_far(&u) == 1);
        settle(&u);
        smp_comm_destroy(w->comm);
        w->comm = NULL;
        w->barrier(w);
    } else {
        w->barrier(w);
        CHECK(receive_big(w, &u, false));
        settle(&u);
        CHECK(u.right == 4);
    }
    w->barrier(w);
    free_slabs(&u);
    end(&u);
}

/* The sender is killed before its copy is done: nothing here waits for it for good. */
TEST_RANK(the_end_beside_a_dead_senders_copy, .processes = "2")
{
    int64_t from;
    user    u;

    if (__lsan_disable != NULL) {
        __lsan_disable();
    }
    begin(w, &u);
    begin_landings(w, &u, false);
    if (w->rank == 0) {
        u.stand_in->hold(true);
        send_x(w, &u, 1, 6, BIG, NULL);
        while (true) {
            sched_yield();
        }
    }
    CHECK(receive_big(w, &u, false));
    CHECK(kill(w->shared->pids[0], SIGKILL) == 0);
    expect_end(w, SMP_ERR_PEER_LOST);
    CHECK(!smp_streams_rest(0)); /* all that wait for it */
    from = smp_clock_ns();
    smp_comm_destroy(w->comm);
    w->comm = NULL;
    CHECK(smp_clock_ns() - from < WORLD_DEADLINE_NS / 2);
    _exit(0); /* the user's stream is stuck */
}

DEVICE_TEST(memory_that_the_sender_cannot_open_is_offered_no_more, .processes = "2")
{
    begin_landings(w, u, false);
    if (w->rank == 0) {
        u->stand_in->fail("cuIpcOpenMemHandle_v2", 1, 2);
    }
    for (int i = 0; i < 3; i++) {
        if (w->rank == 0) {
            send_x(w, u, 1, 6, BIG, NULL);
        } else {
            CHECK(!receive_big(w, u, i != 0));
            settle(u);
            smp_device_end_step(u->port);
            CHECK(used_slabs() == 0);
        }
        w->barrier(w);
    }
    CHECK(landed_so_far(u) == 0);
    free_slabs(u);
}

/* The sender's stream would wait for the link. */
TEST_RANK(a_tensor_for_another_device_does_not_land, .processes = "2")
{
    user u;

    ordinal = w->rank;
    begin(w, &u);
    shake_hands(w, &u);
    for (int i = 0; i < 4; i++) {
        if (w->rank == 0) {
            send_x(w, &u, 1, 6, BIG, NULL);
        } else {
            CHECK(!receive_big(w, &u, i != 2));
            CHECK(used_slabs() == (i == 1 || i == 2)); /* offered, refused */
            settle(&u);
            smp_device_end_step(u.port);
        }
        w->barrier(w);
    }
    free_slabs(&u);
    end(&u);
}

DEVICE_TEST(memory_that_cannot_be_exported_is_offered_a_few_times, .processes = "2")
{
    withheld = w->rank == 1;
    shake_hands(w, u);
    for (int i = 0; i < 12; i++) {
        if (w->rank == 0) {
            send_x(w, u, 1, 6, BIG, NULL);
        } else {
            CHECK(!receive_big(w, u, true));
            CHECK(used_slabs() == 0);
            CHECK(smp_device_wants_landing(u->port, 0, BIG) == (i < 8));
            settle(u);
        }
        w->barrier(w);
    }
    free_slabs(u);
}

/* Whatever fails: what arrives is right, and nobody waits for ever. */
DEVICE_TEST(every_failure_is_survived, .processes = "")
{
    char         why[SMP_DRIVER_TEXT] = "";
    smp_message *message;
    letter       l;
    bool         landed;
    int          lost = 0;

    for (int i = 0; i < 12; i++) { /* no failure of the test's own */
        take_slab(u);
    }
    for (int i = 0; i < 12; i++) {
        give_slab(&slabs[i]);
    }
    if (w->rank == unlucky_rank) {
        u->stand_in->fail(NULL, unlucky_call, 2);
    }
    for (int i = 0; i < 8; i++) {
        for (int turn = 0; turn < 2; turn++) {
            if (turn == w->rank) {
                send_x(w, u, 1 - w->rank, (uint64_t)i, BIG, NULL);
            } else {
                receive(w, &message, &l);
                lost += read_big(u, message, &l, true, &landed, why) != SMP_OK;
            }
        }
        smp_device_end_step(u->port);
    }
    if (w->rank == unlucky_rank) {
        atomic_store(unlucky, u->stand_in->failed());
        u->stand_in->fail(NULL, 0, 0);
    }
    CHECK(lost <= (w->rank == unlucky_rank));
    settle(u);
    w->barrier(w);
    expect_let_go(u);
    w->barrier(w);
    free_slabs(u);
}

/* ----------------------------------------------------------------------- main */

static const world_plan plan = {
    .transports = "shm,tcp", .device_pool_bytes = POOL, .after = none_alive};

TEST(no_failure_is_fatal)
{
    fail_each_call(&world_every_failure_is_survived, &plan, 40, MOST_CALLS);
}

int
main(int argc, char **argv)
{
    find_library();
    return run_worlds(argc, argv, &plan);
}
