/* The end of a step: two-phase commit in each pipeline.
 *
 * pp_rank 0 coordinates.  When every microbatch is done it asks the others whether all
 * is well (SETTLE), with a description of the step.  A rank with the same step and no
 * failure votes yes (SETTLED); a failed rank says ABORT instead.  After the votes of
 * all, pp_rank 0 ends the step (STEP_END).  An ABORT ends it before that.
 *
 * A vote binds the rank: its pp_rank 0 alone may end the step, no signal and no other
 * pipeline.
 *
 * Ownership  The commit owns the end of the step until it is taken.
 * Threads    None: the holder of the server's baton, or the main thread between steps.
 */
#ifndef SMP_SERVER_COMMIT_H
#define SMP_SERVER_COMMIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/messaging/comm.h"
#include "common/status.h"
#include "server/grid.h"
#include "server/replay.h"

typedef struct smp_commit smp_commit;

/* comm: borrowed until destroy; grid: copied.  SMP_ERR_NO_MEMORY. */
smp_status smp_commit_create(smp_comm *comm, const smp_grid *grid, smp_commit **out);
void       smp_commit_destroy(smp_commit *commit); /* takes NULL */

/* A step begins.  An end already there stays. */
void smp_commit_begin(smp_commit *commit, uint32_t step);

/* The description of this rank's step; borrowed until replaced.  NULL, 0: no bytes. */
void smp_commit_describe(smp_commit *commit, const void *bytes, size_t nbytes);

/* pp_rank 0 asks the others, and whether it has.  SMP_ERR_NO_MEMORY. */
smp_status smp_commit_ask(smp_commit *commit);
bool       smp_commit_has_asked(const smp_commit *commit);

/* A SETTLED came to pp_rank 0; an unasked one does not count. */
void smp_commit_hear_vote(smp_commit *commit);

/* Whether all others have voted. */
bool smp_commit_is_unanimous(const smp_commit *commit);

/* A SETTLE came.  False: pp_rank 0 ran another step.  The message stays the caller's.
 */
bool smp_commit_hear_question(smp_commit *commit, const smp_message *question);

/* This rank is well: votes when it was asked, once.  word: of static mode; NULL: none.
 */
void smp_commit_vote(smp_commit *commit, const smp_replay_word *word);
bool smp_commit_has_voted(const smp_commit *commit);

/* A STEP_END or ABORT came; takes it.  True: the step has failed.  pp_rank 0 passes an
 * ABORT of another pipeline on to its own. */
bool smp_commit_hear_end(smp_commit *commit, smp_message *end);

/* Whether an end has come; moves it to the caller, NULL: none. */
bool         smp_commit_has_end(const smp_commit *commit);
smp_message *smp_commit_take_end(smp_commit *commit);

#endif
