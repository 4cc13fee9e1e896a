/* The ready list: this rank's possible next runs, for smp_choose() (server/choice.h).
 *
 * Threads  None: the holder of the server's baton.
 */
#ifndef SMP_SERVER_READY_LIST_H
#define SMP_SERVER_READY_LIST_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "server/backlog.h"
#include "server/ballots.h"
#include "server/choice.h"
#include "server/lineup.h"
#include "server/schedule.h"
#include "server/turns.h"
#include "server/workers.h"

/* All zero: empty. */
typedef struct {
    smp_ready *ready; /* owned; [n] */
    size_t     n;
    size_t     room;
} smp_ready_list;

/* The list's sources; all borrowed for the call. */
typedef struct {
    uint32_t           step;
    const smp_backlog *backlog;
    const smp_workers *workers;
    const smp_lineup  *lineup; /* NULL: no worker waits to issue */
    const smp_ballots *ballots;
    const smp_turns   *turns;    /* NULL: no gates */
    smp_schedule      *schedule; /* NULL but on pp_rank 0 */
} smp_ready_sources;

/* Lists it anew.  An index is a message's in the backlog (RESPONSE, REQUEST), or a
 * worker's number (all other kinds but TURN).  SMP_ERR_NO_MEMORY. */
smp_status smp_ready_list_fill(smp_ready_list *list, const smp_ready_sources *sources);

void smp_ready_list_fini(smp_ready_list *list);

#endif
