/* Messages without a task. */
#include "server/control.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "server/commit.h"
#include "server/detection.h"
#include "server/envelope.h"
#include "server/mismatch.h"

#define AWAITED_BYTES 512

struct smp_control {
    smp_control_parts parts;
    smp_grid          grid;
    smp_control_ops   ops;
    void             *ctx;       /* borrowed */
    smp_turns        *turns;     /* borrowed; NULL: no gates */
    smp_commit       *commit;    /* owned */
    smp_detection    *detection; /* owned */

    uint32_t   step;
    bool       failed;
    smp_status failure; /* why, when this rank knows */
    char       mismatch[SMP_MISMATCH_BYTES];
    char       awaited[AWAITED_BYTES]; /* when a rank was lost */
    int        left;                   /* a departed rank; -1: none */

    uint64_t about_still; /* probes and answers sent */
    uint64_t received;    /* messages but those */
    uint64_t asked;       /* the round of the probe to answer; 0: none */
    bool     leaves;      /* the ranks have been told to leave the replay */
};

smp_status
smp_control_create(const smp_control_parts *parts, const smp_grid *grid,
                   const smp_control_ops *ops, void *ctx, smp_control **out)
{
    smp_control *control = calloc(1, sizeof(*control));
    smp_status   status;

    if (control == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    control->parts = *parts;
    control->grid = *grid;
    control->ops = *ops;
    control->ctx = ctx;
    control->left = -1;
    status = smp_commit_create(parts->comm, grid, &control->commit);
    if (status == SMP_OK) {
        status = smp_detection_create(grid, smp_stage_sequence(parts->stage) != NULL,
                                      &control->detection);
    }
    if (status != SMP_OK) {
        smp_control_destroy(control);
        return status;
    }
    *out = control;
    return SMP_OK;
}

void
smp_control_destroy(smp_control *control)
{
    if (control != NULL) {
        smp_detection_destroy(control->detection);
        smp_commit_destroy(control->commit);
        free(control);
    }
}

/* ------------------------------------------------------------------ the failure */

void
smp_control_fail(smp_control *control, smp_status why)
{
    control->failed = true;
    if (control->failure == SMP_OK) {
        if (why == SMP_ERR_PEER_LOST) {
            smp_board_write_wait(control->parts.board,
                                 smp_comm_lost(control->parts.comm), control->awaited,
                                 sizeof(control->awaited));
        }
        control->failure = why;
    }
}

bool
smp_control_failed(const smp_control *control)
{
    return control->failed;
}

void
smp_control_check(smp_control *control, const smp_key *wanted)
{
    smp_stage       *stage = control->parts.stage;
    smp_sequence    *sequence = smp_stage_sequence(stage);
    smp_lineup_gap   gap;
    smp_sequence_gap rests;

    if (control->failed || smp_stage_one_failed(stage)) {
        return;
    }
    if (sequence != NULL && smp_sequence_differs(sequence, &rests)) {
        smp_mismatch_write_rests(&control->grid, control->parts.names,
                                 control->parts.board, &rests, control->mismatch,
                                 sizeof(control->mismatch));
        smp_control_fail(control, SMP_ERR_MISMATCH);
    } else if (smp_stage_find_gap(stage, wanted, &gap)) {
        smp_mismatch_write_gap(&control->grid, control->parts.names, &gap,
                               control->mismatch, sizeof(control->mismatch));
        smp_control_fail(control, SMP_ERR_MISMATCH);
    }
}

/* ------------------------------------------------------------- the end of a step */

/* Tells the stage, once, of the end of this rank's collectives in this step. */
static void
end_collectives(smp_control *control)
{
    smp_replay *replay = control->parts.replay;

    if (replay == NULL || control->failed) { /* perhaps before its first step */
        smp_stage_end(control->parts.stage, control->failed, NULL);
    } else {
        const smp_replay_word word = smp_replay_tell(replay);

        smp_stage_end(control->parts.stage, control->failed, &word);
    }
    smp_control_check(control, NULL);
}

/* All is well here when all ranks of the stage are through with the step, too. */
static bool
stage_is_well(const smp_control *control)
{
    return !smp_stage_one_failed(control->parts.stage) &&
           smp_stage_is_over(control->parts.stage);
}

static void
vote(smp_control *control)
{
    smp_replay *replay = control->parts.replay;

    if (control->failed || !stage_is_well(control)) {
        return;
    }
    if (replay == NULL) {
        smp_commit_vote(control->commit, NULL);
    } else {
        const smp_replay_word word = smp_replay_tell(replay);

        smp_commit_vote(control->commit, &word);
    }
}

/* -------------------------------------------------------------- static mode */

/* A SETTLED or ISSUED came. */
static void
hear_word(smp_control *control, const smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);
    smp_replay_word     word;

    if (control->parts.replay == NULL || control->failed ||
        message->nbytes != sizeof(*e) + sizeof(word)) {
        return;
    }
    memcpy(&word, message->bytes + sizeof(*e), sizeof(word));
    smp_replay_hear(control->parts.replay, &word, e->kind == SMP_MSG_SETTLED);
}

static void
warn_of_misfit(smp_control *control)
{
    char      text[SMP_MISMATCH_BYTES];
    smp_ready run;
    bool      missing;

    if (!smp_replay_take_misfit(control->parts.replay, &run, &missing)) {
        return;
    }
    smp_board_write_work(control->parts.board,
                         &(smp_work){.microbatch = run.microbatch,
                                     .entry = run.entry,
                                     .phase = (int32_t)run.phase},
                         text, sizeof(text));
    smp_warn(
        "static mode: a step on %s %s: %s.  It was finished in an order of its own, "
        "and recording begins anew.",
        control->parts.names[smp_grid_rank(&control->grid, control->grid.pipeline,
                                           control->grid.pp_rank)],
        missing ? "lacks work of the recorded one"
                : "has work that is not in the recorded one, or is there later",
        text);
}

static void
end_replay(smp_control *control, const smp_replay_verdict *verdict)
{
    smp_replay_end(control->parts.replay, verdict);
    warn_of_misfit(control);
}

smp_replay_verdict
smp_control_verdict(const smp_control *control)
{
    return control->parts.replay == NULL ? (smp_replay_verdict){0}
                                         : smp_replay_judge(control->parts.replay);
}

void
smp_control_end_replay(smp_control *control)
{
    const smp_replay_verdict verdict = smp_control_verdict(control);

    if (control->parts.replay != NULL) {
        end_replay(control, &verdict);
    }
}

/* A STEP_END came. */
static void
hear_verdict(smp_control *control, const smp_envelope *e)
{
    const smp_replay_verdict verdict = {
        .best = e->about, .recorded = (uint32_t)e->seed, .left = (int32_t)e->number};

    if (control->parts.replay != NULL && e->kind == SMP_MSG_STEP_END &&
        !control->failed && !smp_commit_has_end(control->commit)) {
        end_replay(control, &verdict);
    }
}

/* ---------------------------------------------------------------- the question */

/* pp_rank 0 hears whether its earlier messages have been acted on here without a
 * failure, in the same step.  Takes the message. */
static void
settle(smp_control *control, smp_message *message)
{
    if (control->failed) {
        smp_message_free(message);
    } else if (!smp_commit_hear_question(control->commit, message)) {
        control->ops.note(control->ctx, message);
    } else {
        smp_message_free(message);
        end_collectives(control);
        vote(control);
    }
}

/* pp_rank 0 returns when the others have acted on all its messages: also those without
 * an answer (the end of a microbatch, a release) may fail.  Their own messages to a
 * third rank do not count. */
bool
smp_control_is_settled(smp_control *control)
{
    if (!smp_commit_has_asked(control->commit)) {
        const smp_status status = smp_commit_ask(control->commit);

        if (status != SMP_OK) {
            smp_control_fail(control, status);
        } else {
            end_collectives(control);
        }
    }
    return smp_commit_is_unanimous(control->commit) && stage_is_well(control);
}

bool
smp_control_has_end(const smp_control *control)
{
    return smp_commit_has_end(control->commit);
}

bool
smp_control_has_voted(const smp_control *control)
{
    return smp_commit_has_voted(control->commit);
}

/* ------------------------------------------------------------------ arrivals */

/* Another rank of the stage tells of collectives or runs. */
static void
hear_stage(smp_control *control, const smp_message *message)
{
    const uint8_t    kind = smp_message_envelope(message)->kind;
    const smp_status status = smp_stage_hear(control->parts.stage, message);

    if (status != SMP_OK) {
        smp_control_fail(control, status);
    } else if (kind == SMP_MSG_ISSUED) {
        hear_word(control, message);
        smp_control_check(control, control->ops.wanted(control->ctx));
        vote(control);
    } else {
        smp_control_check(control, NULL);
    }
}

/* Whether this rank looks for deadlocks. */
static bool
detects(const smp_control *control)
{
    return control->grid.pp_rank == 0 && control->grid.pipeline == 0 &&
           smp_comm_size(control->parts.comm) > 1;
}

/* A rank answered a probe. */
static void
hear_still(smp_control *control, const smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);
    smp_still           still;

    if (detects(control) && message->source > 0 &&
        message->nbytes == sizeof(*e) + sizeof(still)) {
        memcpy(&still, message->bytes + sizeof(*e), sizeof(still));
        smp_detection_hear(control->detection, message->source, e->call, &still);
    }
}

/* All ranks stand still: this one waits for no run of a replay, and for no ballot. */
static void
leave(smp_control *control)
{
    if (control->parts.replay != NULL) {
        smp_replay_leave(control->parts.replay);
    }
    smp_ballots_leave(smp_stage_ballots(control->parts.stage));
}

static void
keep(smp_control *control, smp_message *message)
{
    const smp_status status = smp_backlog_keep(control->parts.backlog, message);

    if (status != SMP_OK) {
        smp_control_fail(control, status);
    }
}

/* Acts at once on a message without a task; keeps the others. */
static void
sort_in(smp_control *control, smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);

    if (e == NULL) {
        smp_message_free(message);
        smp_control_fail(control, SMP_ERR_MALFORMED);
        return;
    }
    if (e->step < control->step) { /* left over from a failed step */
        smp_message_free(message);
        return;
    }
    if (e->step > control->step) { /* this rank is behind: smp_control_sort_early() */
        keep(control, message);
        return;
    }
    switch ((smp_msg_kind)e->kind) {
    case SMP_MSG_RELEASE:
    case SMP_MSG_CLOSED:
    case SMP_MSG_FORWARD_DONE:
        if (e->kind != SMP_MSG_RELEASE && control->turns != NULL) {
            smp_turns_forward_done(control->turns, e->microbatch);
        }
        control->ops.note(control->ctx, message);
        return;
    case SMP_MSG_STEP_END:
    case SMP_MSG_ABORT:
        hear_verdict(control, e);
        if (smp_commit_hear_end(control->commit, message)) {
            control->failed = true; /* and the message says why */
        }
        return;
    case SMP_MSG_FORWARD:
    case SMP_MSG_BACKWARD:
    case SMP_MSG_RESPONSE:
        keep(control, message);
        return;
    case SMP_MSG_SETTLE:
        settle(control, message);
        return;
    case SMP_MSG_SETTLED:
        hear_word(control, message);
        smp_commit_hear_vote(control->commit);
        break;
    case SMP_MSG_KEY:
    case SMP_MSG_ISSUED:
    case SMP_MSG_RUNS:
    case SMP_MSG_BALLOT:
        hear_stage(control, message);
        break;
    case SMP_MSG_PROBE:
        control->asked = e->call;
        break;
    case SMP_MSG_STILL:
        hear_still(control, message);
        break;
    case SMP_MSG_LEAVE:
        if (!control->failed) {
            leave(control);
        }
        break;
    }
    smp_message_free(message);
}

void
smp_control_sort_early(smp_control *control)
{
    smp_message *message = smp_backlog_take_all(control->parts.backlog);

    while (message != NULL) {
        smp_message *next = message->next;

        message->next = NULL;
        sort_in(control, message);
        message = next;
    }
}

static bool
is_about_still(const smp_envelope *e)
{
    return e != NULL && (e->kind == SMP_MSG_PROBE || e->kind == SMP_MSG_STILL);
}

static void
count_in(smp_control *control, smp_message *message)
{
    control->received += !is_about_still(smp_message_envelope(message));
    sort_in(control, message);
}

/* Whether this step needs a rank of the comm: pp_rank 0 needs all of its pipeline, the
 * others need pp_rank 0; and all need those of their stage until they have ended. */
static bool
needs(const smp_control *control, int rank)
{
    const smp_grid *grid = &control->grid;
    const int       pipeline = smp_grid_pipeline_of(grid, rank);
    const int       pp_rank = smp_grid_pp_rank_of(grid, rank);

    if (pipeline == grid->pipeline) {
        return pp_rank != grid->pp_rank && (grid->pp_rank == 0 || pp_rank == 0);
    }
    return pp_rank == grid->pp_rank &&
           !smp_stage_has_ended(control->parts.stage, pipeline);
}

/* A rank of this step that has left the job; -1: none. */
static int
who_left(const smp_control *control)
{
    for (int rank = 0; rank < smp_comm_size(control->parts.comm); rank++) {
        if (needs(control, rank) && smp_comm_left(control->parts.comm, rank)) {
            return rank;
        }
    }
    return -1;
}

/* Reads the arrived messages; waits up to timeout_ns for the first one.  False: none
 * came in that time. */
static bool
read_comm(smp_control *control, int64_t timeout_ns)
{
    bool any = false;

    for (;;) {
        smp_message *message;
        smp_status status = smp_comm_receive(control->parts.comm, timeout_ns, &message);

        if (status == SMP_OK) {
            any = true;
            count_in(control, message);
            if (smp_control_has_end(control)) {
                return true; /* its sender may leave: no failure of this step */
            }
            timeout_ns = 0;
            continue;
        }
        if (status == SMP_ERR_TIMED_OUT ||
            (status == SMP_ERR_CLOSED && who_left(control) >= 0)) {
            return any;
        }
        if (status != SMP_ERR_INTERRUPTED) {
            smp_control_fail(control, status);
        }
        return true;
    }
}

void
smp_control_read(smp_control *control)
{
    (void)read_comm(control, 0);
}

void
smp_control_hear(smp_control *control, int64_t timeout_ns)
{
    const int64_t deadline = smp_clock_deadline(timeout_ns);

    while (!control->failed && !smp_control_has_end(control)) {
        const int64_t left = deadline - smp_clock_ns();
        smp_message  *message;
        smp_status    status =
            smp_comm_receive(control->parts.comm, left > 0 ? left : 0, &message);

        if (status == SMP_OK) {
            count_in(control, message);
        } else if (status != SMP_ERR_INTERRUPTED) { /* woken: messages may be there */
            return;
        }
    }
}

/* ------------------------------------------------------- when there is nothing */

/* The answer of this idle rank to a probe. */
static smp_still
own_still(smp_control *control)
{
    const smp_stage *stage = control->parts.stage;
    smp_still        still = {
               .sent = smp_comm_sent(control->parts.comm) - control->about_still,
               .received = control->received,
               .issued = smp_stage_issued(stage),
               /* A replay may hold back a worker that could go on. */
               .over = smp_stage_completed(stage) + control->ops.over(control->ctx)};

    smp_board_read(control->parts.board, &still.standing);
    return still;
}

static void
answer_probe(smp_control *control)
{
    struct {
        smp_envelope envelope;
        smp_still    still;
    } message = {.envelope = {.kind = SMP_MSG_STILL,
                              .step = control->step,
                              .call = control->asked},
                 .still = own_still(control)};

    control->asked = 0;
    if (smp_comm_send(control->parts.comm, 0, &message, sizeof(message), NULL, 0) ==
        SMP_OK) {
        control->about_still++;
    }
}

static void
ask_all(smp_control *control)
{
    const smp_envelope probe = {.kind = SMP_MSG_PROBE,
                                .step = control->step,
                                .call = smp_detection_ask(control->detection)};

    for (int rank = 1; rank < smp_comm_size(control->parts.comm); rank++) {
        if (smp_comm_send(control->parts.comm, rank, &probe, sizeof(probe), NULL, 0) ==
            SMP_OK) {
            control->about_still++;
        }
    }
}

/* Whether a task of any rank waits in a ballot, by the last answers. */
static bool
some_cast(const smp_control *control)
{
    const smp_still *of = smp_detection_answers(control->detection);

    for (int rank = 0; rank < smp_comm_size(control->parts.comm); rank++) {
        if (of[rank].standing.nwaits > of[rank].standing.nshown) {
            return true; /* perhaps */
        }
        for (int32_t i = 0; i < of[rank].standing.nshown; i++) {
            if (of[rank].standing.waits[i].kind == SMP_WAIT_BALLOT) {
                return true;
            }
        }
    }
    return false;
}

/* The ranks may wait for runs of a replay, or for ballots, that will never come: they
 * leave these, once in a step.  False: it is something else. */
static bool
all_leave(smp_control *control)
{
    const smp_envelope word = {.kind = SMP_MSG_LEAVE, .step = control->step};

    /* Perhaps this rank alone follows none. */
    if ((control->parts.replay == NULL && !some_cast(control)) || control->leaves) {
        return false;
    }
    control->leaves = true;
    for (int rank = 1; rank < smp_comm_size(control->parts.comm); rank++) {
        (void)smp_comm_send(control->parts.comm, rank, &word, sizeof(word), NULL, 0);
    }
    leave(control);
    smp_detection_begin(control->detection);
    return true;
}

/* All have answered, and rank 0 has nothing to run either.  True: the step has failed,
 * or its replay or ballots.
 */
static bool
is_deadlocked(smp_control *control)
{
    const smp_still own = own_still(control);

    switch (smp_detection_judge(control->detection, &own)) {
    case SMP_DETECTION_DEADLOCK:
        if (all_leave(control)) {
            return true;
        }
        smp_control_fail(control, smp_mismatch_write_calls(
                                      &control->grid, control->parts.names,
                                      smp_detection_answers(control->detection),
                                      control->mismatch, sizeof(control->mismatch))
                                      ? SMP_ERR_MISMATCH
                                      : SMP_ERR_DEADLOCK);
        return true;
    case SMP_DETECTION_AGAIN:
        ask_all(control);
        return false;
    default:
        return false;
    }
}

void
smp_control_idle(smp_control *control)
{
    int left;

    smp_board_idle(control->parts.board);
    smp_stage_tell_runs(control->parts.stage);
    if (control->asked != 0) {
        answer_probe(control);
    }
    if (detects(control) && smp_detection_is_answered(control->detection) &&
        is_deadlocked(control)) {
        return;
    }
    left = who_left(control);
    if (read_comm(control, SMP_DETECTION_IDLE_NS)) {
        return;
    }
    if (left >= 0) { /* and its earlier messages have been read */
        control->left = left;
        smp_control_fail(control, SMP_ERR_UNREACHABLE);
    } else if (detects(control) &&
               smp_detection_idle(control->detection, smp_clock_ns())) {
        ask_all(control);
    }
}

/* ------------------------------------------------------------------------ steps */

/* The stage's common line-up or sequence begins. */
static void
begin_together(smp_control *control, uint32_t step)
{
    control->step = step;
    smp_stage_begin(control->parts.stage, step);
    control->mismatch[0] = '\0';
}

void
smp_control_begin(smp_control *control, uint32_t step)
{
    begin_together(control, step);
    smp_commit_begin(control->commit, step);
    smp_detection_begin(control->detection);
    control->failed = false;
    control->failure = SMP_OK;
    control->leaves = false;
    control->asked = 0; /* in the last step: its rounds had the same numbers */
    control->left = -1;
    control->awaited[0] = '\0';
}

void
smp_control_leave_out(smp_control *control, uint32_t step)
{
    begin_together(control, step);
    control->failed = true;
    end_collectives(control);
}

smp_status
smp_control_end(smp_control *control, smp_message **end)
{
    smp_status status = SMP_OK;

    if (control->failed) {
        status = control->failure == SMP_OK ? SMP_ERR_CLOSED : control->failure;
        end_collectives(control);
        smp_backlog_drop(control->parts.backlog, control->step);
    }
    *end = smp_commit_take_end(control->commit);
    smp_control_describe(control, NULL, 0);
    return status;
}

void
smp_control_describe(smp_control *control, const void *bytes, size_t nbytes)
{
    smp_commit_describe(control->commit, bytes, nbytes);
}

void
smp_control_set_turns(smp_control *control, smp_turns *turns)
{
    control->turns = turns;
}

/* A step has failed here; of its messages only other ranks' last words count. */
static void
hear_after(smp_control *control, smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);

    if (e == NULL || e->step < control->step ||
        (e->step == control->step && e->kind != SMP_MSG_ISSUED)) {
        control->received += e != NULL && !is_about_still(e);
        smp_message_free(message);
        return;
    }
    count_in(control, message);
}

static bool
stage_has_ended(const smp_control *control)
{
    bool all_have = true;

    for (int p = 0; p < control->grid.pipelines; p++) {
        all_have = all_have && (smp_stage_has_ended(control->parts.stage, p) ||
                                smp_comm_left(control->parts.comm,
                                              smp_grid_in_stage(&control->grid, p)));
    }
    return all_have;
}

bool
smp_control_await_stage(smp_control *control, int64_t timeout_ns)
{
    while (!stage_has_ended(control)) {
        smp_message *message;
        smp_status status = smp_comm_receive(control->parts.comm, timeout_ns, &message);

        if (status == SMP_OK) {
            hear_after(control, message);
        } else if (status == SMP_ERR_TIMED_OUT) {
            return false;
        } else if (status != SMP_ERR_INTERRUPTED) {
            break; /* the job comes to its end */
        }
    }
    return true;
}

/* -------------------------------------------------------------- results */

const char *
smp_control_mismatch(const smp_control *control)
{
    return control->mismatch;
}

const char *
smp_control_awaited(const smp_control *control)
{
    return control->awaited;
}

int
smp_control_left(const smp_control *control)
{
    return control->left;
}

size_t
smp_control_write_deadlock(smp_control *control, char *out, size_t room)
{
    const smp_still *of = smp_detection_answers(control->detection);
    size_t           used = 0;

    for (int rank = 0; rank < smp_comm_size(control->parts.comm); rank++) {
        used += smp_board_write(control->parts.board, rank, &of[rank].standing,
                                out + used, room - used);
    }
    return used;
}
