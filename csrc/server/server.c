/* The module server: the choice of the next thread to work.
 *
 * Everything below is guarded by the baton: only its holder reads or writes the server,
 * without a lock.  The exceptions are atomic and say so.
 *
 * server/choice.h chooses from the ready list; server/control.h handles messages
 * without a task.
 */
#define _GNU_SOURCE
#include "server/server.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "common/jitter.h"
#include "common/mix.h"
#include "server/backlog.h"
#include "server/baton.h"
#include "server/calls.h"
#include "server/choice.h"
#include "server/control.h"
#include "server/grid.h"
#include "server/ready_list.h"
#include "server/replay.h"
#include "server/rest.h"
#include "server/sequence.h"
#include "server/stage.h"
#include "server/workers.h"

struct smp_server {
    smp_comm      *comm; /* borrowed */
    smp_grid       grid;
    smp_server_ops ops;
    void          *ctx;      /* borrowed */
    smp_workers   *workers;  /* owned */
    smp_backlog   *backlog;  /* owned */
    smp_board     *board;    /* owned */
    smp_stage     *stage;    /* owned */
    smp_sequence  *sequence; /* borrowed from stage; NULL: an order of its own */
    smp_replay    *replay;   /* owned; NULL: no static mode */
    smp_control   *control;  /* owned */
    smp_ready_list ready;
    bool           overtaken; /* smp_choose()'s */
    uint32_t       step;
    uint64_t       step_kind; /* for the replay */
    smp_turns     *turns;     /* borrowed; NULL: no gates */
    smp_schedule  *schedule;  /* owned during a step; NULL but on pp_rank 0 */
    uint64_t       calls;
    _Atomic bool interrupted; /* set by the main thread while a worker has the baton */
    smp_rest     rest;        /* the main thread's */
    int          forward;     /* where its signals go on to; -1: nowhere */
    smp_timeline timeline;
};

static void
note_event(smp_server *server, const smp_worker *self, smp_event_kind kind)
{
    smp_timeline_add(&server->timeline, (smp_event){.microbatch = self->microbatch,
                                                    .entry = self->entry,
                                                    .worker = self->number,
                                                    .kind = (uint8_t)kind,
                                                    .phase = (uint8_t)self->phase});
}

static smp_work
work_of(const smp_worker *self)
{
    return (smp_work){
        .microbatch = self->microbatch, .entry = self->entry, .phase = self->phase};
}

/* ---------------------------------------------------------------- the next run */

/* Gives a new task to self when it is idle, else to an idle worker.  False: there is
 * no thread for it. */
static bool
assign(smp_server *server, smp_worker *self, smp_why why, smp_message *request,
       int32_t microbatch)
{
    smp_worker *w =
        self->state == SMP_WORKER_IDLE ? self : smp_workers_take_idle(server->workers);

    if (w == NULL) {
        smp_control_fail(server->control, SMP_ERR_NO_THREAD);
        return false;
    }
    w->message = request;
    w->microbatch = microbatch;
    w->task = request == NULL ? smp_call_of_root(microbatch)
                              : smp_message_envelope(request)->number;
    smp_workers_pass(self, w, why);
    return true;
}

/* Takes the message. */
static bool
act_on(smp_server *server, smp_worker *self, smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);

    if (e->kind == SMP_MSG_RESPONSE) {
        smp_worker *w = smp_workers_on_call(server->workers, e->call);

        w->message = message;
        smp_workers_pass(self, w, SMP_WHY_RESPONSE);
        return true;
    }
    if (!assign(server, self, SMP_WHY_REQUEST, message, e->microbatch)) {
        smp_message_free(message);
        return false;
    }
    return true;
}

/* The microbatch begins a phase. */
static bool
start_turn(smp_server *server, smp_worker *self, smp_phase phase, int32_t microbatch)
{
    smp_worker *w;

    smp_schedule_start(server->schedule, phase, microbatch);
    if (phase == SMP_FORWARD) {
        return assign(server, self, SMP_WHY_ROOT, NULL, microbatch);
    }
    w = smp_workers_on_schedule(server->workers, microbatch);
    assert(w != NULL && "a microbatch that is ready has a worker");
    smp_workers_pass(self, w, SMP_WHY_BACKWARD);
    return true;
}

/* Whether runs are chosen from the ready list alone, for their order is kept. */
static bool
keeps_order(const smp_server *server)
{
    return server->sequence != NULL || server->replay != NULL;
}

/* Whether the worker of the replay's next run, if it is known, waits for it still. */
static bool
may_come(const smp_server *server, const smp_ready *run)
{
    const smp_worker *w = smp_workers_first(server->workers);

    if (run->kind == SMP_READY_REQUEST || run->kind == SMP_READY_TURN) {
        return true;
    }
    while (w != NULL && (w->state != SMP_WORKER_PENDING || w->task != run->call ||
                         w->phase != run->phase)) {
        w = w->next;
    }
    if (w == NULL) {
        return false;
    }
    switch ((smp_wait_kind)w->wait.kind) {
    case SMP_WAIT_GATE:
        return run->kind == SMP_READY_GATE;
    case SMP_WAIT_ISSUE:
        return run->kind == SMP_READY_ISSUE;
    case SMP_WAIT_COLLECTIVE:
        return run->kind == SMP_READY_OVER;
    case SMP_WAIT_BALLOT:
        return run->kind == SMP_READY_BALLOT;
    case SMP_WAIT_OUTPUTS:
    case SMP_WAIT_GRADIENTS:
        return run->kind == SMP_READY_RESPONSE;
    default:
        return false;
    }
}

/* The index of the ready run that this rank chooses for itself; -1: none. */
static ptrdiff_t
choose_here(smp_server *server)
{
    const smp_ready_list *list = &server->ready;
    smp_replay           *replay = server->replay;

    if (replay != NULL && smp_replay_is_on(replay)) {
        const ptrdiff_t  found = smp_replay_find(replay, list->ready, list->n);
        const smp_ready *next = smp_replay_next(replay);

        if (found < 0 && smp_replay_is_on(replay) && next != NULL &&
            !may_come(server, next)) {
            smp_replay_leave(replay);
        }
        if (found >= 0 || smp_replay_is_on(replay)) {
            return found;
        }
    }
    return smp_choose(list->ready, list->n, &server->overtaken);
}

/* The first one to run of the ready list.  False: none. */
static bool
choose(smp_server *server, smp_ready *next)
{
    const smp_ready_list   *list = &server->ready;
    const smp_ready_sources sources = {.step = server->step,
                                       .backlog = server->backlog,
                                       .workers = server->workers,
                                       .lineup = smp_stage_lineup(server->stage),
                                       .ballots = smp_stage_ballots(server->stage),
                                       .turns = server->turns,
                                       .schedule = server->schedule};
    const bool              follows =
        server->sequence != NULL && !smp_sequence_leads(server->sequence);
    smp_status status = smp_ready_list_fill(&server->ready, &sources);
    ptrdiff_t  best = -1;

    if (status == SMP_OK) {
        best = follows ? smp_sequence_find(server->sequence, list->ready, list->n)
                       : choose_here(server);
    }
    if (best >= 0 && server->replay != NULL) {
        status = smp_replay_run(server->replay, &list->ready[best]);
    }
    if (status != SMP_OK) {
        smp_control_fail(server->control, status);
        return false;
    }
    if (best < 0) {
        return false;
    }
    *next = list->ready[best];
    if (server->sequence != NULL) {
        smp_sequence_run(server->sequence, next);
        smp_stage_tell_runs(server->stage);
    }
    return true;
}

/* Runs that one.  False: none, or no thread for it. */
static bool
run_next(smp_server *server, smp_worker *self)
{
    smp_ready next;
    smp_why   why;

    if (!choose(server, &next)) {
        return false;
    }
    switch (next.kind) {
    case SMP_READY_GATE:
        why = SMP_WHY_TURN;
        break;
    case SMP_READY_ISSUE:
        why = SMP_WHY_ISSUE;
        break;
    case SMP_READY_OVER:
        why = SMP_WHY_OVER;
        break;
    case SMP_READY_BALLOT:
        why = SMP_WHY_BALLOT;
        break;
    case SMP_READY_TURN:
        return start_turn(server, self, next.phase, next.microbatch);
    default:
        return act_on(server, self, smp_backlog_take(server->backlog, next.index));
    }
    smp_workers_pass(self, smp_workers_number(server->workers, next.index), why);
    return true;
}

static bool
no_work_is_left(const smp_server *server)
{
    return server->schedule != NULL ? smp_schedule_finished(server->schedule)
                                    : smp_control_has_end(server->control);
}

static bool
step_is_over(smp_server *server)
{
    return no_work_is_left(server) &&
           (server->schedule == NULL || smp_control_is_settled(server->control));
}

/* The run of a sequence gives the baton away. */
static void
come_to_rest(smp_server *server, const smp_worker *self)
{
    const smp_wait over = {.work = work_of(self), .kind = SMP_WAIT_NOTHING};

    if (server->sequence != NULL && !smp_control_failed(server->control)) {
        smp_sequence_rest(server->sequence,
                          self->state == SMP_WORKER_PENDING ? &self->wait : &over);
        smp_control_check(server->control, NULL);
    }
}

/* A worker inside a task, for unwinding: self first; NULL: none. */
static smp_worker *
who_unwinds(const smp_server *server, smp_worker *self)
{
    return self->state == SMP_WORKER_PENDING ? self
                                             : smp_workers_pending(server->workers);
}

/* The step is over here: gives the baton to the main thread, and waits for the next. */
static void
give_to_main(smp_server *server, smp_worker *self)
{
    assert(self->state == SMP_WORKER_IDLE);
    smp_workers_put_idle(self);
    smp_rest_give(&server->rest);
    smp_seat_wait(&self->seat, 0);
}

/* Self has nothing to do: finds the worker with work.  Returns when self has a reason
 * to go on (self->why). */
static void
dispatch(smp_server *server, smp_worker *self)
{
    smp_control *control = server->control;

    if (self->why == SMP_WHY_SERVE) {
        self->why = SMP_WHY_NOTHING;
        smp_control_sort_early(control);
    }
    come_to_rest(server, self);
    for (;;) {
        smp_control_read(control);
        if (atomic_exchange(&server->interrupted, false) &&
            !smp_control_has_voted(control)) {
            smp_control_fail(control, SMP_ERR_INTERRUPTED);
        }
        if (!smp_control_failed(control) && no_work_is_left(server) &&
            who_unwinds(server, self) != NULL) { /* a premature end */
            smp_control_fail(control, SMP_ERR_MALFORMED);
        }
        if (smp_control_failed(control)) {
            smp_worker *w = who_unwinds(server, self);

            if (w != NULL) {
                smp_workers_pass(self, w, SMP_WHY_FAILED);
                return;
            }
        }
        if (smp_control_failed(control) || step_is_over(server)) {
            give_to_main(server, self);
            return;
        }
        if (run_next(server, self)) {
            return;
        }
        if (!smp_control_failed(control)) {
            smp_control_idle(control);
        }
    }
}

/* --------------------------------------------------------------------- the tasks */

static void
begin_work(smp_server *server, const smp_worker *self)
{
    note_event(server, self, SMP_EVENT_BEGIN);
    smp_board_work(server->board, work_of(self));
}

void
smp_server_go_on_with(smp_server *server, int32_t entry)
{
    smp_worker *self = smp_workers_self();

    note_event(server, self, SMP_EVENT_END);
    self->entry = entry;
    begin_work(server, self);
}

void
smp_server_note(smp_server *server, smp_event_kind kind, int32_t entry, int32_t about)
{
    const smp_worker *self = smp_workers_self();

    smp_timeline_add(&server->timeline, (smp_event){.microbatch = self->microbatch,
                                                    .entry = entry,
                                                    .worker = self->number,
                                                    .kind = (uint8_t)kind,
                                                    .phase = (uint8_t)self->phase,
                                                    .about = about});
}

static void
run_task(smp_server *server, smp_worker *self)
{
    smp_message *message = self->message;

    self->message = NULL;
    self->state = SMP_WORKER_EXECUTING;
    if (self->why == SMP_WHY_ROOT) {
        self->entry = -1;
        self->phase = SMP_FORWARD;
        begin_work(server, self);
        server->ops.run_root(server->ctx, self->microbatch);
        if (!smp_control_failed(server->control)) {
            smp_schedule_done(server->schedule, self->microbatch);
        }
        smp_server_forward_done(server, self->microbatch);
    } else {
        const smp_envelope *e = smp_message_envelope(message);

        self->entry = e->entry;
        self->phase = (smp_phase)e->phase;
        begin_work(server, self);
        server->ops.execute(server->ctx, message);
    }
    note_event(server, self, SMP_EVENT_END);
    self->state = SMP_WORKER_IDLE;
}

/* A worker's life. */
static void
run_worker(void *ctx, smp_worker *self)
{
    smp_server *server = ctx;

    server->ops.worker_begin(server->ctx);
    while (self->why != SMP_WHY_QUIT) {
        if (self->why == SMP_WHY_REQUEST || self->why == SMP_WHY_ROOT) {
            run_task(server, self);
        }
        dispatch(server, self);
    }
    server->ops.worker_end(server->ctx);
}

/* Leaves the baton until `wanted`.  SMP_ERR_CLOSED when the step failed. */
static smp_status
wait_for(smp_server *server, smp_worker *self, smp_wait what, smp_why wanted)
{
    what.work = work_of(self);
    self->state = SMP_WORKER_PENDING;
    self->wait = what;
    note_event(server, self, SMP_EVENT_WAIT);
    smp_board_wait(server->board, self->number, what);
    dispatch(server, self);
    smp_board_go(server->board, self->number);
    self->state = SMP_WORKER_EXECUTING;
    self->call = 0;
    if (self->why != wanted) {
        assert(self->why == SMP_WHY_FAILED);
        return SMP_ERR_CLOSED;
    }
    note_event(server, self, SMP_EVENT_GO);
    return SMP_OK;
}

smp_status
smp_server_wait(smp_server *server, uint64_t call, smp_wait_kind kind, int32_t entry,
                int owner, smp_message **response)
{
    smp_worker *self = smp_workers_self();
    smp_status  status;

    if (smp_control_failed(server->control)) {
        return SMP_ERR_CLOSED;
    }
    if (!keeps_order(server)) {
        smp_message *early = smp_backlog_take_response(server->backlog, call);

        if (early != NULL) {
            *response = early;
            return SMP_OK;
        }
    }
    smp_jitter();
    self->call = call;
    status =
        wait_for(server, self,
                 (smp_wait){.kind = (int32_t)kind, .wanted = entry, .asked = owner},
                 SMP_WHY_RESPONSE);
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
    smp_worker *self = smp_workers_self();
    smp_status  status;

    if (smp_control_failed(server->control)) {
        return SMP_ERR_CLOSED;
    }
    smp_schedule_ready(server->schedule, microbatch);
    status =
        wait_for(server, self, (smp_wait){.kind = SMP_WAIT_SCHEDULE}, SMP_WHY_BACKWARD);
    if (status == SMP_OK) {
        self->phase = SMP_BACKWARD;
    }
    return status;
}

smp_status
smp_server_await_turn(smp_server *server, int32_t gate, int32_t microbatch)
{
    smp_worker *self = smp_workers_self();

    if (server->turns == NULL ||
        (!keeps_order(server) &&
         smp_turns_may_enter(server->turns, gate, microbatch))) {
        return SMP_OK;
    }
    if (smp_control_failed(server->control)) {
        return SMP_ERR_CLOSED;
    }
    self->gate = gate;
    return wait_for(server, self, (smp_wait){.kind = SMP_WAIT_GATE, .wanted = gate},
                    SMP_WHY_TURN);
}

smp_status
smp_server_line_up(smp_server *server, const smp_key *key)
{
    const smp_lineup *lineup = smp_stage_lineup(server->stage);
    const bool        may = lineup == NULL || smp_lineup_may_issue(lineup, key);

    if (!may) {
        smp_control_check(server->control, key);
    }
    if (smp_control_failed(server->control)) {
        return SMP_ERR_CLOSED;
    }
    if (may && (lineup == NULL || server->replay == NULL)) {
        return SMP_OK;
    }
    smp_jitter();
    return wait_for(server, smp_workers_self(),
                    (smp_wait){.kind = SMP_WAIT_ISSUE, .key = *key}, SMP_WHY_ISSUE);
}

smp_status
smp_server_issued(smp_server *server, const smp_key *key)
{
    const smp_status status = smp_stage_issue(server->stage, key);

    if (status == SMP_OK) {
        smp_control_check(server->control, NULL);
    }
    return status;
}

smp_status
smp_server_await_collective(smp_server *server, const smp_key *key, uint64_t before,
                            const _Atomic bool *over)
{
    smp_worker *self = smp_workers_self();
    smp_status  status = SMP_OK;

    if (smp_control_failed(server->control)) {
        return SMP_ERR_CLOSED;
    }
    if (keeps_order(server) || !atomic_load(over)) {
        smp_jitter();
        self->over = over;
        status = wait_for(
            server, self,
            (smp_wait){.kind = SMP_WAIT_COLLECTIVE, .issued = before, .key = *key},
            SMP_WHY_OVER);
    }
    if (status == SMP_OK) {
        smp_stage_complete(server->stage);
    }
    return status;
}

smp_status
smp_server_agree(smp_server *server, const smp_ballot_list *list, bool for_all,
                 smp_agreement *out)
{
    smp_worker  *self = smp_workers_self();
    smp_ballots *ballots = smp_stage_ballots(server->stage);
    const bool   ordered = keeps_order(server);
    smp_status   status = SMP_OK;

    *out = (smp_agreement){.complete = false};
    if (smp_control_failed(server->control)) {
        return SMP_ERR_CLOSED;
    }
    if (smp_ballots_are_left(ballots)) {
        return SMP_OK;
    }
    status = smp_stage_cast(server->stage, list);
    if (status == SMP_OK && (list->n > 0 || for_all)) {
        if (!ordered) {
            smp_control_read(server->control);
        }
        if (ordered || !smp_ballots_are_decided(ballots, &list->ballot, for_all)) {
            smp_jitter();
            self->ballot = list->ballot;
            self->for_all = for_all;
            status = wait_for(
                server, self,
                (smp_wait){.kind = SMP_WAIT_BALLOT, .wanted = list->ballot.entry},
                SMP_WHY_BALLOT);
        }
        (void)smp_ballots_read(ballots, &list->ballot, &out->outcome);
    }
    out->complete = smp_ballots_are_complete(ballots, &list->ballot);
    smp_ballots_close(ballots, &list->ballot);
    return status;
}

uint64_t
smp_server_issued_so_far(const smp_server *server)
{
    return smp_stage_issued(server->stage);
}

uint64_t
smp_server_next_call(smp_server *server)
{
    return ((uint64_t)(unsigned)server->grid.pp_rank << 48) | ++server->calls;
}

void
smp_server_fail(smp_server *server)
{
    smp_control_fail(server->control, SMP_OK);
}

bool
smp_server_failed(const smp_server *server)
{
    return smp_control_failed(server->control);
}

/* ------------------------------------------------------------- the main thread's */

static void
take_note(void *ctx, smp_message *note)
{
    smp_server *server = ctx;

    server->ops.note(server->ctx, note);
}

static const smp_key *
wanted_key(void *ctx)
{
    const smp_server *server = ctx;
    const smp_worker *w = smp_workers_on_issue(server->workers);

    return w == NULL ? NULL : &w->wait.key;
}

static uint64_t
collectives_over(void *ctx)
{
    const smp_server *server = ctx;
    uint64_t          over = 0;

    for (const smp_worker *w = smp_workers_first(server->workers); w != NULL;
         w = w->next) {
        over += w->state == SMP_WORKER_PENDING && w->wait.kind == SMP_WAIT_COLLECTIVE &&
                atomic_load(w->over);
    }
    return over;
}

static smp_status
create_control(smp_server *server, const smp_server_place *place)
{
    static const smp_control_ops ops = {
        .note = take_note, .wanted = wanted_key, .over = collectives_over};
    const smp_control_parts parts = {.comm = server->comm,
                                     .names = place->names,
                                     .board = server->board,
                                     .backlog = server->backlog,
                                     .stage = server->stage,
                                     .replay = server->replay};

    return smp_control_create(&parts, &server->grid, &ops, server, &server->control);
}

smp_status
smp_server_create(smp_comm *comm, const smp_server_place *place, int spin_us,
                  const smp_server_ops *ops, void *ctx, smp_server **out)
{
    smp_server *server = calloc(1, sizeof(*server));
    smp_status  status;

    if (server == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    server->comm = comm;
    server->grid = smp_grid_of(place->rank, smp_comm_size(comm), place->pipelines);
    server->ops = *ops;
    server->ctx = ctx;
    server->forward = -1;
    status = smp_backlog_create(&server->backlog);
    if (status != SMP_OK) {
        goto err_free_server;
    }
    status = smp_stage_create(comm, &server->grid, place->in_sequence, &server->stage);
    if (status != SMP_OK) {
        goto err_destroy_backlog;
    }
    server->sequence = smp_stage_sequence(server->stage);
    status = smp_board_create(place->rank, server->grid.pp_size,
                              place->in_sequence ? "dp_rank" : "tp_rank", place->names,
                              &server->board);
    if (status != SMP_OK) {
        goto err_destroy_stage;
    }
    if (place->recording_steps > 0 &&
        (server->sequence == NULL || smp_sequence_leads(server->sequence))) {
        status = smp_replay_create(place->rank, (uint32_t)place->recording_steps,
                                   &server->replay);
        if (status != SMP_OK) {
            goto err_destroy_board;
        }
    }
    status = create_control(server, place);
    if (status != SMP_OK) {
        goto err_destroy_replay;
    }
    status = smp_workers_create(spin_us, run_worker, server, &server->workers);
    if (status != SMP_OK) {
        goto err_destroy_control;
    }
    status = smp_rest_init(&server->rest);
    if (status != SMP_OK) {
        goto err_destroy_workers;
    }
    *out = server;
    return SMP_OK;

err_destroy_workers:
    smp_workers_destroy(server->workers);
err_destroy_control:
    smp_control_destroy(server->control);
err_destroy_replay:
    smp_replay_destroy(server->replay);
err_destroy_board:
    smp_board_destroy(server->board);
err_destroy_stage:
    smp_stage_destroy(server->stage);
err_destroy_backlog:
    smp_backlog_destroy(server->backlog);
err_free_server:
    free(server);
    return status;
}

void
smp_server_destroy(smp_server *server)
{
    if (server == NULL) {
        return;
    }
    smp_workers_destroy(server->workers);
    smp_ready_list_fini(&server->ready);
    smp_rest_fini(&server->rest);
    smp_control_destroy(server->control);
    smp_replay_destroy(server->replay);
    smp_board_destroy(server->board);
    smp_stage_destroy(server->stage);
    smp_backlog_destroy(server->backlog);
    free(server);
}

void
smp_server_leave_out(smp_server *server, uint32_t step)
{
    server->step = step;
    smp_control_leave_out(server->control, step);
}

/* The workers run the step.  Whether check_signals has interrupted it. */
static bool
await_step(smp_server *server)
{
    bool interrupted = false;

    while (!smp_rest_wait(&server->rest, server->forward)) {
        if (!server->ops.check_signals(server->ctx) && !interrupted) {
            interrupted = true;
            smp_server_interrupt(server);
        }
    }
    atomic_store(&server->interrupted, false);
    return interrupted;
}

smp_status
smp_server_step(smp_server *server, uint32_t step, smp_schedule *schedule,
                smp_message **end)
{
    smp_worker *first;
    bool        interrupted;
    smp_status  status;

    *end = NULL;
    smp_control_begin(server->control, step);
    if (server->replay != NULL) {
        smp_replay_begin(server->replay, step, server->step_kind,
                         schedule == NULL ? 0 : smp_schedule_microbatches(schedule));
    }
    server->step = step;
    server->overtaken = false;
    server->schedule = schedule;
    server->timeline.count = 0;
    first = smp_workers_take_idle(server->workers);
    if (first == NULL) {
        smp_schedule_destroy(schedule);
        server->schedule = NULL;
        return SMP_ERR_NO_THREAD;
    }
    smp_board_begin(server->board, step);
    smp_workers_give(first, SMP_WHY_SERVE);
    interrupted = await_step(server);
    smp_board_end(server->board);
    status = smp_control_end(server->control, end);
    if (interrupted && (status != SMP_OK || *end == NULL)) {
        status = SMP_ERR_INTERRUPTED;
    }
    smp_schedule_destroy(server->schedule);
    server->schedule = NULL;
    return status;
}

void
smp_server_describe(smp_server *server, const void *bytes, size_t nbytes)
{
    const unsigned char *at = bytes;

    server->step_kind = 0;
    for (size_t i = 0; i < nbytes; i++) {
        server->step_kind = smp_mix(server->step_kind, at[i]);
    }
    smp_control_describe(server->control, bytes, nbytes);
}

smp_replay_verdict
smp_server_verdict(const smp_server *server)
{
    return smp_control_verdict(server->control);
}

void
smp_server_end_replay(smp_server *server)
{
    smp_control_end_replay(server->control);
}

void
smp_server_set_turns(smp_server *server, smp_turns *turns)
{
    server->turns = turns;
    smp_control_set_turns(server->control, turns);
}

bool
smp_server_collectives_ended(smp_server *server, int64_t timeout_ns, uint64_t *least,
                             uint64_t *most)
{
    if (!smp_control_await_stage(server->control, timeout_ns)) {
        return false;
    }
    smp_stage_range(server->stage, least, most);
    return true;
}

bool
smp_server_ended_in_order(const smp_server *server)
{
    return smp_stage_ended_in_order(server->stage);
}

bool
smp_server_all_ended_in_order(const smp_server *server)
{
    return smp_stage_ended_in_order(server->stage) &&
           !smp_stage_one_failed(server->stage);
}

void
smp_server_hear(smp_server *server, int64_t timeout_ns)
{
    smp_control_hear(server->control, timeout_ns);
}

void
smp_server_interrupt(smp_server *server)
{
    atomic_store(&server->interrupted, true);
    smp_comm_wake(server->comm);
}

smp_board *
smp_server_board(smp_server *server)
{
    return server->board;
}

const char *
smp_server_mismatch(const smp_server *server)
{
    return smp_control_mismatch(server->control);
}

const char *
smp_server_awaited(const smp_server *server)
{
    return smp_control_awaited(server->control);
}

int
smp_server_left(const smp_server *server)
{
    return smp_control_left(server->control);
}

size_t
smp_server_write_deadlock(smp_server *server, char *out, size_t room)
{
    return smp_control_write_deadlock(server->control, out, room);
}

int
smp_server_signal_fd(const smp_server *server)
{
    return server->rest.pipe[1];
}

void
smp_server_forward_signals(smp_server *server, int forward)
{
    server->forward = forward;
}

smp_timeline *
smp_server_timeline(smp_server *server)
{
    return &server->timeline;
}
