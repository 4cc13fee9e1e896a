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

static void
begin(rank *self, world *w)
{
    static const int32_t once[] = {1};

    *self = (rank){
        .w = w, .random = (uint64_t)w->rank + 77, .first_entry = HOPS, .faulty = -1};
    CHECK_OK(smp_turns_create(1, once, &self->turns));
    CHECK_OK(smp_server_create(
        w->comm, &(smp_server_place){.rank = w->rank, .pipelines = 1, .names = names},
        0, &ops, self, &self->server));
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

static void
expect_step(rank *self, int32_t active, smp_status want)
{
    CHECK_STATUS(run_step(self, SMP_SCHEDULE_INTERLEAVED, active), want);
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

TEST_OF(rank, nested_calls_answer_on_every_schedule)
{
    static const smp_schedule_kind kinds[] = {SMP_SCHEDULE_SIMPLE,
                                              SMP_SCHEDULE_INTERLEAVED};

    for (int kind = 0; kind < 2; kind++) {
        int32_t least = kinds[kind] == SMP_SCHEDULE_SIMPLE ? MICROBATCHES : 1;

        for (int32_t active = least; active <= MICROBATCHES; active++) {
            CHECK_OK(run_step(self, kinds[kind], active));
            CHECK(self->w->rank != 0 || self->finished == MICROBATCHES);
            CHECK(self->w->rank != 1 || gate_was_in_order(self));
        }
    }
    CHECK(self->w->rank != 1 || self->notes == 5 * MICROBATCHES * 3);
    CHECK(smp_server_timeline(self->server)->count > 0);
}

TEST_OF(rank, a_thousand_steps_with_random_delays)
{
    self->delays = true;
    for (int i = 0; i < world_times(MOST_STEPS); i++) {
        expect_step(self, MICROBATCHES, SMP_OK);
        CHECK(self->w->rank != 1 || gate_was_in_order(self));
    }
    /* Every thread was used again: there are no more than tasks of one step. */
    CHECK(self->begun <= MICROBATCHES * (HOPS + 2));
}

TEST_OF(rank, runs_without_backward_end_the_step)
{
    self->no_backward = true;
    for (int i = 0; i < 20; i++) {
        expect_step(self, 2, SMP_OK);
        CHECK(self->w->rank != 0 || self->finished == MICROBATCHES);
    }
}

/* -------------------------------------------------------------------- failures */

/* The step of every rank ends, and the next one works. */
static void
fail_once_then_work(rank *self)
{
    int tasks_left;

    self->delays = true;
    expect_step(self, MICROBATCHES, SMP_ERR_CLOSED);
    tasks_left = self->inside;
    CHECK(tasks_left == 0);
    CHECK(self->finished < MICROBATCHES);
    self->faulty = -1;
    self->first_entry = HOPS;
    expect_step(self, MICROBATCHES, SMP_OK);
    CHECK(self->w->rank != 0 || self->finished == MICROBATCHES);
    CHECK(self->w->rank != 1 || gate_was_in_order(self));
}

TEST_OF(rank, a_failing_module_ends_the_step_everywhere)
{
    for (int i = 0; i < 30; i++) {
        self->first_entry = FAULTY;
        fail_once_then_work(self);
    }
}

TEST_OF(rank, a_failing_step_function_ends_the_step_everywhere)
{
    for (int i = 0; i < 30; i++) {
        self->faulty = i % MICROBATCHES;
        fail_once_then_work(self);
    }
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

TEST_OF(rank, a_signal_that_says_stop_ends_the_step)
{
    struct sigaction act = {.sa_handler = no_action};

    sigaction(SIGUSR1, &act, NULL);
    self->first_entry = SILENT; /* never answered: only the signal can end it */
    self->until_signal = true;
    if (self->w->rank == 1) {
        nagger    n = {self, pthread_self()};
        pthread_t thread;

        CHECK(pthread_create(&thread, NULL, nag, &n) == 0);
        expect_step(self, 1, SMP_ERR_INTERRUPTED);
        pthread_join(thread, NULL);
    } else {
        expect_step(self, 1, SMP_ERR_CLOSED);
    }
    CHECK(self->inside == 0);
    self->first_entry = HOPS;
    expect_step(self, 1, SMP_OK);
}

TEST_OF(rank, a_deadlock_is_found_and_says_who_waits)
{
    char said[4096];

    expect_step(self, 1, SMP_OK);
    self->first_entry = SILENT; /* nobody answers, and nobody has anything to do */
    if (self->w->rank == 0) {
        expect_step(self, 2, SMP_ERR_DEADLOCK);
        CHECK(smp_server_write_deadlock(self->server, said, sizeof(said)) ==
              strlen(said));
        CHECK_HAS(said, "rank 0: microbatch 0, forward: the step function waits "
                        "for module '?' on rank 1");
        CHECK_HAS(said, "rank 1 has nothing to run");
    } else {
        expect_step(self, 2, SMP_ERR_CLOSED);
    }
    CHECK(self->inside == 0);
    self->first_entry = HOPS;
    expect_step(self, 2, SMP_OK);
}

TEST_OF(rank, a_rank_that_is_slow_or_late_is_no_deadlock)
{
    int64_t until;

    until = smp_clock_ns() + SMP_NS_PER_S; /* the others look why, meanwhile */
    while (self->w->rank == self->w->size - 1 && smp_clock_ns() < until) {
        sched_yield();
    }
    expect_step(self, 2, SMP_OK);
}

TEST_RANK(a_step_ends_when_the_others_have_left)
{
    rank self;

    if (w->rank != 0) {
        smp_comm_destroy(w->comm);
        w->comm = NULL;
        return;
    }
    begin(&self, w);
    self.first_entry = SILENT;
    while (!smp_comm_left(w->comm, 1)) {
        sched_yield();
    }
    expect_step(&self, 2, SMP_ERR_CLOSED); /* send */
    self.no_request = true;
    expect_step(&self, 2, SMP_ERR_UNREACHABLE);
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
        begin(&self, w);
        self.no_request = true;
        while (!smp_comm_left(w->comm, last)) {
            sched_yield();
        }
        expect_step(&self, 2, SMP_ERR_UNREACHABLE);
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

/* Rank 0 writes by hand, rank 1 serves; both by a list of acts. */
typedef enum { OVER, SAYS, HEARS, MEETS, SERVES } act_kind;

typedef struct {
    act_kind     kind;
    smp_envelope e;            /* says or hears */
    size_t       cut;          /* bytes that are not sent */
    smp_status   want;         /* of a step */
    int          tasks, notes; /* that have been run when it is over */
} act;

#define SAY(of, in, ...)                                                               \
    {                                                                                  \
        .kind = SAYS, .e = {.kind = SMP_MSG_##of, .step = in, __VA_ARGS__ }            \
    }
#define END(in) SAY(STEP_END, in, .call = 0)
#define HEAR(of, in, to)                                                               \
    {                                                                                  \
        .kind = HEARS, .e = {.kind = SMP_MSG_##of, .step = in, .call = to }            \
    }
#define MEET                                                                           \
    {                                                                                  \
        .kind = MEETS                                                                  \
    }
#define SERVE(status, so_far)                                                          \
    {                                                                                  \
        .kind = SERVES, .want = status, .tasks = so_far                                \
    }

/* The next message of another rank, which must be of a kind. */
static smp_envelope
hear(world *w, smp_msg_kind kind)
{
    smp_message *m;
    smp_envelope e;

    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
    e = *smp_message_envelope(m);
    smp_message_free(m);
    CHECK(e.kind == kind);
    return e;
}

/* A response in `step`. */
static void
expect_response(world *w, uint32_t step, uint64_t call_number)
{
    smp_envelope e = hear(w, SMP_MSG_RESPONSE);

    CHECK(e.step == step && e.call == call_number);
}

static void
do_act(world *w, rank *self, const act *a)
{
    smp_envelope e;

    switch (a->kind) {
    case SAYS:
        CHECK_OK(send_raw(w, a->e, sizeof(a->e) - a->cut));
        break;
    case HEARS:
        e = hear(w, (smp_msg_kind)a->e.kind);
        CHECK(e.step == a->e.step && e.call == a->e.call);
        break;
    case MEETS:
        w->barrier(w);
        break;
    case SERVES:
        expect_step(self, 1, a->want);
        CHECK(self->tasks == a->tasks && self->notes == a->notes);
        break;
    case OVER:
        break;
    }
}

/* Others than ranks 0 and 1 meet as often. */
static void
act_by_hand(world *w, rank *self, const act *by_0, const act *by_1)
{
    *self = (rank){0};
    if (w->rank == 1) {
        begin(self, w);
    }
    for (const act *a = w->rank == 1 ? by_1 : by_0; a->kind != OVER; a++) {
        if (w->rank <= 1 || a->kind == MEETS) {
            do_act(w, self, a);
        }
    }
    if (w->rank == 1) {
        finish(self);
    } else {
        w->barrier(w);
    }
}

#define BY(...) ((const act[]){__VA_ARGS__, {.kind = OVER}})

TEST_RANK(messages_of_the_next_step_wait_for_it)
{
    rank self;

    act_by_hand(w, &self,
                BY(SAY(FORWARD, 2, .call = 22), /* a step too early */
                   SAY(FORWARD, 1, .call = 11), HEAR(RESPONSE, 1, 11), END(1),
                   HEAR(RESPONSE, 2, 22), END(2)),
                BY(SERVE(SMP_OK, 1), SERVE(SMP_OK, 2)));
}

TEST_RANK(what_came_early_is_acted_on_in_the_order_of_its_arrival)
{
    rank self;

    act_by_hand(
        w, &self,
        BY(SAY(FORWARD, 1, .call = 0), /* leaves a gap before them */
           SAY(RELEASE, 2, .microbatch = 0), SAY(RELEASE, 2, .microbatch = 1),
           SAY(RELEASE, 2, .microbatch = 2), SAY(RELEASE, 2, .microbatch = 3), MEET,
           HEAR(RESPONSE, 1, 0), END(1), END(2)),
        BY(MEET, /* all are read at once */
           SERVE(SMP_OK, 1),
           {.kind = SERVES, .want = SMP_OK, .tasks = 1, .notes = MICROBATCHES}));
    for (int32_t i = 0; i < MICROBATCHES && w->rank == 1; i++) {
        CHECK(self.noted[i] == i);
    }
}

/* Four requests wait when step 2 begins; answers come in the order of the work. */
TEST_RANK(one_forward_goes_before_a_backward_that_is_alone)
{
    rank self;

    act_by_hand(w, &self,
                BY(SAY(FORWARD, 2, .microbatch = 2, .call = 1),
                   SAY(FORWARD, 2, .microbatch = 3, .call = 2),
                   SAY(BACKWARD, 2, .microbatch = 1, .phase = SMP_BACKWARD, .call = 3),
                   SAY(BACKWARD, 2, .microbatch = 0, .phase = SMP_BACKWARD, .call = 4),
                   END(1), HEAR(RESPONSE, 2, 4), HEAR(RESPONSE, 2, 1),
                   HEAR(RESPONSE, 2, 3), HEAR(RESPONSE, 2, 2), END(2)),
                BY(SERVE(SMP_OK, 0), SERVE(SMP_OK, 4)));
}

TEST_RANK(messages_of_a_step_that_failed_are_dropped)
{
    rank self;

    act_by_hand(w, &self,
                BY(SAY(ABORT, 1, .call = 0),
                   SAY(FORWARD, 1, .call = 0), /* sent before the failure was known */
                   SAY(RESPONSE, 1, .call = 0), SAY(FORWARD, 2, .call = 0),
                   HEAR(RESPONSE, 2, 0), END(2)),
                BY(SERVE(SMP_ERR_CLOSED, 0), SERVE(SMP_OK, 1)));
}

TEST_RANK(what_no_server_wrote_fails_the_step)
{
    rank self;

    act_by_hand(w, &self,
                BY({.kind = SAYS, .e = {.kind = SMP_MSG_FORWARD, .step = 1}, .cut = 1},
                   HEAR(ABORT, 1, 0), SAY(LAST + 1, 2, .call = 0), HEAR(ABORT, 2, 0),
                   SAY(FORWARD, 3, .phase = 2), /* smp_choose() has no place for it */
                   HEAR(ABORT, 3, 0), {.kind = SAYS, .cut = sizeof(smp_envelope)},
                   HEAR(ABORT, 4, 0),
                   SAY(RESPONSE, 5, .call = 0), /* to a call that nobody made */
                   END(5)),
                BY(SERVE(SMP_ERR_MALFORMED, 0), SERVE(SMP_ERR_MALFORMED, 0),
                   SERVE(SMP_ERR_MALFORMED, 0), SERVE(SMP_ERR_MALFORMED, 0),
                   SERVE(SMP_OK, 0)));
}

/* What no server wrote is there when the step has been interrupted, and is read while
 * its tasks unwind. */
TEST_RANK(of_two_failures_the_first_is_told)
{
    const smp_envelope e = {.kind = SMP_MSG_LAST + 1, .step = 1};
    rank               self;

    if (w->rank == 0) {
        begin(&self, w);
        self.no_request = true;
        self.interrupts = true;
        expect_step(&self, 1, SMP_ERR_INTERRUPTED);
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
    rank         self;

    if (w->rank == 1) {
        begin(&self, w);
        expect_step(&self, 1, SMP_ERR_MALFORMED);
        CHECK(self.unwound == 1 && self.inside == 0);
        finish(&self);
        return;
    }
    if (w->rank == 0) {
        e.entry = w->size - 1; /* its call comes back here in the end, or to rank 2 */
        if (w->size == 2) {
            CHECK_OK(send_raw(w, e, sizeof(e)));
            hear(w, SMP_MSG_FORWARD);
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
        hear(w, SMP_MSG_FORWARD);
        e.kind = SMP_MSG_STEP_END;
        CHECK_OK(send_raw(w, e, sizeof(e)));
    }
    w->barrier(w);
}

TEST_OF(rank, ranks_that_describe_the_step_otherwise_fail_it)
{
    for (int i = 0; i < 2; i++) { /* of another length, and of the same */
        const char *other = i == 0 ? "evaluate" : "tests";

        smp_server_describe(self->server, self->w->rank == 1 ? other : "train",
                            self->w->rank == 1 ? strlen(other) : 5);
        expect_step(self, 2, SMP_ERR_CLOSED);
        CHECK(self->mismatches == (self->w->rank == 1) * (i + 1));
    }
    smp_server_describe(self->server, "train", 5);
    expect_step(self, 2, SMP_OK);
    expect_step(self, 2, SMP_OK);
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
        begin(&self, w);
        self.first_entry = SILENT;
        atomic_store(&w->shared->scratch[0], smp_clock_ns());
        expect_step(&self, 2, SMP_ERR_CLOSED);
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
    rank self;

    act_by_hand(
        w, &self,
        BY(SAY(FORWARD, 1, .entry = WOKEN), MEET, SAY(ABORT, 1, .call = 0), MEET),
        BY(SERVE(SMP_ERR_CLOSED, 1)));
    CHECK(w->rank != 1 || self.heard);
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
        begin(&self, w);
        expect_step(&self, 1, SMP_ERR_CLOSED);
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
    rank self;

    act_by_hand(w, &self,
                BY(END(1), MEET, SAY(RELEASE, 1, .call = 0), SAY(CLOSED, 1, .call = 0),
                   SAY(FORWARD_DONE, 1, .call = 0), SAY(PROBE, 1, .call = 0),
                   SAY(STILL, 1, .call = 0), SAY(SETTLE, 1, .call = 0),
                   SAY(SETTLED, 1, .call = 0), END(1), SAY(ABORT, 1, .call = 0),
                   /* A gate that microbatch 0 of this step has not passed. */
                   SAY(FORWARD, 2, .entry = GATED, .microbatch = 1, .call = 11),
                   SAY(FORWARD, 2, .microbatch = 2, .call = 22), HEAR(RESPONSE, 2, 22),
                   SAY(FORWARD_DONE, 2, .call = 0), HEAR(RESPONSE, 2, 11), END(2)),
                /* The note is of its own step. */
                BY(SERVE(SMP_OK, 0), MEET,
                   {.kind = SERVES, .want = SMP_OK, .tasks = 2, .notes = 1}));
}

/* What was not yet acted on is let go: its sender has its memory back. */
TEST_RANK(a_step_that_fails_keeps_no_memory_of_its_messages)
{
    smp_envelope e = {.kind = SMP_MSG_FORWARD, .step = 1, .entry = SILENT};
    rank         self;

    if (w->rank == 1) {
        begin(&self, w);
        w->barrier(w); /* sent: both are read before one is acted on */
        expect_step(&self, 1, SMP_ERR_CLOSED);
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
        begin(&self, w);
        self.until_signal = true;
        self.says_late = true;
        CHECK(pthread_create(&thread, NULL, nag, &n) == 0);
        expect_step(&self, 1, SMP_OK);
        pthread_join(thread, NULL);
        w->barrier(w);
        expect_step(&self, 1, SMP_OK);
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

        begin(&self, w);
        CHECK(pthread_create(&thread, NULL, interrupt_when_asked, &self) == 0);
        expect_step(&self, 1, SMP_OK);
        atomic_store(&w->shared->scratch[0], 2);
        expect_step(&self, 1, SMP_ERR_INTERRUPTED);
        pthread_join(thread, NULL);
        finish(&self);
        return;
    }
    if (w->rank == 0) {

        CHECK_OK(send_raw(w, e, sizeof(e)));
        hear(w, SMP_MSG_SETTLED);
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
        begin(&self, w);
        self.first_entry = 0;
        self.no_backward = true;
        for (int step = 1; step <= STEPS; step++) {
            expect_step(&self, 2, SMP_OK);
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
    enum { ROUNDS = COUNT_OF(rounds) };
    smp_envelope request;
    rank         self;

    if (w->rank == 0) {
        begin(&self, w);
        self.first_entry = 0;
        self.no_backward = true;
        expect_step(&self, 1, SMP_OK);
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
        begin(&self, w);
        self.first_entry = SILENT;
        /* In the past: what sleeps until a time that this clock shows wakes at once. */
        atomic_store(&clock_at, __real_smp_clock_ns() - 60 * SMP_NS_PER_S);
        for (int step = 1; step <= 2; step++) {
            expect_step(&self, 1, SMP_ERR_CLOSED);
        }
        atomic_store(&clock_at, 0);
        finish(&self);
        return;
    }
    for (uint32_t step = 1; w->rank == 1 && step <= 2; step++) {
        const smp_envelope e = {.kind = SMP_MSG_ABORT, .step = step};

        hear(w, SMP_MSG_FORWARD);
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
        begin(&self, w);
        expect_step(&self, 1, SMP_ERR_CLOSED);
        expect_step(&self, 1, SMP_OK);
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
