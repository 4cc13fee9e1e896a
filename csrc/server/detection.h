/* Deadlock detection: whether every rank waits and no message is under way.
 *
 * Rank 0 of the comm runs it while it has nothing to run, by the four-counter method of
 * termination detection.  It asks all ranks (PROBE), and each answers (STILL) when it
 * has nothing to run either, with its numbers of sent and received messages.  An idle
 * rank runs again only when a message comes, or a collective is over.  All are
 * deadlocked after two rounds of answers with as many messages received as sent, the
 * same number in both, and no collective under way.
 *
 * The detection decides; the caller sends and receives.
 *
 * Threads  None: the holder of the server's baton.
 */
#ifndef SMP_SERVER_DETECTION_H
#define SMP_SERVER_DETECTION_H

#include <stdbool.h>
#include <stdint.h>

#include "common/clock.h"
#include "common/status.h"
#include "server/board.h"
#include "server/grid.h"

/* A rank's time without a run until it looks for the reason. */
#define SMP_DETECTION_IDLE_NS (300 * SMP_NS_PER_MS)

typedef struct smp_detection smp_detection;

/* An idle rank's answer to a probe, after the envelope.  Travels as it is. */
typedef struct {
    uint64_t     sent; /* messages, probes and their answers left out */
    uint64_t     received;
    uint64_t     issued; /* collectives */
    uint64_t     over;   /* ... of them */
    smp_standing standing;
} smp_still;

typedef enum {
    SMP_DETECTION_UNKNOWN,  /* a rank has not answered, or something is under way */
    SMP_DETECTION_AGAIN,    /* a first round found nothing under way: begin another */
    SMP_DETECTION_DEADLOCK, /* so did the second */
} smp_detection_verdict;

/* in_sequence: runs have one order on all ranks (server/sequence.h).  grid: copied.
 * SMP_ERR_NO_MEMORY. */
smp_status smp_detection_create(const smp_grid *grid, bool in_sequence,
                                smp_detection **out);

/* Takes NULL. */
void smp_detection_destroy(smp_detection *detection);

/* A step begins. */
void smp_detection_begin(smp_detection *detection);

/* Begins a round and returns its number, for the probes to all other ranks. */
uint64_t smp_detection_ask(smp_detection *detection);

/* `rank` > 0 answered in `round`.  Answers in earlier rounds do not count. */
void smp_detection_hear(smp_detection *detection, int rank, uint64_t round,
                        const smp_still *still);

/* Whether all have answered in this round, for smp_detection_judge(). */
bool smp_detection_is_answered(const smp_detection *detection);

/* The verdict of the answers, while rank 0 has nothing to run; own: its own answer. */
smp_detection_verdict smp_detection_judge(smp_detection   *detection,
                                          const smp_still *own);

/* Nothing came for SMP_DETECTION_IDLE_NS.  True: begin a round.  The time between two
 * such rounds doubles while no rank answers, because probes wait where they are sent.
 */
bool smp_detection_idle(smp_detection *detection, int64_t now_ns);

/* The answers by rank of the comm, after SMP_DETECTION_DEADLOCK; before, the last ones.
 * Borrowed until the next call. */
const smp_still *smp_detection_answers(const smp_detection *detection);

#endif
