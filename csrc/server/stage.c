/* A line-up or a sequence, ballots, and the messages to keep them alike on all ranks.
 */
#include "server/stage.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "server/envelope.h"

struct smp_stage {
    smp_comm     *comm; /* borrowed */
    smp_grid      grid;
    uint32_t      step;
    smp_lineup   *lineup;    /* owned; NULL: in a sequence */
    smp_sequence *sequence;  /* owned; NULL: each rank runs in an order of its own */
    smp_ballots  *ballots;   /* owned */
    uint64_t      issued;    /* collectives of the step */
    uint64_t      completed; /* ... of them */
    bool          in_order;  /* this rank has done its part, and said so */
    bool          one_failed;
    uint64_t issued_by[]; /* by pipeline, at the rank's end; else SMP_LINEUP_GOES_ON */
};

smp_status
smp_stage_create(smp_comm *comm, const smp_grid *grid, bool in_sequence,
                 smp_stage **out)
{
    smp_stage *stage = calloc(1, sizeof(*stage) + (size_t)grid->pipelines *
                                                      sizeof(stage->issued_by[0]));
    smp_status status;

    if (stage == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    stage->comm = comm;
    stage->grid = *grid;
    status = in_sequence ? smp_sequence_create(grid->pipeline == 0, &stage->sequence)
                         : smp_lineup_create(grid->pipeline, &stage->lineup);
    if (status == SMP_OK) {
        status = smp_ballots_create(grid->pipelines, &stage->ballots);
    }
    if (status != SMP_OK) {
        smp_stage_destroy(stage);
        return status;
    }
    smp_stage_begin(stage, 0); /* no rank has ended */
    *out = stage;
    return SMP_OK;
}

void
smp_stage_destroy(smp_stage *stage)
{
    if (stage != NULL) {
        smp_sequence_destroy(stage->sequence);
        smp_lineup_destroy(stage->lineup);
        smp_ballots_destroy(stage->ballots);
        free(stage);
    }
}

void
smp_stage_begin(smp_stage *stage, uint32_t step)
{
    stage->step = step;
    if (stage->sequence != NULL) {
        smp_sequence_begin(stage->sequence);
    } else {
        smp_lineup_begin(stage->lineup);
    }
    smp_ballots_begin(stage->ballots);
    for (int p = 0; p < stage->grid.pipelines; p++) {
        stage->issued_by[p] = SMP_LINEUP_GOES_ON;
    }
    stage->issued = 0;
    stage->completed = 0;
    stage->in_order = false;
    stage->one_failed = false;
}

const smp_lineup *
smp_stage_lineup(const smp_stage *stage)
{
    return stage->lineup;
}

smp_sequence *
smp_stage_sequence(smp_stage *stage)
{
    return stage->sequence;
}

smp_ballots *
smp_stage_ballots(smp_stage *stage)
{
    return stage->ballots;
}

/* A lost rank shows in server/control.c. */
static void
send_to_others(smp_stage *stage, const void *bytes, size_t nbytes)
{
    for (int p = 0; p < stage->grid.pipelines; p++) {
        if (p != stage->grid.pipeline) {
            (void)smp_comm_send(stage->comm, smp_grid_in_stage(&stage->grid, p), bytes,
                                nbytes, NULL, 0);
        }
    }
}

smp_status
smp_stage_cast(smp_stage *stage, const smp_ballot_list *list)
{
    struct {
        smp_envelope    envelope;
        smp_ballot_list list;
    } message = {{.kind = SMP_MSG_BALLOT, .step = stage->step}, *list};

    send_to_others(stage, &message,
                   offsetof(smp_ballot_list, words) + sizeof(message.envelope) +
                       list->n * sizeof(list->words[0]));
    return smp_ballots_cast(stage->ballots, list);
}

smp_status
smp_stage_issue(smp_stage *stage, const smp_key *key)
{
    struct {
        smp_envelope envelope;
        smp_key      key;
    } message = {{.kind = SMP_MSG_KEY, .step = stage->step}, *key};

    stage->issued++;
    if (stage->lineup == NULL) {
        return SMP_OK;
    }
    if (smp_lineup_issue(stage->lineup, key) != SMP_OK) {
        return SMP_ERR_NO_MEMORY;
    }
    if (stage->grid.pipeline == 0) {
        send_to_others(stage, &message, sizeof(message));
    }
    return SMP_OK;
}

void
smp_stage_complete(smp_stage *stage)
{
    stage->completed++;
}

uint64_t
smp_stage_issued(const smp_stage *stage)
{
    return stage->issued;
}

uint64_t
smp_stage_completed(const smp_stage *stage)
{
    return stage->completed;
}

void
smp_stage_tell_runs(smp_stage *stage)
{
    struct {
        smp_envelope      envelope;
        smp_sequence_word word;
    } message = {.envelope = {.kind = SMP_MSG_RUNS, .step = stage->step}};

    if (stage->sequence != NULL && smp_sequence_tell(stage->sequence, &message.word)) {
        send_to_others(stage, &message, sizeof(message));
    }
}

void
smp_stage_end(smp_stage *stage, bool failed, const smp_replay_word *word)
{
    struct {
        smp_envelope    envelope;
        smp_replay_word word;
    } message = {.envelope = {.kind = SMP_MSG_ISSUED,
                              .flags = failed ? SMP_FLAG_FAILED : 0,
                              .step = stage->step,
                              .call = stage->issued}};

    if (smp_stage_has_ended(stage, stage->grid.pipeline)) {
        return;
    }
    if (!failed) {
        smp_stage_tell_runs(stage);
    }
    stage->in_order = !failed;
    stage->issued_by[stage->grid.pipeline] = stage->issued;
    if (word != NULL) {
        message.word = *word;
    }
    send_to_others(stage, &message,
                   word == NULL ? sizeof(message.envelope) : sizeof(message));
}

/* tp_rank 0 has issued a collective. */
static smp_status
hear_key(smp_stage *stage, const smp_message *message)
{
    smp_key key;

    if (message->nbytes != sizeof(smp_envelope) + sizeof(key) ||
        stage->grid.pipeline == 0 || stage->lineup == NULL) {
        return SMP_ERR_MALFORMED;
    }
    memcpy(&key, message->bytes + sizeof(smp_envelope), sizeof(key));
    key.path[sizeof(key.path) - 1] = '\0';
    return smp_lineup_hear(stage->lineup, &key);
}

/* The leader of the sequence has run something. */
static smp_status
hear_runs(smp_stage *stage, const smp_message *message)
{
    smp_sequence_word word;

    if (message->nbytes != sizeof(smp_envelope) + sizeof(word) ||
        stage->sequence == NULL) {
        return SMP_ERR_MALFORMED;
    }
    memcpy(&word, message->bytes + sizeof(smp_envelope), sizeof(word));
    return smp_sequence_hear(stage->sequence, &word);
}

static smp_status
hear_ballot(smp_stage *stage, const smp_message *message)
{
    const size_t    head = sizeof(smp_envelope) + offsetof(smp_ballot_list, words);
    smp_ballot_list list = {.n = 0};

    if (message->nbytes < head ||
        message->nbytes > sizeof(smp_envelope) + sizeof(list)) {
        return SMP_ERR_MALFORMED;
    }
    memcpy(&list, message->bytes + sizeof(smp_envelope),
           message->nbytes - sizeof(smp_envelope));
    if (message->nbytes != head + list.n * sizeof(list.words[0])) {
        return SMP_ERR_MALFORMED;
    }
    return smp_ballots_cast(stage->ballots, &list);
}

/* One of the others makes no more collectives. */
static smp_status
hear_issued(smp_stage *stage, const smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);
    const int           pipeline = smp_grid_pipeline_of(&stage->grid, message->source);

    if (pipeline == stage->grid.pipeline) {
        return SMP_ERR_MALFORMED;
    }
    stage->one_failed = stage->one_failed || (e->flags & SMP_FLAG_FAILED) != 0;
    stage->issued_by[pipeline] = e->call;
    return SMP_OK;
}

smp_status
smp_stage_hear(smp_stage *stage, const smp_message *message)
{
    switch ((smp_msg_kind)smp_message_envelope(message)->kind) {
    case SMP_MSG_KEY:
        return hear_key(stage, message);
    case SMP_MSG_RUNS:
        return hear_runs(stage, message);
    case SMP_MSG_BALLOT:
        return hear_ballot(stage, message);
    case SMP_MSG_ISSUED:
        return hear_issued(stage, message);
    default:
        return SMP_ERR_MALFORMED;
    }
}

bool
smp_stage_find_gap(const smp_stage *stage, const smp_key *wanted, smp_lineup_gap *gap)
{
    return stage->lineup != NULL &&
           smp_lineup_find_gap(stage->lineup, stage->issued_by, stage->grid.pipelines,
                               wanted, gap);
}

bool
smp_stage_has_ended(const smp_stage *stage, int pipeline)
{
    return stage->issued_by[pipeline] != SMP_LINEUP_GOES_ON;
}

bool
smp_stage_is_over(const smp_stage *stage)
{
    bool is_over = true;

    for (int p = 0; p < stage->grid.pipelines; p++) {
        is_over = is_over && smp_stage_has_ended(stage, p);
    }
    return is_over;
}

void
smp_stage_range(const smp_stage *stage, uint64_t *least, uint64_t *most)
{
    *least = UINT64_MAX;
    *most = 0;
    for (int p = 0; p < stage->grid.pipelines; p++) {
        const uint64_t issued = stage->issued_by[p];

        if (issued != SMP_LINEUP_GOES_ON) {
            *least = issued < *least ? issued : *least;
            *most = issued > *most ? issued : *most;
        }
    }
}

bool
smp_stage_one_failed(const smp_stage *stage)
{
    return stage->one_failed;
}

bool
smp_stage_ended_in_order(const smp_stage *stage)
{
    return stage->in_order;
}
