/* The watchdog: reports a rank long without a move, with its board.
 *
 * A thread of its own looks at the board now and then.  It takes no lock but the
 * board's and calls no Python.  So it works while a task runs in circles, foreign C
 * code holds the GIL, or another rank is stopped.
 */
#ifndef SMP_SERVER_WATCHDOG_H
#define SMP_SERVER_WATCHDOG_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"
#include "server/board.h"

typedef struct smp_watchdog smp_watchdog;

typedef struct {
    int64_t report_ns; /* without a move: the first report; the next ones after twice,
                          four times as long ...; 0: none */
    int64_t end_ns;    /* ... the end; 0: never */

    /* On the watchdog's thread.  ends: the last call; it ends the process. */
    void (*report)(void *ctx, const smp_standing *standing, bool ends);
    void *ctx; /* borrowed until destroy */
} smp_watchdog_config;

/* board: borrowed until destroy.  *out is NULL when there is nothing to do.
 * SMP_ERR_NO_MEMORY, SMP_ERR_NO_THREAD. */
smp_status smp_watchdog_create(smp_board *board, const smp_watchdog_config *config,
                               smp_watchdog **out);

/* Joins the thread; it is not in a report for long.  Takes NULL. */
void smp_watchdog_destroy(smp_watchdog *watchdog);

#endif
