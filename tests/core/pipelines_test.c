/* Module servers of several pipelines in one process, whose modules make collectives.
 *
 * The comm's ranks are tp_rank * PP + pp_rank.  A collective is a counter: it is over
 * on all tp_ranks when the last one has issued it, and all must issue the same ones in
 * the same order.  The step function calls QUIET and SHARED on the next rank and SHARED
 * on its own, forth and back.  Delays at hand-overs are random (csrc/common/jitter.h).
 *
 * All run twice, the second time in sequence (csrc/server/sequence.h): then tp_rank is
 * dp_rank, and a collective may hold the baton.
 */
#define _GNU_SOURCE
#define WORLD_SPIN_US 0
#include <pthread.h>
#include <sched.h>

#include "common/jitter.h"
#include "server/calls.h"
#include "server/server.h"
#include "traffic.h"

enum {
    LOOKS = 50,
    PP = 2,
    MOST_TP = 3,
    MICROBATCHES = 4,
    MOST_ISSUED = 64,
    QUIET = 0,
    SHARED = 1
};

/* What the tp_ranks of a pp_rank have issued in this step. */
typedef struct {
    pthread_mutex_t lock; /* guards all below but the last two */
    smp_key         keys[MOST_ISSUED];
    int             issuers[MOST_ISSUED];
    int             count[MOST_TP];
    bool            mixed;   /* one issued another than the first */
    pthread_cond_t  is_over; /* an element of `over` has changed */
    _Atomic bool    over[MOST_TP][MOST_ISSUED];
} stage;

static stage stages[PP];
static bool  in_sequence;

/* Responses that the far rank of a tp_rank has sent. */
static _Atomic int answers[MOST_TP];
static smp_comm   *comms[PP * MOST_TP];

/* How a tp_rank's calls differ from the others'. */
typedef enum { ALIKE, LEAVES_OUT, FAILS, ANSWERS_NOT } mood;

typedef struct {
    world      *w;
    smp_server *server;
    int         tp;
    int         tp_rank;
    int         pp_rank;
    uint32_t    step;
    mood        mood;
    int32_t     in;      /* ... in this microbatch */
    bool        crosses; /* the step function is cross_root() */
    bool        holds;   /* collectives hold the baton */
    bool        hears;   /* it reads each response before it waits for it */
    int32_t     microbatches;
    int         inside;
    int         finished;
} rank;

static int
comm_rank(const rank *self, int pp_rank)
{
    return self->tp_rank * PP + pp_rank;
}

static smp_status
send_to(rank *self, int dest, smp_envelope envelope)
{
    envelope.step = self->step;
    return smp_comm_send(self->w->comm, dest, &envelope, sizeof(envelope), NULL, 0);
}

/* Issues: the last one ends it for all. */
static _Atomic bool *
issue(const rank *self, const smp_key *key)
{
    stage    *s = &stages[self->pp_rank];
    const int at = s->count[self->tp_rank]; /* written by this rank alone */
    bool      last;

    if (at == MOST_ISSUED) {
        abort();
    }
    pthread_mutex_lock(&s->lock);
    s->count[self->tp_rank]++;
    if (s->issuers[at] == 0) {
        s->keys[at] = *key;
    } else if (!smp_key_equal(&s->keys[at], key)) {
        s->mixed = true;
    }
    last = ++s->issuers[at] == self->tp;
    pthread_mutex_unlock(&s->lock);
    for (int t = 0; last && t < self->tp; t++) {
        smp_jitter();
        atomic_store(&s->over[t][at], true);
        smp_comm_wake(comms[t * PP + self->pp_rank]);
    }
    if (last) {
        pthread_mutex_lock(&s->lock); /* or one who has looked would miss it */
        pthread_cond_broadcast(&s->is_over);
        pthread_mutex_unlock(&s->lock);
    }
    return &s->over[self->tp_rank][at];
}

/* As a plain collective of torch.distributed. */
static void
hold(rank *self, const _Atomic bool *over)
{
    stage          *s = &stages[self->pp_rank];
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += WORLD_DEADLINE_NS / SMP_NS_PER_S;
    pthread_mutex_lock(&s->lock);
    while (!atomic_load(over)) {
        if (pthread_cond_timedwait(&s->is_over, &s->lock, &until) != 0) {
            fprintf(stderr, "held for ever\n");
            abort();
        }
    }
    pthread_mutex_unlock(&s->lock);
}

static smp_status
collective(rank *self, uint64_t task, int32_t microbatch, smp_phase phase)
{
    smp_key       key = smp_key_of(self->pp_rank == 0 ? "near" : "far");
    uint64_t      before;
    _Atomic bool *over;
    smp_status    status = SMP_OK;

    if (self->mood == LEAVES_OUT && self->in == microbatch && self->pp_rank == 1) {
        return SMP_OK;
    }
    key.call = smp_call_of(task, SHARED, 0, phase);
    key.microbatch = microbatch;
    key.phase = (int32_t)phase;
    if (!self->holds) {
        self->inside--;
        status = smp_server_line_up(self->server, &key);
        self->inside++;
    }
    if (status != SMP_OK) {
        return status;
    }
    before = smp_server_issued_so_far(self->server);
    over = issue(self, &key);
    if (self->holds) {
        hold(self, over);
        return SMP_OK;
    }
    status = smp_server_issued(self->server, &key);
    if (status == SMP_OK) {
        self->inside--;
        status = smp_server_await_collective(self->server, &key, before, over);
        self->inside++;
    }
    return status;
}

static smp_status
call(rank *self, int32_t microbatch, int32_t entry, smp_phase phase)
{
    const uint64_t root = smp_call_of_root(microbatch);
    smp_envelope e = {.kind = phase == SMP_FORWARD ? SMP_MSG_FORWARD : SMP_MSG_BACKWARD,
                      .phase = (uint8_t)phase,
                      .microbatch = microbatch,
                      .entry = entry,
                      .call = smp_server_next_call(self->server),
                      .number = smp_call_of(root, (uint64_t)entry, 0, phase)};
    smp_message *response;
    const int    answered = atomic_load(&answers[self->tp_rank]);
    smp_status   status = send_to(self, comm_rank(self, 1), e);

    /* Not for ever: what answers may come after what this rank has not asked yet. */
    for (int i = 0;
         self->hears && i < LOOKS && atomic_load(&answers[self->tp_rank]) == answered;
         i++) {
        sched_yield();
    }
    if (self->hears) {
        smp_server_hear(self->server, 0);
    }
    if (status == SMP_OK) {
        self->inside--;
        status = smp_server_wait(self->server, e.call, SMP_WAIT_OUTPUTS, entry, 1,
                                 &response);
        self->inside++;
    }
    if (status == SMP_OK) {
        smp_message_free(response);
    }
    return status;
}

static void
execute(void *ctx, smp_message *request)
{
    rank        *self = ctx;
    smp_envelope e = *smp_message_envelope(request);
    int          source = request->source;
    smp_status   status = SMP_OK;

    smp_message_free(request);
    if (++self->inside != 1) {
        abort();
    }
    if (e.entry == SHARED && self->mood == ANSWERS_NOT) {
        self->inside--;
        return;
    }
    if (e.entry == SHARED && self->mood == FAILS && self->in == e.microbatch) {
        status = SMP_ERR_INVALID;
        send_to(self, self->tp_rank == 0 ? PP : 0,
                (smp_envelope){.kind = SMP_MSG_ABORT});
    } else if (e.entry == SHARED) {
        status = collective(self, e.number, e.microbatch, (smp_phase)e.phase);
    }
    if (status == SMP_OK) {
        e.kind = SMP_MSG_RESPONSE;
        (void)send_to(self, source, e);
        atomic_fetch_add(&answers[self->tp_rank], 1);
    } else {
        smp_server_fail(self->server);
    }
    self->inside--;
}

static smp_status
root(rank *self, int32_t mb)
{
    smp_status status = call(self, mb, QUIET, SMP_FORWARD);

    if (status == SMP_OK) {
        status = collective(self, smp_call_of_root(mb), mb, SMP_FORWARD);
    }
    if (status == SMP_OK) {
        status = call(self, mb, SHARED, SMP_FORWARD);
    }
    if (status == SMP_OK) {
        self->inside--;
        status = smp_server_backward_point(self->server, mb);
        self->inside++;
    }
    if (status == SMP_OK) {
        status = call(self, mb, SHARED, SMP_BACKWARD);
    }
    return status == SMP_OK ? collective(self, smp_call_of_root(mb), mb, SMP_BACKWARD)
                            : status;
}

/* Microbatch 0 calls QUIET there and then makes a collective here; number 1 calls
 * SHARED there.  tp_rank 1 begins 1 when it is through with 0; the others begin 1
 * first, and go on with 0 when 1 is in its collective. */
static smp_status
cross_root(rank *self, int32_t mb)
{
    const uint64_t task = smp_call_of_root(mb);
    smp_status     status;

    if (mb == 0 && self->tp_rank != 1) {
        stage *s = &stages[1];
        bool   is_there = false;

        while (!is_there) {
            pthread_mutex_lock(&s->lock);
            is_there = s->count[self->tp_rank] > 0;
            pthread_mutex_unlock(&s->lock);
            sched_yield();
        }
    }
    status = call(self, mb, mb == 0 ? QUIET : SHARED, SMP_FORWARD);
    if (status == SMP_OK && mb == 0) {
        status = collective(self, task, mb, SMP_FORWARD);
    }
    if (status == SMP_OK) {
        self->inside--;
        status = smp_server_backward_point(self->server, mb);
        self->inside++;
    }
    return status;
}

static void
run_root(void *ctx, int32_t mb)
{
    rank *self = ctx;

    if (++self->inside != 1) {
        abort();
    }
    if ((self->crosses ? cross_root(self, mb) : root(self, mb)) == SMP_OK) {
        self->finished++;
    } else {
        smp_server_fail(self->server);
    }
    self->inside--;
}

static void
ignore_note(void *ctx, smp_message *note)
{
    (void)ctx;
    smp_message_free(note);
}

static void
ignore(void *ctx)
{
    (void)ctx;
}

static bool
go_on(void *ctx)
{
    (void)ctx;
    return true;
}

static const smp_server_ops ops = {.worker_begin = ignore,
                                   .worker_end = ignore,
                                   .execute = execute,
                                   .run_root = run_root,
                                   .note = ignore_note,
                                   .check_signals = go_on};

static const char *const names[PP * MOST_TP] = {"rank 0 of 0", "rank 1 of 0",
                                                "rank 0 of 1", "rank 1 of 1",
                                                "rank 0 of 2", "rank 1 of 2"};

static void
begin(rank *self, world *w)
{
    *self = (rank){.w = w,
                   .tp = w->size / PP,
                   .tp_rank = w->rank / PP,
                   .pp_rank = w->rank % PP,
                   .microbatches = MICROBATCHES};
    comms[w->rank] = w->comm;
    w->barrier(w);
    CHECK_OK(smp_server_create(w->comm,
                               &(smp_server_place){.rank = w->rank,
                                                   .pipelines = self->tp,
                                                   .in_sequence = in_sequence,
                                                   .names = names},
                               0, &ops, self, &self->server));
}

static void
finish(rank *self)
{
    self->w->barrier(self->w);
    smp_server_destroy(self->server);
    CHECK(self->inside == 0);
}

/* This rank's schedule; NULL on those that have none. */
static smp_status
make_schedule(const rank *self, smp_schedule **schedule)
{
    static const smp_turn crossed[] = {
        {1, SMP_FORWARD}, {0, SMP_FORWARD}, {0, SMP_BACKWARD}, {1, SMP_BACKWARD}};

    *schedule = NULL;
    if (self->pp_rank != 0) {
        return SMP_OK;
    }
    if (!self->crosses) {
        return smp_schedule_create(SMP_SCHEDULE_INTERLEAVED, self->microbatches,
                                   1 + (int32_t)self->step % MICROBATCHES, NULL, 0,
                                   schedule);
    }
    if (self->tp_rank == 1) {
        return smp_schedule_create(SMP_SCHEDULE_INTERLEAVED, 2, 1, NULL, 0, schedule);
    }
    return smp_schedule_create(SMP_SCHEDULE_LISTED, 2, 2, crossed, 4, schedule);
}

/* One step; who fails tells all, and nobody goes before all have ended. */
static smp_status
run_step(rank *self)
{
    smp_schedule *schedule;
    smp_message  *end;
    smp_status    status;

    self->w->barrier(self->w); /* all have looked at the last step */
    if (self->tp_rank == 0) {
        stage *s = &stages[self->pp_rank];

        memset(s->issuers, 0, sizeof(s->issuers));
        memset(s->count, 0, sizeof(s->count));
        memset(s->over, 0, sizeof(s->over));
        s->mixed = false;
    }
    self->step++;
    self->finished = 0;
    self->w->barrier(self->w);
    if (make_schedule(self, &schedule) != SMP_OK) {
        return SMP_ERR_NO_MEMORY;
    }
    status = smp_server_step(self->server, self->step, schedule, &end);
    if (status == SMP_OK && self->pp_rank == 0) {
        (void)send_to(self, comm_rank(self, 1),
                      (smp_envelope){.kind = SMP_MSG_STEP_END});
    } else if (status != SMP_OK && end == NULL) {
        for (int r = 0; r < self->w->size; r++) {
            if (r != self->w->rank) {
                (void)send_to(self, r, (smp_envelope){.kind = SMP_MSG_ABORT});
            }
        }
    }
    smp_message_free(end);
    return status;
}

static void
check_step(rank *self)
{
    CHECK_OK(run_step(self));
    CHECK(self->pp_rank != 0 || self->finished == MICROBATCHES);
    CHECK(!stages[self->pp_rank].mixed);
    CHECK(stages[self->pp_rank].count[self->tp_rank] == 2 * MICROBATCHES);
}

TEST_OF(rank, collectives_may_hold_the_baton_in_a_sequence)
{
    self->holds = in_sequence;
    for (int i = 0; i < 60; i++) {
        check_step(self);
    }
}

/* Some find a response that is there already, where others wait for theirs. */
TEST_OF(rank, what_a_response_finds_does_not_change_the_sequence)
{
    self->hears = in_sequence && self->tp_rank > 0;
    for (int i = 0; i < 6; i++) {
        check_step(self);
    }
}

/* The leader has nothing to run any more when the others have to hear of it. */
TEST_OF(rank, other_calls_in_the_last_run_are_a_mismatch)
{
    self->microbatches = 1;
    for (int t = 0; in_sequence && t < self->tp; t++) {
        smp_status status;

        self->mood = self->tp_rank == t ? LEAVES_OUT : ALIKE;
        self->in = 0;
        status = run_step(self);
        CHECK(status == SMP_ERR_CLOSED || status == SMP_ERR_MISMATCH);
        if (status == SMP_ERR_MISMATCH) {
            CHECK(strstr(smp_server_mismatch(self->server), " has come to its end"));
        }
    }
}

TEST_OF(rank, pipelines_issue_the_same_in_the_same_order)
{
    for (int i = 0; i < 60; i++) {
        check_step(self);
    }
}

/* A rank that waited with the baton would keep the others' microbatch 0 from its
 * collective; on that tp_rank 1 waits before it begins microbatch 1, and on that all.
 */
TEST_OF(rank, a_rank_that_waits_for_a_collective_runs_what_others_wait_for)
{
    self->crosses = !in_sequence; /* where each may run in an order of its own */
    for (int i = 0; i < 20; i++) {
        CHECK_OK(run_step(self));
        CHECK(self->pp_rank != 0 || self->finished == (in_sequence ? MICROBATCHES : 2));
    }
}

/* So many are issued as by the tp_rank that issued most. */
static void
check_ended(rank *self)
{
    uint64_t least;
    uint64_t most;
    uint64_t counted = 0;

    while (
        !smp_server_collectives_ended(self->server, WORLD_DEADLINE_NS, &least, &most)) {
    }
    self->w->barrier(self->w); /* all have failed: nobody issues any more */
    for (int t = 0; t < self->tp; t++) {
        const uint64_t n = (uint64_t)stages[self->pp_rank].count[t];

        CHECK(n >= least && n <= most);
        counted = n > counted ? n : counted;
    }
    CHECK(counted == most);
    self->w->barrier(self->w);
}

TEST_OF(rank, a_call_that_one_tp_rank_leaves_out_fails_the_step_of_all)
{
    for (int i = 0; i < 2 * self->tp; i++) {
        smp_status status;

        self->mood = self->tp_rank == i % self->tp ? LEAVES_OUT : ALIKE;
        self->in = i < self->tp ? 1 : MICROBATCHES - 1;
        status = run_step(self);
        CHECK(status == SMP_ERR_MISMATCH || status == SMP_ERR_CLOSED);
        if (status == SMP_ERR_MISMATCH) {
            const char *said = smp_server_mismatch(self->server);

            if (in_sequence) {
                CHECK(strstr(said, "rank 1 of 0: microbatch ") == said);
                CHECK_HAS(said, "; rank 1 of ");
                CHECK_HAS(said, " has come to its end");
                CHECK_HAS(said, " waits for the other dp_ranks in module 'far'");
            } else {
                CHECK_HAS(said, "has called module 'far' (microbatch ");
                CHECK_HAS(said, " of 0 has ");
                CHECK_HAS(said, ", and rank ");
            }
        }
        check_ended(self);
        self->mood = ALIKE;
        check_step(self);
    }
}

TEST_OF(rank, a_failure_of_one_rank_ends_the_step_of_all_pipelines)
{
    for (int i = 0; i < 4 * self->tp; i++) {
        self->mood =
            self->tp_rank == i % self->tp && self->pp_rank == 1 ? FAILS : ALIKE;
        self->in = i % MICROBATCHES;
        CHECK_STATUS(run_step(self), SMP_ERR_CLOSED);
        check_ended(self);
        self->mood = ALIKE;
        check_step(self);
    }
}

/* ... whatever of a step that failed came late, and was dropped. */
TEST_OF(rank, after_failures_a_deadlock_is_found_all_the_same)
{
    smp_status status;

    for (int i = 0; i < 2 * self->tp; i++) {
        self->mood =
            self->tp_rank == i % self->tp && self->pp_rank == 1 ? FAILS : ALIKE;
        self->in = i % MICROBATCHES;
        CHECK_STATUS(run_step(self), SMP_ERR_CLOSED);
        check_ended(self);
    }
    self->mood = ANSWERS_NOT;
    status = run_step(self);
    CHECK(status == (self->w->rank == 0 ? SMP_ERR_DEADLOCK : SMP_ERR_CLOSED));
    check_ended(self);
    self->mood = ALIKE;
    check_step(self);
}

/* A rank that makes no step, because it has failed before, has issued nothing in it. */
TEST_OF(rank, a_rank_that_leaves_a_step_out_has_issued_nothing)
{
    uint64_t least;
    uint64_t most;

    check_step(self);
    if (self->w->rank == self->w->size - 1) {
        self->step++;
        self->w->barrier(self->w); /* run_step()'s */
        self->w->barrier(self->w);
        smp_server_leave_out(self->server, self->step);
        for (int r = 0; r < self->w->size - 1; r++) {
            (void)send_to(self, r, (smp_envelope){.kind = SMP_MSG_ABORT});
        }
    } else {
        CHECK_STATUS(run_step(self), SMP_ERR_CLOSED);
    }
    CHECK(smp_server_collectives_ended(self->server, WORLD_DEADLINE_NS, &least, &most));
    CHECK(self->pp_rank != PP - 1 || least == 0);
    self->w->barrier(self->w);
    check_step(self);
}

/* ---------------------------------------------------- messages written by hand */

static void
write_to(world *w, int dest, smp_envelope envelope)
{
    envelope.step = 1;
    CHECK_OK(smp_comm_send(w->comm, dest, &envelope, sizeof(envelope), NULL, 0));
}

static void
expect(world *w, smp_msg_kind kind, int source)
{
    smp_message *m;

    CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &m));
    CHECK(smp_message_envelope(m)->kind == kind && m->source == source);
    smp_message_free(m);
}

/* Rank 1 serves; its pp_rank 0, and its peers, are by hand. */
TEST_OF(rank,
        another_pipelines_failure_comes_too_late_for_who_has_said_that_all_is_well)
{
    smp_message *end;

    if (self->w->rank == 1) {
        CHECK_OK(smp_server_step(self->server, 1, NULL, &end));
        CHECK(smp_message_envelope(end)->kind == SMP_MSG_STEP_END);
        smp_message_free(end);
    } else if (self->w->rank == 0) {
        write_to(self->w, 1, (smp_envelope){.kind = SMP_MSG_SETTLE});
        expect(self->w, SMP_MSG_SETTLED, 1); /* not before its peers have ended */
        CHECK(atomic_load(&self->w->shared->scratch[0]) == self->tp - 1);
        atomic_store(&self->w->shared->scratch[1], 1);
        while (atomic_load(&self->w->shared->scratch[1]) == 1) {
            sched_yield();
        }
        write_to(self->w, 1, (smp_envelope){.kind = SMP_MSG_STEP_END});
    } else if (self->pp_rank == 1) {
        expect(self->w, SMP_MSG_ISSUED, 1);
        atomic_fetch_add(&self->w->shared->scratch[0], 1);
        write_to(self->w, 1, (smp_envelope){.kind = SMP_MSG_ISSUED});
    }
    if (self->w->rank == 3) {
        while (atomic_load(&self->w->shared->scratch[1]) == 0) {
            sched_yield();
        }
        write_to(self->w, 1, (smp_envelope){.kind = SMP_MSG_ABORT});
        atomic_store(&self->w->shared->scratch[1], 2);
    }
}

/* A key goes from the first of a pp_rank's pipelines to the others, and in a sequence
 * to nobody. */
TEST_OF(rank, a_key_for_who_leads_fails_its_step)
{
    const int    dest = in_sequence ? PP + 1 : 1;
    const int    source = in_sequence ? 1 : PP + 1;
    smp_message *end;

    if (self->w->rank == dest) {
        CHECK_STATUS(smp_server_step(self->server, 1, NULL, &end), SMP_ERR_MALFORMED);
    } else if (self->w->rank == source) {
        struct {
            smp_envelope envelope;
            smp_key      key;
        } word = {.envelope = {.kind = SMP_MSG_KEY, .step = 1},
                  .key = smp_key_of("far")};

        CHECK_OK(smp_comm_send(self->w->comm, dest, &word, sizeof(word), NULL, 0));
    }
}

/* Rank 0 runs a step function that nobody answers; rank 1 may have said that all is
 * well. */
TEST_OF(rank, pp_rank_0_passes_another_pipelines_failure_on)
{
    if (self->w->rank == 0) {
        smp_schedule *schedule;
        smp_message  *end;

        CHECK_OK(
            smp_schedule_create(SMP_SCHEDULE_INTERLEAVED, 1, 1, NULL, 0, &schedule));
        self->step = 1;
        CHECK_STATUS(smp_server_step(self->server, 1, schedule, &end), SMP_ERR_CLOSED);
        CHECK(smp_message_envelope(end)->kind == SMP_MSG_ABORT);
        smp_message_free(end);
    } else if (self->w->rank == 1) {
        smp_msg_kind kind = SMP_MSG_FORWARD;

        while (kind != SMP_MSG_ABORT) {
            smp_message *m;

            CHECK_OK(smp_comm_receive(self->w->comm, WORLD_DEADLINE_NS, &m));
            CHECK(m->source == 0);
            kind = (smp_msg_kind)smp_message_envelope(m)->kind;
            smp_message_free(m);
        }
    } else if (self->w->rank == PP) {
        write_to(self->w, 0, (smp_envelope){.kind = SMP_MSG_ABORT});
    }
}

int
main(int argc, char **argv)
{
    setenv("SMP_JITTER", "5", 0);
    smp_jitter_init();
    for (int p = 0; p < PP; p++) {
        pthread_mutex_init(&stages[p].lock, NULL);
        pthread_cond_init(&stages[p].is_over, NULL);
    }
    for (int i = 0; i < 2; i++) {
        in_sequence = i != 0;
        run_worlds_as(argc, argv, &(world_plan){.transports = "shm", .threads = "46"},
                      true);
    }
    return tests_are_over();
}
