/* Deadlock detection: what rounds of answers show, and when the next one begins. */
#include "check.h"
#include "server/detection.h"

#define NS SMP_DETECTION_IDLE_NS

static smp_detection *detection;
static uint64_t       round_now;

/* Of as many ranks, each a pipeline of its own or all in one. */
static smp_status
begin(int pp_size, int pipelines, bool in_sequence)
{
    const smp_grid   grid = smp_grid_of(0, pp_size * pipelines, pipelines);
    const smp_status status = smp_detection_create(&grid, in_sequence, &detection);

    round_now = 0;
    return status;
}

static void
end(void)
{
    smp_detection_destroy(detection);
}

static void
ask(void)
{
    round_now = smp_detection_ask(detection);
}

static void
answer(int rank, uint64_t sent, uint64_t received)
{
    const smp_still still = {.sent = sent, .received = received};

    smp_detection_hear(detection, rank, round_now, &still);
}

static smp_detection_verdict
judge(uint64_t sent, uint64_t received)
{
    const smp_still own = {.sent = sent, .received = received};

    return smp_detection_judge(detection, &own);
}

TEST(two_rounds_without_a_message_under_way_are_a_deadlock)
{
    CHECK_OK(begin(3, 1, false));
    for (int round = 0; round < 2; round++) {
        ask();
        answer(1, 2, 4);
        CHECK(!smp_detection_is_answered(detection));
        CHECK(judge(7, 6) == SMP_DETECTION_UNKNOWN); /* rank 2 may run */
        answer(2, 3, 2);
        CHECK(smp_detection_is_answered(detection));
        CHECK(judge(7, 6) ==
              (round == 0 ? SMP_DETECTION_AGAIN : SMP_DETECTION_DEADLOCK));
    }
    CHECK(smp_detection_answers(detection)[0].sent == 7);
    CHECK(smp_detection_answers(detection)[2].sent == 3);
    end();
}

TEST(a_message_under_way_is_no_deadlock)
{
    CHECK_OK(begin(2, 1, false));
    ask();
    answer(1, 0, 0);
    CHECK(judge(1, 0) == SMP_DETECTION_UNKNOWN);
    CHECK(!smp_detection_is_answered(detection)); /* not before it asks again */
    ask();
    answer(1, 0, 1);
    CHECK(judge(1, 0) == SMP_DETECTION_AGAIN); /* that was the first such round */
    end();
}

/* Rank 0 sent a message after its answer and before that of rank 1, who had one for
 * rank 0 then: the sums are alike, and neither waits. */
TEST(what_was_done_between_two_rounds_is_no_deadlock)
{
    CHECK_OK(begin(2, 1, false));
    ask();
    answer(1, 0, 1);
    CHECK(judge(1, 0) == SMP_DETECTION_AGAIN);
    ask();
    answer(1, 1, 2);
    CHECK(judge(2, 1) == SMP_DETECTION_AGAIN);
    ask();
    answer(1, 1, 2);
    CHECK(judge(2, 1) == SMP_DETECTION_DEADLOCK);
    end();
}

/* What came in between has been answered: the two rounds do not follow one another. */
TEST(a_rank_that_was_idle_in_between_begins_with_the_first_round)
{
    CHECK_OK(begin(2, 1, false));
    ask();
    answer(1, 0, 1);
    CHECK(judge(1, 0) == SMP_DETECTION_AGAIN);
    CHECK(smp_detection_idle(detection, 1));
    ask();
    answer(1, 0, 1);
    CHECK(judge(1, 0) == SMP_DETECTION_AGAIN);
    end();
}

TEST(an_answer_of_another_round_or_step_does_not_count)
{
    const smp_still still = {.sent = 0};

    CHECK_OK(begin(2, 1, false));
    ask();
    ask();
    smp_detection_hear(detection, 1, round_now - 1, &still);
    CHECK(!smp_detection_is_answered(detection));
    answer(1, 0, 0);
    CHECK(smp_detection_is_answered(detection));
    CHECK(judge(0, 0) == SMP_DETECTION_AGAIN);
    smp_detection_begin(detection);
    CHECK(!smp_detection_is_answered(detection));
    answer(1, 0, 0);
    CHECK(!smp_detection_is_answered(detection));
    ask();
    answer(1, 0, 0);
    CHECK(judge(0, 0) == SMP_DETECTION_AGAIN); /* not the second such round */
    end();
}

/* Two pipelines of one rank each: rank 0 issued `left` collectives and rank 1 `right`,
 * of which none is over on rank 1. */
static smp_detection_verdict
judge_issued(uint64_t left, uint64_t right)
{
    const smp_still own = {.issued = left, .over = left};
    const smp_still other = {.issued = right};

    ask();
    smp_detection_hear(detection, 1, round_now, &other);
    return smp_detection_judge(detection, &own);
}

TEST(a_collective_that_all_have_issued_is_under_way_until_it_is_over)
{
    CHECK_OK(begin(1, 2, false));
    CHECK(judge_issued(1, 1) == SMP_DETECTION_UNKNOWN);
    CHECK(judge_issued(0, 1) == SMP_DETECTION_AGAIN); /* it waits for rank 0 */
    CHECK(judge_issued(0, 1) == SMP_DETECTION_DEADLOCK);
    (void)end();

    CHECK_OK(begin(1, 2, true)); /* rank 0 is yet to issue it */
    CHECK(judge_issued(0, 1) == SMP_DETECTION_UNKNOWN);
    end();
}

/* When it asks, looking every NS from `from` on, where the nth time is 1 << n. */
static unsigned
times_asked(int64_t from, int looks)
{
    unsigned asked = 0;

    for (int i = 0; i < looks; i++) {
        asked |= (unsigned)smp_detection_idle(detection, from + i * NS) << i;
    }
    return asked;
}

TEST(pauses_double_until_someone_answers)
{
    const unsigned doubling = 1u << 0 | 1u << 1 | 1u << 4 | 1u << 11;

    CHECK_OK(begin(2, 1, false));
    CHECK(times_asked(NS, 16) == doubling);
    ask();
    answer(1, 0, 0);
    CHECK(times_asked(20 * NS, 16) == doubling);
    smp_detection_begin(detection);
    CHECK(times_asked(NS, 16) == doubling); /* the clock was moved back: a new step */
    for (int i = 0; i < 100; i++) {         /* but not for ever */
        CHECK(smp_detection_idle(detection, 1000 * NS + i * 19 * SMP_NS_PER_S));
    }
    end();
}

RUN_TESTS
