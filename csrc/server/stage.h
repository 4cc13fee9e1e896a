/* A stage: the ranks of one pp_rank, one in each pipeline.
 *
 * They issue the collectives of modules in one order (server/lineup.h), or run all in
 * one order (server/sequence.h).  They agree on chains (server/ballots.h).  Each tells
 * the others when it is through with a step, and its number of collectives.  The
 * messages are KEY, RUNS, BALLOT and ISSUED.
 *
 * Threads  None: the holder of the server's baton, or the main thread between steps.
 */
#ifndef SMP_SERVER_STAGE_H
#define SMP_SERVER_STAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/messaging/comm.h"
#include "common/status.h"
#include "server/ballots.h"
#include "server/grid.h"
#include "server/lineup.h"
#include "server/replay.h"
#include "server/sequence.h"

typedef struct smp_stage smp_stage;

/* comm: borrowed until destroy; grid: copied.  in_sequence: they run all in one order.
 * SMP_ERR_NO_MEMORY. */
smp_status smp_stage_create(smp_comm *comm, const smp_grid *grid, bool in_sequence,
                            smp_stage **out);
void       smp_stage_destroy(smp_stage *stage); /* takes NULL */

/* A step begins. */
void smp_stage_begin(smp_stage *stage, uint32_t step);

/* The order of collectives; NULL: in a sequence, where each rank issues in its
 * program's order.  Lives as long as the stage. */
const smp_lineup *smp_stage_lineup(const smp_stage *stage);

/* The order of runs, for the caller to use; NULL: each rank has an order of its own. */
smp_sequence *smp_stage_sequence(smp_stage *stage);

/* The ballots, to be read; live as long as the stage. */
smp_ballots *smp_stage_ballots(smp_stage *stage);

/* Casts this rank's list, and tells the others.  SMP_ERR_NO_MEMORY. */
smp_status smp_stage_cast(smp_stage *stage, const smp_ballot_list *list);

/* This rank has issued a collective, in its turn: tells its followers.
 * SMP_ERR_NO_MEMORY. */
smp_status smp_stage_issue(smp_stage *stage, const smp_key *key);

/* A collective of this rank is over. */
void smp_stage_complete(smp_stage *stage);

/* The numbers of this rank's collectives in this step: issued; and over. */
uint64_t smp_stage_issued(const smp_stage *stage);
uint64_t smp_stage_completed(const smp_stage *stage);

/* Tells the followers the next word of a sequence's leader. */
void smp_stage_tell_runs(smp_stage *stage);

/* Tells, once a step, of the end of this rank's collectives.  word: of static mode;
 * NULL: none. */
void smp_stage_end(smp_stage *stage, bool failed, const smp_replay_word *word);

/* Acts on a KEY, RUNS, BALLOT or ISSUED of this step; the message stays the caller's.
 * SMP_ERR_MALFORMED, SMP_ERR_NO_MEMORY. */
smp_status smp_stage_hear(smp_stage *stage, const smp_message *message);

/* Evidence of different collectives by now: see smp_lineup_find_gap().  In a sequence
 * none. */
bool smp_stage_find_gap(const smp_stage *stage, const smp_key *wanted,
                        smp_lineup_gap *gap);

/* Whether the rank of a pipeline, this one too, makes no more collectives; and every
 * one. */
bool smp_stage_has_ended(const smp_stage *stage, int pipeline);
bool smp_stage_is_over(const smp_stage *stage);

/* The fewest and the most collectives of a rank, among ranks at their end. */
void smp_stage_range(const smp_stage *stage, uint64_t *least, uint64_t *most);

/* Whether the step failed at one of the others; its reason comes elsewhere. */
bool smp_stage_one_failed(const smp_stage *stage);

/* Whether this rank ended the step without a failure. */
bool smp_stage_ended_in_order(const smp_stage *stage);

#endif
