/* The choice of a rank's next run: a function of the ready list alone.
 *
 * First match first, of several the lowest microbatch, then the first to arrive:
 *   1. a worker with a collective to issue: ranks of the TP_GROUP wait for it
 *   2. a response of a forward, or its finished collective or ballot: the waiting task
 *      soon gives other ranks work
 *   3. all of a backward: it frees memory
 *   4. a backward's start by the schedule
 *   5. a worker at an open gate
 *   6. a request of a forward
 *   7. a forward's start by the schedule
 * But one request of a forward may go before a lone request of a backward: the rank
 * then still has the backward while the forward's answer is on its way to pp_rank 0 and
 * becomes a backward.  (In half of the steps of benchmarks/pipeline.py a rank otherwise
 * waited for its last backward, a third of a slot.)
 *
 * Threads  any.
 */
#ifndef SMP_SERVER_CHOICE_H
#define SMP_SERVER_CHOICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/schedule.h"

/* The reason of a possible run. */
typedef enum {
    SMP_READY_ISSUE,    /* a worker's collective is the next; in any phase */
    SMP_READY_RESPONSE, /* a message for a waiting worker */
    SMP_READY_OVER,     /* a worker's awaited collective is over */
    SMP_READY_BALLOT,   /* a worker's ballot has an outcome */
    SMP_READY_REQUEST,  /* a message asking for a task */
    SMP_READY_GATE,     /* a worker's gate has opened; in any phase */
    SMP_READY_TURN,     /* the schedule lets a microbatch start */
    SMP_READY_KINDS
} smp_ready_kind;

typedef struct {
    smp_ready_kind kind;
    smp_phase      phase;
    int32_t        microbatch;
    int32_t        entry;   /* of the task; -1: the step function */
    int32_t        source;  /* of a message: the rank of the comm; -1 for all else */
    uint64_t       call;    /* of the task: server/calls.h */
    uint64_t       arrival; /* of a message: when it came; 0 for all else */
    size_t         index;   /* the caller's own */
} smp_ready;

/* Whether both are the same run of the program, perhaps on two ranks or in two steps.
 */
bool smp_ready_is_same(const smp_ready *a, const smp_ready *b);

/* The first to arrive of those that are this run; -1: none. */
ptrdiff_t smp_ready_find(const smp_ready *run, const smp_ready *ready, size_t n);

/* The index of the one to run; -1: there is none.  *overtaken: the last request of a
 * forward went before a backward; false when a step begins, then as the last call left
 * it. */
ptrdiff_t smp_choose(const smp_ready *ready, size_t n, bool *overtaken);

#endif
