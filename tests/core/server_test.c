/* Module servers of one process, each with its own comm over shared memory.
 *
 * Modules are C functions: entry n > 0 calls entry n - 1 on the next rank and adds its
 * own; entry 0 answers at once; GATED passes a gate in microbatch order; FAULTY fails
 * the step.  A backward walks the same way back.  Each rank counts in a plain variable,
 * so that the thread sanitizer sees whether the baton excludes.
 */
#define _GNU_SOURCE
#define WORLD_SPIN_US 0
#include <limits.h>
#include <sched.h>
#include <time.h>

#include "server/detection.h"
#include "server/server.h"
#include "traffic.h"

#define MICROBATCHES 4
#define MOST_STEPS 1000

enum { HOPS = 5, GATED = 100, FAULTY = 101, SILENT = 102, WOKEN = 103, PATIENT };

typedef struct {
    world       *w;
    smp_server  *server;
    smp_turns   *turns;
    uint64_t     random;
    uint32_t     step;
    bool         delays;
    int32_t      first_entry; /* what the step function calls first */
    int32_t      faulty;      /* microbatch whose step function fails; -1: none */
    bool         no_backward;
    bool         no_request;   /* the step function waits for what nobody was asked */
    bool         interrupts;   /* it interrupts the step, between two barriers */
    bool         until_signal; /* SILENT runs until a signal came */
    bool         says_late;    /* check_signals answers when the step is over */
    long         tasks;        /* the baton's holder only */
    int          inside;
    int32_t      passed[MICROBATCHES]; /* the gate, in order */
    int          npassed;
    int          notes;
    int32_t      noted[MICROBATCHES]; /* of the first notes */
    int          mismatches;          /* pp_rank 0 was in another step */
    int          finished;     /* step functions that returned without an error */
    bool         heard;        /* that the step has failed */
    int          unwound;      /* tasks that were told that the step failed */
    int          begun, ended; /* workers */
    _Atomic int  signals;
    _Atomic bool in_gate;
} rank;

/* A clock that a test moves; 0: the real one. */
static _Atomic int64_t    clock_at;
static _Atomic long       looks_at_clock; /* of workers that ran a step function */
static _Thread_local bool looks_count;

int64_t __real_smp_clock_ns(void);
int64_t __wrap_smp_clock_ns(void);

int64_t
__wrap_smp_clock_ns(void)
{
    int64_t at = atomic_load(&clock_at);

    atomic_fetch_add(&looks_at_clock, looks_count);
    return at != 0 ? at : __real_smp_clock_ns();
}

/* What entry n makes of a value, in one thread. */
static uint64_t
answer(int from, int size, int32_t entry, uint64_t value)
{
    if (entry <= 0) {
        return value * 31 + (uint64_t)from;
    }
    return answer((from + 1) % size, size, entry - 1, value * 3 + (uint64_t)from) + 1;
}

/* Rests at times.  It does not yield: on a busy machine that takes milliseconds. */
static void
wander(rank *self)
{
    uint64_t number = self->delays ? next_random(&self->random) : 1;

    if (number % 8 == 0) {
        nanosleep(&(struct timespec){.tv_nsec = (long)(number / 8 % 20000)}, NULL);
    }
}

static smp_status
send_to(rank *self, int dest, smp_envelope envelope)
{
    envelope.step = self->step;
    return smp_comm_send(self->w->comm, dest, &envelope, sizeof(envelope), NULL, 0);
}

static void
send_to_all(rank *self, smp_envelope envelope)
{
    for (int i = 0; i + 1 < self->w->size; i++) {
        (void)send_to(self, other(self->w, i), envelope);
    }
}

/* The worker gives the baton away in between. */
static smp_status
call(rank *self, int dest, smp_envelope envelope, uint64_t *result)
{
    smp_message *response;
    smp_status   status;

    envelope.call = smp_server_next_call(self->server);
    status = self->no_request ? SMP_OK : send_to(self, dest, envelope);
    if (status != SMP_OK) {
        return status;
    }
    wander(self);
    self->inside--;
    status = smp_server_wait(self->server, envelope.call,
                             envelope.phase == SMP_FORWARD ? SMP_WAIT_OUTPUTS
                                                           : SMP_WAIT_GRADIENTS,
                             envelope.entry, dest, &response);
    self->inside++;
    if (status == SMP_OK) {
        *result = smp_message_envelope(response)->seed;
        smp_message_free(response);
    }
    return status;
}

/* A module, or its backward: the same walk. */
static smp_status
run_entry(rank *self, const smp_envelope *e, uint64_t *result)
{
    smp_envelope next = {.kind = e->kind,
                         .phase = e->phase,
                         .microbatch = e->microbatch,
                         .entry = e->entry - 1,
                         .seed = e->seed * 3 + (uint64_t)self->w->rank};
    smp_status   status;

    wander(self);
    switch (e->entry) {
    case 0:
        *result = e->seed * 31 + (uint64_t)self->w->rank;
        return SMP_OK;
    case GATED:
        self->inside--;
        status = smp_server_await_turn(self->server, 0, e->microbatch);
        self->inside++;
        if (status != SMP_OK) {
            return status;
        }
        self->passed[self->npassed++] = e->microbatch;
        smp_turns_left(self->turns, 0, e->microbatch);
        *result = e->seed;
        return SMP_OK;
    case FAULTY:
        smp_server_fail(self->server);
        return SMP_ERR_CLOSED;
    default:
        status = call(self, (self->w->rank + 1) % self->w->size, next, result);
        *result += 1;
        return status;
    }
}

static void
execute(void *ctx, smp_message *request)
{
    rank        *self = ctx;
    smp_envelope e = *smp_message_envelope(request);
    int          source = request->source;
    uint64_t     result = 0;
    smp_status   status;

    smp_message_free(request);
    self->tasks++;
    self->inside++;
    if (self->inside != 1) {
        fprintf(stderr, "%d tasks at once\n", self->inside);
        abort();
    }
    if (e.entry == SILENT) {
        atomic_store(&self->w->shared->scratch[0], 1);
        while (self->until_signal && atomic_load(&self->signals) == 0) {
            sched_yield();
        }
        self->inside--;
        return;
    }
    if (e.entry == WOKEN) {
        self->w->barrier(self->w);
        self->w->barrier(self->w); /* a message is here */
        smp_comm_wake(self->w->comm);
        smp_server_hear(self->server, 0);
    } else if (e.entry == PATIENT) {
        self->w->barrier(self->w);
        atomic_store(&looks_at_clock, 0);
        looks_count = true;
        smp_server_hear(self->server, WORLD_DEADLINE_NS);
        looks_count = false;
        atomic_store(&looks_at_clock, LONG_MAX);
    }
    if (e.entry == WOKEN || e.entry == PATIENT) {
        self->heard = smp_server_failed(self->server);
        self->inside--;
        return;
    }
    status = run_entry(self, &e, &result);
    if (status == SMP_OK) {
        (void)send_to(self, source,
                      (smp_envelope){.kind = SMP_MSG_RESPONSE,
                                     .phase = e.phase,
                                     .microbatch = e.microbatch,
                                     .call = e.call,
                                     .seed = result});
    } else {
        self->unwound++;
        smp_server_fail(self->server);
    }
    self->inside--;
}

static smp_status
root(rank *self, int32_t mb)
{
    int          size = self->w->size;
    uint64_t     value = (uint64_t)mb + 10;
    uint64_t     got = 0;
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .microbatch = mb, .seed = value};
    smp_status   status;

    e.entry = self->first_entry;
    status = call(self, 1, e, &got);
    if (status == SMP_OK && self->first_entry == HOPS &&
        got != answer(1, size, HOPS, value)) {
        fprintf(stderr, "forward %d: another value\n", mb);
        abort();
    }
    if (status == SMP_OK) {
        e.entry = GATED;
        status = call(self, 1, e, &got);
    }
    if (status != SMP_OK || self->faulty == mb) {
        return status == SMP_OK ? SMP_ERR_INVALID : status;
    }
    smp_server_forward_done(self->server, mb);
    send_to_all(self, (smp_envelope){.kind = SMP_MSG_FORWARD_DONE, .microbatch = mb});
    if (self->no_backward) {
        return SMP_OK;
    }
    self->inside--;
    status = smp_server_backward_point(self->server, mb);
    self->inside++;
    if (status == SMP_OK) {
        e = (smp_envelope){.kind = SMP_MSG_BACKWARD,
                           .phase = SMP_BACKWARD,
                           .microbatch = mb,
                           .entry = HOPS - 1,
                           .seed = value};
        status = call(self, 1, e, &got);
    }
    if (status == SMP_OK && got != answer(1, size, HOPS - 1, value)) {
        fprintf(stderr, "backward %d: another value\n", mb);
        abort();
    }
    if (status == SMP_OK) {
        (void)send_to(self, 1,
                      (smp_envelope){.kind = SMP_MSG_RELEASE, .microbatch = mb});
        send_to_all(self, (smp_envelope){.kind = SMP_MSG_CLOSED, .microbatch = mb});
    }
    return status;
}

static void
run_root(void *ctx, int32_t mb)
{
    rank *self = ctx;

    self->inside++;
    if (self->inside != 1) {
        abort();
    }
    looks_count = true;
    if (self->interrupts) {
        self->w->barrier(self->w);
        self->w->barrier(self->w);
        smp_server_interrupt(self->server);
    }
    if (root(self, mb) == SMP_OK) {
        self->finished++;
    } else {
        self->unwound++;
        smp_server_fail(self->server);
    }
    self->inside--;
}

static void
take_note(void *ctx, smp_message *note)
{
    rank *self = ctx;

    if (self->notes < MICROBATCHES) {
        self->noted[self->notes] = smp_message_envelope(note)->microbatch;
    }
    self->notes++;
    if (smp_message_envelope(note)->kind == SMP_MSG_SETTLE) {
        self->mismatches++;
        smp_server_fail(self->server);
    }
    smp_message_free(note);
}

static void
worker_begin(void *ctx)
{
    ((rank *)ctx)->begun++;
}

static void
worker_end(void *ctx)
{
    ((rank *)ctx)->ended++;
}

static bool
check_signals(void *ctx)
{
    rank   *self = ctx;
    int64_t until = smp_clock_ns() + 100 * SMP_NS_PER_MS;

    atomic_fetch_add(&self->signals, 1);
    while (self->says_late && smp_clock_ns() < until) {
        sched_yield(); /* on a slow machine the step is not over then: nothing is seen
                        */
    }
    return false;
}

static const smp_server_ops ops = {.worker_begin = worker_begin,
                                   .worker_end = worker_end,
                                   .execute = execute,
                                   .run_root = run_root,
                                   .note = take_note,
                                   .check_signals = check_signals};

static const char *const names[WORLD_RANKS] = {"rank 0", "rank 1", "rank 2", "rank 3",
                                               "rank 4", "rank 5", "rank 6", "rank 7"};

static smp_status
begin(rank *self, world *w)
{
    static const int32_t once[] = {1};

    *self = (rank){
        .w = w, .random = (uint64_t)w->rank + 77, .first_entry = HOPS, .faulty = -1};
    if (smp_turns_create(1, once, &self->turns) != SMP_OK) {
        return SMP_ERR_NO_MEMORY;
    }
    return smp_server_create(
        w->comm, &(smp_server_place){.rank = w->rank, .pipelines = 1, .names = names},
        0, &ops, self, &self->server);
}

/* Ends the servers; no rank leaves while another still works. */
static void
finish(rank *self)
{
    self->w->barrier(self->w);
    smp_server_destroy(self->server);
    smp_turns_destroy(self->turns);
    CHECK(self->inside == 0);
    CHECK(self->begun == self->ended); /* each worker that began has ended */
}

/* One step as a rank of the job runs it: who fails tells the others. */
static smp_status
run_step(rank *self, smp_schedule_kind kind, int32_t active)
{
    smp_schedule *schedule = NULL;
    smp_message  *end;
    smp_status    status;

    self->step++;
    self->npassed = 0;
    self->unwound = 0;
    self->finished = 0;
    status = smp_turns_begin(self->turns, MICROBATCHES);
    smp_server_set_turns(self->server, self->turns);
    if (status == SMP_OK && self->w->rank == 0) {
        status = smp_schedule_create(kind, MICROBATCHES, active, NULL, 0, &schedule);
    }
    if (status != SMP_OK) {
        return status;
    }
    status = smp_server_step(self->server, self->step, schedule, &end);
    if (status == SMP_OK && self->w->rank == 0) {
        send_to_all(self, (smp_envelope){.kind = SMP_MSG_STEP_END});
    } else if (status != SMP_OK && end == NULL) {
        send_to_all(self, (smp_envelope){.kind = SMP_MSG_ABORT});
    }
    smp_message_free(end);
    return status;
}

static bool
gate_was_in_order(const rank *self)
{
    for (int i = 0; i < self->npassed; i++) {
        if (self->passed[i] != i) {
            return false;
        }
    }
    return self->npassed == MICROBATCHES;
}

/* ---------------------------------------------------------------------- steps */

TEST_RANK(nested_calls_answer_on_every_schedule)
{
    static const smp_schedule_kind kinds[] = {SMP_SCHEDULE_SIMPLE,
                                              SMP_SCHEDULE_INTERLEAVED};
    rank                           self;

    CHECK_OK(begin(&self, w));
    for (int kind = 0; kind < 2; kind++) {
        int32_t least = kinds[kind] == SMP_SCHEDULE_SIMPLE ? MICROBATCHES : 1;

        for (int32_t active = least; active <= MICROBATCHES; active++) {
            CHECK_OK(run_step(&self, kinds[kind], active));
            CHECK(w->rank != 0 || self.finished == MICROBATCHES);
            CHECK(w->rank != 1 || gate_was_in_order(&self));
        }
    }
    CHECK(w->rank != 1 || self.notes == 5 * MICROBATCHES * 3);
    CHECK(smp_server_timeline(self.server)->count > 0);
    finish(&self);
}

TEST_RANK(a_thousand_steps_with_random_delays)
{
    rank self;

    CHECK_OK(begin(&self, w));
    self.delays = true;
    for (int i = 0; i < world_times(MOST_STEPS); i++) {
        CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, MICROBATCHES));
        CHECK(w->rank != 1 || gate_was_in_order(&self));
    }
    /* Every thread was used again: there are no more than tasks of one step. */
    CHECK(self.begun <= MICROBATCHES * (HOPS + 2));
    finish(&self);
}

TEST_RANK(runs_without_backward_end_the_step)
{
    rank self;

    CHECK_OK(begin(&self, w));
    self.no_backward = true;
    for (int i = 0; i < 20; i++) {
        CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2));
        CHECK(w->rank != 0 || self.finished == MICROBATCHES);
    }
    finish(&self);
}

/* -------------------------------------------------------------------- failures */

/* The step of every rank ends, and the next one works. */
static void
fail_once_then_work(rank *self)
{
    int tasks_left;

    self->delays = true;
    CHECK_STATUS(run_step(self, SMP_SCHEDULE_INTERLEAVED, MICROBATCHES),
                 SMP_ERR_CLOSED);
    tasks_left = self->inside;
    CHECK(tasks_left == 0);
    CHECK(self->finished < MICROBATCHES);
    self->faulty = -1;
    self->first_entry = HOPS;
    CHECK_OK(run_step(self, SMP_SCHEDULE_INTERLEAVED, MICROBATCHES));
    CHECK(self->w->rank != 0 || self->finished == MICROBATCHES);
    CHECK(self->w->rank != 1 || gate_was_in_order(self));
}

TEST_RANK(a_failing_module_ends_the_step_everywhere)
{
    rank self;

    CHECK_OK(begin(&self, w));
    for (int i = 0; i < 30; i++) {
        self.first_entry = FAULTY;
        fail_once_then_work(&self);
    }
    finish(&self);
}

TEST_RANK(a_failing_step_function_ends_the_step_everywhere)
{
    rank self;

    CHECK_OK(begin(&self, w));
    for (int i = 0; i < 30; i++) {
        self.faulty = i % MICROBATCHES;
        fail_once_then_work(&self);
    }
    finish(&self);
}

static void
no_action(int number)
{
    (void)number;
}

/* Sends SIGUSR1 to the thread until its check_signals has run. */
typedef struct {
    rank     *self;
    pthread_t thread;
} nagger;

static void *
nag(void *arg)
{
    nagger *n = arg;

    while (n->self->says_late && atomic_load(&n->self->w->shared->scratch[1]) == 0) {
        sched_yield(); /* the end of the step is there */
    }
    while (atomic_load(&n->self->signals) == 0) {
        pthread_kill(n->thread, SIGUSR1);
        sched_yield();
    }
    return NULL;
}

TEST_RANK(a_signal_that_says_stop_ends_the_step)
{
    struct sigaction act = {.sa_handler = no_action};
    rank             self;

    sigaction(SIGUSR1, &act, NULL);
    CHECK_OK(begin(&self, w));
    self.first_entry = SILENT; /* never answered: only the signal can end it */
    self.until_signal = true;
    if (w->rank == 1) {
        nagger    n = {&self, pthread_self()};
        pthread_t thread;

        CHECK(pthread_create(&thread, NULL, nag, &n) == 0);
        CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 1), SMP_ERR_INTERRUPTED);
        pthread_join(thread, NULL);
    } else {
        CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 1), SMP_ERR_CLOSED);
    }
    CHECK(self.inside == 0);
    self.first_entry = HOPS;
    CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 1));
    finish(&self);
}

TEST_RANK(a_deadlock_is_found_and_says_who_waits)
{
    rank self;
    char said[4096];

    CHECK_OK(begin(&self, w));
    CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 1));
    self.first_entry = SILENT; /* nobody answers, and nobody has anything to do */
    if (w->rank == 0) {
        CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2), SMP_ERR_DEADLOCK);
        CHECK(smp_server_write_deadlock(self.server, said, sizeof(said)) ==
              strlen(said));
        CHECK_HAS(said, "rank 0: microbatch 0, forward: the step function waits "
                        "for module '?' on rank 1");
        CHECK_HAS(said, "rank 1 has nothing to run");
    } else {
        CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2), SMP_ERR_CLOSED);
    }
    CHECK(self.inside == 0);
    self.first_entry = HOPS;
    CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2));
    finish(&self);
}

TEST_RANK(a_rank_that_is_slow_or_late_is_no_deadlock)
{
    int64_t until;
    rank    self;

    CHECK_OK(begin(&self, w));
    until = smp_clock_ns() + SMP_NS_PER_S; /* the others look why, meanwhile */
    while (w->rank == w->size - 1 && smp_clock_ns() < until) {
        sched_yield();
    }
    CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2));
    finish(&self);
}

TEST_RANK(a_step_ends_when_the_others_have_left)
{
    rank self;

    if (w->rank != 0) {
        smp_comm_destroy(w->comm);
        w->comm = NULL;
        return;
    }
    CHECK_OK(begin(&self, w));
    self.first_entry = SILENT;
    while (!smp_comm_left(w->comm, 1)) {
        sched_yield();
    }
    CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2),
                 SMP_ERR_CLOSED); /* send */
    self.no_request = true;
    CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2), SMP_ERR_UNREACHABLE);
    CHECK(smp_server_left(self.server) >= 1);
    CHECK(self.inside == 0 && self.finished == 0);
    smp_server_destroy(self.server);
    smp_turns_destroy(self.turns);
}

/* pp_rank 0 needs all of them: here the last one is missing. */
TEST_RANK(a_step_ends_when_one_of_the_others_has_left)
{
    const int last = w->size - 1;
    rank      self;

    if (w->rank == last) {
        smp_comm_destroy(w->comm);
        w->comm = NULL;
    } else if (w->rank == 0) {
        CHECK_OK(begin(&self, w));
        self.no_request = true;
        while (!smp_comm_left(w->comm, last)) {
            sched_yield();
        }
        CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2), SMP_ERR_UNREACHABLE);
        CHECK(smp_server_left(self.server) == last);
        finish(&self);
        return;
    }
    w->barrier(w);
}

/* ---------------------------------------------------- messages written by hand */

static smp_status
send_raw(world *w, smp_envelope envelope, size_t nbytes)
{
    return smp_comm_send(w->comm, 1, &envelope, nbytes, NULL, 0);
}

/* Rank 0 writes by hand; the other ranks serve. */
static void
serve_one(rank *self, smp_status want)
{
    CHECK_STATUS(run_step(self, SMP_SCHEDULE_INTERLEAVED, 1), want);
}

/* The value of the next message to rank 0, which must be a response in `step`. */
static void
expect_response(world *w, uint32_t step, uint64_t call_number)
{
    smp_message *m;

    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
    CHECK(smp_message_envelope(m)->kind == SMP_MSG_RESPONSE);
    CHECK(smp_message_envelope(m)->step == step);
    CHECK(smp_message_envelope(m)->call == call_number);
    smp_message_free(m);
}

TEST_RANK(messages_of_the_next_step_wait_for_it)
{
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .step = 2, .call = 22};
    rank         self;

    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_OK);
        CHECK(self.tasks == 1);
        serve_one(&self, SMP_OK);
        CHECK(self.tasks == 2);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        CHECK_OK(send_raw(w, e, sizeof(e))); /* a step too early */
        e.step = 1;
        e.call = 11;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        expect_response(w, 1, 11);
        e.kind = SMP_MSG_STEP_END;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        expect_response(w, 2, 22);
        e.step = 2;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
}

TEST_RANK(what_came_early_is_acted_on_in_the_order_of_its_arrival)
{
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .step = 1};
    rank         self;

    if (w->rank == 0) {
        CHECK_OK(send_raw(w, e, sizeof(e))); /* leaves a gap before them */
        e = (smp_envelope){.kind = SMP_MSG_RELEASE, .step = 2};
        for (; e.microbatch < MICROBATCHES; e.microbatch++) {
            CHECK_OK(send_raw(w, e, sizeof(e)));
        }
    }
    w->barrier(w); /* rank 1 reads them at once */
    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_OK);
        CHECK(self.notes == 0);
        serve_one(&self, SMP_OK);
        CHECK(self.notes == MICROBATCHES);
        for (int32_t i = 0; i < MICROBATCHES; i++) {
            CHECK(self.noted[i] == i);
        }
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        expect_response(w, 1, 0);
        for (uint32_t step = 1; step <= 2; step++) {
            e = (smp_envelope){.kind = SMP_MSG_STEP_END, .step = step};
            CHECK_OK(send_raw(w, e, sizeof(e)));
        }
    }
    w->barrier(w);
}

/* Four requests wait when step 2 begins; answers come in the order of the work. */
TEST_RANK(one_forward_goes_before_a_backward_that_is_alone)
{
    static const struct {
        smp_msg_kind kind;
        int32_t      microbatch;
    } sent[] = {{SMP_MSG_FORWARD, 2},
                {SMP_MSG_FORWARD, 3},
                {SMP_MSG_BACKWARD, 1},
                {SMP_MSG_BACKWARD, 0}};
    static const uint64_t order[] = {4, 1, 3, 2}; /* calls: places in `sent`, from 1 */
    smp_envelope          e = {.step = 2};
    rank                  self;

    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_OK);
        serve_one(&self, SMP_OK);
        CHECK(self.tasks == 4);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        for (uint64_t i = 0; i < 4; i++) {
            e.kind = (uint8_t)sent[i].kind;
            e.phase = e.kind == SMP_MSG_BACKWARD ? SMP_BACKWARD : SMP_FORWARD;
            e.microbatch = sent[i].microbatch;
            e.call = i + 1;
            CHECK_OK(send_raw(w, e, sizeof(e)));
        }
        e = (smp_envelope){.kind = SMP_MSG_STEP_END, .step = 1};
        CHECK_OK(send_raw(w, e, sizeof(e)));
        for (int i = 0; i < 4; i++) {
            expect_response(w, 2, order[i]);
        }
        e.step = 2;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
}

TEST_RANK(messages_of_a_step_that_failed_are_dropped)
{
    smp_envelope e = {.kind = SMP_MSG_ABORT, .step = 1};
    rank         self;

    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_ERR_CLOSED);
        serve_one(&self, SMP_OK);
        CHECK(self.tasks == 1);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        CHECK_OK(send_raw(w, e, sizeof(e)));
        e.kind = SMP_MSG_FORWARD; /* sent before the failure was known */
        CHECK_OK(send_raw(w, e, sizeof(e)));
        e.kind = SMP_MSG_RESPONSE;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        e.kind = SMP_MSG_FORWARD;
        e.step = 2;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        expect_response(w, 2, 0);
        e.kind = SMP_MSG_STEP_END;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
}

TEST_RANK(what_no_server_wrote_fails_the_step)
{
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .step = 1};
    rank         self;

    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        for (int i = 0; i < 4; i++) {
            serve_one(&self, SMP_ERR_MALFORMED);
        }
        serve_one(&self, SMP_OK);
        CHECK(self.tasks == 0);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        smp_message *m;

        for (uint32_t step = 1; step <= 5; step++) {
            e = (smp_envelope){.kind = SMP_MSG_FORWARD, .step = step};
            if (step == 1) {
                CHECK_OK(send_raw(w, e, sizeof(e) - 1));
            } else if (step == 2) {
                e.kind = SMP_MSG_LAST + 1;
                CHECK_OK(send_raw(w, e, sizeof(e)));
            } else if (step == 3) {
                e.phase = 2; /* smp_choose() has no place for it */
                CHECK_OK(send_raw(w, e, sizeof(e)));
            } else if (step == 4) {
                CHECK_OK(send_raw(w, e, 0));
            } else {
                e.kind = SMP_MSG_RESPONSE; /* to a call that nobody made */
                e.call = 0;
                CHECK_OK(send_raw(w, e, sizeof(e)));
                e.kind = SMP_MSG_STEP_END;
                CHECK_OK(send_raw(w, e, sizeof(e)));
                continue;
            }
            CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
            CHECK(smp_message_envelope(m)->kind == SMP_MSG_ABORT);
            smp_message_free(m);
        }
    }
    w->barrier(w);
}

/* What no server wrote is there when the step has been interrupted, and is read while
 * its tasks unwind. */
TEST_RANK(of_two_failures_the_first_is_told)
{
    const smp_envelope e = {.kind = SMP_MSG_LAST + 1, .step = 1};
    rank               self;

    if (w->rank == 0) {
        CHECK_OK(begin(&self, w));
        self.no_request = true;
        self.interrupts = true;
        CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 1), SMP_ERR_INTERRUPTED);
        CHECK(self.unwound == 1);
        finish(&self);
        return;
    }
    w->barrier(w);
    if (w->rank == 1) {
        CHECK_OK(smp_comm_send(w->comm, 0, &e, sizeof(e), NULL, 0));
    }
    w->barrier(w);
    w->barrier(w);
}

TEST_RANK(the_end_of_a_step_with_a_call_under_way_fails_it)
{
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .entry = 1, .step = 1};
    smp_message *m;
    rank         self;

    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_ERR_MALFORMED);
        CHECK(self.unwound == 1 && self.inside == 0);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        e.entry = w->size - 1; /* its call comes back here in the end, or to rank 2 */
        if (w->size == 2) {
            CHECK_OK(send_raw(w, e, sizeof(e)));
            CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
            CHECK(smp_message_envelope(m)->kind == SMP_MSG_FORWARD);
            smp_message_free(m);
            e.entry =
                0; /* another worker looks for work then, not the one that waits */
            e.call = 7;
            CHECK_OK(send_raw(w, e, sizeof(e)));
            expect_response(w, 1, 7);
        } else {
            CHECK_OK(send_raw(w, e, sizeof(e))); /* rank 2 never answers */
        }
        e.kind = SMP_MSG_STEP_END;
        e.entry = 0;
        if (w->size == 2) {
            CHECK_OK(send_raw(w, e, sizeof(e)));
        }
    } else {
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
        CHECK(smp_message_envelope(m)->kind == SMP_MSG_FORWARD);
        smp_message_free(m);
        e.kind = SMP_MSG_STEP_END;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
}

TEST_RANK(ranks_that_describe_the_step_otherwise_fail_it)
{
    rank self;

    CHECK_OK(begin(&self, w));
    for (int i = 0; i < 2; i++) { /* of another length, and of the same */
        const char *other = i == 0 ? "evaluate" : "tests";

        smp_server_describe(self.server, w->rank == 1 ? other : "train",
                            w->rank == 1 ? strlen(other) : 5);
        CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2), SMP_ERR_CLOSED);
        CHECK(self.mismatches == (w->rank == 1) * (i + 1));
    }
    smp_server_describe(self.server, "train", 5);
    CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2));
    CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2));
    finish(&self);
}

/* Rank 0 asks at 0.3 s, after 0.3 s more, after 0.9 s, ...; a slow machine only asks
 * later. */
TEST_RANK(a_rank_that_is_away_is_asked_less_and_less_often)
{
    enum { PROBES = 3 };
    const int64_t at_least = 1500 * SMP_NS_PER_MS; /* 900 with pauses that stay short */
    smp_message  *m;
    rank          self;
    int           probes = 0;

    if (w->rank == 0) {
        CHECK_OK(begin(&self, w));
        self.first_entry = SILENT;
        atomic_store(&w->shared->scratch[0], smp_clock_ns());
        CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2), SMP_ERR_CLOSED);
        finish(&self);
        return;
    }
    while (w->rank == 1 && probes < PROBES) {
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
        probes += smp_message_envelope(m)->kind == SMP_MSG_PROBE;
        smp_message_free(m);
    }
    if (w->rank == 1) {
        smp_envelope e = {.kind = SMP_MSG_ABORT, .step = 1};

        CHECK(smp_clock_ns() - atomic_load(&w->shared->scratch[0]) >= at_least);
        CHECK_OK(smp_comm_send(w->comm, 0, &e, sizeof(e), NULL, 0));
    }
    w->barrier(w);
}

/* What has ended a collective of its own has woken it, too. */
TEST_RANK(a_failure_is_heard_by_a_task_that_something_else_has_woken)
{
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .step = 1, .entry = WOKEN};
    rank         self;

    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_ERR_CLOSED);
        CHECK(self.heard);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
    if (w->rank == 0) {
        e.kind = SMP_MSG_ABORT;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
    w->barrier(w);
}

/* The message comes when the task looks for the third time at the clock: to begin with,
 * and before the first wait, it looks twice. */
TEST_RANK(a_failure_is_heard_that_comes_later)
{
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .step = 1, .entry = PATIENT};
    rank         self;

    atomic_store(&looks_at_clock, 0);
    w->barrier(w);
    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_ERR_CLOSED);
        CHECK(self.heard);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
    while (w->rank == 0 && atomic_load(&looks_at_clock) < 3) {
        sched_yield();
    }
    if (w->rank == 0) {
        e.kind = SMP_MSG_ABORT;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
}

/* Whatever it says, also if the step that it is about has gone well. */
TEST_RANK(messages_of_the_last_step_change_nothing_in_the_next)
{
    static const smp_msg_kind late[] = {
        SMP_MSG_RELEASE, SMP_MSG_CLOSED,   SMP_MSG_FORWARD_DONE,
        SMP_MSG_PROBE,   SMP_MSG_STILL,    SMP_MSG_SETTLE,
        SMP_MSG_SETTLED, SMP_MSG_STEP_END, SMP_MSG_ABORT,
    };
    smp_envelope e = {.kind = SMP_MSG_STEP_END, .step = 1};
    rank         self;

    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_OK);
        w->barrier(w); /* now they come */
        serve_one(&self, SMP_OK);
        CHECK(self.tasks == 2);
        CHECK(self.notes == 1); /* of its own step */
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        CHECK_OK(send_raw(w, e, sizeof(e)));
        w->barrier(w);
        for (size_t i = 0; i < sizeof(late) / sizeof(late[0]); i++) {
            e.kind = (uint8_t)late[i];
            CHECK_OK(send_raw(w, e, sizeof(e)));
        }
        e = (smp_envelope){.kind = SMP_MSG_FORWARD, .step = 2};
        e.entry = GATED; /* which microbatch 0 of this step has not passed */
        e.microbatch = 1;
        e.call = 11;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        e.entry = 0;
        e.microbatch = 2;
        e.call = 22;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        expect_response(w, 2, 22);
        e = (smp_envelope){.kind = SMP_MSG_FORWARD_DONE, .step = 2};
        CHECK_OK(send_raw(w, e, sizeof(e)));
        expect_response(w, 2, 11);
        e.kind = SMP_MSG_STEP_END;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    } else {
        w->barrier(w);
    }
    w->barrier(w);
}

/* What was not yet acted on is let go: its sender has its memory back. */
TEST_RANK(a_step_that_fails_keeps_no_memory_of_its_messages)
{
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .step = 1, .entry = SILENT};
    rank         self;

    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        w->barrier(w); /* sent: both are read before one is acted on */
        serve_one(&self, SMP_ERR_CLOSED);
        CHECK(self.tasks == 0);
        w->barrier(w); /* rank 0 has its memory */
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        int64_t        deadline = smp_clock_ns() + WORLD_DEADLINE_NS;
        smp_comm_stats stats;
        smp_block     *block;

        CHECK_OK(smp_comm_block(w->comm, 1, 1 << 20, &block));
        CHECK_OK(smp_comm_send(w->comm, 1, &e, sizeof(e), &block, 1));
        e.kind = SMP_MSG_ABORT;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        w->barrier(w);
        do {
            sched_yield();
            smp_comm_counters(w->comm, &stats);
            CHECK(smp_clock_ns() < deadline);
        } while (stats.pool_in_use != 0);
    } else {
        w->barrier(w);
    }
    w->barrier(w);
    w->barrier(w);
}

/* Rank 1 has said that all is well: the step is rank 0's to end.  The signal is heard
 * of before and when no worker looks any more. */
TEST_RANK(a_signal_at_the_end_of_a_step_ends_neither_it_nor_the_next)
{
    struct sigaction act = {.sa_handler = no_action};
    smp_envelope     e = {.kind = SMP_MSG_FORWARD, .step = 1, .entry = SILENT};
    rank             self;

    if (w->rank == 0) {
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    if (w->rank == 1) {
        nagger    n = {&self, pthread_self()};
        pthread_t thread;

        sigaction(SIGUSR1, &act, NULL);
        CHECK_OK(begin(&self, w));
        self.until_signal = true;
        self.says_late = true;
        CHECK(pthread_create(&thread, NULL, nag, &n) == 0);
        serve_one(&self, SMP_OK);
        pthread_join(thread, NULL);
        w->barrier(w);
        serve_one(&self, SMP_OK);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        while (atomic_load(&w->shared->scratch[0]) == 0) {
            sched_yield(); /* else the end would come before the request is run */
        }
        e.kind = SMP_MSG_SETTLE;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        e.kind = SMP_MSG_STEP_END;
        CHECK_OK(send_raw(w, e, sizeof(e)));
        atomic_store(&w->shared->scratch[1], 1);
        e.step = 2;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
    w->barrier(w);
}

/* Interrupts rank 1's step in each of the rounds. */
static void *
interrupt_when_asked(void *arg)
{
    rank *self = arg;

    for (int round = 1; round <= 2; round++) {
        while (atomic_load(&self->w->shared->scratch[0]) != round) {
            sched_yield();
        }
        smp_server_interrupt(self->server);
        atomic_store(&self->w->shared->scratch[1], round);
    }
    return NULL;
}

/* Rank 1 has said that all is well: rank 0 alone may end the step.  In the next one it
 * has not yet. */
TEST_RANK(who_has_said_that_all_is_well_is_not_interrupted)
{
    smp_envelope e = {.kind = SMP_MSG_SETTLE, .step = 1};
    rank         self;

    if (w->rank == 1) {
        pthread_t thread;

        CHECK_OK(begin(&self, w));
        CHECK(pthread_create(&thread, NULL, interrupt_when_asked, &self) == 0);
        serve_one(&self, SMP_OK);
        atomic_store(&w->shared->scratch[0], 2);
        serve_one(&self, SMP_ERR_INTERRUPTED);
        pthread_join(thread, NULL);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        smp_message *m;

        CHECK_OK(send_raw(w, e, sizeof(e)));
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
        CHECK(smp_message_envelope(m)->kind == SMP_MSG_SETTLED);
        smp_message_free(m);
        e.kind = SMP_MSG_STEP_END;
        for (int round = 1; round <= 2; round++) {
            if (round == 1) {
                atomic_store(&w->shared->scratch[0], round);
            }
            while (atomic_load(&w->shared->scratch[1]) != round) {
                sched_yield();
            }
            e.step = (uint32_t)round;
            CHECK_OK(send_raw(w, e, sizeof(e)));
        }
    }
    w->barrier(w);
}

/* To rank 0. */
static smp_status
send_home(world *w, smp_envelope envelope)
{
    return smp_comm_send(w->comm, 0, &envelope, sizeof(envelope), NULL, 0);
}

/* Answers forwards until a message of `kind` comes, which it returns; 0: ABORT came, or
 * nothing. */
static smp_envelope
answer_until(world *w, smp_msg_kind kind)
{
    smp_message *m;

    while (smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m) == SMP_OK) {
        smp_envelope e = *smp_message_envelope(m);

        smp_message_free(m);
        if (e.kind == kind) {
            return e;
        }
        if (e.kind == SMP_MSG_ABORT) {
            break;
        }
        if (e.kind == SMP_MSG_FORWARD) {
            e.kind = SMP_MSG_RESPONSE;
            (void)send_home(w, e);
        }
    }
    return (smp_envelope){0};
}

/* While rank 0 waits for those of this step it serves: rank 1 asks it for something. */
TEST_RANK(a_late_word_that_all_is_well_is_not_of_this_step)
{
    enum { STEPS = 3 };
    rank self;

    if (w->rank == 0) {
        CHECK_OK(begin(&self, w));
        self.first_entry = 0;
        self.no_backward = true;
        for (int step = 1; step <= STEPS; step++) {
            CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 2));
            CHECK(self.tasks == step);
        }
        finish(&self);
        return;
    }
    for (uint32_t step = 1; step <= STEPS; step++) {
        smp_envelope e = answer_until(w, SMP_MSG_SETTLE);

        CHECK(e.kind == SMP_MSG_SETTLE && e.step == step);
        e.kind = SMP_MSG_SETTLED;
        if (w->rank == 1) {
            while (atomic_load(&w->shared->scratch[0]) != (w->size - 2) * (int)step) {
                sched_yield(); /* the others have said so: rank 0 lacks only one */
            }
            e.step = step - 1;
            CHECK_OK(send_home(w, e));
            e = (smp_envelope){.kind = SMP_MSG_FORWARD, .step = step, .call = 7};
            CHECK_OK(send_home(w, e));
            expect_response(w, step, 7);
            e.kind = SMP_MSG_SETTLED;
        }
        CHECK_OK(send_home(w, e));
        atomic_fetch_add(&w->shared->scratch[0], w->rank != 1);
    }
    w->barrier(w);
}

/* ------------------------------------------------- deadlock detection, by hand */

typedef struct {
    smp_envelope envelope;
    smp_still    still;
} still_message;

static smp_status
send_still(world *w, uint32_t step, uint64_t round, uint64_t sent, uint64_t received)
{
    still_message m = {.envelope = {.kind = SMP_MSG_STILL, .step = step, .call = round},
                       .still = {.sent = sent, .received = received}};

    return smp_comm_send(w->comm, 0, &m, sizeof(m), NULL, 0);
}

/* Rank 0 has sent one message, and waits for its answer.  What rank 1 says of itself it
 * can have done with ranks that are not here. */
TEST_RANK(a_message_under_way_is_no_deadlock)
{
    static const struct {
        uint64_t sent, received;
    } rounds[] = {
        {0, 0}, /* the message to rank 1 is under way */
        {0, 1}, /* it was read: nothing is under way, at last */
        {2, 3}, /* but something was done in between */
        {3, 3}, /* and the answer comes: just before this */
    };
    enum { ROUNDS = sizeof(rounds) / sizeof(rounds[0]) };
    smp_envelope request;
    rank         self;

    if (w->rank == 0) {
        CHECK_OK(begin(&self, w));
        self.first_entry = 0;
        self.no_backward = true;
        CHECK_OK(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 1));
        CHECK(self.finished == MICROBATCHES);
        finish(&self);
        return;
    }
    if (w->rank == 1) {
        smp_message *m;

        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
        request = *smp_message_envelope(m);
        smp_message_free(m);
        CHECK(request.kind == SMP_MSG_FORWARD);
    }
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        uint64_t     sent = w->rank == 1 ? rounds[round - 1].sent : 0;
        uint64_t     received = w->rank == 1 ? rounds[round - 1].received : 0;
        smp_envelope probe = answer_until(w, SMP_MSG_PROBE);

        CHECK(probe.kind == SMP_MSG_PROBE && probe.call == round);
        if (w->rank == 1 && round == ROUNDS) {
            request.kind = SMP_MSG_RESPONSE;
            CHECK_OK(send_home(w, request));
        }
        CHECK_OK(send_still(w, probe.step, round, sent, received));
        if (round == 1) { /* nothing was under way in another step, or round */
            CHECK_OK(send_still(w, probe.step - 1, round, 0, w->rank == 1));
            CHECK_OK(send_still(w, probe.step, round - 1, 0, w->rank == 1));
        }
    }
    CHECK(answer_until(w, SMP_MSG_SETTLE).kind == SMP_MSG_SETTLE);
    CHECK_OK(send_home(w, (smp_envelope){.kind = SMP_MSG_SETTLED, .step = 1}));
    w->barrier(w);
}

/* Moves the clock by as long as a rank rests before it looks, and waits until the
 * worker that rests has looked, and rests again: it looks at the clock all the time. */
static void
tick(void)
{
    long enough;

    atomic_fetch_add(&clock_at, 300 * SMP_NS_PER_MS);
    enough = atomic_load(&looks_at_clock) + 32; /* with the new time, but for one */
    while (atomic_load(&looks_at_clock) < enough) {
        sched_yield();
    }
}

/* How many ticks it takes until rank 0 asks in this round. */
static int
ticks_until_asked(world *w, uint64_t round)
{
    enum { MOST_TICKS = 40 };
    uint64_t asked = 0;
    int      ticks = 0;

    while (asked < round && ticks < MOST_TICKS) {
        smp_message *m;

        tick();
        ticks++;
        while (smp_comm_receive(w->comm, 0, &m) == SMP_OK) {
            if (smp_message_envelope(m)->kind == SMP_MSG_PROBE) {
                asked = smp_message_envelope(m)->call;
            }
            smp_message_free(m);
        }
    }
    return ticks;
}

TEST_RANK(an_answer_and_a_new_step_have_all_asked_often_again)
{
    rank self;

    if (w->rank == 0) {
        CHECK_OK(begin(&self, w));
        self.first_entry = SILENT;
        /* In the past: what sleeps until a time that this clock shows wakes at once. */
        atomic_store(&clock_at, __real_smp_clock_ns() - 60 * SMP_NS_PER_S);
        for (int step = 1; step <= 2; step++) {
            CHECK_STATUS(run_step(&self, SMP_SCHEDULE_INTERLEAVED, 1), SMP_ERR_CLOSED);
        }
        atomic_store(&clock_at, 0);
        finish(&self);
        return;
    }
    for (uint32_t step = 1; w->rank == 1 && step <= 2; step++) {
        const smp_envelope e = {.kind = SMP_MSG_ABORT, .step = step};
        smp_message       *m;

        CHECK_OK(smp_comm_receive(w->comm, SMP_NEVER, &m));
        CHECK(smp_message_envelope(m)->kind == SMP_MSG_FORWARD);
        smp_message_free(m);
        CHECK(ticks_until_asked(w, 2) <= 4); /* after pauses of one tick, */
        CHECK(ticks_until_asked(w, 3) > 2);  /* ... three, seven and so on */
        CHECK_OK(send_still(w, step, 3, 0, 0));
        CHECK(ticks_until_asked(w, 5) <= 4);
        CHECK(ticks_until_asked(w, 6) > 2);
        CHECK_OK(smp_comm_send(w->comm, 0, &e, sizeof(e), NULL, 0));
    }
    w->barrier(w);
}

TEST_RANK(a_rank_that_was_asked_in_the_last_step_does_not_answer_in_the_next)
{
    smp_envelope e = {.kind = SMP_MSG_PROBE, .step = 1, .call = 1};
    smp_message *m;
    rank         self;

    if (w->rank == 0) { /* before rank 1 looks: it never has nothing to do in step 1 */
        CHECK_OK(send_raw(w, e, sizeof(e)));
        e.kind = SMP_MSG_ABORT;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
    if (w->rank == 1) {
        CHECK_OK(begin(&self, w));
        serve_one(&self, SMP_ERR_CLOSED);
        serve_one(&self, SMP_OK);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        CHECK_STATUS(smp_comm_receive(w->comm, 300 * SMP_NS_PER_MS, &m),
                     SMP_ERR_TIMED_OUT);
        e = (smp_envelope){.kind = SMP_MSG_PROBE, .step = 2, .call = 2};
        CHECK_OK(send_raw(w, e, sizeof(e)));
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
        CHECK(smp_message_envelope(m)->kind == SMP_MSG_STILL);
        CHECK(smp_message_envelope(m)->call == 2);
        smp_message_free(m);
        e.kind = SMP_MSG_STEP_END;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
}

RUN_WORLDS(.transports = "shm", .threads = "23")
