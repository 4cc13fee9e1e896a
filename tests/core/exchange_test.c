/* Spec: csrc/comm/device/exchange.h and collective/devices.h: all-gathers between
 * devices, over the stand-in of the driver (stand_in.c), whose copies are late. */
#define _GNU_SOURCE
#include "comm/device/exchange.h"

#include <sched.h>

#include "comm/collective/group.h"
#include "common/log.h"
#include "device_user.h"

#define ROUNDS 40

/* Further calls of the driver than these are repetitions. */
#define MOST_CALLS 160

/* Of two halves: many rounds of a small tensor. */
#define SMALL ((size_t)4096)

/* So long a tensor of one member may be. */
#define LARGEST (USER_BYTES / WORLD_RANKS)

/* Operations that are under way at a time in one test. */
#define AT_ONCE 5

/* One operation of a member. */
typedef struct {
    uint64_t          seed;
    uint64_t          x;
    uint64_t          y;
    size_t            counts[WORLD_RANKS]; /* bytes */
    bool              uneven;
    uint64_t          outs[WORLD_RANKS];
    smp_device_mark  *mark;
    smp_device_gather gather;
} task;

static uint64_t
seed_of(const task *t, int member)
{
    return t->seed * WORLD_RANKS + (uint64_t)member;
}

/* Of all ranks, in order. */
static smp_status
make_group_of_all(world *w, uint64_t id, smp_group **out)
{
    static const int ranks[WORLD_RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
    smp_group_config config = {.ranks = ranks,
                               .size = w->size,
                               .id = id,
                               .name = "test",
                               .timeout_ns = WORLD_DEADLINE_NS};
    int              failed;

    return smp_group_create(w->comm, &config, out, &failed);
}

static smp_group *
world_group(world *w)
{
    smp_group *group = NULL;

    CHECK_OK(make_group_of_all(w, 7, &group));
    return group;
}

static bool
says(const smp_group *group, const char *words)
{
    return strstr(smp_group_error(group), words) != NULL;
}

/* Meets; *exchange is NULL if one of the members will not. */
static smp_status
meet(smp_group *group, size_t bytes, smp_exchange **exchange, const char **why)
{
    const smp_device_offer offer = {.number = 0, .bytes = bytes};
    const smp_call         call = {
                .operation = SMP_ALL_GATHER, .dtype = SMP_U8, .count = 1, .offer = &offer};
    smp_status status = smp_group_run(group, &call);

    *exchange = smp_group_exchange(group, why);
    return status;
}

/* A task on x and y, the same on all members; uneven: of random lengths. */
static void
plan(task *t, int size, uint64_t seed, uint64_t x, uint64_t y, size_t most, bool uneven)
{
    uint64_t random = seed * 77 + 5;

    memset(t, 0, sizeof(*t));
    t->seed = seed;
    t->x = x;
    t->y = y;
    t->uneven = uneven;
    for (int m = 0; m < size; m++) {
        t->counts[m] =
            uneven || m == 0 ? next_random(&random) % (most + 1) : t->counts[0];
        t->outs[m] = y;
        y += t->counts[m];
    }
}

static size_t
longest(const task *t, int size)
{
    size_t most = 0;

    for (int m = 0; m < size; m++) {
        most = t->counts[m] > most ? t->counts[m] : most;
    }
    return most;
}

/* The script's stream fills x; the host's part of the operation, which reads it, is
 * over then.  What the group says. */
static smp_status
run_task(user *u, smp_group *group, smp_exchange *exchange, task *t, bool *begun)
{
    int      self = smp_group_member(group);
    char     why[SMP_DRIVER_TEXT];
    smp_call call = {.operation = SMP_ALL_GATHER,
                     .dtype = SMP_U8,
                     .count = t->counts[self],
                     .counts = t->uneven ? t->counts : NULL};

    launch(u, fill_kernel, t->x, t->counts[self], seed_of(t, self));
    t->mark = smp_exchange_mark(exchange, why);
    *begun = t->mark != NULL && smp_exchange_begin(exchange, t->mark, u->stream, why);
    if (!*begun) {
        return SMP_ERR_SYSTEM;
    }
    t->gather = (smp_device_gather){.mark = t->mark, .in = t->x, .outs = t->outs};
    call.gather = &t->gather;
    return smp_group_run(group, &call);
}

/* The script's stream waits for the operation, looks at all of y, and uses both again.
 */
static void
look_at(user *u, smp_group *group, smp_exchange *exchange, const task *t)
{
    char why[SMP_DRIVER_TEXT];
    int  size = smp_group_size(group);

    CHECK(smp_exchange_join(exchange, t->mark, u->stream, why));
    for (int m = 0; m < size; m++) {
        launch(u, check_kernel, t->outs[m], t->counts[m], seed_of(t, m));
        launch(u, fill_kernel, t->outs[m], t->counts[m], 8);
    }
    launch(u, fill_kernel, t->x, t->counts[smp_group_member(group)], 9);
    smp_exchange_put_mark(exchange, t->mark); /* its next user comes after the join */
}

static void
gather(user *u, smp_group *group, smp_exchange *exchange, task *t)
{
    bool begun;

    CHECK_OK(run_task(u, group, exchange, t, &begun));
    look_at(u, group, exchange, t);
}

/* Operations of this group with tensors read where they lie. */
static uint64_t
reads_of(const smp_group *group)
{
    smp_group_use use;

    smp_group_count(group, &use);
    return use.device_reads;
}

/* Of equal lengths, more than a half's. */
static void
plan_large(task *t, int size, uint64_t seed, const user *u)
{
    uint64_t y = u->y;

    plan(t, size, seed, u->x, u->y, 0, false);
    for (int m = 0; m < size; m++) {
        t->counts[m] = SMALL + seed % 100;
        t->outs[m] = y;
        y += t->counts[m];
    }
}

/* Other memory in the place of x or y, which the device does not use any more. */
static void
renew(user *u, uint64_t *memory)
{
    settle(u);
    CHECK(u->driver->free(*memory) == 0);
    CHECK(u->driver->alloc(memory, smp_driver_blocks(USER_BYTES)) == 0);
}

/* Memory that cannot be exported; the caller's. */
static uint64_t
withheld_memory(user *u)
{
    uint64_t memory = 0;

    CHECK(u->driver->alloc(&memory, smp_driver_blocks(USER_BYTES)) == 0);
    u->stand_in->withhold(memory);
    return memory;
}

/* A group of all ranks that has met. */
static void
begin_group(world *w, user *u, size_t bytes, smp_group **group, smp_exchange **exchange)
{
    const char *why;

    begin(w, u);
    *group = world_group(w);
    CHECK(smp_group_exchange(*group, &why) == NULL && strcmp(why, "") == 0);
    CHECK_OK(meet(*group, bytes, exchange, &why));
    CHECK(*exchange != NULL && strcmp(why, "") == 0);
    CHECK(smp_exchange_device(*exchange) == 0);
}

/* A test in a group of all ranks that has met. */
#define EXCHANGE_TEST(...) EXCHANGE_TEST_(__VA_ARGS__, .next = NULL)
#define EXCHANGE_TEST_(test, ...)                                                      \
    static void test##_met(world *w, user *u, smp_group *group,                        \
                           smp_exchange *exchange);                                    \
    TEST_RANK_(test, __VA_ARGS__)                                                      \
    {                                                                                  \
        smp_exchange *exchange;                                                        \
        smp_group    *group;                                                           \
        user          u;                                                               \
                                                                                       \
        begin_group(w, &u, SMALL, &group, &exchange);                                  \
        test##_met(w, &u, group, exchange);                                            \
        smp_group_destroy(group);                                                      \
        end(&u);                                                                       \
    }                                                                                  \
    static void test##_met(world *w, user *u, smp_group *group, smp_exchange *exchange)

/* ------------------------------------------------------------------------- tests */

/* Tensors of all sizes.  Returns the number of those longer than a half. */
static uint64_t
gather_many(world *w, user *u, smp_group *group, smp_exchange *exchange)
{
    uint64_t random = 3;
    uint64_t large = 0;
    task     t;

    for (int i = 0; i < ROUNDS; i++) {
        size_t most = i % 3 == 0 ? 100 : i % 3 == 1 ? 9000 : LARGEST;

        plan(&t, w->size, next_random(&random) % 1000, u->x, u->y, most, i % 2 == 1);
        gather(u, group, exchange, &t);
        large += longest(&t, w->size) > SMALL / 2;
        if (i % 8 == 0) { /* or the thread is far ahead */
            settle(u);
        }
    }
    settle(u);
    CHECK(u->right == ROUNDS * w->size);
    return large;
}

EXCHANGE_TEST(every_member_gets_what_all_had, .processes = "4", .threads = "13")
{
    uint64_t      large;
    smp_group_use use;

    CHECK(smp_exchange_half(exchange) == SMALL / 2);
    large = gather_many(w, u, group, exchange);
    smp_group_count(group, &use);
    CHECK(use.operations == ROUNDS && use.device_operations == ROUNDS);
    CHECK(use.bytes == use.device_bytes && use.bytes > 0);
    CHECK(use.device_reads == large && large > ROUNDS / 2);
}

/* ... also where one of the tensors cannot be read where it lies. */
EXCHANGE_TEST(memory_of_one_member_that_cannot_be_exported_goes_by_halves,
              .processes = "4", .threads = "3")
{
    if (w->rank == 1) {
        u->stand_in->withhold(u->x);
    }
    (void)gather_many(w, u, group, exchange);
    CHECK(reads_of(group) == 0);
}

/* ... and where one member cannot open it, until it is in other memory. */
EXCHANGE_TEST(memory_that_one_member_cannot_open_goes_by_halves, .processes = "3")
{
    task t;

    if (w->rank == 1) {
        u->stand_in->fail("cuIpcOpenMemHandle_v2", 1, 2);
    }
    for (uint64_t i = 0; i < 6; i++) {
        if (i == 3 && w->rank == 0) { /* the first of the others that rank 1 opens */
            renew(u, &u->x);
        }
        plan_large(&t, w->size, i, u);
        gather(u, group, exchange, &t);
        CHECK(reads_of(group) == (i < 3 ? 0 : i - 2));
        CHECK(w->rank != 1 || u->stand_in->failed());
    }
    settle(u);
    CHECK(u->right == 6 * w->size);
}

/* An address means other memory after each: the earlier one is closed, and not read. */
EXCHANGE_TEST(memory_may_be_freed_and_allocated_again, .processes = "3")
{
    int  before = 0;
    task t;

    for (uint64_t i = 0; i < 8; i++) {
        uint64_t was = u->x;

        if (i % 3 != (uint64_t)w->rank) {
            renew(u, &u->x);
            CHECK(u->x == was);
        }
        plan_large(&t, w->size, i, u);
        gather(u, group, exchange, &t);
        settle(u);
        CHECK(reads_of(group) == i + 1);
        before = i == 0 ? u->stand_in->alive() : before;
        CHECK(u->stand_in->alive() == before);
    }
}

/* ... also where another group had the earlier one open, and has nothing to do since:
 * its halves, and a tensor. */
EXCHANGE_TEST(memory_freed_in_one_group_is_opened_in_another, .processes = "3")
{
    const char   *why;
    smp_exchange *second_exchange;
    smp_group    *second;
    task          t;

    for (uint64_t i = 0; i < 2; i++) {
        plan_large(&t, w->size, i, u);
        gather(u, group, exchange, &t);
        settle(u);
        w->barrier(w);
        CHECK(u->driver->free(u->x) == 0);
        if (i == 1) { /* the halves come to the address of x */
            CHECK_OK(make_group_of_all(w, 8, &second));
            CHECK_OK(meet(second, SMALL, &second_exchange, &why));
            CHECK(second_exchange != NULL);
        }
        CHECK(u->driver->alloc(&u->x, smp_driver_blocks(USER_BYTES)) == 0);
        w->barrier(w);
    }
    plan_large(&t, w->size, 2, u);
    gather(u, group, exchange, &t);
    plan_large(&t, w->size, 3, u);
    gather(u, second, second_exchange, &t);
    renew(u, &u->x);
    w->barrier(w);
    plan_large(&t, w->size, 4, u);
    gather(u, second, second_exchange, &t);
    settle(u);
    CHECK(u->right == 5 * w->size && reads_of(group) == 3 && reads_of(second) == 2);
    smp_group_destroy(second);
}

/* Memory of tensors that are gone does not stay open; nor does all of a great many. */
EXCHANGE_TEST(memory_that_is_not_used_any_more_is_closed, .processes = "2")
{
    static uint64_t all[SMP_EXPORTS + 20];
    int             before;
    task            t;

    for (uint64_t i = 0; i < COUNT_OF(all); i++) {
        CHECK(u->driver->alloc(&all[i], SMP_DRIVER_BLOCK) == 0);
    }
    before = u->stand_in->alive();
    for (uint64_t i = 0; i < COUNT_OF(all); i++) {
        plan_large(&t, w->size, i, u);
        t.x = all[i];
        gather(u, group, exchange, &t);
        settle(u);
    }
    CHECK(reads_of(group) > SMP_EXPORTS);
    CHECK(u->stand_in->alive() > before + SMP_EXPORTS / 2 &&
          u->stand_in->alive() <= before + SMP_EXPORTS);
    for (uint64_t i = 0; i < COUNT_OF(all); i++) {
        CHECK(u->driver->free(all[i]) == 0);
    }
    before -= (int)COUNT_OF(all);
    for (uint64_t i = 0; i < SMP_EXPORTS / 4; i++) {
        plan_large(&t, w->size, i, u);
        gather(u, group, exchange, &t);
        settle(u);
    }
    CHECK(u->stand_in->alive() < before + 8);
}

/* Each group opens it by itself. */
EXCHANGE_TEST(two_groups_read_the_same_tensors, .processes = "3")
{
    const char   *why;
    smp_exchange *other_exchange;
    smp_group    *other;
    task          t;

    CHECK_OK(make_group_of_all(w, 8, &other));
    CHECK_OK(meet(other, SMALL, &other_exchange, &why));
    for (uint64_t i = 0; i < 12; i++) {
        bool first = i % 2 == 0 || i >= 8;

        plan_large(&t, w->size, i, u);
        gather(u, first ? group : other, first ? exchange : other_exchange, &t);
        if (i == 7) {
            CHECK(reads_of(other) == 4);
            settle(u);
            smp_group_destroy(other);
        }
    }
    settle(u);
    CHECK(u->right == 12 * w->size && reads_of(group) == 8);
}

/* In place, and of nothing. */
EXCHANGE_TEST(the_own_part_may_lie_in_the_output, .processes = "3")
{
    task t;

    for (uint64_t i = 0; i < 12; i++) {
        plan(&t, w->size, i, u->x, u->y, 7000, i % 2 == 1);
        t.x = t.outs[w->rank];
        gather(u, group, exchange, &t);
    }
    plan(&t, w->size, 0, u->x, u->y, 0, false);
    gather(u, group, exchange, &t);
    settle(u);
}

/* Several are under way, with and without halves, and are waited for in another order;
 * host tensors go between them. */
EXCHANGE_TEST(operations_overlap, .processes = "3", .threads = "2")
{
    const size_t room = USER_BYTES / AT_ONCE;
    task         tasks[AT_ONCE];
    uint64_t     withheld = withheld_memory(u);
    uint64_t     large = 0;
    bool         begun;

    for (uint64_t round = 0; round < 6; round++) {
        for (size_t i = 0; i < AT_ONCE; i++) {
            float    in = (float)w->rank;
            float    out = -1;
            smp_call call = {.operation = SMP_ALL_REDUCE,
                             .dtype = SMP_F32,
                             .count = 1,
                             .in = &in,
                             .out = &out};

            plan(&tasks[i], w->size, round * AT_ONCE + i,
                 (i % 2 == 1 ? u->x : withheld) + i * room, u->y + i * room,
                 room / WORLD_RANKS, (i + round) % 2 == 1);
            large += i % 2 == 1 && longest(&tasks[i], w->size) > SMALL / 2;
            CHECK_OK(run_task(u, group, exchange, &tasks[i], &begun));
            CHECK_OK(smp_group_run(group, &call));
            CHECK(out == (float)(w->size * (w->size - 1) / 2));
        }
        for (size_t i = AT_ONCE; i-- > 0;) {
            look_at(u, group, exchange, &tasks[i]);
        }
    }
    settle(u);
    CHECK(u->right == 6 * AT_ONCE * w->size);
    CHECK(large > 0 && reads_of(group) == large);
    CHECK(u->driver->free(withheld) == 0);
}

/* An operation is over on the hosts before the device of rank 0 has done anything. */
static void
gather_ahead(world *w, user *u, smp_group *group, smp_exchange *exchange, uint64_t x)
{
    task t;
    bool begun;

    w->barrier(w);
    if (w->rank == 0) {
        u->stand_in->hold(true);
    }
    w->barrier(w);
    plan(&t, w->size, 1, x, u->y, LARGEST, false);
    CHECK(t.counts[0] > 3 * SMALL / 2); /* four rounds and more */
    CHECK_OK(run_task(u, group, exchange, &t, &begun));
    CHECK(!smp_exchange_is_over(exchange, t.mark));
    CHECK(u->driver->stream_query(u->stream) == SMP_DRIVER_NOT_READY || w->rank != 0);
    w->barrier(w);
    u->stand_in->hold(false);
    look_at(u, group, exchange, &t);
    settle(u);
    CHECK(smp_exchange_is_over(exchange, t.mark));
}

EXCHANGE_TEST(nobody_waits_for_a_device, .processes = "2")
{
    char     why[SMP_DRIVER_TEXT];
    int      before = u->stand_in->alive();
    uint64_t withheld;

    smp_exchange_put_mark(exchange, smp_exchange_mark(exchange, why));
    CHECK(u->stand_in->alive() == before); /* the trial has given its own back */
    withheld = withheld_memory(u);
    gather_ahead(w, u, group, exchange, withheld);
    gather_ahead(w, u, group, exchange, u->x);
    CHECK(u->right == 2 * w->size && reads_of(group) == 1);
    CHECK(u->driver->free(withheld) == 0);
}

/* Who calls something else is named with what it calls, and the group goes on. */
EXCHANGE_TEST(calls_that_differ_are_an_error_on_all, .processes = "3", .threads = "2")
{
    char           why[SMP_DRIVER_TEXT];
    uint8_t        in = 0;
    uint8_t        out[WORLD_RANKS];
    task           t;
    bool           begun;
    bool           last = w->rank == w->size - 1;
    bool           is_process = w->shared->pids[w->rank] == getpid();
    const smp_call on_host = {.operation = SMP_ALL_GATHER,
                              .dtype = SMP_U8,
                              .count = 1,
                              .in = &in,
                              .out = out};

    for (uint64_t i = 0; i < 6; i++) {
        plan(&t, w->size, i, u->x, u->y, 9000, false);
        gather(u, group, exchange, &t);

        plan(&t, w->size, i, u->x, u->y, 0, false);
        for (int m = 0; m < w->size; m++) {
            t.counts[m] = i % 2 == 0 ? 1 : last ? 5001 : 5000;
        }
        if (i % 2 == 0 && last) {
            CHECK_STATUS(smp_group_run(group, &on_host), SMP_ERR_MISMATCH);
        } else {
            /* Nobody uses the tensor, but the own half may be filled from it. */
            if (is_process) {
                settle(u);
            }
            u->stand_in->hold(is_process);
            CHECK_STATUS(run_task(u, group, exchange, &t, &begun), SMP_ERR_MISMATCH);
            CHECK(!is_process || !smp_exchange_is_over(exchange, t.mark));
            u->stand_in->hold(false);
            CHECK(smp_exchange_join(exchange, t.mark, u->stream, why));
            launch(u, fill_kernel, t.x, t.counts[w->rank], 9);
            smp_exchange_put_mark(exchange, t.mark);
        }
        CHECK(says(group, " uint8 on a device"));
    }
    settle(u);
    CHECK(u->right == 6 * w->size);
}

/* In the meeting, too: the next one is another. */
DEVICE_TEST(a_meeting_can_be_tried_again, .processes = "3", .threads = "2")
{
    const char   *why;
    smp_exchange *exchange;
    smp_group    *group = world_group(w);
    task          t;

    if (w->rank == 0) {
        CHECK_STATUS(smp_group_run(group, &(smp_call){.operation = SMP_BARRIER}),
                     SMP_ERR_MISMATCH);
    } else {
        CHECK_STATUS(meet(group, SMALL, &exchange, &why), SMP_ERR_MISMATCH);
        CHECK(exchange == NULL && strcmp(why, "") == 0);
    }
    CHECK_OK(meet(group, SMALL, &exchange, &why));
    CHECK(exchange != NULL);
    plan(&t, w->size, 1, u->x, u->y, 9000, true);
    gather(u, group, exchange, &t);
    settle(u);
    smp_group_destroy(group);
}

/* All have the same answer, and the same words for it. */
DEVICE_TEST(one_that_will_not_is_enough, .processes = "3", .threads = "2")
{
    const char   *why;
    smp_exchange *exchange;
    smp_group    *group = world_group(w);

    CHECK_OK(meet(group, w->rank == 1 ? 0 : SMALL, &exchange, &why));
    CHECK(exchange == NULL);
    CHECK_TEXT(why, "rank 1: comm_device_gather_bytes is 0");
    CHECK(u->right == 0);
    smp_group_destroy(group);
}

/* Nobody's device gathers, all know why, one has warned of it, and the group goes on.
 */
static void
expect_nobody_gathers(world *w, user *u, const char *of)
{
    char          text[SMP_WARNING_BYTES];
    char          said[SMP_WARNING_BYTES] = "";
    const char   *why;
    float         in = 1;
    float         out = 0;
    smp_exchange *exchange;
    smp_group    *group;
    smp_call      sum = {.operation = SMP_ALL_REDUCE,
                         .dtype = SMP_F32,
                         .count = 1,
                         .in = &in,
                         .out = &out};

    group = world_group(w);
    CHECK_OK(meet(group, SMALL, &exchange, &why));
    hurries = false;
    u->stand_in->misbehave(STAND_IN_IS_SOUND);
    CHECK(exchange == NULL);
    CHECK(strstr(why, "rank ") == why && strstr(why, of) != NULL);
    if (smp_warning_take(text)) {
        CHECK(strstr(text, why) != NULL && strstr(text, "through NCCL") != NULL);
        snprintf(said, sizeof(said), "rank %d:", w->rank);
        CHECK(strstr(why, said) == why);
        atomic_fetch_add(&w->shared->scratch[1], 1);
    }
    CHECK_OK(smp_group_run(group, &sum));
    CHECK(out == (float)w->size);
    smp_group_destroy(group);
    CHECK(atomic_load(&w->shared->scratch[1]) == 1);
    CHECK_OK(make_group_of_all(w, 8, &group)); /* another one */
    CHECK_OK(meet(group, SMALL, &exchange, &why));
    CHECK(exchange == NULL && strstr(why, "a trial in another group failed") != NULL);
    CHECK(!smp_warning_take(text));
    smp_group_destroy(group);
    end(u);
}

TEST_RANK(other_bytes_turn_it_off, .processes = "3")
{
    user u;

    begin(w, &u);
    u.stand_in->misbehave(w->rank == 1 ? STAND_IN_SPOILS_BYTES : STAND_IN_IS_SOUND);
    expect_nobody_gathers(w, &u, "other bytes than");
}

TEST_RANK(an_error_turns_it_off, .processes = "3")
{
    user u;

    begin(w, &u);
    if (w->rank == 1) {
        u.stand_in->fail("cuMemcpyDtoDAsync_v2", 3, 2);
    }
    expect_nobody_gathers(w, &u, "rank 1: cuMemcpyDtoDAsync: CUDA_ERROR");
}

/* ... also where the patterns lie: two others' halves are opened before. */
TEST_RANK(a_trial_that_cannot_open_memory_turns_it_off, .processes = "3")
{
    user u;

    begin(w, &u);
    if (w->rank == 1) {
        u.stand_in->fail("cuIpcOpenMemHandle_v2", 3, 2);
    }
    expect_nobody_gathers(w, &u, "rank 1: cuIpcOpenMemHandle: CUDA_ERROR");
}

/* What rank 1's device is told is never done. */
TEST_RANK(a_trial_without_an_end_turns_it_off, .processes = "2")
{
    user u;

    begin(w, &u);
    u.stand_in->misbehave(w->rank == 1 ? STAND_IN_LATE_EVENTS : STAND_IN_IS_SOUND);
    hurries = true;
    expect_nobody_gathers(w, &u, "did not come");
}

/* Halves are as large as the smallest of all members' is. */
DEVICE_TEST(members_may_have_halves_of_other_sizes, .processes = "3")
{
    const char   *why;
    smp_exchange *exchange;
    smp_group    *group = world_group(w);
    task          t;

    watch_exports(u);
    CHECK_OK(meet(group, SMALL + (size_t)w->rank * 1000, &exchange, &why));
    CHECK(shown_bytes > 0 && shown_bytes % SMP_DRIVER_BLOCK == 0); /* ours alone */
    CHECK(exchange != NULL && smp_exchange_half(exchange) == SMALL / 2);
    for (uint64_t i = 0; i < 5; i++) {
        plan(&t, w->size, i, u->x, u->y, 9000, true);
        gather(u, group, exchange, &t);
    }
    settle(u);
    smp_group_destroy(group);
}

/* One leaves early: its memory stays until the others have left, too. */
TEST_RANK(one_may_leave_before_the_others, .processes = "2")
{
    char              why[SMP_DRIVER_TEXT];
    smp_exchange_card card;
    smp_exchange     *exchange;
    smp_group        *group;
    task              t;
    user              u;
    int               before;

    begin(w, &u);
    before = u.stand_in->alive();
    end(&u);
    begin_group(w, &u, SMALL, &group, &exchange);
    plan(&t, w->size, 1, u.x, u.y, LARGEST, false);
    gather(&u, group, exchange, &t);
    settle(&u);
    w->barrier(w);
    if (w->rank == 0) {
        smp_group_destroy(group);
        CHECK(u.stand_in->alive() > before);
        w->barrier(w);
        w->barrier(w);
        /* Whatever is made looks after what was left; there is no device 7. */
        CHECK(smp_exchange_create(7, SMALL, 2, 0, &card, why) == NULL);
        CHECK(u.stand_in->alive() == before);
    } else {
        w->barrier(w);
        smp_group_destroy(group);
        CHECK(u.stand_in->alive() == before);
        w->barrier(w);
    }
    CHECK(u.right == w->size);
    end(&u);
}

TEST_RANK(a_group_ends_beside_work_without_end, .processes = "2")
{
    smp_exchange *exchange;
    smp_group    *group;
    void         *stuck;
    user          u;

    begin_group(w, &u, SMALL, &group, &exchange);
    stuck = begin_stuck(&u);
    smp_group_destroy(group);
    end_stuck(&u, stuck);
    w->barrier(w);
    end(&u);
}

/* What the unlucky rank and the others may say of an operation. */
static void
expect_one_to_blame(const world *w, smp_group *group, smp_status status, bool begun,
                    bool is_over)
{
    char who[64];

    if (w->rank == unlucky_rank) {
        CHECK_STATUS(status, SMP_ERR_SYSTEM);
        CHECK(!is_over); /* nobody knows what its device still does */
        CHECK(!begun || says(group, "CUDA_ERROR_OUT_OF_MEMORY"));
        return;
    }
    snprintf(who, sizeof(who), "rank %d ", unlucky_rank);
    CHECK(status == SMP_ERR_SYSTEM || status == SMP_ERR_CLOSED);
    CHECK(says(group, who));
}

/* Whatever fails: either nobody uses devices, or what arrives is right and who failed
 * is named. */
DEVICE_TEST(every_failure_is_survived, .processes = "")
{
    const char   *why;
    smp_exchange *exchange;
    smp_group    *group = world_group(w);
    smp_status    status = SMP_OK;
    task          t;
    bool          begun;

    if (w->rank == unlucky_rank) {
        u->stand_in->fail(NULL, unlucky_call, 2);
    }
    CHECK_OK(meet(group, SMALL, &exchange, &why));
    if (exchange == NULL) {
        char who[32];

        snprintf(who, sizeof(who), "rank %d: cu", unlucky_rank);
        CHECK(strstr(why, who) == why);
        CHECK_HAS(why, "CUDA_ERROR_OUT_OF_MEMORY");
    }
    for (uint64_t i = 0; i < 4 && exchange != NULL && status == SMP_OK; i++) {
        plan(&t, w->size, i, u->x, u->y, 7000, i % 2 == 1);
        status = run_task(u, group, exchange, &t, &begun);
        if (status != SMP_OK) {
            expect_one_to_blame(w, group, status, begun,
                                begun && smp_exchange_is_over(exchange, t.mark));
        } else if (smp_exchange_join(exchange, t.mark, u->stream, (char[160]){0})) {
            for (int m = 0; m < w->size; m++) {
                launch(u, check_kernel, t.outs[m], t.counts[m], seed_of(&t, m));
            }
            if (w->rank != unlucky_rank) {
                settle(u);
            }
        } else {
            CHECK(w->rank == unlucky_rank);
            status = SMP_ERR_SYSTEM; /* it leaves, as a script does */
        }
    }
    if (w->rank == unlucky_rank) {
        atomic_store(unlucky, u->stand_in->failed());
        u->stand_in->fail(NULL, 0, 0);
    }
    smp_group_destroy(group);
}

/* A member is killed while devices exchange: all others name it, at once, though theirs
 * may wait for its copies for ever. */
TEST_RANK(a_killed_member_is_named, .processes = "3")
{
    smp_status    status = SMP_OK;
    smp_exchange *exchange;
    smp_group    *group;
    pthread_t     thread;
    task          t;
    user          u;
    bool          begun;

    begin_group(w, &u, SMALL, &group, &exchange);
    if (w->rank == 1) {
        CHECK(pthread_create(&thread, NULL, die_soon, w) == 0);
    }
    for (uint64_t i = 0; status == SMP_OK; i++) {
        plan(&t, w->size, i, u.x, u.y, 9000, true);
        status = run_task(&u, group, exchange, &t, &begun);
        smp_exchange_put_mark(exchange, t.mark);
    }
    CHECK_STATUS(status, SMP_ERR_PEER_LOST);
    CHECK(says(group, "rank 1 is lost"));
    smp_group_destroy(group);
}

/* --------------------------------------------------------------------------- main */

static const world_plan the_plan = {.transports = "shm", .after = none_alive};

TEST(no_failure_is_fatal)
{
    fail_each_call(&world_every_failure_is_survived, &the_plan, 60, MOST_CALLS);
}

int
main(int argc, char **argv)
{
    find_library();
    return run_worlds(argc, argv, &the_plan);
}
