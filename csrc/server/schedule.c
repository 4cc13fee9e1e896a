/* The next microbatch's start: three orders over one small state per microbatch. */
#include "server/schedule.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    MB_WAITING,
    MB_FORWARD,
    MB_READY,
    MB_BACKWARD,
    MB_DONE,
} mb_state;

const char *
smp_phase_name(smp_phase phase)
{
    return phase == SMP_FORWARD ? "forward" : "backward";
}

struct smp_schedule {
    smp_schedule_kind kind;
    int32_t           microbatches;
    int32_t           active_limit;
    int32_t           active;       /* started and not done */
    int32_t           next_forward; /* the lowest WAITING microbatch */
    int32_t           done;
    smp_turn         *turns; /* owned; LISTED only */
    int32_t           nturns;
    int32_t           next_turn;
    mb_state          state[]; /* by microbatch */
};

/* Each forward once, before its backward, and no other microbatch. */
static bool
turns_are_valid(const smp_turn *turns, int32_t nturns, int32_t microbatches)
{
    bool *seen = calloc((size_t)microbatches * 2, sizeof(*seen));
    bool  valid = seen != NULL;

    for (int32_t i = 0; valid && i < nturns; i++) {
        int32_t mb = turns[i].microbatch;
        bool   *of; /* its seen phases: forward, backward */

        if (mb < 0 || mb >= microbatches) {
            valid = false;
            continue;
        }
        of = seen + 2 * (size_t)mb;
        if (turns[i].phase == SMP_FORWARD) {
            valid = !of[0];
            of[0] = true;
        } else {
            valid = of[0] && !of[1];
            of[1] = true;
        }
    }
    for (int32_t mb = 0; valid && mb < microbatches; mb++) {
        valid = seen[2 * (size_t)mb] && seen[2 * (size_t)mb + 1];
    }
    free(seen);
    return valid;
}

/* The current turn of a listed schedule, past the backwards of runs without one.  False
 * at the end of the list. */
static bool
listed_turn(smp_schedule *schedule, smp_turn *turn)
{
    while (schedule->next_turn < schedule->nturns) {
        *turn = schedule->turns[schedule->next_turn];
        if (turn->phase == SMP_FORWARD ||
            schedule->state[turn->microbatch] != MB_DONE) {
            return true;
        }
        schedule->next_turn++;
    }
    return false;
}

static bool
next_listed(smp_schedule *schedule, smp_phase phase, int32_t *microbatch)
{
    smp_turn turn;

    if (!listed_turn(schedule, &turn) || turn.phase != phase) {
        return false;
    }
    if (phase == SMP_BACKWARD && schedule->state[turn.microbatch] != MB_READY) {
        return false;
    }
    if (phase == SMP_FORWARD && schedule->active >= schedule->active_limit) {
        return false;
    }
    *microbatch = turn.microbatch;
    return true;
}

static bool
next_backward(const smp_schedule *schedule, int32_t *microbatch)
{
    bool forwards_left = schedule->next_forward < schedule->microbatches;

    for (int32_t mb = 0; mb < schedule->next_forward; mb++) {
        if (schedule->state[mb] == MB_FORWARD) {
            forwards_left = true;
        }
    }
    if (schedule->kind == SMP_SCHEDULE_SIMPLE && forwards_left) {
        return false;
    }
    for (int32_t mb = 0; mb < schedule->next_forward; mb++) {
        if (schedule->state[mb] == MB_READY) {
            *microbatch = mb;
            return true;
        }
    }
    return false;
}

smp_status
smp_schedule_create(smp_schedule_kind kind, int32_t microbatches, int32_t active,
                    const smp_turn *turns, int32_t nturns, smp_schedule **out)
{
    smp_schedule *schedule;

    if (microbatches < 1 || active < 1 ||
        (kind == SMP_SCHEDULE_SIMPLE && active < microbatches)) {
        return SMP_ERR_INVALID;
    }
    if (kind == SMP_SCHEDULE_LISTED && !turns_are_valid(turns, nturns, microbatches)) {
        return SMP_ERR_INVALID;
    }
    schedule = calloc(1, sizeof(*schedule) +
                             (size_t)microbatches * sizeof(schedule->state[0]));
    if (schedule == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    schedule->kind = kind;
    schedule->microbatches = microbatches;
    schedule->active_limit = active;
    if (kind == SMP_SCHEDULE_LISTED) {
        schedule->turns = malloc((size_t)nturns * sizeof(*turns));
        if (schedule->turns == NULL) {
            free(schedule);
            return SMP_ERR_NO_MEMORY;
        }
        memcpy(schedule->turns, turns, (size_t)nturns * sizeof(*turns));
        schedule->nturns = nturns;
    }
    *out = schedule;
    return SMP_OK;
}

void
smp_schedule_destroy(smp_schedule *schedule)
{
    if (schedule == NULL) {
        return;
    }
    free(schedule->turns);
    free(schedule);
}

int32_t
smp_schedule_microbatches(const smp_schedule *schedule)
{
    return schedule->microbatches;
}

bool
smp_schedule_next(smp_schedule *schedule, smp_phase phase, int32_t *microbatch)
{
    if (schedule->kind == SMP_SCHEDULE_LISTED) {
        return next_listed(schedule, phase, microbatch);
    }
    if (phase == SMP_BACKWARD) {
        return next_backward(schedule, microbatch);
    }
    *microbatch = schedule->next_forward;
    return schedule->next_forward < schedule->microbatches &&
           schedule->active < schedule->active_limit;
}

void
smp_schedule_start(smp_schedule *schedule, smp_phase phase, int32_t microbatch)
{
    if (schedule->kind == SMP_SCHEDULE_LISTED) {
        schedule->next_turn++;
    } else if (phase == SMP_FORWARD) {
        schedule->next_forward++;
    }
    if (phase == SMP_FORWARD) {
        schedule->state[microbatch] = MB_FORWARD;
        schedule->active++;
    } else {
        schedule->state[microbatch] = MB_BACKWARD;
    }
}

void
smp_schedule_ready(smp_schedule *schedule, int32_t microbatch)
{
    assert(schedule->state[microbatch] == MB_FORWARD);
    schedule->state[microbatch] = MB_READY;
}

void
smp_schedule_done(smp_schedule *schedule, int32_t microbatch)
{
    assert(schedule->state[microbatch] == MB_FORWARD ||
           schedule->state[microbatch] == MB_BACKWARD);
    schedule->state[microbatch] = MB_DONE;
    schedule->active--;
    schedule->done++;
}

bool
smp_schedule_finished(const smp_schedule *schedule)
{
    return schedule->done == schedule->microbatches;
}
