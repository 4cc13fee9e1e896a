/* Schedules, drawn: what a rank starts when every phase takes one tick. */
#include <stdlib.h>

#include "check.h"
#include "server/schedule.h"

#define MOST 8

/* A schedule, what happens to its microbatches, and the order in which one rank starts
 * the turns then: "..": nothing could start. */
typedef struct {
    const char       *says;
    smp_schedule_kind kind;
    int32_t           microbatches;
    int32_t           active;
    const char       *want;
    int32_t     forward_ticks;    /* until a forward reaches model.backward; 0: one */
    const char *turns;            /* listed, as in `want` */
    unsigned    without_backward; /* microbatches, as bits */
} plan;

/* "F0 B0": of microbatch 0. */
static int32_t
read_turns(const char *text, smp_turn turns[2 * MOST])
{
    int32_t n = 0;

    for (; text != NULL; text = strchr(text, ' ')) {
        text += *text == ' ';
        turns[n].phase = *text == 'B' ? SMP_BACKWARD : SMP_FORWARD;
        turns[n++].microbatch = atoi(text + 1);
    }
    return n;
}

static void
draw(const plan *p, char *picture)
{
    smp_schedule *schedule;
    smp_turn      turns[2 * MOST];
    int32_t       nturns = read_turns(p->turns, turns);
    int32_t       due[MOST];
    bool          running[MOST] = {false};
    char         *at = picture;

    CHECK_OK(smp_schedule_create(p->kind, p->microbatches, p->active, turns, nturns,
                                 &schedule));
    for (int32_t tick = 0; !smp_schedule_finished(schedule) && tick < 40; tick++) {
        int32_t mb;

        for (int32_t m = 0; m < p->microbatches; m++) {
            if (running[m] && due[m] == tick) {
                running[m] = false;
                if ((p->without_backward >> m & 1) != 0) {
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
}

#define SIMPLE SMP_SCHEDULE_SIMPLE
#define INTERLEAVED SMP_SCHEDULE_INTERLEAVED
#define BY_LIST SMP_SCHEDULE_LISTED

static const plan plans[] = {
    {"simple runs all forwards, then all backwards", SIMPLE, 4, 4,
     "F0 F1 F2 F3 B0 B1 B2 B3", 0, NULL, 0},
    {"interleaved prefers a backward that is ready", INTERLEAVED, 3, 3,
     "F0 B0 F1 B1 F2 B2", 0, NULL, 0},
    {"also a slow one", INTERLEAVED, 4, 4, "F0 F1 B0 B1 F2 F3 B2 B3", 2, NULL, 0},
    {"the third forward waits while two microbatches are active", INTERLEAVED, 3, 2,
     "F0 F1 .. .. B0 B1 F2 .. .. .. B2", 4, NULL, 0},
    {"one active microbatch is plain accumulation", INTERLEAVED, 3, 1,
     "F0 .. B0 F1 .. B1 F2 .. B2", 2, NULL, 0},
    {"a listed order is followed strictly", BY_LIST, 3, 3, "F0 F1 B1 F2 B0 B2", 0,
     "F0 F1 B1 F2 B0 B2", 0},
    {"whatever is ready", BY_LIST, 3, 3, "F0 F1 .. .. B1 F2 B0 .. B2", 3,
     "F0 F1 B1 F2 B0 B2", 0},
    {"a run without backward gives its place to the next, listed", BY_LIST, 2, 2,
     "F0 F1 B1", 0, "F0 F1 B0 B1", 1},
    {"... simple", SIMPLE, 3, 3, "F0 F1 F2 B0 B2", 0, NULL, 2},
    {"... and all of them", INTERLEAVED, 3, 1, "F0 F1 F2", 0, NULL, 7},
    {"a listed forward waits while as many as allowed are active", BY_LIST, 2, 1,
     "F0 .. F1 ..", 2, "F0 F1 B0 B1", 3},
};

TEST(turns_start_as_drawn)
{
    for (size_t i = 0; i < COUNT_OF(plans); i++) {
        char got[256] = "";

        check_row = plans[i].says;
        draw(&plans[i], got);
        CHECK_TEXT(got, plans[i].want);
    }
}

static smp_status
create_listed(const char *text)
{
    smp_schedule *schedule = NULL;
    smp_turn      turns[2 * MOST];
    int32_t       nturns = read_turns(text, turns);
    smp_status    status =
        smp_schedule_create(SMP_SCHEDULE_LISTED, 2, 2, turns, nturns, &schedule);

    smp_schedule_destroy(schedule);
    return status;
}

TEST(an_order_that_names_not_each_forward_once_before_its_backward_is_invalid)
{
    static const char *const wrong[] = {"F1 F0 B0",    NULL,          "F0 B1 F1 B0",
                                        "F0 F0 B0 B1", "F0 F2 B0 B2", "F0 F-1 B0 B-1"};
    smp_schedule            *schedule = NULL;

    CHECK_OK(create_listed("F1 F0 B0 B1"));
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        CHECK_STATUS(create_listed(wrong[i]), SMP_ERR_INVALID);
    }
    CHECK_STATUS(smp_schedule_create(SMP_SCHEDULE_SIMPLE, 0, 1, NULL, 0, &schedule),
                 SMP_ERR_INVALID);
    CHECK_STATUS(smp_schedule_create(SMP_SCHEDULE_SIMPLE, 1, 0, NULL, 0, &schedule),
                 SMP_ERR_INVALID);
    CHECK_STATUS(smp_schedule_create(SMP_SCHEDULE_SIMPLE, 3, 2, NULL, 0, &schedule),
                 SMP_ERR_INVALID); /* its third forward would wait for ever */
    CHECK(schedule == NULL);
}

RUN_TESTS
