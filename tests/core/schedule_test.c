/* Schedules, drawn: what a rank starts when every phase takes one tick. */
#include <stdlib.h>

#include "check.h"
#include "server/schedule.h"

#define MOST 8

/* What happens to a microbatch that reached model.backward, or did not. */
typedef struct {
    smp_schedule_kind kind;
    int32_t           microbatches;
    int32_t           active;
    const smp_turn   *turns;
    int32_t           nturns;
    bool              without_backward[MOST];
    int32_t           forward_ticks; /* how long a forward is away; 0: one tick */
} plan;

/* The order in which one rank starts the turns.  A forward that started reaches
 * model.backward forward_ticks later; "..": nothing could start. */
static int
draw(const plan *p, char *picture)
{
    smp_schedule *schedule;
    int32_t       due[MOST];
    bool          running[MOST] = {false};
    char         *at = picture;

    if (smp_schedule_create(p->kind, p->microbatches, p->active, p->turns, p->nturns,
                            &schedule) != SMP_OK) {
        return 1;
    }
    for (int32_t tick = 0; !smp_schedule_finished(schedule) && tick < 40; tick++) {
        int32_t mb;

        for (int32_t m = 0; m < p->microbatches; m++) {
            if (running[m] && due[m] == tick) {
                running[m] = false;
                if (p->without_backward[m]) {
                    smp_schedule_done(schedule, m);
                } else {
                    smp_schedule_ready(schedule, m);
                }
            }
        }
        if (smp_schedule_finished(schedule)) {
            break;
        }
        if (smp_schedule_next(schedule, SMP_BACKWARD, &mb)) {
            smp_schedule_start(schedule, SMP_BACKWARD, mb);
            at += sprintf(at, "B%d ", mb);
            smp_schedule_done(schedule, mb);
        } else if (smp_schedule_next(schedule, SMP_FORWARD, &mb)) {
            smp_schedule_start(schedule, SMP_FORWARD, mb);
            at += sprintf(at, "F%d ", mb);
            running[mb] = true;
            due[mb] = tick + (p->forward_ticks == 0 ? 1 : p->forward_ticks);
        } else {
            at += sprintf(at, ".. ");
        }
    }
    at[at == picture ? 0 : -1] = '\0';
    smp_schedule_destroy(schedule);
    return 0;
}

#define CHECK_PICTURE(p, want)                                                         \
    do {                                                                               \
        char got_[256] = "";                                                           \
        CHECK(draw(&(p), got_) == 0);                                                  \
        if (strcmp(got_, want) != 0) {                                                 \
            fprintf(stderr, "%s:%d\nwant %s\ngot  %s\n", __FILE__, __LINE__, want,     \
                    got_);                                                             \
            check_fail();                                                              \
        }                                                                              \
    } while (0)

TEST(simple_runs_all_forwards_then_all_backwards)
{
    plan p = {.kind = SMP_SCHEDULE_SIMPLE, .microbatches = 4, .active = 4};

    CHECK_PICTURE(p, "F0 F1 F2 F3 B0 B1 B2 B3");
}

TEST(interleaved_prefers_a_backward_that_is_ready)
{
    plan quick = {.kind = SMP_SCHEDULE_INTERLEAVED, .microbatches = 3, .active = 3};
    plan slow = {.kind = SMP_SCHEDULE_INTERLEAVED,
                 .microbatches = 4,
                 .active = 4,
                 .forward_ticks = 2};

    CHECK_PICTURE(quick, "F0 B0 F1 B1 F2 B2");
    CHECK_PICTURE(slow, "F0 F1 B0 B1 F2 F3 B2 B3");
}

TEST(the_third_forward_waits_while_two_microbatches_are_active)
{
    plan p = {.kind = SMP_SCHEDULE_INTERLEAVED,
              .microbatches = 3,
              .active = 2,
              .forward_ticks = 4};

    CHECK_PICTURE(p, "F0 F1 .. .. B0 B1 F2 .. .. .. B2");
}

TEST(one_active_microbatch_is_plain_accumulation)
{
    plan p = {.kind = SMP_SCHEDULE_INTERLEAVED,
              .microbatches = 3,
              .active = 1,
              .forward_ticks = 2};

    CHECK_PICTURE(p, "F0 .. B0 F1 .. B1 F2 .. B2");
}

TEST(a_listed_order_is_followed_strictly)
{
    static const smp_turn turns[] = {{0, SMP_FORWARD},  {1, SMP_FORWARD},
                                     {1, SMP_BACKWARD}, {2, SMP_FORWARD},
                                     {0, SMP_BACKWARD}, {2, SMP_BACKWARD}};
    plan                  p = {.kind = SMP_SCHEDULE_LISTED,
                               .microbatches = 3,
                               .active = 3,
                               .turns = turns,
                               .nturns = 6};

    CHECK_PICTURE(p, "F0 F1 B1 F2 B0 B2");
    p.forward_ticks = 3;
    CHECK_PICTURE(p, "F0 F1 .. .. B1 F2 B0 .. B2");
}

TEST(a_run_without_backward_gives_its_place_to_the_next)
{
    static const smp_turn turns[] = {
        {0, SMP_FORWARD}, {1, SMP_FORWARD}, {0, SMP_BACKWARD}, {1, SMP_BACKWARD}};
    plan listed = {.kind = SMP_SCHEDULE_LISTED,
                   .microbatches = 2,
                   .active = 2,
                   .turns = turns,
                   .nturns = 4,
                   .without_backward = {true, false}};
    plan simple = {.kind = SMP_SCHEDULE_SIMPLE,
                   .microbatches = 3,
                   .active = 3,
                   .without_backward = {false, true, false}};
    plan none = {.kind = SMP_SCHEDULE_INTERLEAVED,
                 .microbatches = 3,
                 .active = 1,
                 .without_backward = {true, true, true}};

    CHECK_PICTURE(listed, "F0 F1 B1");
    CHECK_PICTURE(simple, "F0 F1 F2 B0 B2");
    CHECK_PICTURE(none, "F0 F1 F2");
}

TEST(a_listed_forward_waits_while_as_many_as_allowed_are_active)
{
    static const smp_turn turns[] = {
        {0, SMP_FORWARD}, {1, SMP_FORWARD}, {0, SMP_BACKWARD}, {1, SMP_BACKWARD}};
    plan p = {.kind = SMP_SCHEDULE_LISTED,
              .microbatches = 2,
              .active = 1,
              .turns = turns,
              .nturns = 4,
              .forward_ticks = 2,
              .without_backward = {true, true}};

    CHECK_PICTURE(p, "F0 .. F1 ..");
}

static smp_status
create_listed(const smp_turn *turns, int32_t nturns)
{
    smp_schedule *schedule = NULL;
    smp_status    status =
        smp_schedule_create(SMP_SCHEDULE_LISTED, 2, 2, turns, nturns, &schedule);

    smp_schedule_destroy(schedule);
    return status;
}

TEST(an_order_that_names_not_each_forward_once_before_its_backward_is_invalid)
{
    static const smp_turn right[] = {
        {1, SMP_FORWARD}, {0, SMP_FORWARD}, {0, SMP_BACKWARD}, {1, SMP_BACKWARD}};
    static const smp_turn early[] = {
        {0, SMP_FORWARD}, {1, SMP_BACKWARD}, {1, SMP_FORWARD}, {0, SMP_BACKWARD}};
    static const smp_turn twice[] = {
        {0, SMP_FORWARD}, {0, SMP_FORWARD}, {0, SMP_BACKWARD}, {1, SMP_BACKWARD}};
    static const smp_turn range[] = {
        {0, SMP_FORWARD}, {2, SMP_FORWARD}, {0, SMP_BACKWARD}, {2, SMP_BACKWARD}};
    static const smp_turn below[] = {
        {0, SMP_FORWARD}, {-1, SMP_FORWARD}, {0, SMP_BACKWARD}, {-1, SMP_BACKWARD}};
    smp_schedule *schedule = NULL;

    CHECK_OK(create_listed(right, 4));
    CHECK_STATUS(create_listed(right, 3), SMP_ERR_INVALID);
    CHECK_STATUS(create_listed(right, 0), SMP_ERR_INVALID);
    CHECK_STATUS(create_listed(early, 4), SMP_ERR_INVALID);
    CHECK_STATUS(create_listed(twice, 4), SMP_ERR_INVALID);
    CHECK_STATUS(create_listed(range, 4), SMP_ERR_INVALID);
    CHECK_STATUS(create_listed(below, 4), SMP_ERR_INVALID);
    CHECK_STATUS(smp_schedule_create(SMP_SCHEDULE_SIMPLE, 0, 1, NULL, 0, &schedule),
                 SMP_ERR_INVALID);
    CHECK_STATUS(smp_schedule_create(SMP_SCHEDULE_SIMPLE, 1, 0, NULL, 0, &schedule),
                 SMP_ERR_INVALID);
    CHECK_STATUS(smp_schedule_create(SMP_SCHEDULE_SIMPLE, 3, 2, NULL, 0, &schedule),
                 SMP_ERR_INVALID); /* its third forward would wait for ever */
    CHECK(schedule == NULL);
}

RUN_TESTS
