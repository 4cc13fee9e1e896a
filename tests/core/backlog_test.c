/* The backlog: what is kept, taken and dropped. */
#include "check.h"
#include "server/backlog.h"
#include "server/envelope.h"

#define MANY 100

static smp_backlog *backlog;

static smp_status
keep(smp_msg_kind kind, uint32_t step, uint64_t call)
{
    const smp_envelope e = {.kind = (uint8_t)kind, .step = step, .call = call};
    smp_message       *m;
    smp_status         status = smp_message_create(0, sizeof(e), 0, &m);

    if (status == SMP_OK) {
        memcpy(m->bytes, &e, sizeof(e));
        status = smp_backlog_keep(backlog, m);
    }
    return status;
}

/* Frees the message; its call, 0 for none. */
static uint64_t
call_of(smp_message *message)
{
    uint64_t call = message == NULL ? 0 : smp_message_envelope(message)->call;

    smp_message_free(message);
    return call;
}

TEST(a_message_is_taken_once)
{
    bool     seen[MANY + 1] = {false};
    uint64_t arrival;

    CHECK_OK(smp_backlog_create(&backlog));
    for (uint64_t call = 1; call <= MANY; call++) {
        CHECK_OK(keep(SMP_MSG_FORWARD, 1, call));
    }
    for (size_t left = MANY; left > 0; left--) {
        const size_t       i = left * left * 7 % 31 % left;
        const smp_message *m = smp_backlog_at(backlog, i, &arrival);
        const uint64_t     call = smp_message_envelope(m)->call;

        CHECK(smp_backlog_count(backlog) == left);
        CHECK(arrival == call - 1 && !seen[call]);
        CHECK(call_of(smp_backlog_take(backlog, i)) == call);
        seen[call] = true;
    }
    CHECK(smp_backlog_count(backlog) == 0);
    smp_backlog_destroy(backlog);
}

TEST(a_response_is_found_by_its_call)
{
    CHECK_OK(smp_backlog_create(&backlog));
    CHECK_OK(keep(SMP_MSG_FORWARD, 1, 8));
    CHECK_OK(keep(SMP_MSG_RESPONSE, 1, 7));
    CHECK_OK(keep(SMP_MSG_RESPONSE, 1, 9));
    CHECK(call_of(smp_backlog_take_response(backlog, 8)) == 0); /* a request */
    CHECK(call_of(smp_backlog_take_response(backlog, 9)) == 9);
    CHECK(call_of(smp_backlog_take_response(backlog, 9)) == 0);
    CHECK(smp_backlog_count(backlog) == 2);
    smp_backlog_destroy(backlog);
}

/* Also after one was taken from their middle. */
TEST(all_are_taken_in_the_order_of_their_arrival)
{
    smp_message *m;
    uint64_t     last = 0;
    int          n = 0;

    CHECK_OK(smp_backlog_create(&backlog));
    CHECK(smp_backlog_take_all(backlog) == NULL);
    for (uint64_t call = 1; call <= MANY; call++) {
        CHECK_OK(keep(SMP_MSG_FORWARD, 2, call));
    }
    smp_message_free(smp_backlog_take(backlog, 3));
    m = smp_backlog_take_all(backlog);
    CHECK(smp_backlog_count(backlog) == 0);
    while (m != NULL) {
        smp_message   *next = m->next;
        const uint64_t call = call_of(m);

        CHECK(call > last);
        last = call;
        n++;
        m = next;
    }
    CHECK(n == MANY - 1 && last == MANY);
    smp_backlog_destroy(backlog);
}

TEST(what_belongs_to_a_step_that_is_over_is_dropped)
{
    CHECK_OK(smp_backlog_create(&backlog));
    for (uint32_t step = 1; step <= 6; step++) {
        CHECK_OK(keep(SMP_MSG_FORWARD, step % 3 + 1, step));
    }
    smp_backlog_drop(backlog, 2);
    CHECK(smp_backlog_count(backlog) == 2);
    CHECK(smp_message_envelope(smp_backlog_at(backlog, 0, &(uint64_t){0}))->step == 3);
    CHECK(smp_message_envelope(smp_backlog_at(backlog, 1, &(uint64_t){0}))->step == 3);
    smp_backlog_destroy(backlog); /* frees the rest: the leak check sees it */
}

RUN_TESTS
