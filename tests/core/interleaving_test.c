/* The hand-overs between ranks and threads, in every order of their steps: queue in
 * shared memory, doorbell, kicks of the progress thread; what a server runs next of
 * what has come; modules' collectives; members of a group in steps; work items;
 * posted receives.  Spec: csrc/comm/memory/ring.h, csrc/comm/memory/doorbell.h,
 * csrc/comm/messaging/comm.h, csrc/server/choice.h and lineup.h,
 * csrc/comm/collective/intra_host/epoch_barrier.h, queue.h and mailbox.h.
 *
 * It is the core's own code that runs, with ranks that have memory and no sockets. Each
 * kind of hand-over is also run with a mistake in it, which must be found. */
#define _GNU_SOURCE
#include "check.h"
#include "comm/collective/intra_host/epoch_barrier.h"
#include "comm/collective/mailbox.h"
#include "comm/collective/queue.h"
#include "comm/memory/arena.h"
#include "explorer.h"
#include "server/choice.h"
#include "server/lineup.h"

/* There are no tensors in the pool here. */
#define smp_arena_wants_pages(arena) ((void)(arena), false)
#include "comm/messaging/comm.c"
#include "comm/messaging/messages.c"
#include "comm/transport/shm/shm.c"

/* ------------------------------------------------------ ranks without their sockets */

enum { RANKS = 3 };

typedef struct {
    smp_comm        comm;
    shm             transport;
    peer            peers[RANKS];
    peer           *peer_list[RANKS];
    smp_endpoint   *routes[RANKS];
    _Atomic uint8_t states[RANKS];
    smp_traffic     sent[RANKS];
    smp_segment     segment;
    smp_doorbell    doorbell;
} rank;

static rank     ranks[RANKS];
static smp_ring rings[RANKS][RANKS]; /* [to][from] */

/* Where the kicks of a rank's progress thread go; its loop's descriptor is the next. */
static int
kick_fd_of(int r)
{
    return 2 * r;
}

static void
make_rank(int r)
{
    rank     *self = &ranks[r];
    smp_comm *comm = &self->comm;

    memset(self, 0, sizeof(*self));
    for (int from = 0; from < RANKS; from++) { /* not the data: 64 KiB each */
        atomic_init(&rings[r][from].tail, 0);
        atomic_init(&rings[r][from].head, 0);
        atomic_init(&rings[r][from].hungry, 0);
    }
    self->segment.doorbell = &self->doorbell;
    self->segment.rings = rings[r];
    comm->rank = r;
    comm->size = RANKS;
    comm->generation = smp_fork_generation();
    comm->segment = &self->segment;
    comm->loop = (smp_loop){.epoll_fd = kick_fd_of(r) + 1, .kick_fd = kick_fd_of(r)};
    comm->endpoints =
        (smp_endpoints){{{&smp_transport_shm, &self->transport, true}}, 1};
    comm->routes = self->routes;
    comm->spins = true;
    comm->peers = (smp_peers){.size = RANKS, .states = self->states};
    comm->traffic = self->sent;
    atomic_init(&comm->peers.open, RANKS - 1);
    smp_inbox_init(&comm->inbox);
    smp_post_init(&comm->post);
    fill_host(comm, NULL);
    self->transport.host = &comm->host;
    self->transport.peers = self->peer_list;
    for (int other = 0; other < RANKS; other++) {
        peer *p = &self->peers[other];

        if (other != r) {
            self->routes[other] = &comm->endpoints.list[0];
            atomic_init(&self->states[other], SMP_PEER_OPEN);
            self->peer_list[other] = p;
            p->self = &self->transport;
            p->rank = other;
            p->segment = &ranks[other].segment;
            p->kick_fd = kick_fd_of(other);
            p->consumer.ring = &rings[r][other];
            p->producer.ring = &rings[other][r];
            smp_lock_init(&p->lock, SMP_LOCK_PEER);
            smp_stream_init(&p->stream, -1);
        }
    }
}

static void
make_ranks(void)
{
    for (int r = 0; r < RANKS; r++) {
        make_rank(r);
    }
}

static void
want(bool condition, const char *what)
{
    if (!condition) {
        explore_wrong(what);
    }
}

static void
send_number(int from, int to, uint64_t number, size_t bytes)
{
    static uint64_t data[SMP_RING_ENTRY_BYTES / 8];

    data[0] = number;
    want(smp_comm_send(&ranks[from].comm, to, data, bytes, NULL, 0) == SMP_OK,
         "cannot send");
}

/* The next number that rank 0 gets; the status where it gets none. */
static smp_status
receive_number(uint64_t *number, int *source)
{
    smp_message *message;
    smp_status   status = smp_comm_receive(&ranks[0].comm, -1, &message);

    if (status == SMP_OK) {
        memcpy(number, message->bytes, sizeof(*number));
        *source = message->source;
        smp_message_free(message);
    }
    return status;
}

/* Rank 0 gets 1, 2, ... `last` from each of ranks 1 to `senders`. */
static void
receive_in_order(int senders, uint64_t last)
{
    uint64_t had[RANKS] = {0};

    for (uint64_t i = 0; i < (uint64_t)senders * last; i++) {
        uint64_t number = 0;
        int      source = 0;

        want(receive_number(&number, &source) == SMP_OK, "cannot receive");
        want(number == ++had[source], "out of order");
    }
}

/* ------------------------------------------------------------- looking for mistakes */

static void
all_right(const exploration *what, const char *name)
{
    explore_findings found;

    explore(what, true, &found);
    if (getenv("SMP_TEST_TIMES") != NULL) {
        fprintf(stderr, "%-62s %8llu orders, %8llu redundant, %4zu steps\n", name,
                (unsigned long long)found.runs, (unsigned long long)found.redundant,
                found.longest);
    }
    CHECK(found.wrong[0] == '\0');
    CHECK(found.runs > 1);
}

static void
finds(const exploration *what, const char *wrong)
{
    explore_findings found;

    explore(what, false, &found);
    if (strcmp(found.wrong, wrong) != 0) {
        fprintf(stderr, "found '%s', not '%s', in %llu orders\n", found.wrong, wrong,
                (unsigned long long)found.runs);
        check_fail();
    }
}

/* A thread, by the name of what it does. */
#define T(what)                                                                        \
    {                                                                                  \
#        what, what, false                                                             \
    }

/* What a thread does, or a set-up. */
#define STEP(name, what)                                                               \
    static void name(void)                                                             \
    {                                                                                  \
        what;                                                                          \
    }

#define RIGHT(name, ...)                                                               \
    TEST(name)                                                                         \
    {                                                                                  \
        static const exploration what = {__VA_ARGS__};                                 \
                                                                                       \
        all_right(&what, #name);                                                       \
    }

#define WRONG(name, text, ...)                                                         \
    TEST(name)                                                                         \
    {                                                                                  \
        static const exploration what = {__VA_ARGS__};                                 \
                                                                                       \
        finds(&what, text);                                                            \
    }

/* --------------------------------------------------------------------- the explorer */

enum { WRITES = 3 };

static _Atomic int words[2];

STEP(make_words, atomic_init(&words[0], 0); atomic_init(&words[1], 0))

static void
add_to_word_0(void)
{
    for (int i = 0; i < WRITES; i++) {
        atomic_fetch_add(&words[0], 1);
    }
}

static void
add_to_word_1(void)
{
    for (int i = 0; i < WRITES; i++) {
        atomic_fetch_add(&words[1], 1);
    }
}

/* Two threads that write one word three times each: 6! / (3! 3!) orders.  A third
 * that writes another word adds none. */
TEST(orders_that_differ_are_tried_once_each)
{
    static const exploration what = {
        .set_up = make_words,
        .threads = {T(add_to_word_0), T(add_to_word_0), T(add_to_word_1)},
    };
    explore_findings found;

    explore(&what, true, &found);
    CHECK(found.wrong[0] == '\0');
    CHECK(found.runs == 20);
}

STEP(add_in_two_steps, atomic_store(&words[0], atomic_load(&words[0]) + 1))
STEP(check_both_counted, want(words[0] == 2, "an addition is lost"))

WRONG(a_lost_update_is_found, "an addition is lost", .set_up = make_words,
      .threads = {T(add_in_two_steps), T(add_in_two_steps)},
      .check = check_both_counted)

/* ------------------------------------------------------- the queue and the doorbell */

STEP(send_one, send_number(1, 0, 1, 8))
STEP(send_two, send_number(1, 0, 1, 8); send_number(1, 0, 2, 8))
STEP(send_from_2, send_number(2, 0, 1, 8))
STEP(receive_one, receive_in_order(1, 1))
STEP(receive_two, receive_in_order(1, 2))
STEP(receive_from_both, receive_in_order(2, 1))

RIGHT(a_message_is_never_slept_through, .set_up = make_ranks,
      .threads = {T(send_one), T(receive_one)})

RIGHT(two_messages_come_in_order, .set_up = make_ranks,
      .threads = {T(send_two), T(receive_two)})

RIGHT(two_senders_are_both_heard, .set_up = make_ranks,
      .threads = {T(send_one), T(send_from_2), T(receive_from_both)})

/* Sleeps as smp_comm_receive() does, but for the look after it lies down. */
static void
receive_without_a_second_look(void)
{
    smp_message  *message = NULL;
    smp_doorbell *doorbell = ranks[0].comm.segment->doorbell;

    while (look(&ranks[0].comm, &message) == SMP_ERR_TIMED_OUT) {
        smp_doorbell_lie_down(doorbell);
        smp_doorbell_sleep(doorbell, SMP_NEVER);
    }
    smp_doorbell_get_up(doorbell);
    smp_message_free(message);
}

WRONG(a_receiver_that_does_not_look_again_is_found,
      "receive_without_a_second_look: sleeps for ever", .set_up = make_ranks,
      .threads = {T(send_one), T(receive_without_a_second_look)})

/* Rings, then publishes. */
static void
send_the_wrong_way_round(void)
{
    smp_ring_producer *producer = &ranks[1].peers[0].producer;
    uint64_t           number = 1;
    void              *to;

    want(smp_ring_reserve(producer, smp_record_bytes(8, NULL, 0, NULL), &to) == SMP_OK,
         "cannot reserve");
    smp_record_write(to, SMP_RECORD_WHOLE, &number, 8, NULL, 0, NULL);
    smp_doorbell_ring(ranks[0].segment.doorbell);
    smp_ring_commit(producer);
}

WRONG(a_sender_that_rings_before_it_publishes_is_found, "receive_one: sleeps for ever",
      .set_up = make_ranks, .threads = {T(send_the_wrong_way_round), T(receive_one)})

/* ----------------------------------------------------------------------- other news */

STEP(wake_rank_0, smp_comm_wake(&ranks[0].comm))

static void
receive_and_be_woken(void)
{
    int woken = 0;
    int messages = 0;

    for (int i = 0; i < 2; i++) {
        uint64_t   number;
        int        source;
        smp_status status = receive_number(&number, &source);

        woken += status == SMP_ERR_INTERRUPTED;
        messages += status == SMP_OK;
    }
    want(woken == 1 && messages == 1, "not one message and one waking");
}

RIGHT(a_wake_up_call_is_heard_beside_a_message, .set_up = make_ranks,
      .threads = {T(send_one), T(wake_rank_0), T(receive_and_be_woken)})

/* As the progress thread does with what came through a socket. */
static void
deliver_one(void)
{
    uint64_t     number = 1;
    smp_message *message;

    want(smp_message_create(2, sizeof(number), 0, &message) == SMP_OK, "no memory");
    memcpy(message->bytes, &number, sizeof(number));
    host_deliver(&ranks[0].comm, message);
}

RIGHT(what_the_progress_thread_delivers_is_heard_beside_the_queues,
      .set_up = make_ranks,
      .threads = {T(send_one), T(deliver_one), T(receive_from_both)})

/* ---------------------------------------------------------------------- a full ring */

enum { FULL = 4 }; /* so many of the longest fill it */

static void
make_ranks_with_a_full_ring(void)
{
    make_ranks();
    for (uint64_t i = 1; i <= FULL; i++) {
        send_number(1, 0, i, SMP_RING_ENTRY_BYTES - 64);
    }
    want(rings[0][1].tail + SMP_RING_BYTES / 8 > SMP_RING_BYTES, "not full");
    (void)smp_thread_start(&ranks[1].comm.thread, "progress", progress_main,
                           &ranks[1].comm);
}

STEP(send_one_more, send_number(1, 0, FULL + 1, SMP_RING_ENTRY_BYTES - 64))
STEP(receive_all, receive_in_order(1, FULL + 1))

RIGHT(a_full_ring_is_refilled_when_there_is_room, .set_up = make_ranks_with_a_full_ring,
      .threads = {T(send_one_more), T(receive_all), {"progress", NULL, true}})

/* A progress thread that does not reserve once more after it has asked. */
static void
ask_and_wait(void)
{
    peer *p = &ranks[1].peers[0];
    void *to;

    for (;;) {
        want(smp_ring_reserve(&p->producer, SMP_RING_ENTRY_BYTES, &to) == SMP_OK,
             "cannot reserve");
        if (to != NULL) {
            return;
        }
        smp_ring_ask_for_room(&p->producer);
        smp_loop_wait(&ranks[1].comm.loop, -1);
    }
}

STEP(receive_what_fills_it, receive_in_order(1, FULL))

WRONG(a_producer_that_asks_and_does_not_look_again_is_found,
      "ask_and_wait: sleeps for ever", .set_up = make_ranks_with_a_full_ring,
      .threads = {T(ask_and_wait), T(receive_what_fills_it), {"unused", NULL, true}})

/* --------------------------------------------------------------------------- deaths */

enum { SENDER, KILLER, RECEIVER };

/* What rank 0's progress thread does when it learns of it. */
static void
kill_rank_1(void)
{
    explore_kill(SENDER);
    host_ended(&ranks[0].comm, 1, SMP_ERR_PEER_LOST);
}

static void
receive_until_the_loss(void)
{
    uint64_t   last = 0;
    uint64_t   number = 0;
    int        source;
    smp_status status;

    while ((status = receive_number(&number, &source)) == SMP_OK) {
        want(number == ++last, "out of order");
    }
    want(status == SMP_ERR_PEER_LOST, "another status");
    want(smp_comm_lost(&ranks[0].comm) == 1, "another rank is lost");
}

/* Nothing that was published is lost. */
static void
check_that_all_was_read(void)
{
    want(atomic_load(&rings[0][1].tail) == atomic_load(&rings[0][1].head),
         "a message that was sent was not received");
}

RIGHT(a_sender_that_dies_at_any_step_is_noticed_after_its_messages,
      .set_up = make_ranks,
      .threads = {T(send_one), T(kill_rank_1), T(receive_until_the_loss)},
      .check = check_that_all_was_read)

static void
make_ranks_without_rank_2(void)
{
    make_ranks();
    host_ended(&ranks[0].comm, 2, SMP_ERR_CLOSED);
}

/* Then nobody is left, but not because all have gone by themselves. */
RIGHT(a_sender_that_dies_last_has_not_left, .set_up = make_ranks_without_rank_2,
      .threads = {T(send_one), T(kill_rank_1), T(receive_until_the_loss)},
      .check = check_that_all_was_read)

/* One that died between clearing the doorbell and the system call. */
static void
kill_rank_1_and_ring_softly(void)
{
    smp_comm *comm = &ranks[0].comm;

    explore_kill(SENDER);
    smp_peers_close(&comm->peers, 1, SMP_ERR_PEER_LOST, "shm");
    smp_doorbell_ring(comm->segment->doorbell);
}

WRONG(a_doorbell_that_is_not_rung_hard_after_a_death_is_found,
      "receive_until_the_loss: sleeps for ever", .set_up = make_ranks,
      .threads = {T(send_one), T(kill_rank_1_and_ring_softly),
                  T(receive_until_the_loss)})

STEP(say_one_thing_and_leave, send_one(); host_ended(&ranks[0].comm, 1, SMP_ERR_CLOSED))

static void
receive_until_it_has_left(void)
{
    uint64_t   number = 0;
    uint64_t   last = 0;
    int        source;
    smp_status status;

    while ((status = receive_number(&number, &source)) == SMP_OK) {
        want(number == ++last, "out of order");
    }
    want(last == 1, "a message of a rank that has left is missing");
    want(status == SMP_ERR_CLOSED, "another status");
}

RIGHT(the_last_words_of_who_leaves_are_heard, .set_up = make_ranks_without_rank_2,
      .threads = {T(say_one_thing_and_leave), T(receive_until_it_has_left)})

/* ----------------------------------------------------------------- members in steps */

enum { GROUP = 77 };

static smp_epoch_barrier members[RANKS]; /* members[m]: as member m sees the group */
static smp_control_block controls[RANKS];
static smp_member        member_lists[RANKS][RANKS];

static void
make_members(int n)
{
    make_ranks();
    for (int m = 0; m < n; m++) {
        smp_control_block *control = &controls[m];

        atomic_init(&control->id, GROUP);
        atomic_init(&control->nonce, (uint64_t)m + 1);
        atomic_init(&control->doorbell.asleep, 0);
        atomic_init(&control->read, 0);
        atomic_init(&control->waits, 0);
        atomic_init(&control->failed, SMP_OK);
        atomic_init(&control->slots[0].notice.step, 0);
        atomic_init(&control->slots[1].notice.step, 0);
        for (int other = 0; other < n; other++) {
            member_lists[m][other] = (smp_member){.rank = other,
                                                  .control = &controls[other],
                                                  .nonce = (uint64_t)other + 1};
        }
        members[m] = (smp_epoch_barrier){.comm = &ranks[m].comm,
                                         .size = n,
                                         .self = m,
                                         .members = member_lists[m],
                                         .id = GROUP,
                                         .generation = smp_fork_generation()};
    }
}

STEP(make_two_members, make_members(2))
STEP(make_three_members, make_members(3))

/* Posts its number for this step. */
static void
post(int m)
{
    smp_epoch_barrier *self = &members[m];

    smp_epoch_barrier_slot(self, m, self->step + 1)->notice.count =
        100 * (self->step + 1) + (uint64_t)m;
    smp_epoch_barrier_post(self);
}

/* Waits for the others; what became of it. */
static smp_status
await(int m)
{
    smp_epoch_barrier *self = &members[m];
    smp_status         status = SMP_OK;
    int                missing;

    while (!smp_epoch_barrier_arrived(self)) {
        status = smp_epoch_barrier_trouble(self, &missing);
        if (status != SMP_OK) {
            return status;
        }
        smp_epoch_barrier_wait(self, SMP_NEVER);
    }
    for (int other = 0; other < self->size; other++) {
        want(smp_epoch_barrier_slot(self, other, self->step)->notice.count ==
                 100 * self->step + (uint64_t)other,
             "a slot has another step's number");
    }
    smp_epoch_barrier_read(self);
    return status;
}

static void
go_in_steps(int m, int steps)
{
    for (int i = 0; i < steps; i++) {
        post(m);
        want(await(m) == SMP_OK, "trouble");
    }
}

/* Both have posted step 1 and nobody has read it. */
static void
make_two_members_in_step_1(void)
{
    make_members(2);
    post(0);
    post(1);
}

STEP(read_step_1, want(await(0) == SMP_OK, "trouble"); post(0))

/* The slot of step 3 is that of step 1. */
static void
go_on_to_step_3(void)
{
    want(await(1) == SMP_OK, "trouble");
    post(1);
    want(await(1) == SMP_OK, "trouble");
    post(1);
}

STEP(member_0_twice, go_in_steps(0, 2))
STEP(member_1_twice, go_in_steps(1, 2))
STEP(member_0_once, go_in_steps(0, 1))
STEP(member_1_once, go_in_steps(1, 1))
STEP(member_1_that_posts, post(1))
STEP(member_2_that_posts, post(2))

RIGHT(a_slot_is_filled_again_when_all_have_read_it,
      .set_up = make_two_members_in_step_1,
      .threads = {T(read_step_1), T(go_on_to_step_3)})

RIGHT(two_members_never_miss_a_step, .set_up = make_two_members,
      .threads = {T(member_0_twice), T(member_1_twice)})

RIGHT(a_member_waits_for_the_last_of_two, .set_up = make_three_members,
      .threads = {T(member_0_once), T(member_1_that_posts), T(member_2_that_posts)})

static void
give_up_in_step_2(void)
{
    go_in_steps(1, 1);
    smp_epoch_barrier_fail(&members[1], SMP_ERR_TIMED_OUT, "tired");
}

static void
hear_of_it_in_step_2(void)
{
    char why[16] = "";

    go_in_steps(0, 1);
    post(0);
    want(await(0) == SMP_ERR_TIMED_OUT, "another status");
    want(smp_epoch_barrier_why(&members[0], 1, why, sizeof(why)) &&
             strcmp(why, "tired") == 0,
         "another reason");
}

RIGHT(a_member_that_gives_up_is_heard, .set_up = make_two_members,
      .threads = {T(hear_of_it_in_step_2), T(give_up_in_step_2)})

/* Lies down and sleeps without looking whether the others have posted meanwhile. */
static void
member_0_without_a_second_look(void)
{
    smp_doorbell *doorbell = &controls[0].doorbell;

    post(0);
    while (!smp_epoch_barrier_arrived(&members[0])) {
        smp_doorbell_lie_down(doorbell);
        smp_doorbell_sleep(doorbell, SMP_NEVER);
    }
}

WRONG(a_member_that_does_not_look_again_is_found,
      "member_0_without_a_second_look: sleeps for ever", .set_up = make_two_members,
      .threads = {T(member_0_without_a_second_look), T(member_1_once)})

/* A step ahead of the others' reading: with one slot for all steps, that is. */
static void
member_1_that_does_not_wait(void)
{
    for (int i = 0; i < 3; i++) {
        post(1);
    }
}

WRONG(a_member_that_does_not_wait_for_the_readers_is_found,
      "member_0_once: a slot has another step's number", .set_up = make_two_members,
      .threads = {T(member_0_once), T(member_1_that_does_not_wait)})

/* Nobody rings for the dead: the sleeper looks around every SLEEP_NS. */
STEP(kill_member_0, explore_kill(0); host_ended(&ranks[1].comm, 0, SMP_ERR_PEER_LOST))

static void
member_1_until_the_loss(void)
{
    smp_status status = SMP_OK;

    for (int i = 0; i < 2 && status == SMP_OK; i++) {
        post(1);
        status = await(1);
    }
    want(status == SMP_OK || status == SMP_ERR_PEER_LOST, "another status");
    want(status == SMP_OK ||
             atomic_load(&controls[0].slots[members[1].step & 1].notice.step) !=
                 members[1].step,
         "it had posted this step");
}

RIGHT(a_member_that_dies_at_any_step_is_noticed, .set_up = make_two_members,
      .threads = {T(member_0_once), T(kill_member_0), T(member_1_until_the_loss)},
      .timers = true)

/* --------------------------------------------------------------------------- work
 * items */

static smp_carrier  *the_carrier;
static smp_queue    *the_queue;
static smp_work_item items[2];
static int           carried_out; /* calls of the group that follows */

/* A group whose operations are over at once, one at a time. */
smp_status
smp_group_start(smp_group *group, const smp_call *call)
{
    (void)group;
    (void)call;
    carried_out++;
    return SMP_OK;
}

smp_status
smp_group_wait(smp_group *group, int64_t until_ns, bool *over)
{
    (void)group;
    (void)until_ns;
    *over = true;
    return SMP_OK;
}

uint64_t
smp_group_sequence(const smp_group *group)
{
    (void)group;
    return (uint64_t)carried_out;
}

void
smp_group_keys(const smp_group *group, uint32_t keys[2])
{
    (void)group;
    keys[0] = keys[1] = 0;
}

const char *
smp_group_error(const smp_group *group)
{
    (void)group;
    return "";
}

/* Nobody waits for others here. */
int64_t
smp_group_waited_ns(const smp_group *group)
{
    (void)group;
    return 0;
}

void
smp_group_describe(const smp_group *group, const smp_call *next, uint64_t ahead,
                   char *out, size_t bytes)
{
    (void)group;
    (void)next;
    (void)ahead;
    (void)bytes;
    out[0] = '\0';
}

static void
make_carrier(void)
{
    static const smp_call call = {.operation = SMP_BARRIER};

    carried_out = 0;
    memset(items, 0, sizeof(items));
    for (int i = 0; i < 2; i++) {
        items[i].calls = &call;
        items[i].ncalls = 1;
    }
    want(smp_carrier_create(&the_carrier) == SMP_OK, "no carrier");
    want(smp_queue_create(the_carrier, NULL, &the_queue) == SMP_OK, "no queue");
}

static void
issue_announced(void)
{
    smp_work_item_issue(&items[0], the_queue, true);
    smp_work_item_issue(&items[1], the_queue, true);
}

static void
hear_of_both(void)
{
    for (int i = 0; i < 2; i++) {
        smp_work_item *finished = NULL;

        want(smp_carrier_finished(the_carrier, &finished) == SMP_OK, "closed");
        want(finished == &items[i], "out of order");
        want(smp_work_item_is_over(finished), "not over");
    }
}

STEP(check_two_calls, want(carried_out == 2, "not two calls"))

RIGHT(announced_orders_are_carried_out_and_heard_of, .set_up = make_carrier,
      .threads = {T(issue_announced), T(hear_of_both), {"carrier", NULL, true}},
      .check = check_two_calls)

static void
issue_and_wait(void)
{
    smp_work_item_issue(&items[0], the_queue, false);
    want(smp_work_item_wait(&items[0], SMP_NEVER), "not over");
}

static void
issue_announced_and_wait(void)
{
    smp_work_item_issue(&items[1], the_queue, true);
    want(smp_work_item_wait(&items[1], SMP_NEVER), "not over");
}

RIGHT(waiters_and_the_carrier_share_a_queue, .set_up = make_carrier,
      .threads = {T(issue_and_wait),
                  T(issue_announced_and_wait),
                  {"carrier", NULL, true}},
      .check = check_two_calls)

static void
issue_and_leave(void)
{
    smp_work_item_issue(&items[0], the_queue, false);
    smp_work_item_leave(&items[0]);
}

static void
hear_of_one(void)
{
    smp_work_item *finished;

    want(smp_carrier_finished(the_carrier, &finished) == SMP_OK, "closed");
}

RIGHT(an_order_that_is_left_is_the_carriers, .set_up = make_carrier,
      .threads = {T(issue_and_leave), T(hear_of_one), {"carrier", NULL, true}})

STEP(issue_one_announced, smp_work_item_issue(&items[1], the_queue, true))

RIGHT(what_a_waiter_does_not_carry_out_is_the_carriers, .set_up = make_carrier,
      .threads = {T(issue_and_wait),
                  T(issue_one_announced),
                  T(hear_of_one),
                  {"carrier", NULL, true}},
      .check = check_two_calls)

static void
issue_and_end(void)
{
    smp_work_item_issue(&items[0], the_queue, true);
    smp_work_item_issue(&items[1], the_queue, true);
    smp_queue_destroy(the_queue);
    want(smp_work_item_is_over(&items[0]) && smp_work_item_is_over(&items[1]),
         "not over");
    smp_carrier_close(the_carrier);
}

static void
hear_until_closed(void)
{
    smp_work_item *finished;
    int            heard = 0;

    while (smp_carrier_finished(the_carrier, &finished) == SMP_OK) {
        heard++;
    }
    want(heard == 2, "not heard of both");
}

RIGHT(a_queue_ends_with_all_its_orders, .set_up = make_carrier,
      .threads = {T(issue_and_end), T(hear_until_closed), {"carrier", NULL, true}})

/* ------------------------------------------------------------- what a server chooses
 */

static const smp_ready choices[2] = {
    {.kind = SMP_READY_REQUEST, .phase = SMP_BACKWARD, .microbatch = 0},
    {.kind = SMP_READY_RESPONSE, .phase = SMP_FORWARD, .microbatch = 1},
};

STEP(send_choice_0, send_number(1, 0, 0, 8))
STEP(send_choice_1, send_number(2, 0, 1, 8))

/* Rank 0 runs one of what has come, until it has run both. */
static void
serve_choices(void)
{
    smp_ready ready[2];
    bool      overtaken = false;
    size_t    n = 0;

    for (int left = 2; left > 0; left--) {
        smp_message *message;
        ptrdiff_t    best;

        while (smp_comm_receive(&ranks[0].comm, n == 0 ? -1 : 0, &message) == SMP_OK) {
            ready[n] = choices[message->bytes[0]];
            ready[n].index = message->bytes[0];
            ready[n].arrival = n;
            n++;
            smp_message_free(message);
        }
        best = smp_choose(ready, n, &overtaken);
        want(best >= 0, "nothing is chosen");
        want(n == 1 || ready[best].index == 1, "a response of a forward waits");
        ready[best] = ready[--n];
    }
}

RIGHT(whatever_the_order_of_arrival_the_first_match_goes_first, .set_up = make_ranks,
      .threads = {T(serve_choices), T(send_choice_0), T(send_choice_1)})

/* ------------------------------------------------------------- collectives of modules
 */

static _Atomic bool collective_over;

STEP(make_collective, make_ranks(); atomic_init(&collective_over, false))

static void
end_collective(void)
{
    atomic_store(&collective_over, true);
    smp_comm_wake(&ranks[0].comm);
}

static void
end_collective_the_wrong_way_round(void)
{
    smp_comm_wake(&ranks[0].comm);
    atomic_store(&collective_over, true);
}

/* As dispatch() does: reads what is there, looks, sleeps. */
static void
await_collective(void)
{
    int64_t timeout_ns = 0;

    for (;;) {
        smp_message *message;

        (void)smp_comm_receive(&ranks[0].comm, timeout_ns, &message);
        if (atomic_load(&collective_over)) {
            return;
        }
        timeout_ns = timeout_ns == 0 ? -1 : 0;
    }
}

RIGHT(the_end_of_a_collective_is_never_slept_through, .set_up = make_collective,
      .threads = {T(end_collective), T(await_collective)})

WRONG(a_completer_that_wakes_before_it_says_so_is_found,
      "await_collective: sleeps for ever", .set_up = make_collective,
      .threads = {T(end_collective_the_wrong_way_round), T(await_collective)})

static smp_lineup *tp_ranks[2];

static void
make_tp_ranks(void)
{
    for (int t = 0; t < 2; t++) {
        smp_lineup_destroy(tp_ranks[t]);
        want(smp_lineup_create(t, &tp_ranks[t]) == SMP_OK, "no memory");
        smp_lineup_begin(tp_ranks[t]);
    }
    make_ranks();
}

static void
issue_1_then_0(void)
{
    for (uint64_t number = 2; number-- > 0;) {
        smp_key key = smp_key_of("module");

        key.call = number;
        want(smp_lineup_issue(tp_ranks[0], &key) == SMP_OK, "no memory");
        want(smp_comm_send(&ranks[1].comm, 0, &key, sizeof(key), NULL, 0) == SMP_OK,
             "cannot send");
    }
}

/* Its program calls 0 first. */
static void
issue_what_comes(void)
{
    smp_key wanted[2] = {smp_key_of("module"), smp_key_of("module")};

    wanted[1].call = 1;
    for (size_t next = 2; next-- > 0;) {
        smp_message *message;

        while (!smp_lineup_may_issue(tp_ranks[1], &wanted[0]) &&
               !smp_lineup_may_issue(tp_ranks[1], &wanted[1])) {
            smp_key key;

            want(smp_comm_receive(&ranks[0].comm, -1, &message) == SMP_OK,
                 "cannot receive");
            memcpy(&key, message->bytes, sizeof(key));
            smp_message_free(message);
            want(smp_lineup_hear(tp_ranks[1], &key) == SMP_OK, "no memory");
        }
        want(smp_lineup_may_issue(tp_ranks[1], &wanted[next]), "another order");
        want(smp_lineup_issue(tp_ranks[1], &wanted[next]) == SMP_OK, "no memory");
    }
}

RIGHT(a_follower_issues_in_the_order_of_tp_rank_0, .set_up = make_tp_ranks,
      .threads = {T(issue_1_then_0), T(issue_what_comes)})

/* ---------------------------------------------------------------------- posted
 * receives */

static smp_mailbox *mailboxes[2];

static void
make_mailboxes(void)
{
    make_ranks();
    for (int r = 0; r < 2; r++) {
        want(smp_mailbox_create(&ranks[r].comm, &mailboxes[r]) == SMP_OK, "no memory");
    }
}

static void
post_tag(int from, int64_t tag)
{
    smp_address address = {.group = 1, .tag = tag, .dtype = SMP_I64, .count = 1};

    want(smp_mailbox_send(mailboxes[from], 0, &address, &tag) == SMP_OK, "cannot send");
}

static void
get_tag(int source, int64_t tag)
{
    int64_t            got = 0;
    smp_posted_receive receive = {
        .want = {.group = 1, .tag = tag, .dtype = SMP_I64, .count = 1},
        .source = source,
        .out = &got};

    smp_receive_post(mailboxes[0], &receive);
    want(smp_receive_wait(mailboxes[0], &receive, SMP_NEVER), "not over");
    want(receive.status == SMP_OK && got == tag, "another message");
}

STEP(post_2_then_1, post_tag(1, 2); post_tag(1, 1))
STEP(get_1, get_tag(1, 1))
STEP(get_2, get_tag(1, 2))

RIGHT(one_waiter_sorts_in_for_the_other, .set_up = make_mailboxes,
      .threads = {T(post_2_then_1), T(get_1), T(get_2)})

/* Gives up; what the other one waits for comes later. */
static void
give_up_then_post_2(void)
{
    smp_posted_receive receive = {.want = {.group = 1, .tag = 9, .dtype = SMP_I64},
                                  .source = 1};

    smp_receive_post(mailboxes[0], &receive);
    want(!smp_receive_wait(mailboxes[0], &receive, smp_clock_ns() + 5 * SMP_NS_PER_MS),
         "a message that nobody sent");
    smp_receive_cancel(mailboxes[0], &receive);
    post_tag(1, 2);
}

RIGHT(who_gives_up_leaves_the_sorting_to_the_others, .set_up = make_mailboxes,
      .threads = {T(give_up_then_post_2), T(get_2)}, .timers = true)

STEP(post_to_itself, post_tag(0, 3))
STEP(get_from_itself, get_tag(0, 3))

RIGHT(a_message_to_oneself_wakes_who_waits_for_it, .set_up = make_mailboxes,
      .threads = {T(post_to_itself), T(get_from_itself)})

RUN_TESTS
