/* Ballots: the ranks of a stage agree how far they go together. */
#include "check.h"
#include "server/ballots.h"

enum { RANKS = 3, OPEN = -1 };

static smp_ballots *ballots;

/* A rank's list in the ballot of the call: a word for each letter. */
static void
cast(uint64_t call, const char *words)
{
    smp_ballot_list list = {.ballot = {.call = call, .subject = 7}};

    for (; words[list.n] != '\0'; list.n++) {
        list.words[list.n] = (uint32_t)words[list.n];
    }
    CHECK_OK(smp_ballots_cast(ballots, &list));
}

static int
outcome_of(uint64_t call)
{
    size_t outcome;

    return smp_ballots_read(ballots, &(smp_ballot){.call = call, .subject = 7},
                            &outcome)
               ? (int)outcome
               : OPEN;
}

static void
begin(void)
{
    CHECK_OK(smp_ballots_create(RANKS, &ballots));
    smp_ballots_begin(ballots);
}

TEST(the_outcome_is_the_number_of_leading_words_that_all_have)
{
    begin();
    cast(1, "abcd");
    cast(2, "xy");
    cast(1, "abce");
    CHECK(outcome_of(1) == OPEN);
    cast(2, "xy");
    cast(1, "abc");
    cast(2, "xyz");
    CHECK(outcome_of(1) == 3);
    CHECK(outcome_of(2) == 2);
    smp_ballots_destroy(ballots);
}

TEST(a_no_needs_no_other_list_and_late_ones_do_not_count_in_the_next_ballot)
{
    begin();
    cast(1, "ab");
    cast(1, "");
    CHECK(outcome_of(1) == 0);
    smp_ballots_close(ballots, &(smp_ballot){.call = 1, .subject = 7});
    cast(1, "ab"); /* the last of them */
    for (int rank = 0; rank < RANKS; rank++) {
        cast(1, "ab");
    }
    CHECK(outcome_of(1) == 2);
    smp_ballots_destroy(ballots);
}

TEST(a_rank_that_leaves_waits_for_none_until_the_next_step)
{
    begin();
    cast(1, "a");
    cast(2, "a");
    cast(2, "a");
    cast(2, "a");
    CHECK(outcome_of(1) == OPEN);
    smp_ballots_leave(ballots);
    CHECK(outcome_of(1) == 0);
    CHECK(outcome_of(2) == 1);
    CHECK(smp_ballots_are_left(ballots));
    smp_ballots_begin(ballots);
    CHECK(!smp_ballots_are_left(ballots));
    cast(1, "a");
    CHECK(outcome_of(1) == OPEN);
    smp_ballots_destroy(ballots);
}

RUN_TESTS
