/* The leader's next word; a follower's list of runs, a place in it, and how this rank's
 * last one came to rest. */
#include "server/sequence.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_ROOM 64

typedef struct {
    smp_ready what;
    smp_wait  rest; /* the leader's, when it is known */
} run;

struct smp_sequence {
    bool              leads;
    bool              running; /* this rank's last run has not come to rest */
    smp_sequence_word word;    /* the leader's next; a follower's: no rest, no run */

    /* A follower's. */
    run             *runs; /* owned: the leader's of this step, as far as known */
    size_t           nruns;
    size_t           room;
    size_t           nrests;   /* so many of them have come to rest on the leader */
    size_t           ran;      /* by this rank: runs[0 .. ran) */
    bool             compares; /* `rest` counts, for the leader's is not known yet */
    smp_wait         rest;     /* of this rank's last run */
    bool             differs;
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
    sequence->running = false;
    memset(&sequence->word, 0, sizeof(sequence->word));
    sequence->nruns = 0;
    sequence->nrests = 0;
    sequence->ran = 0;
    sequence->compares = false;
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

void
smp_sequence_run(smp_sequence *sequence, const smp_ready *next)
{
    sequence->running = true;
    if (sequence->leads) {
        smp_sequence_word *word = &sequence->word;

        assert(!word->runs && "the last one has been told");
        word->runs = true;
        word->next.kind = next->kind;
        word->next.phase = next->phase;
        word->next.microbatch = next->microbatch;
        word->next.call = next->call;
    } else {
        assert(smp_ready_is_same(&sequence->runs[sequence->ran].what, next));
        sequence->ran++;
    }
}

/* This rank's last run beside the leader's, when both have come to rest. */
static void
compare(smp_sequence *sequence)
{
    const smp_wait *leader;

    if (!sequence->compares || sequence->nrests < sequence->ran) {
        return;
    }
    leader = &sequence->runs[sequence->ran - 1].rest;
    sequence->compares = false;
    if (!is_same_rest(leader, &sequence->rest) && !sequence->differs) {
        sequence->differs = true;
        sequence->gap = (smp_sequence_gap){.leader = *leader, .own = sequence->rest};
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
        sequence->word.rests = true;
        sequence->word.rest = *rest;
    } else {
        sequence->compares = true;
        sequence->rest = *rest;
        compare(sequence);
    }
}

bool
smp_sequence_tell(smp_sequence *sequence, smp_sequence_word *out)
{
    memcpy(out, &sequence->word, sizeof(*out)); /* it travels, with every byte */
    memset(&sequence->word, 0, sizeof(sequence->word));
    return out->rests || out->runs;
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
    sequence->runs[sequence->nruns++].what = *next;
    return SMP_OK;
}

smp_status
smp_sequence_hear(smp_sequence *sequence, const smp_sequence_word *word)
{
    if (sequence->leads || (word->rests && sequence->nrests == sequence->nruns)) {
        return SMP_ERR_MALFORMED;
    }
    if (word->rests) {
        sequence->runs[sequence->nrests++].rest = word->rest;
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
