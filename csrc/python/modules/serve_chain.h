/* The owner's side of a chain (chain.h).
 *
 * Threads  The GIL is held, by the holder of the baton; a request runs on a worker.
 */
#ifndef SMP_PYTHON_MODULES_SERVE_CHAIN_H
#define SMP_PYTHON_MODULES_SERVE_CHAIN_H

#include "python/modules/context.h"
#include "python/modules/task.h"

/* Runs the calls behind a request's first, and answers it.  A call that fails, or
 * changes its arguments, undoes them all: SMP_FLAG_RESET, and the caller makes its
 * calls one by one.
 *
 * first     the request, read up to its list of calls.
 * value     the first call's; borrowed; NULL with refuse_foreseen()'s exception.
 * context   keeps the graph, unless the flag is set.
 * envelope  the request's, then the response's.
 * Returns   whether the response is on its way; else an exception is set. */
bool smp_serve_chain(smp_unpack *first, PyObject *value, smp_context *context,
                     smp_envelope *envelope, int source, smp_task *task);

/* Takes and answers the request for an output of a chain. */
bool smp_serve_fetch(smp_message *request);

/* The task runs a call that was made only foreseen, and it may run in vain: it may not.
 * NULL, with an exception. */
PyObject *smp_serve_chain_refuse(smp_task *task);

/* Adds refuse_foreseen(), for code that may run for a call that was made only.  0, or
 * -1 with an exception. */
int smp_serve_chain_add(PyObject *module);

#endif
