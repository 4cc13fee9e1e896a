/* Ballots: the ranks of a stage agree how far they go together.
 *
 * A chain's calls run before their caller has made them (python/modules/chain.h).  A
 * module with collectives needs all tp_ranks for that, or none.  So each casts a list
 * of words, its plan.  The outcome is the number of leading words that are alike on all
 * of them.  An empty list is a no, and needs no wait.
 *
 * Ranks with different programs may wait in different ballots.  Where all ranks stand
 * still, they leave: they cast no more in this step, and open ballots have outcome 0.
 *
 * Threads  None: the holder of the server's baton.
 */
#ifndef SMP_SERVER_BALLOTS_H
#define SMP_SERVER_BALLOTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

/* The most words of a list. */
enum { SMP_BALLOT_WORDS = 64 };

/* The question of a ballot: there is one at most, by call and subject, in a step. */
typedef struct {
    uint64_t call; /* server/calls.h */
    uint32_t subject;
    int32_t  entry; /* of the call; for people */
} smp_ballot;

/* A rank's list.  Travels as it is. */
typedef struct {
    smp_ballot ballot;
    uint32_t   n;
    uint32_t   words[SMP_BALLOT_WORDS];
} smp_ballot_list;

typedef struct smp_ballots smp_ballots;

/* ranks: of the stage.  SMP_ERR_NO_MEMORY. */
smp_status smp_ballots_create(int ranks, smp_ballots **out);
void       smp_ballots_destroy(smp_ballots *ballots); /* takes NULL */

/* A step begins. */
void smp_ballots_begin(smp_ballots *ballots);

/* The list of one of the ranks, this one too, each once.  SMP_ERR_NO_MEMORY. */
smp_status smp_ballots_cast(smp_ballots *ballots, const smp_ballot_list *list);

/* All ranks stand still. */
void smp_ballots_leave(smp_ballots *ballots);
bool smp_ballots_are_left(const smp_ballots *ballots);

/* The outcome of a ballot cast here.  False: lists are missing. */
bool smp_ballots_read(const smp_ballots *ballots, const smp_ballot *ballot,
                      size_t *outcome);

/* Whether all ranks have cast. */
bool smp_ballots_are_complete(const smp_ballots *ballots, const smp_ballot *ballot);

/* Whether there is nothing to wait for any more: the outcome is known; for_all: all
 * ranks have cast, or they leave. */
bool smp_ballots_are_decided(const smp_ballots *ballots, const smp_ballot *ballot,
                             bool for_all);

/* This rank has read it. */
void smp_ballots_close(smp_ballots *ballots, const smp_ballot *ballot);

#endif
