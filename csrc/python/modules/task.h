/* A thread's task under way, and its thread's way to Python.
 *
 * Threads  The GIL is held, but where said.
 */
#ifndef SMP_PYTHON_MODULES_TASK_H
#define SMP_PYTHON_MODULES_TASK_H

#include "python/values/torch_api.h"
#include "server/calls.h"

/* A task under way on this rank: the step function of a microbatch, or a request.
 * Lives on its worker's stack. */
typedef struct smp_task {
    int32_t   microbatch;
    int32_t   entry;  /* -1: the step function */
    uint64_t  number; /* server/calls.h */
    smp_calls calls;  /* made by the task */
    uint64_t  order;  /* of this request within its microbatch, by begin */
    uint64_t  count;  /* requests of the microbatch so far; travels with control */
    smp_phase phase;
    int backward_depth;  /* inside model.backward, a backward request, or a checkpoint's
                            second forward */
    int32_t   backwards; /* model.backward calls of the microbatch before this one */
    PyObject *rng_state; /* owned; its stream while another task has the generator */
    struct smp_chain   *chain; /* owned: calls foreseen and not made yet; NULL: none */
    struct smp_trail   *trail; /* owned: the last call, to learn from; NULL: none */
    struct smp_history *history; /* owned: arguments of the last calls; NULL: none */
    PyObject           *placeholders; /* owned: list of weak references; NULL: none */
    PyObject           *again; /* owned: dict, number -> Call: calls made again by
                                  checkpoints, before their backwards (nodes.h); NULL: none */
    bool foreseen; /* a call of a chain runs: it may run again, or in vain */
    bool refused;  /* it may not: serve_chain.h */
    PyObject
        *undo; /* owned: list of functions () -> None, for its effects; NULL: none */
} smp_task;

/* The task of this thread; NULL outside a step. */
extern _Thread_local smp_task *smp_this_task;

/* On a worker's thread, known to Python from smp_python_begin() to smp_python_end(),
 * and outside of tasks without the GIL: gives it away, takes it back. */
void smp_python_begin(void);
void smp_python_rest(void);
void smp_python_wake(void);
void smp_python_end(void);

#endif
