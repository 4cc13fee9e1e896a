/* The sequence: one order of all runs, on all ranks with the same pp_rank.
 *
 * A module in a collective of its own holds the baton.  So the ranks of a DP_GROUP,
 * each in a pipeline of its own, must let their tasks run in one order.  The leader,
 * dp_rank 0, chooses freely, and tells its runs to the others.  These make a list of
 * them, and run the next one of the list when they can.  No ranks wait in a circle: a
 * run of the leader needs only its earlier runs.
 *
 * One run is all work of a task until it gives the baton away.  A run's rest (over, or
 * a wait) is alike on all ranks, too; the leader tells its own, and another rest means
 * different programs.
 *
 * Threads  None: the holder of the server's baton.
 */
#ifndef SMP_SERVER_SEQUENCE_H
#define SMP_SERVER_SEQUENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "server/board.h"
#include "server/choice.h"

typedef struct smp_sequence smp_sequence;

/* The leader's word to the others: the rest of its last run, its next run, or both.
 * Travels as it is. */
typedef struct {
    int32_t   rests; /* `rest` counts */
    int32_t   runs;  /* `next` counts */
    smp_wait  rest;
    smp_ready next; /* arrival and index: 0 */
} smp_sequence_word;

/* A rest of this rank's run unlike the leader's. */
typedef struct {
    smp_wait leader;
    smp_wait own;
} smp_sequence_gap;

/* SMP_ERR_NO_MEMORY. */
smp_status smp_sequence_create(bool leads, smp_sequence **out);
void       smp_sequence_destroy(smp_sequence *sequence); /* takes NULL */

/* A step begins. */
void smp_sequence_begin(smp_sequence *sequence);

bool smp_sequence_leads(const smp_sequence *sequence);

/* The index of the list's next run among the ready ones here; -1: not ready, or not
 * known yet.  Not the leader's. */
ptrdiff_t smp_sequence_find(const smp_sequence *sequence, const smp_ready *ready,
                            size_t n);

/* This rank runs it: the leader its choice, with the last one told; the others the
 * found one. */
void smp_sequence_run(smp_sequence *sequence, const smp_ready *next);

/* The run has given the baton away.  Does nothing without a run. */
void smp_sequence_rest(smp_sequence *sequence, const smp_wait *rest);

/* The leader's next word, then taken as told; false: none, or this is not the
 * leader. */
bool smp_sequence_tell(smp_sequence *sequence, smp_sequence_word *out);

/* A word of the leader has come.  SMP_ERR_NO_MEMORY; SMP_ERR_MALFORMED: no leader's
 * word. */
smp_status smp_sequence_hear(smp_sequence *sequence, const smp_sequence_word *word);

/* Evidence of different runs by now.  False: all is well so far. */
bool smp_sequence_differs(const smp_sequence *sequence, smp_sequence_gap *gap);

#endif
