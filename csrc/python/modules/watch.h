/* The watchdog of this rank's session; see server/watchdog.h.
 *
 * Threads  The main thread; stop without the GIL, which a report does not need.
 */
#ifndef SMP_PYTHON_MODULES_WATCH_H
#define SMP_PYTHON_MODULES_WATCH_H

#include "python/values/torch_api.h"

#include "common/status.h"

/* After the server was made.  Limits in seconds, 0 for none.  SMP_ERR_NO_MEMORY,
 * SMP_ERR_NO_THREAD. */
smp_status smp_watch_start(double report_s, double end_s);

/* Before the server is destroyed. */
void smp_watch_stop(void);

int smp_watch_add_functions(PyObject *module);

#endif
