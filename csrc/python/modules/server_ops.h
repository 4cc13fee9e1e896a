/* The server's callbacks: workers, tasks, notes, signals.
 *
 * Threads  As in the server's table: server/server.h.
 */
#ifndef SMP_PYTHON_MODULES_SERVER_OPS_H
#define SMP_PYTHON_MODULES_SERVER_OPS_H

#include "server/server.h"

extern const smp_server_ops smp_session_ops;

/* Raises the exception of a signal's handler during the step.  False: there is none.
 * The GIL is held. */
bool smp_session_raise_signal(void);

#endif
