/* Static mode on one rank: which runs fit an order, and what words and verdicts do. */
#include "check.h"
#include "server/replay.h"

#define STEPS 2
#define KIND 7

static smp_ready
request(int32_t microbatch, int32_t source, uint64_t arrival)
{
    return (smp_ready){.kind = SMP_READY_REQUEST,
                       .microbatch = microbatch,
                       .source = source,
                       .call = (uint64_t)(100 + microbatch),
                       .arrival = arrival};
}

static const smp_ready TURN = {.kind = SMP_READY_TURN, .source = -1, .call = 1};

/* A step with these runs, in order, and the verdict of pp_rank 0. */
static smp_replay_verdict
step(smp_replay *replay, uint64_t number, const smp_ready *runs, size_t n)
{
    smp_replay_verdict verdict;

    smp_replay_begin(replay, number, KIND, 4);
    for (size_t i = 0; i < n; i++) {
        CHECK_OK(smp_replay_run(replay, &runs[i]));
    }
    (void)smp_replay_tell(replay);
    verdict = smp_replay_judge(replay);
    smp_replay_end(replay, &verdict);
    return verdict;
}

/* Its order is that of `runs`, and step STEPS + 1 has begun. */
static smp_replay *
replaying(const smp_ready *runs, size_t n)
{
    smp_replay *replay;

    CHECK_OK(smp_replay_create(0, STEPS, &replay));
    for (uint64_t number = 1; number <= STEPS; number++) {
        smp_replay_verdict verdict = step(replay, number, runs, n);

        CHECK(verdict.recorded == number && verdict.left == 0 && verdict.best >= 1);
    }
    smp_replay_begin(replay, STEPS + 1, KIND, 4);
    CHECK(smp_replay_is_on(replay));
    return replay;
}

TEST(the_next_run_of_the_order_is_awaited_while_it_may_come)
{
    const smp_ready runs[] = {request(0, 1, 5), request(1, 2, 6), TURN};
    const smp_ready later[] = {TURN, request(1, 2, 9)};
    smp_replay     *replay = replaying(runs, 3);

    CHECK(smp_replay_find(replay, NULL, 0) == -1);
    CHECK(smp_replay_find(replay, later, 2) == -1); /* of another source */
    CHECK(smp_replay_is_on(replay));
    for (size_t i = 0; i < 3; i++) {
        CHECK(smp_replay_find(replay, runs, 3) == (ptrdiff_t)i);
        CHECK_OK(smp_replay_run(replay, &runs[i]));
    }
    CHECK(smp_replay_next(replay) == NULL && smp_replay_tell(replay).left == 0);
    smp_replay_destroy(replay);
}

TEST(a_run_that_does_not_fit_ends_the_replay_and_is_told_once)
{
    const smp_ready runs[] = {request(0, 1, 5), request(1, 1, 6), TURN};
    const smp_ready unfit[] = {
        request(2, 1, 8), /* not in the order */
        request(1, 1, 8), /* its source has sent the first one before */
    };

    for (size_t i = 0; i < sizeof(unfit) / sizeof(unfit[0]); i++) {
        smp_replay *replay = replaying(runs, 3);
        smp_ready   told;
        bool        missing;

        CHECK(smp_replay_find(replay, &unfit[i], 1) == -1);
        CHECK(!smp_replay_is_on(replay));
        CHECK_OK(smp_replay_run(replay, &unfit[i]));
        CHECK(smp_replay_tell(replay).left == 1);
        smp_replay_end(replay, &(smp_replay_verdict){.left = 1});
        CHECK(smp_replay_take_misfit(replay, &told, &missing));
        CHECK(smp_ready_is_same(&told, &unfit[i]) && !missing);
        CHECK(!smp_replay_take_misfit(replay, &told, &missing));
        smp_replay_begin(replay, STEPS + 2, KIND, 4);
        CHECK(!smp_replay_is_on(replay));
        smp_replay_destroy(replay);
    }
}

TEST(a_step_with_fewer_runs_and_one_of_a_rank_without_the_order_do_not_fit)
{
    const smp_ready runs[] = {TURN, request(0, 1, 5)};
    smp_replay     *replay = replaying(runs, 2);

    CHECK_OK(smp_replay_run(replay, &runs[0]));
    CHECK(smp_replay_tell(replay).left == 1);
    /* Then all record; the best of a rank that has missed it is another step. */
    smp_replay_end(replay, &(smp_replay_verdict){.left = 1});
    smp_replay_begin(replay, STEPS + 2, KIND, 4);
    smp_replay_end(replay, &(smp_replay_verdict){.best = STEPS + 9, .recorded = STEPS});
    smp_replay_begin(replay, STEPS + 3, KIND, 4);
    CHECK(!smp_replay_is_on(replay));
    CHECK(smp_replay_tell(replay).left == 1);
    smp_replay_destroy(replay);
}

TEST(words_choose_the_fastest_step_and_differing_ones_begin_anew)
{
    smp_replay        *replay;
    smp_replay_word    word;
    smp_replay_verdict verdict;

    CHECK_OK(smp_replay_create(0, 3, &replay));
    for (uint64_t number = 1; number <= 2; number++) {
        smp_replay_begin(replay, number, KIND, 4);
        word = smp_replay_tell(replay);
        word.ns =
            number == 1 ? 900000000000 : 800000000000; /* the slowest pipeline's */
        smp_replay_hear(replay, &word, false);
        word.ns *= 2;
        smp_replay_hear(replay, &word, true); /* a vote has no time */
        verdict = smp_replay_judge(replay);
        smp_replay_end(replay, &verdict);
        CHECK(verdict.best == number && verdict.recorded == number);
    }
    smp_replay_begin(replay, 3, KIND, 4);
    word = smp_replay_tell(replay);
    word.recorded--; /* its last step failed */
    smp_replay_hear(replay, &word, false);
    verdict = smp_replay_judge(replay);
    CHECK(verdict.recorded == 0 && verdict.best == 0 && verdict.left == 1);
    smp_replay_destroy(replay);
}

TEST(kinds_of_steps_have_orders_of_their_own_up_to_a_number)
{
    const smp_ready runs[] = {TURN};
    smp_replay     *replay = replaying(runs, 1);

    (void)smp_replay_tell(replay);
    for (uint64_t kind = 20; kind < 27; kind++) {
        smp_replay_begin(replay, kind, kind, 4);
        CHECK(!smp_replay_is_on(replay));
    }
    smp_replay_begin(replay, 27, KIND, 4);
    CHECK(smp_replay_is_on(replay));
    for (uint64_t kind = 30; kind < 38; kind++) {
        smp_replay_begin(replay, kind, kind, 4);
    }
    smp_replay_begin(replay, 38, KIND, 4);
    CHECK(!smp_replay_is_on(replay));
    smp_replay_destroy(replay);
}

TEST(a_step_with_fewer_microbatches_leaves_the_order_as_it_is)
{
    const smp_ready    runs[] = {TURN, request(0, 1, 5)};
    smp_replay        *replay = replaying(runs, 2);
    smp_replay_word    word = smp_replay_tell(replay);
    smp_replay_verdict verdict;

    for (uint64_t number = STEPS + 2; number < STEPS + 4; number++) {
        smp_replay_begin(replay, number, KIND, 3);
        CHECK(!smp_replay_is_on(replay));
        CHECK_OK(smp_replay_run(replay, &runs[1]));
        word.left = 2; /* the other rank waited for more */
        smp_replay_hear(replay, &word, true);
        verdict = smp_replay_judge(replay);
        CHECK(verdict.recorded == STEPS && verdict.left == 0);
        smp_replay_end(replay, &verdict);
    }
    smp_replay_begin(replay, STEPS + 4, KIND, 4);
    CHECK(smp_replay_is_on(replay));
    smp_replay_end(replay, &(smp_replay_verdict){.left = 1});
    for (int32_t more = 4; more < 6; more++) { /* a longer step is the first recorded */
        smp_replay_begin(replay, (uint64_t)(STEPS + 1 + more), KIND, more);
        verdict = smp_replay_judge(replay);
        CHECK(verdict.recorded == 1 && verdict.best == (uint64_t)(STEPS + 1 + more));
        smp_replay_end(replay, &verdict);
    }
    smp_replay_destroy(replay);
}

RUN_TESTS
