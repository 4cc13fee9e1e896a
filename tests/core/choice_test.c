/* What goes first: each rule by itself, and all of them in every order of arrival. */
#include "check.h"
#include "server/choice.h"

#define MOST 6

/* One letter for what could run: of a forward r a response, q a request, t a turn, of a
 * backward R, Q, T; g a gate; then the microbatch. */
static smp_ready
ready_of(const char *word, uint64_t arrival)
{
    smp_ready ready = {.microbatch = word[1] - '0'};

    switch (word[0] | 32) {
    case 'r':
        ready.kind = SMP_READY_RESPONSE;
        break;
    case 'q':
        ready.kind = SMP_READY_REQUEST;
        break;
    case 'g':
        ready.kind = SMP_READY_GATE;
        break;
    default:
        ready.kind = SMP_READY_TURN;
        break;
    }
    ready.phase = word[0] & 32 ? SMP_FORWARD : SMP_BACKWARD;
    if (ready.kind == SMP_READY_RESPONSE || ready.kind == SMP_READY_REQUEST) {
        ready.arrival = arrival;
    }
    return ready;
}

/* The order in which all that could run does, from "q1 R0 ..." in order of arrival. */
static const char *
draw(const char *words, bool backwards)
{
    static char picture[3 * MOST + 1];
    smp_ready   ready[MOST];
    const char *word[MOST];
    size_t      n = 0;
    bool        overtaken = false;
    char       *at = picture;

    for (const char *w = words; *w != '\0'; w += w[2] == '\0' ? 2 : 3) {
        word[n++] = w;
    }
    for (size_t i = 0; i < n; i++) {
        size_t from = backwards ? n - 1 - i : i;

        ready[i] = ready_of(word[from], from + 1);
        ready[i].index = from;
    }
    while (n > 0) {
        ptrdiff_t best = smp_choose(ready, n, &overtaken);

        at += sprintf(at, "%.2s ", word[ready[best].index]);
        ready[best] = ready[--n];
    }
    at[-1] = '\0';
    return picture;
}

TEST(nothing_is_chosen_of_nothing)
{
    bool overtaken = true;

    CHECK(smp_choose(NULL, 0, &overtaken) == -1);
    CHECK(overtaken);
}

/* In the list, too, the order says nothing. */
TEST(the_first_match_goes_first)
{
    static const struct {
        const char *ready, *runs;
    } cases[] = {
        {"R0 r1", "r1 R0"},       /* a response of a forward, then of a backward */
        {"Q0 r1", "r1 Q0"},       /* ... then a request of one */
        {"T0 Q1 Q2", "Q1 Q2 T0"}, /* which goes before a turn of a backward, */
        {"T0 R1", "R1 T0"},       /* ... as a response does */
        {"g0 T1", "T1 g0"},       /* the turn before a gate */
        {"q0 g1", "g1 q0"},       /* the gate before a request of a forward */
        {"t0 q1", "q1 t0"},       /* that before a turn of a forward */
        {"t0 q1 g2 T3 R4 r5", "r5 R4 T3 g2 q1 t0"},
        {"q2 q0 q1", "q0 q1 q2"}, /* the lowest microbatch */
        {"r2 r0 r1", "r0 r1 r2"},
        {"R1 Q0 R0", "Q0 R0 R1"}, /* of one microbatch the first that arrived */
        {"R0 Q1 Q0", "R0 Q0 Q1"},
        {"g1 g0", "g0 g1"},
    };

    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        for (int backwards = 0; backwards < 2; backwards++) {
            CHECK_TEXT(draw(cases[i].ready, backwards), cases[i].runs);
        }
    }
}

TEST(one_request_of_a_forward_goes_before_one_of_a_backward_that_is_alone)
{
    static const struct {
        const char *ready, *runs;
    } cases[] = {
        {"Q0 q1", "q1 Q0"},       {"Q0 q2 q1", "q1 Q0 q2"}, /* one, the lowest */
        {"Q0 Q1 q2", "Q0 q2 Q1"}, /* not before two; one of them is alone then */
        {"R0 Q1 q2", "R0 q2 Q1"}, /* nor before a response and a request */
        {"R0 q1", "R0 q1"},       /* nor before a response */
        {"T0 q1", "T0 q1"},       /* nor before what is no message */
        {"Q0 q1 r2", "r2 q1 Q0"}, {"Q0 t1 T2 g3", "Q0 T2 g3 t1"},
    };

    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        CHECK_TEXT(draw(cases[i].ready, false), cases[i].runs);
    }
}

/* Else a rank that always has a request of a forward would never run that backward. */
TEST(a_backward_is_overtaken_once)
{
    smp_ready ready[2] = {ready_of("Q0", 1), ready_of("q1", 2)};
    bool      overtaken = false;

    for (int i = 0; i < 3; i++) {
        CHECK(smp_choose(ready, 2, &overtaken) == 1);
        CHECK(overtaken);
        ready[1] = ready_of("r1", 3); /* what comes in between changes nothing */
        CHECK(smp_choose(ready, 2, &overtaken) == 1);
        ready[1] = ready_of("q2", 4);
        CHECK(smp_choose(ready, 2, &overtaken) == 0);
        CHECK(!overtaken);
    }
}

RUN_TESTS
