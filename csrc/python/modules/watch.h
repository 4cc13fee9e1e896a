/* The watchdog of this rank; see server/watchdog.h.
 *
 * Threads  The main thread; stop without the GIL.
 */
#ifndef SMP_PYTHON_MODULES_WATCH_H
#define SMP_PYTHON_MODULES_WATCH_H

#include "python/values/torch_api.h"

#include "common/status.h"
#include "server/board.h"

/* Watches the board of `rank`, named `name` (its first 63 bytes are kept), until stop.
 * Limits in seconds, 0 for none.  SMP_ERR_NO_MEMORY, SMP_ERR_NO_THREAD. */
smp_status smp_watch_start(smp_board *board, int rank, const char *name,
                           double report_s, double end_s);

/* Before the board is destroyed. */
void smp_watch_stop(void);

int smp_watch_add_functions(PyObject *module);

#endif
