/* A list of runs, a place in it, and how this rank's last one came to rest. */
#include "server/sequence.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_ROOM 64

typedef struct {
    smp_ready what;
    smp_wait  rest;
    bool      rested; /* on the leader: `rest` counts */
} run;

struct smp_sequence {
    bool     leads;
    run     *runs; /* owned: the leader's runs of this step, as far as known */
    size_t   nruns;
    size_t   room;
    size_t   ran;     /* by this rank: runs[0 .. ran) */
    bool     running; /* the last of them has not come to rest */
    smp_wait rest;    /* of this rank's last one, where the leader's is not known yet */
    bool     compares; /* ... `rest` counts */
    size_t   told;     /* by the leader: so many runs, */
    size_t   rests_told;
    bool     differs;
    smp_sequence_gap gap;
};

static bool
is_same_rest(const smp_wait *a, const smp_wait *b)
{
    if (a->kind != b->kind || a->wanted != b->wanted ||
        a->work.microbatch != b->work.microbatch || a->work.entry != b->work.entry ||
        a->work.phase != b->work.phase) {
        return false;
    }
    return a->kind < SMP_WAIT_ISSUE || smp_key_equal(&a->key, &b->key);
}

smp_status
smp_sequence_create(bool leads, smp_sequence **out)
{
    smp_sequence *sequence = calloc(1, sizeof(*sequence));

    if (sequence == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    sequence->leads = leads;
    *out = sequence;
    return SMP_OK;
}

void
smp_sequence_destroy(smp_sequence *sequence)
{
    if (sequence != NULL) {
        free(sequence->runs);
        free(sequence);
    }
}

void
smp_sequence_begin(smp_sequence *sequence)
{
    sequence->nruns = 0;
    sequence->ran = 0;
    sequence->running = false;
    sequence->compares = false;
    sequence->told = 0;
    sequence->rests_told = 0;
    sequence->differs = false;
}

bool
smp_sequence_leads(const smp_sequence *sequence)
{
    return sequence->leads;
}

ptrdiff_t
smp_sequence_find(const smp_sequence *sequence, const smp_ready *ready, size_t n)
{
    return sequence->ran == sequence->nruns
               ? -1
               : smp_ready_find(&sequence->runs[sequence->ran].what, ready, n);
}

static smp_status
append(smp_sequence *sequence, const smp_ready *next)
{
    if (sequence->nruns == sequence->room) {
        const size_t room = sequence->room == 0 ? FIRST_ROOM : 2 * sequence->room;
        run         *more = realloc(sequence->runs, room * sizeof(*more));

        if (more == NULL) {
            return SMP_ERR_NO_MEMORY;
        }
        sequence->runs = more;
        sequence->room = room;
    }
    sequence->runs[sequence->nruns].what = *next;
    sequence->runs[sequence->nruns].rested = false;
    sequence->nruns++;
    return SMP_OK;
}

smp_status
smp_sequence_run(smp_sequence *sequence, const smp_ready *next)
{
    if (sequence->leads) {
        const smp_status status = append(sequence, next);

        if (status != SMP_OK) {
            return status;
        }
    }
    assert(smp_ready_is_same(&sequence->runs[sequence->ran].what, next));
    sequence->ran++;
    sequence->running = true;
    return SMP_OK;
}

/* This rank's last run beside the leader's, when both have come to rest. */
static void
compare(smp_sequence *sequence)
{
    const run *last;

    if (!sequence->compares || !sequence->runs[sequence->ran - 1].rested) {
        return;
    }
    last = &sequence->runs[sequence->ran - 1];
    sequence->compares = false;
    if (!is_same_rest(&last->rest, &sequence->rest) && !sequence->differs) {
        sequence->differs = true;
        sequence->gap = (smp_sequence_gap){.leader = last->rest, .own = sequence->rest};
    }
}

void
smp_sequence_rest(smp_sequence *sequence, const smp_wait *rest)
{
    if (!sequence->running) {
        return;
    }
    sequence->running = false;
    if (sequence->leads) {
        run *last = &sequence->runs[sequence->ran - 1];

        last->rest = *rest;
        last->rested = true;
        return;
    }
    sequence->rest = *rest;
    sequence->compares = true;
    compare(sequence);
}

bool
smp_sequence_tell(smp_sequence *sequence, smp_sequence_word *out)
{
    const run *last;

    if (!sequence->leads) {
        return false;
    }
    memset(out, 0, sizeof(*out)); /* it travels: no byte is left over */
    if (sequence->rests_told < sequence->told &&
        sequence->runs[sequence->rests_told].rested) {
        out->rests = true;
        out->rest = sequence->runs[sequence->rests_told].rest;
        sequence->rests_told++;
    }
    if (sequence->told < sequence->nruns) {
        last = &sequence->runs[sequence->told];
        out->runs = true;
        out->next.kind = last->what.kind;
        out->next.phase = last->what.phase;
        out->next.microbatch = last->what.microbatch;
        out->next.call = last->what.call;
        sequence->told++;
    }
    return out->rests || out->runs;
}

smp_status
smp_sequence_hear(smp_sequence *sequence, const smp_sequence_word *word)
{
    if (sequence->leads || (word->rests && sequence->rests_told == sequence->nruns)) {
        return SMP_ERR_MALFORMED;
    }
    if (word->rests) {
        run *its = &sequence->runs[sequence->rests_told++];

        its->rest = word->rest;
        its->rested = true;
        compare(sequence);
    }
    return word->runs ? append(sequence, &word->next) : SMP_OK;
}

bool
smp_sequence_differs(const smp_sequence *sequence, smp_sequence_gap *gap)
{
    if (sequence->differs) {
        *gap = sequence->gap;
    }
    return sequence->differs;
}
