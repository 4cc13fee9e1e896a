/* A task's exception: it fails the step, or becomes the caller's.
 *
 * Threads  A worker with the GIL and the baton.
 */
#ifndef SMP_PYTHON_MODULES_FAILURE_H
#define SMP_PYTHON_MODULES_FAILURE_H

#include "python/modules/task.h"
#include "server/envelope.h"

/* Takes the set exception: ends the step on every rank. */
void smp_session_fail(smp_task *task);

/* The same while a message is being read: no other one is read inside it. */
void smp_session_fail_at_once(const smp_task *task);

/* Whether the set exception is for a request's caller to catch: not Ctrl-C and the
 * like, or a lost rank, and not in a sequence. */
bool smp_session_may_answer(void);

/* Answers the task's request with the set exception, then its caller's to catch.
 * False, with the exception still set: it ends the step (smp_session_may_answer(), or a
 * failed send). */
bool smp_session_answer_raised(const smp_task *task, int source, smp_envelope envelope);

#endif
