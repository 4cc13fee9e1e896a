/* Records of steps by kind, and a place in the order under replay. */
#include "server/replay.h"

#include <stdlib.h>

#include "common/clock.h"

#define FIRST_ROOM 64

/* Kinds with an order: training and evaluation of some step functions. */
#define KINDS 8

typedef struct {
    smp_ready *runs; /* owned */
    size_t     n;
    size_t     room;
    uint64_t   step; /* 0: none */
} order;

/* The record of one kind of step. */
typedef struct {
    uint64_t kind;
    uint64_t used;     /* the last step of the kind; 0: free */
    int32_t  most;     /* microbatches of a step so far, where they are known */
    uint32_t recorded; /* good steps in a row; alike on all ranks */
    uint64_t best;     /* the fastest of them; likewise */
    int64_t  best_ns;  /* pp_rank 0's */
    order    fastest;
    order    last;
} record;

struct smp_replay {
    int       rank;
    uint32_t  steps;
    record    records[KINDS];
    record   *now;      /* of the step under way; borrowed from records */
    uint64_t  number;   /* of that step */
    int64_t   begin_ns; /* smp_clock_ns() */
    bool      is_on;    /* now->fastest is followed */
    bool      records_it;
    bool      is_short; /* the step has fewer microbatches than others of its kind */
    bool      is_long;  /* and more */
    size_t    ran;      /* so many runs of now->fastest */
    bool      told;
    int64_t   ns;   /* the most of this rank's and of those heard in the stage */
    int32_t   left; /* 1 + the lowest rank; 0: none */
    bool      has_misfit;
    bool      missing;
    smp_ready misfit;
};

smp_status
smp_replay_create(int rank, uint32_t steps, smp_replay **out)
{
    smp_replay *replay = calloc(1, sizeof(*replay));

    if (replay == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    replay->rank = rank;
    replay->steps = steps;
    *out = replay;
    return SMP_OK;
}

void
smp_replay_destroy(smp_replay *replay)
{
    if (replay == NULL) {
        return;
    }
    for (size_t i = 0; i < KINDS; i++) {
        free(replay->records[i].fastest.runs);
        free(replay->records[i].last.runs);
    }
    free(replay);
}

/* ------------------------------------------------------------------------ steps */

/* The record of this kind; else the one unused for longest, empty. */
static record *
record_of(smp_replay *replay, uint64_t kind)
{
    record *oldest = &replay->records[0];

    for (size_t i = 0; i < KINDS; i++) {
        record *r = &replay->records[i];

        if (r->used != 0 && r->kind == kind) {
            return r;
        }
        if (r->used < oldest->used) {
            oldest = r;
        }
    }
    oldest->kind = kind;
    oldest->most = 0;
    oldest->recorded = 0;
    oldest->best = 0;
    oldest->fastest.step = 0;
    return oldest;
}

static void
note_left(smp_replay *replay, int32_t left)
{
    if (left != 0 && (replay->left == 0 || left < replay->left)) {
        replay->left = left;
    }
}

void
smp_replay_begin(smp_replay *replay, uint64_t number, uint64_t kind,
                 int32_t microbatches)
{
    record *r = record_of(replay, kind);

    replay->is_short = microbatches < r->most;
    replay->is_long = r->recorded > 0 && microbatches > r->most;
    r->most = replay->is_short ? r->most : microbatches;
    r->used = number;
    replay->now = r;
    replay->number = number;
    replay->begin_ns = smp_clock_ns();
    replay->is_on =
        !replay->is_short && r->recorded >= replay->steps && r->fastest.step == r->best;
    replay->records_it = !replay->is_short && r->recorded < replay->steps;
    replay->ran = 0;
    replay->told = false;
    replay->ns = 0;
    replay->left = 0;
    replay->has_misfit = false;
    r->last.n = 0;
    r->last.step = number;
    if (!replay->is_on && !replay->records_it && !replay->is_short) {
        note_left(replay, replay->rank + 1);
    }
}

bool
smp_replay_is_on(const smp_replay *replay)
{
    return replay->is_on;
}

const smp_ready *
smp_replay_next(const smp_replay *replay)
{
    const order *its = &replay->now->fastest;

    return replay->ran < its->n ? &its->runs[replay->ran] : NULL;
}

static void
leave_for(smp_replay *replay, const smp_ready *misfit, bool missing)
{
    replay->is_on = false;
    note_left(replay, replay->rank + 1);
    if (misfit != NULL) {
        replay->has_misfit = true;
        replay->missing = missing;
        replay->misfit = *misfit;
    }
}

void
smp_replay_leave(smp_replay *replay)
{
    if (replay->is_on) {
        leave_for(replay, smp_replay_next(replay), true);
    }
}

static bool
is_message(const smp_ready *ready)
{
    return ready->kind == SMP_READY_RESPONSE || ready->kind == SMP_READY_REQUEST;
}

/* Whether the ready run comes later in the order, and does not tell that the next one
 * will never come. */
static bool
fits_later(const smp_replay *replay, const smp_ready *ready)
{
    const order     *its = &replay->now->fastest;
    const smp_ready *next = &its->runs[replay->ran];

    for (size_t i = replay->ran + 1; i < its->n; i++) {
        if (smp_ready_is_same(&its->runs[i], ready)) {
            return !is_message(next) || !is_message(ready) ||
                   next->source != its->runs[i].source ||
                   its->runs[i].arrival < next->arrival;
        }
    }
    return false;
}

ptrdiff_t
smp_replay_find(smp_replay *replay, const smp_ready *ready, size_t n)
{
    const smp_ready *next = smp_replay_next(replay);
    const ptrdiff_t  found = next == NULL ? -1 : smp_ready_find(next, ready, n);

    for (size_t i = 0; found < 0 && i < n; i++) {
        if (next == NULL || !fits_later(replay, &ready[i])) {
            leave_for(replay, &ready[i], false);
            break;
        }
    }
    return found;
}

smp_status
smp_replay_run(smp_replay *replay, const smp_ready *next)
{
    order *its = &replay->now->last;

    if (replay->is_on) {
        replay->ran++;
    }
    if (!replay->records_it) {
        return SMP_OK;
    }
    if (its->n == its->room) {
        const size_t room = its->room == 0 ? FIRST_ROOM : 2 * its->room;
        smp_ready   *more = realloc(its->runs, room * sizeof(*more));

        if (more == NULL) {
            return SMP_ERR_NO_MEMORY;
        }
        its->runs = more;
        its->room = room;
    }
    its->runs[its->n++] = *next;
    return SMP_OK;
}

/* ----------------------------------------------------------- the end of a step */

smp_replay_word
smp_replay_tell(smp_replay *replay)
{
    if (!replay->told) {
        const int64_t ns = smp_clock_ns() - replay->begin_ns;

        replay->told = true;
        replay->ns = ns > replay->ns ? ns : replay->ns;
        if (replay->is_on && smp_replay_next(replay) != NULL) {
            smp_replay_leave(replay); /* the step had fewer runs */
        }
    }
    return (smp_replay_word){.ns = replay->ns,
                             .best = replay->now->best,
                             .recorded = replay->now->recorded,
                             .left = replay->left};
}

void
smp_replay_hear(smp_replay *replay, const smp_replay_word *word, bool in_vote)
{
    note_left(replay, word->left);
    if (word->best != replay->now->best || word->recorded != replay->now->recorded) {
        note_left(replay, replay->rank + 1); /* an earlier end was good for one alone */
    }
    if (!in_vote && word->ns > replay->ns) {
        replay->ns = word->ns;
    }
}

smp_replay_verdict
smp_replay_judge(const smp_replay *replay)
{
    const record      *r = replay->now;
    smp_replay_verdict verdict = {.best = r->best, .recorded = r->recorded};

    if (replay->is_short) {
        return verdict;
    }
    if (replay->left != 0) {
        return (smp_replay_verdict){.left = replay->left};
    }
    if (replay->records_it) {
        verdict.recorded = replay->is_long ? 1 : r->recorded + 1;
        if (r->best == 0 || replay->is_long || replay->ns < r->best_ns) {
            verdict.best = replay->number;
        }
    }
    return verdict;
}

void
smp_replay_end(smp_replay *replay, const smp_replay_verdict *verdict)
{
    record *r = replay->now;

    r->recorded = verdict->recorded;
    r->best = verdict->best;
    if (replay->records_it && verdict->best == replay->number) {
        const order fastest = r->last;

        r->last = r->fastest;
        r->fastest = fastest;
        r->best_ns = replay->ns;
    }
    replay->has_misfit = replay->has_misfit && verdict->left == replay->rank + 1;
    replay->is_on = false;
}

bool
smp_replay_take_misfit(smp_replay *replay, smp_ready *run, bool *missing)
{
    const bool has = replay->has_misfit;

    *run = replay->misfit;
    *missing = replay->missing;
    replay->has_misfit = false;
    return has;
}
