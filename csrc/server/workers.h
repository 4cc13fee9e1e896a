/* The workers: threads for tasks, each with a seat to wait for the baton.
 *
 * server/server.h draws the order of their states.
 *
 * The giver of the baton writes its reason first.  A thread without a task is used
 * again, last in first out.
 *
 * Ownership  The workers are the set's, until destroy.
 * Threads    create, destroy: the main thread, without a step.  All else: the holder of
 *            the baton; smp_workers_give() gives it away, smp_workers_pass() too, and
 *            returns with it.
 */
#ifndef SMP_SERVER_WORKERS_H
#define SMP_SERVER_WORKERS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/messaging/comm.h"
#include "common/status.h"
#include "server/ballots.h"
#include "server/baton.h"
#include "server/board.h"
#include "server/schedule.h"

typedef enum {
    SMP_WORKER_IDLE,
    SMP_WORKER_EXECUTING,
    SMP_WORKER_PENDING,
} smp_worker_state;

/* The reason of giving a worker the baton. */
typedef enum {
    SMP_WHY_NOTHING,
    SMP_WHY_REQUEST,  /* worker->message is to be executed */
    SMP_WHY_ROOT,     /* run the step function for worker->microbatch */
    SMP_WHY_RESPONSE, /* worker->message is the awaited response */
    SMP_WHY_BACKWARD, /* its model.backward may go on */
    SMP_WHY_TURN,     /* its microbatch may pass the gate */
    SMP_WHY_ISSUE,    /* its collective is the next */
    SMP_WHY_OVER,     /* ... is over */
    SMP_WHY_BALLOT,   /* its ballot has an outcome */
    SMP_WHY_FAILED,   /* the step failed: unwind */
    SMP_WHY_QUIT,     /* the server is being destroyed */
    SMP_WHY_SERVE,    /* a step began: look for work */
} smp_why;

typedef struct smp_workers smp_workers;
typedef struct smp_worker  smp_worker;

struct smp_worker {
    smp_workers        *workers; /* borrowed: its set */
    pthread_t           thread;
    smp_seat            seat;
    smp_worker_state    state;
    smp_why             why;        /* written by the giver before it gives the baton */
    smp_message        *message;    /* with REQUEST, RESPONSE; owned */
    int32_t             microbatch; /* of the task; with ROOT the one to run */
    int32_t             entry;      /* of the task; -1: the step function */
    uint64_t            task;       /* its number (server/calls.h) */
    smp_wait            wait;       /* PENDING: for what */
    uint64_t            call;       /* ... OUTPUTS, GRADIENTS: the call; else 0 */
    int32_t             gate;       /* ... GATE */
    const _Atomic bool *over;       /* ... COLLECTIVE: set when it is; borrowed */
    smp_ballot          ballot;     /* ... BALLOT */
    bool                for_all;    /* ... BALLOT: also where its outcome is 0 */
    smp_phase           phase;
    uint16_t            number;    /* in the order of their creation, from 0 */
    smp_worker         *next;      /* in the set */
    smp_worker         *next_idle; /* among those in their seats without a task */
};

/* run: a thread's function from its first baton until QUIT; not called if the first
 * says QUIT.  ctx: borrowed until destroy.  SMP_ERR_NO_MEMORY. */
smp_status smp_workers_create(int   spin_us, void (*run)(void *ctx, smp_worker *self),
                              void *ctx, smp_workers **out);

/* Gives each the baton to QUIT, joins and frees it.  Takes NULL. */
void smp_workers_destroy(smp_workers *workers);

/* The worker of this thread. */
smp_worker *smp_workers_self(void);

/* All workers, linked by next; and their number. */
smp_worker *smp_workers_first(const smp_workers *workers);
size_t      smp_workers_count(const smp_workers *workers);

/* Takes one without a task from the idle ones; else makes a new one, with its thread
 * started in its seat.  NULL: no thread or memory. */
smp_worker *smp_workers_take_idle(smp_workers *workers);

/* Self has no task: joins the idle ones. */
void smp_workers_put_idle(smp_worker *self);

/* Gives the baton to `to`.  The caller then waits in its own seat, or ends. */
void smp_workers_give(smp_worker *to, smp_why why);

/* Gives the baton to `to` and waits until self is given it; keeps it if `to` is self.
 * Self joins the idle ones if without a task. */
void smp_workers_pass(smp_worker *self, smp_worker *to, smp_why why);

/* The worker with this number, which exists. */
smp_worker *smp_workers_number(const smp_workers *workers, size_t number);

/* A PENDING worker: on the response to `call`; to begin the backward of `microbatch`;
 * on its turn among the collectives; for any reason.  NULL: none. */
smp_worker *smp_workers_on_call(const smp_workers *workers, uint64_t call);
smp_worker *smp_workers_on_schedule(const smp_workers *workers, int32_t microbatch);
smp_worker *smp_workers_on_issue(const smp_workers *workers);
smp_worker *smp_workers_pending(const smp_workers *workers);

#endif
