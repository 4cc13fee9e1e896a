/* A question, votes and an end. */
#include "server/commit.h"

#include <stdlib.h>
#include <string.h>

#include "server/envelope.h"

struct smp_commit {
    smp_comm    *comm; /* borrowed */
    smp_grid     grid;
    uint32_t     step;
    const void  *described; /* borrowed: the step's description */
    size_t       ndescribed;
    bool         asked; /* pp_rank 0 has asked the others */
    int          votes;
    int          asker; /* the asking rank of the comm; -1: none */
    bool         voted;
    smp_message *end; /* owned: STEP_END or ABORT */
};

smp_status
smp_commit_create(smp_comm *comm, const smp_grid *grid, smp_commit **out)
{
    smp_commit *commit = calloc(1, sizeof(*commit));

    if (commit == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    commit->comm = comm;
    commit->grid = *grid;
    commit->asker = -1;
    *out = commit;
    return SMP_OK;
}

void
smp_commit_destroy(smp_commit *commit)
{
    if (commit != NULL) {
        smp_message_free(commit->end);
        free(commit);
    }
}

void
smp_commit_begin(smp_commit *commit, uint32_t step)
{
    commit->step = step;
    commit->asked = false;
    commit->votes = 0;
    commit->asker = -1;
    commit->voted = false;
}

void
smp_commit_describe(smp_commit *commit, const void *bytes, size_t nbytes)
{
    commit->described = bytes;
    commit->ndescribed = nbytes;
}

/* To the others of this pipeline.  A lost rank shows in server/control.c. */
static void
send_to_pipeline(smp_commit *commit, const void *bytes, size_t nbytes)
{
    for (int rank = 1; rank < commit->grid.pp_size; rank++) {
        (void)smp_comm_send(commit->comm, smp_grid_in_pipeline(&commit->grid, rank),
                            bytes, nbytes, NULL, 0);
    }
}

smp_status
smp_commit_ask(smp_commit *commit)
{
    smp_envelope question = {.kind = SMP_MSG_SETTLE, .step = commit->step};
    size_t       nbytes = sizeof(question) + commit->ndescribed;
    char        *bytes = malloc(nbytes);

    commit->asked = true;
    if (bytes == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    memcpy(bytes, &question, sizeof(question));
    if (commit->ndescribed > 0) {
        memcpy(bytes + sizeof(question), commit->described, commit->ndescribed);
    }
    send_to_pipeline(commit, bytes, nbytes);
    free(bytes);
    return SMP_OK;
}

bool
smp_commit_has_asked(const smp_commit *commit)
{
    return commit->asked;
}

void
smp_commit_hear_vote(smp_commit *commit)
{
    commit->votes += commit->asked;
}

bool
smp_commit_is_unanimous(const smp_commit *commit)
{
    return commit->votes == commit->grid.pp_size - 1;
}

bool
smp_commit_hear_question(smp_commit *commit, const smp_message *question)
{
    const size_t n = question->nbytes - sizeof(smp_envelope);

    if (n != commit->ndescribed ||
        (n > 0 &&
         memcmp(question->bytes + sizeof(smp_envelope), commit->described, n) != 0)) {
        return false;
    }
    commit->asker = question->source;
    return true;
}

void
smp_commit_vote(smp_commit *commit, const smp_replay_word *word)
{
    struct {
        smp_envelope    envelope;
        smp_replay_word word;
    } answer = {.envelope = {.kind = SMP_MSG_SETTLED, .step = commit->step}};

    if (commit->asker >= 0 && !commit->voted) {
        if (word != NULL) {
            answer.word = *word;
        }
        (void)smp_comm_send(commit->comm, commit->asker, &answer,
                            word == NULL ? sizeof(answer.envelope) : sizeof(answer),
                            NULL, 0);
        commit->voted = true;
    }
}

bool
smp_commit_has_voted(const smp_commit *commit)
{
    return commit->voted;
}

/* Whether an ABORT fails the step here.  Not after this rank's vote, from another
 * pipeline: this rank ends as its pp_rank 0 says, and pp_rank 0 has heard the ABORT
 * too. */
static bool
hear_abort(smp_commit *commit, const smp_message *message)
{
    const smp_grid *grid = &commit->grid;

    if (smp_grid_pipeline_of(grid, message->source) == grid->pipeline) {
        return true;
    }
    if (commit->voted) {
        return false;
    }
    if (grid->pp_rank == 0) {
        send_to_pipeline(commit, message->bytes, message->nbytes);
    }
    return true;
}

bool
smp_commit_hear_end(smp_commit *commit, smp_message *end)
{
    const bool aborts = smp_message_envelope(end)->kind == SMP_MSG_ABORT;
    const bool fails = aborts && hear_abort(commit, end);

    if (commit->end != NULL || aborts != fails) {
        smp_message_free(end);
    } else {
        commit->end = end;
    }
    return fails;
}

bool
smp_commit_has_end(const smp_commit *commit)
{
    return commit->end != NULL;
}

smp_message *
smp_commit_take_end(smp_commit *commit)
{
    smp_message *end = commit->end;

    commit->end = NULL;
    return end;
}
