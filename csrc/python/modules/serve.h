/* The owner's side of a remote call: running a module, and its backward, for others.
 *
 * Threads  The GIL is held, by the holder of the baton; a request runs on a worker.
 */
#ifndef SMP_PYTHON_MODULES_SERVE_H
#define SMP_PYTHON_MODULES_SERVE_H

#include "comm/messaging/comm.h"
#include "python/modules/task.h"

/* Takes and runs the request, and answers it; a failure ends the step. */
void smp_serve_request(smp_message *request, smp_task *task);

#endif
