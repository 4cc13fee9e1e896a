/* Waits of a task for another rank.
 *
 * Threads  A worker with a task, with the GIL and the baton, which it gives away.
 */
#ifndef SMP_PYTHON_MODULES_WAIT_H
#define SMP_PYTHON_MODULES_WAIT_H

#include "comm/messaging/comm.h"
#include "python/values/torch_api.h"
#include "server/server.h"

/* Waits for a response; kind and entry say what it is.  NULL: with an exception, which
 * is `aborted` when the step failed. */
smp_message *smp_session_wait(uint64_t call, smp_wait_kind kind, int32_t entry);

#endif
