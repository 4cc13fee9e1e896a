/* A worker's thread and its task. */
#include "python/modules/task.h"

#include "python/process/heap.h"

_Thread_local smp_task *smp_this_task;

/* The worker's Python thread state while it does not hold the GIL. */
static _Thread_local PyThreadState *resting;

void
smp_python_begin(void)
{
    (void)PyGILState_Ensure();
    smp_python_rest();
}

void
smp_python_rest(void)
{
    smp_heap_give_scratch();
    resting = PyEval_SaveThread();
}

void
smp_python_wake(void)
{
    PyEval_RestoreThread(resting);
}

void
smp_python_end(void)
{
    smp_python_wake();
    PyGILState_Release(PyGILState_UNLOCKED);
}
