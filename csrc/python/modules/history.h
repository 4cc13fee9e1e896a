/* The last calls of a task, whose arguments later ones may have again: masks, say; and
 * the task's own arguments: labels for the last call, say.
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_HISTORY_H
#define SMP_PYTHON_MODULES_HISTORY_H

#include "python/modules/task.h"
#include "python/values/pack.h"

/* Calls before the last one, remembered; in the place of their number: the task's own
 * arguments. */
enum { SMP_HISTORY_FARTHEST = 8, SMP_HISTORY_GIVEN = 254 };

/* The task's own arguments; kwargs: NULL: none.  0, or -1 with an exception. */
int smp_history_give(smp_task *task, PyObject *args, PyObject *kwargs);

/* The call with the packed arguments is over.  0, or -1 with an exception. */
int smp_history_add(smp_task *task, const smp_pack *pack);

/* An argument (borrowed) of the call so many before the last one, or the task's own:
 * a plain tensor, those in lists, tuples and dicts counted as they stand; NULL: it is
 * gone, has changed, or none is known. */
PyObject *smp_history_at(const smp_task *task, size_t back, size_t number);

/* Looks for an argument of a call before the last one, or of the task. */
bool smp_history_find(const smp_task *task, const PyObject *tensor, size_t *back,
                      size_t *number);

/* The task's is over. */
void smp_history_forget(smp_task *task);

/* A tensor's count of changes; -1: unknown, since it is one of inference mode. */
long smp_history_version(PyObject *tensor);

#endif
