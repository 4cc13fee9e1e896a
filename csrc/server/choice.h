/* What a rank runs next of what it could run: a function of that alone.
 *
 * First match first, of several the lowest microbatch, then the first that arrived:
 *   1. a worker that may issue a collective: ranks of the TP_GROUP wait for it
 *   2. a response of a forward, a collective of one that is over: what waits for it
 * soon gives other ranks work
 *   3. what belongs to a backward: it frees memory
 *   4. a backward that the schedule lets start
 *   5. a worker whose gate has opened
 *   6. a request of a forward
 *   7. a forward that the schedule lets start
 * But one request of a forward may go before a request of a backward that is alone: the
 * rank then still has that one while the answer to the forward is on its way to pp_rank
 * 0 and becomes a backward.  (In half of the steps of benchmarks/pipeline.py a rank
 * waited so for its last backward, a third of a slot.)
 *
 * Threads  any.
 */
#ifndef SMP_SERVER_CHOICE_H
#define SMP_SERVER_CHOICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/schedule.h"

/* Why something could run. */
typedef enum {
    SMP_READY_ISSUE,    /* a worker's collective is the next; in any phase */
    SMP_READY_RESPONSE, /* a message that a worker waits for */
    SMP_READY_OVER,     /* the collective that a worker waits for is over */
    SMP_READY_REQUEST,  /* a message that asks for a task */
    SMP_READY_GATE,     /* a worker's gate has opened; in any phase */
    SMP_READY_TURN,     /* the schedule lets a microbatch start */
    SMP_READY_KINDS
} smp_ready_kind;

typedef struct {
    smp_ready_kind kind;
    smp_phase      phase;
    int32_t        microbatch;
    uint64_t       call;    /* of the task: server/calls.h */
    uint64_t       arrival; /* of a message: when it came; 0 for all else */
    size_t         index;   /* the caller's own */
} smp_ready;

/* The index of the one to run; -1: there is none.  *overtaken: the last request of a
 * forward went before a backward; false when a step begins, then as the last call left
 * it. */
ptrdiff_t smp_choose(const smp_ready *ready, size_t n, bool *overtaken);

#endif
