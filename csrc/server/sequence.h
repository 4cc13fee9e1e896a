/* One order of all that runs, on all ranks that have the same pp_rank.
 *
 * A module that calls a collective of its own holds the baton in it.  So the ranks of a
 * DP_GROUP, each in a pipeline of its own, must let their tasks run in one order.  The
 * leader, dp_rank 0, runs what it likes, and what it runs makes a list that the others
 * hear; they run what is next in the list when they can.  Nobody waits in a circle:
 * what the leader ran first needs only what it ran before.
 *
 * All that a task does until it gives the baton away is one run.  How a run came to
 * rest (over, or waiting for what) is alike on all ranks, too; the leader tells that,
 * and where it is not alike the ranks' programs differ.
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

/* What the leader tells the others: the rest of its last run, what it runs next, or
 * both.  Travels as it is. */
typedef struct {
    int32_t   rests; /* `rest` counts */
    int32_t   runs;  /* `next` counts */
    smp_wait  rest;
    smp_ready next; /* arrival and index: 0 */
} smp_sequence_word;

/* How a run of this rank came to rest otherwise than the leader's. */
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

/* Where the next of the list is among what is ready here; -1: nowhere, or it is not
 * known yet.  Not the leader's. */
ptrdiff_t smp_sequence_find(const smp_sequence *sequence, const smp_ready *ready,
                            size_t n);

/* This rank runs it: the leader what it has chosen, the others what was found.
 * SMP_ERR_NO_MEMORY. */
smp_status smp_sequence_run(smp_sequence *sequence, const smp_ready *next);

/* What runs has given the baton away.  Does nothing where nothing ran. */
void smp_sequence_rest(smp_sequence *sequence, const smp_wait *rest);

/* What the leader has yet to tell; false: nothing, or this is not the leader.  It is
 * told then. */
bool smp_sequence_tell(smp_sequence *sequence, smp_sequence_word *out);

/* The leader has told.  SMP_ERR_NO_MEMORY; SMP_ERR_MALFORMED: no leader says that. */
smp_status smp_sequence_hear(smp_sequence *sequence, const smp_sequence_word *word);

/* What shows by now that the ranks do not run the same.  False: all is well so far. */
bool smp_sequence_differs(const smp_sequence *sequence, smp_sequence_gap *gap);

#endif
