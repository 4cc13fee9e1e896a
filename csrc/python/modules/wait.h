/* Waits of a task for another rank.
 *
 * Threads  A worker with a task, with the GIL and the baton: it gives both away.
 */
#ifndef SMP_PYTHON_MODULES_WAIT_H
#define SMP_PYTHON_MODULES_WAIT_H

#include "comm/messaging/comm.h"
#include "python/values/torch_api.h"
#include "server/server.h"

/* Waits for a response; kind and entry: the wait on the board.  NULL with an exception:
 * `aborted` when the step failed. */
smp_message *smp_session_wait(uint64_t call, smp_wait_kind kind, int32_t entry);

#endif
