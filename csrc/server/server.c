/* The module server: who works next.
 *
 * Everything below is guarded by the baton: only the thread that holds it reads or
 * writes the server, so there is no lock.  The exceptions are atomic and say so.
 *
 * What runs next, first match first:
 *   1. what belongs to a backward, lowest microbatch first: it frees memory
 *   2. a backward that the schedule lets start
 *   3. what belongs to a forward, lowest microbatch first
 *   4. a forward that the schedule lets start
 */
#define _GNU_SOURCE
#include "server/server.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/jitter.h"
#include "server/baton.h"

typedef enum { WORKER_IDLE, WORKER_EXECUTING, WORKER_PENDING } worker_state;

/* Why a worker is given the baton. */
typedef enum {
    WHY_NOTHING,
    WHY_REQUEST,  /* worker->message is to be executed */
    WHY_ROOT,     /* run the step function for worker->microbatch */
    WHY_RESPONSE, /* worker->message answers what it waits for */
    WHY_BACKWARD, /* its model.backward may go on */
    WHY_TURN,     /* its microbatch may pass the gate */
    WHY_FAILED,   /* the step failed: unwind */
    WHY_QUIT,     /* the server is being destroyed */
    WHY_SERVE,    /* a step began: look for work */
} reason;

typedef struct worker worker;

struct worker {
    smp_server  *server; /* borrowed */
    pthread_t    thread;
    smp_seat     seat;
    worker_state state;
    reason       why;        /* written by the giver before it gives the baton */
    smp_message *message;    /* with WHY_REQUEST, WHY_RESPONSE */
    int32_t      microbatch; /* of the task; with WHY_ROOT what to run */
    int32_t      entry;      /* of the task; -1: the step function */
    uint64_t     waits_for;  /* PENDING: a call, or 0 for its turn of backward */
    int32_t      gate;       /* PENDING: the gate it waits at; -1: none */
    smp_phase    phase;
    uint16_t     number;
    worker      *next;      /* in server->workers */
    worker      *next_idle; /* in server->idle */
};

/* A message that was received and not yet acted on. */
typedef struct {
    smp_message *message;
    uint64_t     arrival;
} waiting;

struct smp_server {
    smp_comm      *comm; /* borrowed */
    smp_server_ops ops;
    void          *ctx; /* borrowed */
    int            rank;
    int            spin_us;

    worker  *workers; /* owned: every worker there is */
    worker  *idle;    /* those in their seats without a task, last in first out */
    uint16_t nworkers;

    waiting *inbox; /* owned: ninbox messages, in no order */
    size_t   ninbox;
    size_t   inbox_room;
    uint64_t arrivals;

    uint32_t      step;
    smp_turns    *turns;    /* borrowed; NULL: no gates */
    smp_schedule *schedule; /* owned during a step; NULL but on pp_rank 0 */
    smp_message  *end;      /* STEP_END or ABORT */
    bool          failed;
    smp_status    failure; /* why, when the comm or a thread failed */
    uint64_t      calls;
    uint64_t      switches;

    _Atomic bool interrupted; /* set by the main thread while a worker has the baton */
    smp_seat     main_seat;
    smp_timeline timeline;
};

static void
note_event(worker *self, smp_event_kind kind)
{
    smp_timeline_add(&self->server->timeline,
                     (smp_event){.microbatch = self->microbatch,
                                 .entry = self->entry,
                                 .worker = self->number,
                                 .kind = (uint8_t)kind,
                                 .phase = (uint8_t)self->phase});
}

/* ---------------------------------------------------------------- the inbox */

static bool
inbox_add(smp_server *server, smp_message *message)
{
    smp_jitter();
    if (server->ninbox == server->inbox_room) {
        size_t   room = server->inbox_room == 0 ? 32 : 2 * server->inbox_room;
        waiting *more = realloc(server->inbox, room * sizeof(*more));

        if (more == NULL) {
            return false;
        }
        server->inbox = more;
        server->inbox_room = room;
    }
    server->inbox[server->ninbox++] =
        (waiting){.message = message, .arrival = server->arrivals++};
    return true;
}

static smp_message *
inbox_remove(smp_server *server, size_t i)
{
    smp_message *message = server->inbox[i].message;

    smp_jitter();
    server->inbox[i] = server->inbox[--server->ninbox];
    return message;
}

/* Frees what belongs to steps up to `step`; a faster rank may have begun the next. */
static void
inbox_forget(smp_server *server, uint32_t step)
{
    for (size_t i = server->ninbox; i-- > 0;) {
        if (smp_message_envelope(server->inbox[i].message)->step <= step) {
            smp_message_free(inbox_remove(server, i));
        }
    }
}

static worker *
pending_on(smp_server *server, uint64_t call)
{
    for (worker *w = server->workers; w != NULL; w = w->next) {
        if (call != 0 && w->state == WORKER_PENDING && w->waits_for == call) {
            return w;
        }
    }
    return NULL;
}

/* Index of the message to act on next in `phase`, or -1.  A response that nobody waits
 * for yet stays: its worker will ask. */
static ptrdiff_t
inbox_best(const smp_server *server, smp_phase phase)
{
    ptrdiff_t best = -1;

    for (size_t i = 0; i < server->ninbox; i++) {
        const smp_envelope *e = smp_message_envelope(server->inbox[i].message);

        if (e->phase != phase || e->step != server->step) {
            continue;
        }
        if (e->kind == SMP_MSG_RESPONSE &&
            pending_on((smp_server *)server, e->call) == NULL) {
            continue;
        }
        if (best >= 0) {
            const smp_envelope *b = smp_message_envelope(server->inbox[best].message);

            if (e->microbatch > b->microbatch ||
                (e->microbatch == b->microbatch &&
                 server->inbox[i].arrival > server->inbox[best].arrival)) {
                continue;
            }
        }
        best = (ptrdiff_t)i;
    }
    return best;
}

static void
fail_with(smp_server *server, smp_status failure)
{
    server->failed = true;
    if (server->failure == SMP_OK) {
        server->failure = failure;
    }
}

static void
keep(smp_server *server, smp_message *message)
{
    if (!inbox_add(server, message)) {
        smp_message_free(message);
        fail_with(server, SMP_ERR_NO_MEMORY);
    }
}

/* Acts at once on what starts no task; keeps the rest for inbox_best. */
static void
sort_in(smp_server *server, smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);

    if (e == NULL) {
        smp_message_free(message);
        fail_with(server, SMP_ERR_MALFORMED);
        return;
    }
    if (e->step < server->step) { /* left over from a step that failed */
        smp_message_free(message);
        return;
    }
    if (e->step > server->step) { /* this rank is behind: see sort_again() */
        keep(server, message);
        return;
    }
    switch ((smp_msg_kind)e->kind) {
    case SMP_MSG_RELEASE:
    case SMP_MSG_CLOSED:
    case SMP_MSG_FORWARD_DONE:
        if (e->kind != SMP_MSG_RELEASE && server->turns != NULL) {
            smp_turns_forward_done(server->turns, e->microbatch);
        }
        server->ops.note(server->ctx, message);
        return;
    case SMP_MSG_STEP_END:
    case SMP_MSG_ABORT:
        if (e->kind == SMP_MSG_ABORT) {
            server->failed = true;
        }
        if (server->end == NULL) {
            server->end = message;
        } else {
            smp_message_free(message);
        }
        return;
    case SMP_MSG_FORWARD:
    case SMP_MSG_BACKWARD:
    case SMP_MSG_RESPONSE:
        keep(server, message);
        return;
    }
}

/* A step begins: what came for it early is acted on now. */
static void
sort_again(smp_server *server)
{
    size_t   early = server->ninbox;
    waiting *entries = server->inbox;

    server->inbox = NULL;
    server->ninbox = 0;
    server->inbox_room = 0;
    for (size_t i = 0; i < early; i++) {
        sort_in(server, entries[i].message);
    }
    free(entries);
}

/* Reads what has arrived; waits for the first message when `block`. */
static void
read_comm(smp_server *server, bool block)
{
    int64_t timeout_ns = block ? -1 : 0;

    for (;;) {
        smp_message *message;
        smp_status   status = smp_comm_receive(server->comm, timeout_ns, &message);

        if (status == SMP_OK) {
            sort_in(server, message);
            if (server->end != NULL) {
                return; /* whoever sent it may leave: that is no failure of this step */
            }
            timeout_ns = 0;
            continue;
        }
        if (status != SMP_ERR_TIMED_OUT && status != SMP_ERR_INTERRUPTED) {
            fail_with(server, status);
        }
        return;
    }
}

/* ------------------------------------------------------------- the hand-over */

/* Gives the baton to `to`.  The caller then waits in its own seat, or ends. */
static void
give(worker *to, reason why)
{
    to->why = why;
    to->server->switches++;
    smp_seat_give(&to->seat);
}

static void *worker_main(void *arg);

/* An idle worker, taken from the list; a new one when there is none.  A new one starts
 * in its seat.  NULL: no thread or memory. */
static worker *
idle_worker(smp_server *server)
{
    worker *w = server->idle;

    if (w != NULL) {
        server->idle = w->next_idle;
        return w;
    }
    w = calloc(1, sizeof(*w));
    if (w == NULL) {
        return NULL;
    }
    w->server = server;
    w->number = server->nworkers;
    if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
        free(w);
        return NULL;
    }
    server->nworkers++;
    w->next = server->workers;
    server->workers = w;
    return w;
}

static bool
step_is_over(const smp_server *server)
{
    if (server->schedule != NULL) {
        return smp_schedule_finished(server->schedule);
    }
    return server->end != NULL;
}

/* Hands the baton to `w`, or keeps it when that is self.  True: self has it. */
static bool
pass(worker *self, worker *w, reason why)
{
    if (w == self) {
        w->why = why;
        return true;
    }
    if (self->state == WORKER_IDLE) {
        self->next_idle = self->server->idle;
        self->server->idle = self;
    }
    give(w, why);
    smp_seat_wait(&self->seat, self->server->spin_us);
    return true;
}

/* Gives a new task to self when it is idle, else to an idle worker.  False: there is
 * no thread for it. */
static bool
assign(worker *self, reason why, smp_message *request, int32_t microbatch)
{
    worker *w = self->state == WORKER_IDLE ? self : idle_worker(self->server);

    if (w == NULL) {
        return false;
    }
    w->message = request;
    w->microbatch = microbatch;
    return pass(self, w, why);
}

static bool
act_on(worker *self, smp_message *message)
{
    smp_server         *server = self->server;
    const smp_envelope *e = smp_message_envelope(message);

    if (e->kind == SMP_MSG_RESPONSE) {
        worker *w = pending_on(server, e->call);

        w->message = message;
        return pass(self, w, WHY_RESPONSE);
    }
    if (!assign(self, WHY_REQUEST, message, e->microbatch)) {
        smp_message_free(message);
        fail_with(server, SMP_ERR_NO_THREAD);
        return false;
    }
    return true;
}

static bool
start_turn(worker *self, smp_phase phase)
{
    smp_server *server = self->server;
    int32_t     microbatch;

    if (server->schedule == NULL ||
        !smp_schedule_next(server->schedule, phase, &microbatch)) {
        return false;
    }
    if (phase == SMP_FORWARD) {
        if (assign(self, WHY_ROOT, NULL, microbatch)) {
            return true;
        }
        fail_with(server, SMP_ERR_NO_THREAD);
        return false;
    }
    for (worker *w = server->workers; w != NULL; w = w->next) {
        if (w->state == WORKER_PENDING && w->waits_for == 0 && w->gate < 0 &&
            w->microbatch == microbatch) {
            return pass(self, w, WHY_BACKWARD);
        }
    }
    assert(false && "a microbatch that is ready has a worker");
    return false;
}

/* The worker with the lowest microbatch of those whose gate has opened, or NULL. */
static worker *
at_open_gate(const smp_server *server)
{
    worker *best = NULL;

    for (worker *w = server->workers; server->turns != NULL && w != NULL; w = w->next) {
        if (w->state == WORKER_PENDING && w->gate >= 0 &&
            (best == NULL || w->microbatch < best->microbatch) &&
            smp_turns_may_enter(server->turns, w->gate, w->microbatch)) {
            best = w;
        }
    }
    return best;
}

/* Some worker that is inside a task, for unwinding; NULL: none. */
static worker *
any_pending(const smp_server *server)
{
    for (worker *w = server->workers; w != NULL; w = w->next) {
        if (w->state == WORKER_PENDING) {
            return w;
        }
    }
    return NULL;
}

/* Self has nothing to do: finds who has.  Returns when self was given a reason to go
 * on (self->why). */
static void
dispatch(worker *self)
{
    smp_server *server = self->server;
    bool        block = false;

    if (self->why == WHY_SERVE) {
        self->why = WHY_NOTHING;
        sort_again(server);
    }
    for (;;) {
        ptrdiff_t best;
        worker   *entering;

        read_comm(server, block);
        block = false;
        if (atomic_exchange(&server->interrupted, false)) {
            fail_with(server, SMP_ERR_INTERRUPTED);
        }
        if (!server->failed && step_is_over(server) &&
            (self->state == WORKER_PENDING || any_pending(server) != NULL)) {
            fail_with(server, SMP_ERR_MALFORMED); /* an end that came too early */
        }
        if (server->failed) {
            worker *w = self->state == WORKER_PENDING ? self : any_pending(server);

            if (w != NULL) {
                (void)pass(self, w, WHY_FAILED);
                return;
            }
        }
        if (server->failed || step_is_over(server)) {
            assert(self->state == WORKER_IDLE);
            self->next_idle = server->idle;
            server->idle = self;
            smp_seat_give(&server->main_seat);
            smp_seat_wait(&self->seat, 0);
            return;
        }
        best = inbox_best(server, SMP_BACKWARD);
        if (best >= 0) {
            if (act_on(self, inbox_remove(server, (size_t)best))) {
                return;
            }
            continue;
        }
        if (start_turn(self, SMP_BACKWARD)) {
            return;
        }
        entering = at_open_gate(server);
        if (entering != NULL) {
            (void)pass(self, entering, WHY_TURN);
            return;
        }
        best = inbox_best(server, SMP_FORWARD);
        if (best >= 0) {
            if (act_on(self, inbox_remove(server, (size_t)best))) {
                return;
            }
            continue;
        }
        if (start_turn(self, SMP_FORWARD)) {
            return;
        }
        block = !server->failed;
    }
}

/* --------------------------------------------------------------- the workers */

static _Thread_local worker *this_worker;

static void
run_task(worker *self)
{
    smp_server  *server = self->server;
    smp_message *message = self->message;

    self->message = NULL;
    self->state = WORKER_EXECUTING;
    if (self->why == WHY_ROOT) {
        self->entry = -1;
        self->phase = SMP_FORWARD;
        note_event(self, SMP_EVENT_BEGIN);
        server->ops.run_root(server->ctx, self->microbatch);
        if (!server->failed) {
            smp_schedule_done(server->schedule, self->microbatch);
        }
        if (server->turns != NULL) {
            smp_turns_forward_done(server->turns, self->microbatch);
        }
    } else {
        const smp_envelope *e = smp_message_envelope(message);

        self->entry = e->entry;
        self->phase = (smp_phase)e->phase;
        note_event(self, SMP_EVENT_BEGIN);
        server->ops.execute(server->ctx, message);
    }
    note_event(self, SMP_EVENT_END);
    self->state = WORKER_IDLE;
}

static void *
worker_main(void *arg)
{
    worker     *self = arg;
    smp_server *server = self->server;

    this_worker = self;
    smp_seat_wait(&self->seat, 0);
    if (self->why != WHY_QUIT) {
        server->ops.worker_begin(server->ctx);
        while (self->why != WHY_QUIT) {
            if (self->why == WHY_REQUEST || self->why == WHY_ROOT) {
                run_task(self);
            }
            dispatch(self);
        }
        server->ops.worker_end(server->ctx);
    }
    return NULL;
}

/* ----------------------------------------------------------------- the public */

smp_status
smp_server_create(smp_comm *comm, int rank, int spin_us, const smp_server_ops *ops,
                  void *ctx, smp_server **out)
{
    smp_server *server = calloc(1, sizeof(*server));

    if (server == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    server->comm = comm;
    server->rank = rank;
    server->spin_us = spin_us;
    server->ops = *ops;
    server->ctx = ctx;
    *out = server;
    return SMP_OK;
}

void
smp_server_destroy(smp_server *server)
{
    if (server == NULL) {
        return;
    }
    for (worker *w = server->workers; w != NULL;) {
        worker *next = w->next;

        give(w, WHY_QUIT);
        pthread_join(w->thread, NULL);
        free(w);
        w = next;
    }
    inbox_forget(server, UINT32_MAX);
    smp_message_free(server->end);
    free(server->inbox);
    free(server);
}

smp_status
smp_server_step(smp_server *server, uint32_t step, smp_schedule *schedule,
                smp_message **end)
{
    worker    *first;
    bool       interrupted = false;
    smp_status status = SMP_OK;

    *end = NULL;
    server->step = step;
    server->schedule = schedule;
    server->failed = false;
    server->failure = SMP_OK;
    server->timeline.count = 0;
    first = idle_worker(server);
    if (first == NULL) {
        smp_schedule_destroy(schedule);
        server->schedule = NULL;
        return SMP_ERR_NO_THREAD;
    }
    give(first, WHY_SERVE);
    while (!smp_seat_wait_signal(&server->main_seat)) {
        if (!interrupted && !server->ops.check_signals(server->ctx)) {
            interrupted = true;
            atomic_store(&server->interrupted, true);
            smp_comm_wake(server->comm);
        }
    }
    atomic_store(&server->interrupted, false);
    if (server->failed) {
        status = server->failure == SMP_OK ? SMP_ERR_CLOSED : server->failure;
        inbox_forget(server, step);
    }
    if (interrupted) {
        status = SMP_ERR_INTERRUPTED;
    }
    *end = server->end;
    server->end = NULL;
    smp_schedule_destroy(server->schedule);
    server->schedule = NULL;
    return status;
}

uint64_t
smp_server_next_call(smp_server *server)
{
    return ((uint64_t)(unsigned)server->rank << 48) | ++server->calls;
}

/* Leaves the baton until `why_wanted`.  SMP_ERR_CLOSED when the step failed. */
static smp_status
wait_for(worker *self, uint64_t call, int32_t gate, reason why_wanted)
{
    self->state = WORKER_PENDING;
    self->waits_for = call;
    self->gate = gate;
    note_event(self, SMP_EVENT_WAIT);
    dispatch(self);
    self->state = WORKER_EXECUTING;
    if (self->why != why_wanted) {
        assert(self->why == WHY_FAILED);
        return SMP_ERR_CLOSED;
    }
    note_event(self, SMP_EVENT_GO);
    return SMP_OK;
}

smp_status
smp_server_wait(smp_server *server, uint64_t call, smp_message **response)
{
    worker    *self = this_worker;
    smp_status status;

    if (server->failed) {
        return SMP_ERR_CLOSED;
    }
    for (size_t i = 0; i < server->ninbox; i++) {
        const smp_envelope *e = smp_message_envelope(server->inbox[i].message);

        if (e->kind == SMP_MSG_RESPONSE && e->call == call) {
            *response = inbox_remove(server, i);
            return SMP_OK;
        }
    }
    smp_jitter();
    status = wait_for(self, call, -1, WHY_RESPONSE);
    if (status == SMP_OK) {
        *response = self->message;
        self->message = NULL;
    }
    return status;
}

void
smp_server_forward_done(smp_server *server, int32_t microbatch)
{
    if (server->turns != NULL) {
        smp_turns_forward_done(server->turns, microbatch);
    }
}

smp_status
smp_server_backward_point(smp_server *server, int32_t microbatch)
{
    worker    *self = this_worker;
    smp_status status;

    if (server->failed) {
        return SMP_ERR_CLOSED;
    }
    smp_schedule_ready(server->schedule, microbatch);
    status = wait_for(self, 0, -1, WHY_BACKWARD);
    if (status == SMP_OK) {
        self->phase = SMP_BACKWARD;
    }
    return status;
}

void
smp_server_set_turns(smp_server *server, smp_turns *turns)
{
    server->turns = turns;
}

smp_status
smp_server_await_turn(smp_server *server, int32_t gate, int32_t microbatch)
{
    if (server->turns == NULL || smp_turns_may_enter(server->turns, gate, microbatch)) {
        return SMP_OK;
    }
    if (server->failed) {
        return SMP_ERR_CLOSED;
    }
    return wait_for(this_worker, 0, gate, WHY_TURN);
}

void
smp_server_hear(smp_server *server)
{
    smp_message *message;

    while (server->end == NULL &&
           smp_comm_receive(server->comm, 0, &message) == SMP_OK) {
        sort_in(server, message);
    }
}

void
smp_server_fail(smp_server *server)
{
    server->failed = true;
}

bool
smp_server_failed(const smp_server *server)
{
    return server->failed;
}

uint64_t
smp_server_switches(const smp_server *server)
{
    return server->switches;
}

smp_timeline *
smp_server_timeline(smp_server *server)
{
    return &server->timeline;
}
