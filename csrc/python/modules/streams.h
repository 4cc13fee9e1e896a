/* Random numbers by microbatch and call, independent of timing.
 *
 * Threads  The GIL is held, by the holder of the baton.
 * Errors   0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_MODULES_STREAMS_H
#define SMP_PYTHON_MODULES_STREAMS_H

#include "python/modules/task.h"

/* Makes the default generator this task's. */
int smp_stream_enter(smp_task *task);

/* The same, and seeds it. */
int smp_stream_seed(smp_task *task, uint64_t seed);

/* The task has come to its end. */
void smp_stream_leave(smp_task *task);

/* Draws a request's seed from the stream of the running task. */
int smp_stream_draw(uint64_t *seed);

/* The next n seeds, without drawing them. */
int smp_stream_foresee(uint64_t *seeds, size_t n);

#endif
