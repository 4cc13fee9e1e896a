/* The order in which microbatches pass a module that changes its buffers. */
#include "check.h"
#include "server/turns.h"

/* Which microbatches may enter the gate now, drawn: "x.x". */
static const char *
draw(const smp_turns *turns, int32_t gate, int32_t microbatches)
{
    static char picture[16];

    for (int32_t mb = 0; mb < microbatches; mb++) {
        picture[mb] = smp_turns_may_enter(turns, gate, mb) ? 'x' : '.';
    }
    picture[microbatches] = '\0';
    return picture;
}

TEST(a_microbatch_enters_when_every_earlier_one_has_called_as_often_as_traced)
{
    static const int32_t expected[] = {2};
    smp_turns           *turns;

    CHECK_OK(smp_turns_create(1, expected, &turns));
    CHECK_OK(smp_turns_begin(turns, 3));
    CHECK_TEXT(draw(turns, 0, 3), "x..");
    smp_turns_left(turns, 0, 0);
    CHECK_TEXT(draw(turns, 0, 3), "x..");
    smp_turns_left(turns, 0, 0);
    CHECK_TEXT(draw(turns, 0, 3), "xx.");
    smp_turns_left(turns, 0, 1);
    smp_turns_left(turns, 0, 1);
    CHECK_TEXT(draw(turns, 0, 3), "xxx");
    CHECK_OK(smp_turns_begin(turns, 3)); /* the next step starts anew */
    CHECK_TEXT(draw(turns, 0, 3), "x..");
    smp_turns_destroy(turns);
}

TEST(a_forward_that_is_over_opens_every_gate)
{
    static const int32_t expected[] = {1, 0};
    smp_turns           *turns;

    CHECK_OK(smp_turns_create(2, expected, &turns));
    CHECK_OK(smp_turns_begin(turns, 3));
    smp_turns_left(turns, 1,
                   0); /* not known how often: only the end of forward tells */
    CHECK_TEXT(draw(turns, 1, 3), "x..");
    smp_turns_forward_done(turns, 1);
    CHECK_TEXT(draw(turns, 0, 3), "x..");
    smp_turns_forward_done(turns, 0);
    CHECK_TEXT(draw(turns, 0, 3), "xxx");
    CHECK_TEXT(draw(turns, 1, 3), "xxx");
    smp_turns_destroy(turns);
}

/* Data may decide how often a module is called. */
TEST(a_number_of_calls_that_was_exceeded_is_not_believed_again)
{
    static const int32_t expected[] = {1};
    smp_turns           *turns;

    CHECK_OK(smp_turns_create(1, expected, &turns));
    CHECK_OK(smp_turns_begin(turns, 3));
    smp_turns_left(turns, 0, 0);
    CHECK(smp_turns_may_enter(turns, 0, 1));
    smp_turns_left(turns, 0, 0);
    CHECK(!smp_turns_may_enter(turns, 0, 1));
    smp_turns_forward_done(turns, 0);
    CHECK(smp_turns_may_enter(turns, 0, 1));

    CHECK_OK(smp_turns_begin(turns, 3));
    smp_turns_left(turns, 0, 0);
    CHECK(!smp_turns_may_enter(turns, 0, 1));
    smp_turns_destroy(turns);
}

TEST(each_gate_has_a_number_of_its_own)
{
    static const int32_t expected[] = {1, 2, 1, 3};
    smp_turns           *turns;

    CHECK_OK(smp_turns_create(4, expected, &turns));
    CHECK_OK(smp_turns_begin(turns, 2));
    for (int32_t gate = 0; gate < 4; gate++) {
        for (int32_t call = 1; call <= expected[gate]; call++) {
            CHECK(!smp_turns_may_enter(turns, gate, 1));
            smp_turns_left(turns, gate, 0);
        }
        CHECK(smp_turns_may_enter(turns, gate, 1));
    }
    smp_turns_destroy(turns);
}

TEST(numbers_that_name_nothing_change_nothing)
{
    static const int32_t expected[] = {1};
    smp_turns           *turns;

    CHECK_OK(smp_turns_create(1, expected, &turns));
    CHECK_OK(smp_turns_begin(turns, 2));
    smp_turns_left(turns, 0, -1);
    smp_turns_left(turns, 0, 2);
    smp_turns_left(turns, 1, 0);
    smp_turns_left(turns, -1, 0);
    smp_turns_forward_done(turns, -1);
    smp_turns_forward_done(turns, 2);
    CHECK_TEXT(draw(turns, 0, 2), "x.");
    CHECK(smp_turns_may_enter(turns, 5, 1) && smp_turns_may_enter(turns, -1, 1));
    smp_turns_destroy(turns);
    smp_turns_destroy(NULL);
}

RUN_TESTS
