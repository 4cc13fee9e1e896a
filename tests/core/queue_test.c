/* Work items of groups, and tensors from rank to rank, on ranks that are processes and
 * threads.  Spec: csrc/comm/collective/queue.h, csrc/comm/collective/mailbox.h. */
#define _GNU_SOURCE
#include "comm/collective/queue.h"

#include <sched.h>

#include "comm/collective/mailbox.h"
#include "comm/memory/control_block.h"
#include "comm/messaging/neighbour.h"
#include "world.h"

/* ------------------------------------------------------------------------- queues */

/* A group of all ranks, with its queue. */
typedef struct {
    smp_group *group;
    smp_queue *queue;
} line;

static smp_status
open_line_of(world *w, smp_carrier *carrier, const smp_group_config *config, line *out)
{
    int        failed;
    smp_status status = smp_group_create(w->comm, config, &out->group, &failed);

    return status == SMP_OK ? smp_queue_create(carrier, out->group, &out->queue)
                            : status;
}

static smp_status
open_line(world *w, smp_carrier *carrier, uint64_t id, line *out)
{
    static const int       ranks[WORLD_RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    const smp_group_config config = {.ranks = ranks,
                                     .size = w->size,
                                     .id = id,
                                     .name = "test",
                                     .timeout_ns = WORLD_DEADLINE_NS};

    return open_line_of(w, carrier, &config, out);
}

static void
close_line(line *l)
{
    smp_queue_destroy(l->queue);
    smp_group_destroy(l->group);
}

/* A sum of one number. */
typedef struct {
    smp_work_item item;
    smp_call      call;
    int32_t       value;
} sum;

static void
issue_sum(sum *s, line *l, int32_t value, bool announced)
{
    s->value = value;
    s->call = (smp_call){.operation = SMP_ALL_REDUCE,
                         .dtype = SMP_I32,
                         .count = 1,
                         .in = &s->value,
                         .out = &s->value};
    s->item = (smp_work_item){.calls = &s->call, .ncalls = 1};
    smp_work_item_issue(&s->item, l->queue, announced);
}

TEST_RANK(announced_orders_are_carried_out_in_the_order_of_issue)
{
    enum { COUNT = 50 };
    smp_carrier *carrier;
    line         l;
    sum          sums[COUNT];

    CHECK_OK(smp_carrier_create(&carrier));
    CHECK_OK(open_line(w, carrier, 7, &l));
    for (int i = 0; i < COUNT; i++) {
        issue_sum(&sums[i], &l, i, true);
    }
    for (int i = 0; i < COUNT; i++) {
        smp_work_item *item;

        CHECK_OK(smp_carrier_finished(carrier, &item));
        CHECK(item == &sums[i].item);
        CHECK(item->sequence == (uint64_t)i + 1);
        CHECK_OK(item->status);
        CHECK(sums[i].value == i * w->size);
    }
    close_line(&l);
    smp_carrier_close(carrier);
    CHECK_STATUS(smp_carrier_finished(carrier, &(smp_work_item *){NULL}),
                 SMP_ERR_CLOSED);
    smp_carrier_destroy(carrier);
}

TEST_RANK(a_waiter_gets_what_was_issued_before_too)
{
    smp_carrier *carrier;
    line         l;
    sum          first;
    sum          second;
    sum          last;

    CHECK_OK(smp_carrier_create(&carrier));
    CHECK_OK(open_line(w, carrier, 7, &l));
    for (int i = 0; i < 200; i++) {
        smp_work_item *item;

        issue_sum(&first, &l, 1, true);
        issue_sum(&second, &l, 2, false);
        issue_sum(&last, &l, 3, false);
        CHECK(smp_work_item_wait(&last.item, SMP_NEVER));
        CHECK(smp_work_item_is_over(&first.item) &&
              smp_work_item_is_over(&second.item));
        CHECK(first.value == w->size && second.value == 2 * w->size &&
              last.value == 3 * w->size);
        CHECK_OK(smp_carrier_finished(carrier, &item));
        CHECK(item == &first.item);
    }
    close_line(&l);
    smp_carrier_destroy(carrier);
}

TEST_RANK(groups_do_not_wait_for_each_other)
{
    enum { GROUPS = 3 };
    smp_carrier *carrier;
    line         lines[GROUPS];
    sum          sums[GROUPS];

    CHECK_OK(smp_carrier_create(&carrier));
    for (int g = 0; g < GROUPS; g++) {
        CHECK_OK(open_line(w, carrier, 7 + (uint64_t)g, &lines[g]));
    }
    for (int i = 0; i < 100; i++) {
        smp_work_item *item;

        /* Each rank begins with another group: one queue for all would never end. */
        for (int k = 0; k < GROUPS; k++) {
            int g = (k + w->rank + i) % GROUPS;

            issue_sum(&sums[g], &lines[g], g, true);
        }
        CHECK(smp_work_item_wait(&sums[i % GROUPS].item, SMP_NEVER));
        for (int k = 0; k < GROUPS; k++) {
            CHECK_OK(smp_carrier_finished(carrier, &item));
            CHECK_OK(item->status);
        }
        for (int g = 0; g < GROUPS; g++) {
            CHECK(sums[g].value == g * w->size);
        }
    }
    for (int g = 0; g < GROUPS; g++) {
        close_line(&lines[g]);
    }
    smp_carrier_destroy(carrier);
}

TEST_RANK(an_order_that_its_waiter_leaves_is_finished_by_the_carrier)
{
    smp_carrier   *carrier;
    line           l;
    sum            s;
    sum            again;
    smp_work_item *item;

    CHECK_OK(smp_carrier_create(&carrier));
    CHECK_OK(open_line(w, carrier, 7, &l));
    if (w->rank == 0) {
        issue_sum(&s, &l, 1, false);
        CHECK(!smp_work_item_wait(&s.item, smp_clock_ns() + SMP_NS_PER_MS));
        smp_work_item_leave(&s.item);
    }
    w->barrier(w);
    if (w->rank != 0) {
        issue_sum(&s, &l, 1, true);
    }
    CHECK_OK(smp_carrier_finished(carrier, &item));
    CHECK(item == &s.item && s.value == w->size);
    issue_sum(&again, &l, 1, false);
    CHECK(smp_work_item_wait(&again.item, SMP_NEVER));
    smp_work_item_leave(&again.item); /* that it is over is still to be told */
    CHECK_OK(smp_carrier_finished(carrier, &item));
    CHECK(item == &again.item && again.value == w->size);
    CHECK(smp_queue_issued(l.queue) == 2);
    close_line(&l);
    smp_carrier_close(carrier);
    CHECK_STATUS(smp_carrier_finished(carrier, &item), SMP_ERR_CLOSED);
    smp_carrier_destroy(carrier);
}

TEST_RANK(an_order_stops_at_the_first_call_that_fails)
{
    smp_carrier  *carrier;
    line          l;
    smp_call      calls[] = {{.operation = SMP_BARRIER},
                             {.operation = SMP_BROADCAST, .root = w->rank},
                             {.operation = SMP_BARRIER}};
    smp_work_item item = {.calls = calls, .ncalls = 3};
    sum           after;

    CHECK_OK(smp_carrier_create(&carrier));
    CHECK_OK(open_line(w, carrier, 7, &l));
    smp_work_item_issue(&item, l.queue, false);
    CHECK(smp_work_item_wait(&item, SMP_NEVER));
    CHECK_STATUS(item.status, SMP_ERR_MISMATCH);
    CHECK(item.at == 1 && item.sequence == 2);
    CHECK_HAS(item.error, "broadcast");
    smp_work_item_fini(&item);
    issue_sum(&after, &l, 1, false);
    CHECK(smp_work_item_wait(&after.item, SMP_NEVER) && after.value == w->size);
    close_line(&l);
    smp_carrier_destroy(carrier);
}

TEST_RANK(what_a_destroyed_queue_still_had_is_over)
{
    smp_carrier *carrier;
    line         l;
    sum          sums[2];

    CHECK_OK(smp_carrier_create(&carrier));
    CHECK_OK(open_line(w, carrier, 7, &l));
    if (w->rank == 0) { /* the others never come */
        issue_sum(&sums[0], &l, 1, true);
        issue_sum(&sums[1], &l, 1, true);
    }
    CHECK(smp_queue_issued(l.queue) == (w->rank == 0 ? 2 : 0)); /* one waits */
    smp_queue_destroy(l.queue);
    for (int i = 0; i < 2 && w->rank == 0; i++) {
        CHECK(smp_work_item_is_over(&sums[i].item));
        CHECK_STATUS(sums[i].item.status, SMP_ERR_CLOSED);
    }
    w->barrier(w);
    smp_group_destroy(l.group);
    smp_carrier_destroy(carrier);
}

static void *
wait_for_sum(void *arg)
{
    sum *s = arg;

    return smp_work_item_wait(&s->item, SMP_NEVER) ? s : NULL;
}

/* Rank 0's thread is in an operation that nobody joins. */
TEST_RANK(who_waits_in_a_queue_that_is_destroyed_is_told)
{
    smp_carrier *carrier;
    line         l;
    sum          s;
    pthread_t    thread;
    void        *over;

    CHECK_OK(smp_carrier_create(&carrier));
    CHECK_OK(open_line(w, carrier, 7, &l));
    w->barrier(w); /* nobody sleeps in the meeting any more */
    if (w->rank == 0) {
        issue_sum(&s, &l, 1, false);
        CHECK(pthread_create(&thread, NULL, wait_for_sum, &s) == 0);
    }
    while (!world_sleeps(w, 0)) {
        sched_yield();
    }
    w->barrier(w);
    smp_queue_destroy(l.queue);
    if (w->rank == 0) {
        pthread_join(thread, &over);
        CHECK(over == &s);
        CHECK_STATUS(s.item.status, SMP_ERR_CLOSED);
    }
    w->barrier(w);
    smp_group_destroy(l.group);
    smp_carrier_destroy(carrier);
}

TEST_RANK(a_work_item_says_what_it_waits_for)
{
    smp_carrier   *carrier;
    smp_work_item *item;
    line           l;
    sum            first;
    sum            second;
    const char    *others = w->size == 2   ? "rank 1"
                            : w->size == 3 ? "ranks 1, 2"
                                           : "ranks 1 to ";
    char           text[SMP_GROUP_TEXT];
    char           want[160];

    CHECK_OK(smp_carrier_create(&carrier));
    CHECK_OK(open_line(w, carrier, 7, &l));
    if (w->rank == 0) {
        issue_sum(&first, &l, 1, true);
        issue_sum(&second, &l, 1, true);
        do { /* the carrier begins when it comes to that */
            CHECK(smp_work_item_describe(&first.item, text, sizeof(text)));
        } while (strstr(text, "waits for") == NULL);
        snprintf(want, sizeof(want),
                 "group 'test': all-reduce 1 (sum) of 1 int32 waits for %s", others);
        CHECK(strstr(text, want) == text);
        CHECK(smp_work_item_describe(&second.item, text, sizeof(text)));
        snprintf(want, sizeof(want),
                 "group 'test': all-reduce 2 (sum) of 1 int32 stands behind "
                 "all-reduce 1 (sum) of 1 int32, which waits for %s",
                 others);
        CHECK(strstr(text, want) == text);
        do { /* the carrier tells a wait when it has lasted for a while */
            smp_carrier_describe(carrier, text, sizeof(text));
        } while (text[0] == '\0');
        snprintf(want, sizeof(want),
                 "group 'test': all-reduce 1 (sum) of 1 int32 waits for %s", others);
        CHECK(strstr(text, want) == text);
    }
    w->barrier(w);
    if (w->rank != 0) {
        issue_sum(&first, &l, 1, true);
        issue_sum(&second, &l, 1, true);
    }
    CHECK(smp_work_item_wait(&second.item, SMP_NEVER));
    CHECK(!smp_work_item_describe(&second.item, text, sizeof(text)));
    smp_carrier_describe(carrier, text, sizeof(text));
    CHECK(text[0] == '\0');
    for (int i = 0; i < 2; i++) {
        CHECK_OK(smp_carrier_finished(carrier, &item));
    }
    close_line(&l);
    smp_carrier_destroy(carrier);
}

/* --------------------------------------------------------------------- mailboxes */

static smp_address
address_of(int64_t tag, size_t count)
{
    return (smp_address){.group = 7, .tag = tag, .dtype = SMP_I32, .count = count};
}

/* A posted receive for `count` numbers. */
static smp_posted_receive
receive_for(int source, int64_t tag, int32_t *out, size_t count)
{
    return (smp_posted_receive){
        .want = address_of(tag, count), .source = source, .out = out};
}

static bool
arrives(smp_mailbox *mailbox, smp_posted_receive *receive)
{
    return smp_receive_wait(mailbox, receive, smp_clock_ns() + WORLD_DEADLINE_NS);
}

/* Posts it, and it is over with that status. */
static void
hears(smp_mailbox *mailbox, smp_posted_receive *receive, smp_status want)
{
    smp_receive_post(mailbox, receive);
    CHECK(arrives(mailbox, receive));
    CHECK_STATUS(receive->status, want);
}

TEST_RANK(messages_are_told_apart_by_tag_and_source)
{
    smp_mailbox       *mailbox;
    int32_t            got[WORLD_RANKS][3];
    smp_posted_receive receives[WORLD_RANKS][3];

    CHECK_OK(smp_mailbox_create(w->comm, &mailbox));
    for (int32_t tag = 0; tag < 3; tag++) { /* half before they are sent, half after */
        for (int r = 0; r < w->size; r += 2) {
            receives[r][tag] = receive_for(r, tag, &got[r][tag], 1);
            smp_receive_post(mailbox, &receives[r][tag]);
        }
    }
    for (int32_t tag = 2; tag >= 0; tag--) {
        for (int r = 0; r < w->size; r++) {
            smp_address address = address_of(tag, 1);
            int32_t     value = 10 * w->rank + tag;

            CHECK_OK(smp_mailbox_send(mailbox, r, &address, &value));
        }
    }
    for (int32_t tag = 0; tag < 3; tag++) {
        for (int r = 0; r < w->size; r++) {
            if (r % 2 != 0) {
                receives[r][tag] = receive_for(r, tag, &got[r][tag], 1);
                smp_receive_post(mailbox, &receives[r][tag]);
            }
            CHECK(arrives(mailbox, &receives[r][tag]));
            CHECK_OK(receives[r][tag].status);
            CHECK(receives[r][tag].from == r && got[r][tag] == 10 * r + tag);
        }
    }
    smp_mailbox_destroy(mailbox);
    w->barrier(w);
}

TEST_RANK(large_messages_from_anybody)
{
    enum { COUNT = 300000 };
    smp_mailbox       *mailbox;
    int32_t           *numbers = malloc(COUNT * sizeof(*numbers));
    smp_posted_receive receive;
    int                heard = 0;

    CHECK(numbers != NULL);
    CHECK_OK(smp_mailbox_create(w->comm, &mailbox));
    for (int i = 0; i < COUNT; i++) {
        numbers[i] = w->rank * i;
    }
    for (int r = 0; r < w->size; r++) {
        smp_address address = address_of(0, COUNT);

        CHECK_OK(smp_mailbox_send(mailbox, r, &address, numbers));
    }
    for (int n = 0; n < w->size; n++) {
        receive = receive_for(SMP_ANY_SOURCE, 0, numbers, COUNT);
        hears(mailbox, &receive, SMP_OK);
        CHECK(numbers[COUNT - 1] == receive.from * (COUNT - 1));
        heard |= 1 << receive.from;
    }
    CHECK(heard == (1 << w->size) - 1);
    w->barrier(w); /* one that nobody receives is freed */
    CHECK_OK(smp_mailbox_send(mailbox, w->rank, &(smp_address){.group = 8}, NULL));
    smp_mailbox_destroy(mailbox);
    free(numbers);
}

TEST_RANK(a_message_of_another_size_or_dtype_is_an_error_that_has_both)
{
    smp_mailbox       *mailbox;
    int32_t            two[2] = {0};
    smp_posted_receive receive = receive_for(0, 0, two, 2);
    smp_address        three = address_of(0, 3);
    smp_address        bytes = {.group = 7, .dtype = SMP_U8, .count = 2};
    smp_address        odd = {
               .group = 7, .dtype = SMP_I32, .kind = smp_kind_of(1, 32, 1), .count = 2};
    int32_t sent[3] = {1, 2, 3};

    CHECK_OK(smp_mailbox_create(w->comm, &mailbox));
    for (int r = 0; r < w->size && w->rank == 0; r++) {
        CHECK_OK(smp_mailbox_send(mailbox, r, &three, sent));
        CHECK_OK(smp_mailbox_send(mailbox, r, &bytes, sent));
        CHECK_OK(smp_mailbox_send(mailbox, r, &odd, sent));
    }
    hears(mailbox, &receive, SMP_ERR_MISMATCH);
    CHECK(receive.got.count == 3 && receive.got.dtype == SMP_I32 && receive.from == 0);
    hears(mailbox, &receive, SMP_ERR_MISMATCH);
    CHECK(receive.got.count == 2 && receive.got.dtype == SMP_U8 && two[0] == 0);
    hears(mailbox, &receive, SMP_ERR_MISMATCH);
    CHECK(receive.got.kind == smp_kind_of(1, 32, 1) && two[0] == 0);
    smp_mailbox_destroy(mailbox);
    w->barrier(w);
}

TEST_RANK(nothing_goes_into_a_receive_that_was_cancelled)
{
    smp_mailbox       *mailbox;
    int32_t            first = -1;
    int32_t            second = -1;
    int                from = (w->rank + 1) % w->size;
    smp_posted_receive down = receive_for(from, 0, &first, 1);
    smp_posted_receive up = receive_for(from, 0, &second, 1);
    smp_address        address = address_of(0, 1);

    CHECK_OK(smp_mailbox_create(w->comm, &mailbox));
    smp_receive_post(mailbox, &down);
    smp_receive_post(mailbox, &up);
    CHECK(!smp_receive_wait(mailbox, &down, smp_clock_ns() + SMP_NS_PER_MS));
    smp_receive_cancel(mailbox, &down);
    w->barrier(w);
    for (int r = 0; r < w->size; r++) {
        CHECK_OK(smp_mailbox_send(mailbox, r, &address, &w->rank));
    }
    CHECK(arrives(mailbox, &up));
    CHECK(first == -1 && second == from);
    smp_mailbox_destroy(mailbox);
    w->barrier(w);
}

TEST_RANK(a_source_that_has_left_is_named_after_its_last_message)
{
    smp_mailbox       *mailbox;
    int32_t            value = 5;
    smp_posted_receive receive = receive_for(0, 0, &value, 1);
    smp_address        address = address_of(0, 1);

    CHECK_OK(smp_mailbox_create(w->comm, &mailbox));
    if (w->rank == 0) {
        for (int r = 1; r < w->size; r++) {
            CHECK_OK(smp_mailbox_send(mailbox, r, &address, &value));
        }
        smp_mailbox_destroy(mailbox);
        smp_comm_destroy(w->comm);
        w->comm = NULL;
        w->barrier(w);
        return;
    }
    value = 0;
    hears(mailbox, &receive, SMP_OK);
    CHECK(value == 5);
    hears(mailbox, &receive, SMP_ERR_CLOSED);
    CHECK(receive.from == 0);
    smp_mailbox_destroy(mailbox);
    w->barrier(w);
}

/* Rank 0 hears that rank 1 is dead, then from the others. */
TEST_RANK(a_dead_rank_keeps_nobody_from_hearing_the_living, .processes = "234")
{
    smp_mailbox       *mailbox;
    int32_t            value = 0;
    smp_posted_receive receive = receive_for(1, 0, &value, 1);
    smp_address        address = address_of(0, 1);

    CHECK_OK(smp_mailbox_create(w->comm, &mailbox));
    w->barrier(w); /* who dies while others still connect is named by connect */
    if (w->rank == 1) {
        kill(getpid(), SIGKILL);
    }
    if (w->rank != 0) {
        while (atomic_load(&w->shared->scratch[0]) < w->rank) {
            sched_yield();
        }
        CHECK_OK(smp_mailbox_send(mailbox, 0, &address, &w->rank));
        smp_mailbox_destroy(mailbox);
        return;
    }
    hears(mailbox, &receive, SMP_ERR_PEER_LOST);
    CHECK(receive.from == 1);
    for (int r = 2; r < w->size; r++) {
        receive = receive_for(r, 0, &value, 1);
        smp_receive_post(mailbox, &receive);
        CHECK(!smp_receive_wait(mailbox, &receive, smp_clock_ns() + SMP_NS_PER_MS));
        atomic_store(&w->shared->scratch[0], r);
        CHECK(arrives(mailbox, &receive));
        CHECK_OK(receive.status);
        CHECK(value == r);
        hears(mailbox, &receive, SMP_ERR_CLOSED);
        CHECK(receive.from == r);
    }
    receive = receive_for(SMP_ANY_SOURCE, 0, &value, 1);
    hears(mailbox, &receive, SMP_ERR_PEER_LOST);
    CHECK(receive.from == 1);
    smp_mailbox_destroy(mailbox);
}

/* Receives 1,000 messages of its own tag. */
typedef struct {
    smp_mailbox *mailbox;
    int          from;
    int64_t      tag;
    int          failed;
} reader;

static void *
read_messages(void *arg)
{
    reader *self = arg;

    for (int32_t i = 0; i < 1000; i++) {
        int32_t            got = -1;
        smp_posted_receive receive = receive_for(self->from, self->tag, &got, 1);

        smp_receive_post(self->mailbox, &receive);
        if (!arrives(self->mailbox, &receive) || got != i) {
            self->failed = 1;
            smp_receive_cancel(self->mailbox, &receive);
            return NULL;
        }
    }
    return NULL;
}

TEST_RANK(threads_that_wait_sort_in_for_each_other)
{
    smp_mailbox *mailbox;
    reader       readers[3];
    pthread_t    threads[3];

    CHECK_OK(smp_mailbox_create(w->comm, &mailbox));
    for (int t = 0; t < 3; t++) {
        readers[t] = (reader){mailbox, (w->rank + 1) % w->size, t, 0};
        CHECK(pthread_create(&threads[t], NULL, read_messages, &readers[t]) == 0);
    }
    for (int32_t i = 0; i < 3000; i++) {
        smp_address address = address_of(i % 3, 1);
        int32_t     value = i / 3;

        CHECK_OK(smp_mailbox_send(mailbox, (w->rank + w->size - 1) % w->size, &address,
                                  &value));
    }
    for (int t = 0; t < 3; t++) {
        pthread_join(threads[t], NULL);
        CHECK(!readers[t].failed);
    }
    w->barrier(w);
    smp_mailbox_destroy(mailbox);
}

RUN_WORLDS(.transports = "shm", .processes = "234", .threads = "23")
