/* Static mode: the order of runs in recorded steps, and the replay of the fastest one.
 * [paper, section 4.4]
 *
 *     RECORDING --so many good steps--> REPLAYING
 *         ^                                 |
 *         +-------a run does not fit--------+
 *
 * Steps with different descriptions have orders of their own.  Runs have the same
 * numbers in every step (server/calls.h), so an order is a list of them.  Any order is
 * right: a rank may leave a replay at any moment, and then chooses freely
 * (server/choice.h) until the end of the step.
 *
 * A run of the order cannot come any more, and the rank leaves, when
 *   - a ready run is none of those left in the order;
 *   - its sender has sent a later run's message: each sends in its own replayed order;
 *   - its task waits for something else (the server's to know);
 *   - all ranks wait (server/detection.h).
 *
 * The orders of one step on all ranks need each other; so all ranks replay the same
 * step.  pp_rank 0 decides which, from the words of its stage and the votes of its
 * pipeline, and its verdict comes with the end of the step.  A rank without the order
 * of that step is a rank whose runs do not fit.
 *
 * A step may have fewer microbatches than others of its kind, as the last one of an
 * epoch.  pp_rank 0 neither records nor replays it.  The other ranks may leave their
 * order in it; the verdict has the orders stay as they are.
 *
 * Threads  None: the holder of the server's baton, or the main thread between steps.
 */
#ifndef SMP_SERVER_REPLAY_H
#define SMP_SERVER_REPLAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "server/choice.h"

typedef struct smp_replay smp_replay;

/* A rank's word at the end of its part of a step.  Travels as it is. */
typedef struct {
    int64_t  ns;       /* the step's time so far */
    uint64_t best;     /* the fastest recorded step; 0: none */
    uint32_t recorded; /* so many good steps */
    int32_t  left;     /* 1 + the lowest rank without a fitting run; 0: none */
} smp_replay_word;

/* pp_rank 0's, for the steps to come. */
typedef struct {
    uint64_t best;
    uint32_t recorded; /* 0: recording begins anew */
    int32_t  left;     /* as above; its rank gives the warning */
} smp_replay_verdict;

/* rank: of the comm.  steps: those to record, >= 1.  SMP_ERR_NO_MEMORY. */
smp_status smp_replay_create(int rank, uint32_t steps, smp_replay **out);
void       smp_replay_destroy(smp_replay *replay); /* takes NULL */

/* Step `number` begins, > 0; kind: a number for its description.  microbatches: 0 on a
 * rank that does not know. */
void smp_replay_begin(smp_replay *replay, uint64_t number, uint64_t kind,
                      int32_t microbatches);

/* Whether this rank follows an order now. */
bool smp_replay_is_on(const smp_replay *replay);

/* The index of the order's next run among the ready ones; -1: it is not ready, or one
 * of them does not fit, and the replay is off then. */
ptrdiff_t smp_replay_find(smp_replay *replay, const smp_ready *ready, size_t n);

/* The order's next run; NULL: none is left.  Borrowed until the next call. */
const smp_ready *smp_replay_next(const smp_replay *replay);

/* The order's next run cannot come any more: leaves the order. */
void smp_replay_leave(smp_replay *replay);

/* This rank runs it.  SMP_ERR_NO_MEMORY. */
smp_status smp_replay_run(smp_replay *replay, const smp_ready *next);

/* This rank's word, with the least fitting of all heard by then.  Its time is that of
 * the first word of the step. */
smp_replay_word smp_replay_tell(smp_replay *replay);

/* Another rank's word.  in_vote: from this pipeline; its time does not count. */
void smp_replay_hear(smp_replay *replay, const smp_replay_word *word, bool in_vote);

/* On pp_rank 0, with all words heard. */
smp_replay_verdict smp_replay_judge(const smp_replay *replay);

/* The step has ended well, with this verdict. */
void smp_replay_end(smp_replay *replay, const smp_replay_verdict *verdict);

/* After the end, on the rank named by the verdict: the run that did not fit, once.
 * *missing: the order had it, and it did not come.  False: nothing to tell. */
bool smp_replay_take_misfit(smp_replay *replay, smp_ready *run, bool *missing);

#endif
