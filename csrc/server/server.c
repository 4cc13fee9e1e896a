/* The module server: who works next.
 *
 * Everything below is guarded by the baton: only the thread that holds it reads or
 * writes the server, so there is no lock.  The exceptions are atomic and say so.
 *
 * What runs next is server/choice.h's.
 *
 * The comm's ranks are those of several pipelines, pipeline * pp_size + pp_rank: of the
 * MP_GROUP, by tp_rank; with a sequence of all replicas, by dp_rank.  Requests stay in
 * a pipeline; keys of collectives, or the sequence, go between ranks that have the same
 * pp_rank.  What ends a step is said to all.
 */
#define _GNU_SOURCE
#include "server/server.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/jitter.h"
#include "server/baton.h"
#include "server/calls.h"
#include "server/choice.h"
#include "server/rest.h"
#include "server/sequence.h"

/* How long a rank has nothing to run before it looks why. */
#define IDLE_NS (300 * SMP_NS_PER_MS)
#define MOST_PAUSE_NS (10 * SMP_NS_PER_S)

#define AWAITED_BYTES 512
#define MISMATCH_BYTES 1280

typedef enum { WORKER_IDLE, WORKER_EXECUTING, WORKER_PENDING } worker_state;

/* Why a worker is given the baton. */
typedef enum {
    WHY_NOTHING,
    WHY_REQUEST,  /* worker->message is to be executed */
    WHY_ROOT,     /* run the step function for worker->microbatch */
    WHY_RESPONSE, /* worker->message answers what it waits for */
    WHY_BACKWARD, /* its model.backward may go on */
    WHY_TURN,     /* its microbatch may pass the gate */
    WHY_ISSUE,    /* its collective is the next */
    WHY_OVER,     /* ... is over */
    WHY_FAILED,   /* the step failed: unwind */
    WHY_QUIT,     /* the server is being destroyed */
    WHY_SERVE,    /* a step began: look for work */
} reason;

typedef struct worker worker;

struct worker {
    smp_server         *server; /* borrowed */
    pthread_t           thread;
    smp_seat            seat;
    worker_state        state;
    reason              why;        /* written by the giver before it gives the baton */
    smp_message        *message;    /* with WHY_REQUEST, WHY_RESPONSE */
    int32_t             microbatch; /* of the task; with WHY_ROOT what to run */
    int32_t             entry;      /* of the task; -1: the step function */
    uint64_t            task;       /* its number (server/calls.h) */
    smp_wait            wait;       /* PENDING: for what */
    uint64_t            call;       /* ... OUTPUTS, GRADIENTS: the call */
    int32_t             gate;       /* ... GATE */
    const _Atomic bool *over;       /* ... COLLECTIVE: set when it is; borrowed */
    smp_phase           phase;
    uint16_t            number;
    worker             *next;      /* in server->workers */
    worker             *next_idle; /* in server->idle */
};

/* A message that was received and not yet acted on. */
typedef struct {
    smp_message *message;
    uint64_t     arrival;
} waiting;

/* What an idle rank answers to a probe, after the envelope. */
typedef struct {
    uint64_t     sent; /* messages, probes and their answers left out */
    uint64_t     received;
    uint64_t     issued; /* collectives */
    uint64_t     over;   /* ... of them */
    smp_standing standing;
} smp_still;

/* The search for a deadlock, on rank 0 of the comm. */
typedef struct {
    uint64_t   round;    /* the last one asked about; 0: none in this step */
    int        answers;  /* to it */
    bool       again;    /* the round before found no message under way, */
    uint64_t   total;    /* ... and so many sent by all ranks so far */
    smp_still *of;       /* owned, by rank of the comm: the answers */
    int64_t    next_ns;  /* when to ask again */
    int64_t    pause_ns; /* doubles while nobody answers: what is asked waits there */
} search;

struct smp_server {
    smp_comm      *comm; /* borrowed */
    smp_server_ops ops;
    void          *ctx;  /* borrowed */
    int            rank; /* pp_rank */
    int            size; /* of this pipeline */
    int            pipeline;
    int            pipelines;
    int            spin_us;
    uint16_t       nworkers;
    bool           overtaken; /* smp_choose()'s */

    worker *workers; /* owned: every worker there is */
    worker *idle;    /* those in their seats without a task, last in first out */

    waiting   *inbox; /* owned: ninbox messages, in no order */
    size_t     ninbox;
    size_t     inbox_room;
    uint64_t   arrivals;
    smp_ready *ready; /* owned: what could run, for smp_choose() */
    size_t     ready_room;

    uint32_t      step;
    int           settled;   /* how many have said that all is well */
    smp_turns    *turns;     /* borrowed; NULL: no gates */
    smp_schedule *schedule;  /* owned during a step; NULL but on pp_rank 0 */
    smp_message  *end;       /* STEP_END or ABORT */
    const void   *described; /* borrowed during a step: what it is */
    size_t        ndescribed;
    bool          settling; /* pp_rank 0 has asked the others whether all is well */
    bool promised; /* this rank has said so: pp_rank 0 alone may end the step */
    bool failed;
    bool in_order;    /* this rank has done its part, and said so */
    bool peer_failed; /* one of the same pp_rank says so, and who failed will say why */
    int  asker;       /* the rank of the comm that has asked this one; -1 */
    smp_status failure; /* why, when the comm or a thread failed */
    int        left;    /* the rank that has left; -1 */
    uint64_t   calls;

    smp_lineup   *lineup;     /* owned */
    uint64_t      over;       /* collectives of the step that are */
    smp_sequence *sequence;   /* owned; NULL: each rank runs in an order of its own */
    const char *const *names; /* borrowed: what errors call the ranks of the comm */
    char               mismatch[MISMATCH_BYTES];

    uint64_t about_still; /* probes and answers sent */
    uint64_t received;    /* messages but those */
    uint64_t asked;       /* the round of the probe to answer; 0: none */
    search   search;
    char     awaited[AWAITED_BYTES]; /* when a rank was lost */

    smp_board   *board;       /* owned */
    _Atomic bool interrupted; /* set by the main thread while a worker has the baton */
    smp_rest     rest;        /* the main thread's */
    int          forward;     /* where its signals go on to; -1: nowhere */
    smp_timeline timeline;
};

/* The rank of the comm that is this pp_rank of this pipeline. */
static int
rank_of_comm(const smp_server *server, int pp_rank)
{
    return server->pipeline * server->size + pp_rank;
}

/* ... that has this rank's pp_rank in another pipeline. */
static int
peer(const smp_server *server, int tp_rank)
{
    return tp_rank * server->size + server->rank;
}

/* Whether this rank looks for deadlocks. */
static bool
searches(const smp_server *server)
{
    return server->rank == 0 && server->pipeline == 0 &&
           smp_comm_size(server->comm) > 1;
}

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
        if (call != 0 && w->state == WORKER_PENDING && w->call == call) {
            return w;
        }
    }
    return NULL;
}

static void
fail_with(smp_server *server, smp_status failure)
{
    server->failed = true;
    if (server->failure == SMP_OK) {
        if (failure == SMP_ERR_PEER_LOST) {
            smp_board_write_wait(server->board, smp_comm_lost(server->comm),
                                 server->awaited, sizeof(server->awaited));
        }
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

/* A rank answered a probe. */
static void
hear_still(smp_server *server, const smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);
    search             *search = &server->search;

    if (searches(server) && e->call == search->round && message->source > 0 &&
        message->nbytes == sizeof(*e) + sizeof(smp_still)) {
        memcpy(&search->of[message->source], message->bytes + sizeof(*e),
               sizeof(smp_still));
        search->answers++;
        search->next_ns = 0;
        search->pause_ns = IDLE_NS;
    }
}

/* The tp_ranks do not make the same calls, by what is known here. */
static void
fail_if_calls_differ(smp_server *server, const smp_key *wanted)
{
    smp_lineup_gap gap;
    char           called[2 * SMP_KEY_PATH];

    if (server->failed || server->peer_failed ||
        !smp_lineup_find_gap(server->lineup, wanted, &gap)) {
        return;
    }
    (void)smp_key_write(&gap.key, called, sizeof(called));
    snprintf(server->mismatch, sizeof(server->mismatch),
             "%s has called %s, and %s has ended the step without",
             server->names[peer(server, gap.caller)], called,
             server->names[peer(server, gap.other)]);
    fail_with(server, SMP_ERR_MISMATCH);
}

/* A run of this rank has come to rest otherwise than the leader's, as far as known. */
static void
fail_if_runs_differ(smp_server *server)
{
    smp_sequence_gap gap;
    char             leader[MISMATCH_BYTES / 2];
    char             own[MISMATCH_BYTES / 2];

    if (server->failed || server->peer_failed ||
        !smp_sequence_differs(server->sequence, &gap)) {
        return;
    }
    smp_board_write_one(server->board, peer(server, 0), &gap.leader, leader,
                        sizeof(leader));
    smp_board_write_one(server->board, peer(server, server->pipeline), &gap.own, own,
                        sizeof(own));
    snprintf(server->mismatch, sizeof(server->mismatch), "%s: %.500s; %s: %.500s",
             server->names[peer(server, 0)], leader,
             server->names[peer(server, server->pipeline)], own);
    fail_with(server, SMP_ERR_MISMATCH);
}

/* The leader of a sequence: what it has not told yet. */
static void
tell_followers(smp_server *server)
{
    struct {
        smp_envelope      envelope;
        smp_sequence_word word;
    } message = {.envelope = {.kind = SMP_MSG_RUNS, .step = server->step}};

    if (server->sequence == NULL || server->failed ||
        !smp_sequence_tell(server->sequence, &message.word)) {
        return;
    }
    for (int p = 0; p < server->pipelines; p++) {
        if (p != server->pipeline) {
            (void)smp_comm_send(server->comm, peer(server, p), &message,
                                sizeof(message), NULL, 0);
        }
    }
}

static void
hear_runs(smp_server *server, const smp_message *message)
{
    smp_sequence_word word;
    smp_status        status;

    if (message->nbytes != sizeof(smp_envelope) + sizeof(word) ||
        server->sequence == NULL) {
        fail_with(server, SMP_ERR_MALFORMED);
        return;
    }
    memcpy(&word, message->bytes + sizeof(smp_envelope), sizeof(word));
    status = smp_sequence_hear(server->sequence, &word);
    if (status != SMP_OK) {
        fail_with(server, status);
    }
    fail_if_runs_differ(server);
}

/* Tells the ranks of the same pp_rank, once, that this one makes no more collectives in
 * this step. */
static void
end_collectives(smp_server *server)
{
    smp_envelope word = {.kind = SMP_MSG_ISSUED,
                         .flags = server->failed ? SMP_FLAG_FAILED : 0,
                         .step = server->step,
                         .call = smp_lineup_issued(server->lineup)};

    if (smp_lineup_has_ended(server->lineup, server->pipeline)) {
        return;
    }
    tell_followers(server);
    server->in_order = !server->failed;
    smp_lineup_end(server->lineup, server->pipeline, word.call);
    for (int t = 0; t < server->pipelines; t++) {
        if (t != server->pipeline) {
            (void)smp_comm_send(server->comm, peer(server, t), &word, sizeof(word),
                                NULL, 0);
        }
    }
    fail_if_calls_differ(server, NULL);
}

/* All is well here when the ranks of the same pp_rank are through with the step, too.
 */
static void
promise(smp_server *server)
{
    smp_envelope answer = {.kind = SMP_MSG_SETTLED, .step = server->step};

    if (server->asker >= 0 && !server->promised && !server->failed &&
        !server->peer_failed && smp_lineup_is_over(server->lineup)) {
        (void)smp_comm_send(server->comm, server->asker, &answer, sizeof(answer), NULL,
                            0);
        server->promised = true;
    }
}

/* pp_rank 0 hears whether what it sent before has been acted on here without a failure,
 * in the same step.  Takes the message. */
static void
settle(smp_server *server, smp_message *message)
{
    size_t n = message->nbytes - sizeof(smp_envelope);

    if (server->failed) {
        smp_message_free(message);
    } else if (n != server->ndescribed ||
               (n > 0 && memcmp(message->bytes + sizeof(smp_envelope),
                                server->described, n) != 0)) {
        server->ops.note(server->ctx, message);
    } else {
        server->asker = message->source;
        smp_message_free(message);
        end_collectives(server);
        promise(server);
    }
}

/* tp_rank 0 has issued a collective. */
static void
hear_key(smp_server *server, const smp_message *message)
{
    smp_key key;

    if (message->nbytes != sizeof(smp_envelope) + sizeof(key) ||
        server->pipeline == 0 || server->sequence != NULL) {
        fail_with(server, SMP_ERR_MALFORMED);
        return;
    }
    memcpy(&key, message->bytes + sizeof(smp_envelope), sizeof(key));
    key.path[sizeof(key.path) - 1] = '\0';
    if (smp_lineup_hear(server->lineup, &key) != SMP_OK) {
        fail_with(server, SMP_ERR_NO_MEMORY);
    }
    fail_if_calls_differ(server, NULL);
}

/* The key of a worker that waits for its turn, where all wait for one. */
static const smp_key *
wanted_key(const smp_server *server)
{
    for (const worker *w = server->workers; w != NULL; w = w->next) {
        if (w->state == WORKER_PENDING && w->wait.kind == SMP_WAIT_ISSUE) {
            return &w->wait.key;
        }
    }
    return NULL;
}

/* A rank of the same pp_rank makes no more collectives. */
static void
hear_issued(smp_server *server, const smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);
    const int           pipeline = message->source / server->size;

    if (pipeline == server->pipeline) {
        fail_with(server, SMP_ERR_MALFORMED);
        return;
    }
    server->peer_failed = server->peer_failed || (e->flags & SMP_FLAG_FAILED) != 0;
    smp_lineup_end(server->lineup, pipeline, e->call);
    fail_if_calls_differ(server, wanted_key(server));
    promise(server);
}

/* The step failed elsewhere.  False: this one ends all the same as pp_rank 0 says, who
 * has heard of it too: in another pipeline. */
static bool
hear_abort(smp_server *server, const smp_message *message)
{
    const bool is_own = message->source / server->size == server->pipeline;

    if (!is_own && server->promised) {
        return false;
    }
    server->failed = true;
    for (int rank = 1; !is_own && server->rank == 0 && rank < server->size; rank++) {
        (void)smp_comm_send(server->comm, rank_of_comm(server, rank), message->bytes,
                            message->nbytes, NULL, 0);
    }
    return true;
}

/* Acts at once on what starts no task; keeps the rest for smp_choose(). */
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
        if ((e->kind == SMP_MSG_ABORT && !hear_abort(server, message)) ||
            server->end != NULL) {
            smp_message_free(message);
        } else {
            server->end = message;
        }
        return;
    case SMP_MSG_FORWARD:
    case SMP_MSG_BACKWARD:
    case SMP_MSG_RESPONSE:
        keep(server, message);
        return;
    case SMP_MSG_SETTLE:
        settle(server, message);
        return;
    case SMP_MSG_SETTLED:
        server->settled += server->settling;
        smp_message_free(message);
        return;
    case SMP_MSG_KEY:
        hear_key(server, message);
        smp_message_free(message);
        return;
    case SMP_MSG_ISSUED:
        hear_issued(server, message);
        smp_message_free(message);
        return;
    case SMP_MSG_RUNS:
        hear_runs(server, message);
        smp_message_free(message);
        return;
    case SMP_MSG_PROBE:
        server->asked = e->call;
        smp_message_free(message);
        return;
    case SMP_MSG_STILL:
        hear_still(server, message);
        smp_message_free(message);
        return;
    }
}

static int
by_arrival(const void *a, const void *b)
{
    const waiting *left = a;
    const waiting *right = b;

    return (left->arrival > right->arrival) - (left->arrival < right->arrival);
}

/* A step begins: what came for it early is acted on now, in the order of its arrival.
 */
static void
sort_again(smp_server *server)
{
    size_t   early = server->ninbox;
    waiting *entries = server->inbox;

    if (early > 0) {
        qsort(entries, early, sizeof(*entries), by_arrival);
    }

    server->inbox = NULL;
    server->ninbox = 0;
    server->inbox_room = 0;
    for (size_t i = 0; i < early; i++) {
        sort_in(server, entries[i].message);
    }
    free(entries);
}

static void
count_in(smp_server *server, smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);

    if (e == NULL || (e->kind != SMP_MSG_PROBE && e->kind != SMP_MSG_STILL)) {
        server->received++;
    }
    sort_in(server, message);
}

/* Whether this step needs a rank of the comm: pp_rank 0 needs all of its pipeline, the
 * others need pp_rank 0; and all need those of the same pp_rank until they have ended.
 */
static bool
needs(const smp_server *server, int rank)
{
    const int pipeline = rank / server->size;
    const int pp_rank = rank % server->size;

    if (pipeline == server->pipeline) {
        return pp_rank != server->rank && (server->rank == 0 || pp_rank == 0);
    }
    return pp_rank == server->rank && !smp_lineup_has_ended(server->lineup, pipeline);
}

/* A rank that has left the job and that this step needs; -1: none. */
static int
who_left(const smp_server *server)
{
    for (int rank = 0; rank < smp_comm_size(server->comm); rank++) {
        if (needs(server, rank) && smp_comm_left(server->comm, rank)) {
            return rank;
        }
    }
    return -1;
}

/* Reads what has arrived; waits up to timeout_ns for the first message.  False: none
 * came in that time. */
static bool
read_comm(smp_server *server, int64_t timeout_ns)
{
    bool any = false;

    for (;;) {
        smp_message *message;
        smp_status   status = smp_comm_receive(server->comm, timeout_ns, &message);

        if (status == SMP_OK) {
            any = true;
            count_in(server, message);
            if (server->end != NULL) {
                return true; /* its sender may leave: that is no failure of this step */
            }
            timeout_ns = 0;
            continue;
        }
        if (status == SMP_ERR_TIMED_OUT ||
            (status == SMP_ERR_CLOSED && who_left(server) >= 0)) {
            return any;
        }
        if (status != SMP_ERR_INTERRUPTED) {
            fail_with(server, status);
        }
        return true;
    }
}

/* --------------------------------------------------------- when there is nothing */

static void
send_about_still(smp_server *server, int dest, smp_envelope envelope, bool with_still)
{
    struct {
        smp_envelope envelope;
        smp_still    still;
    } message = {.envelope = envelope};

    message.envelope.step = server->step;
    if (with_still) {
        message.still.sent = smp_comm_sent(server->comm) - server->about_still;
        message.still.received = server->received;
        message.still.issued = smp_lineup_issued(server->lineup);
        message.still.over = server->over;
        smp_board_read(server->board, &message.still.standing);
    }
    if (smp_comm_send(server->comm, dest, &message,
                      with_still ? sizeof(message) : sizeof(envelope), NULL,
                      0) == SMP_OK) {
        server->about_still++;
    }
}

static void
ask_all(smp_server *server)
{
    server->search.round++;
    server->search.answers = 0;
    for (int rank = 1; rank < smp_comm_size(server->comm); rank++) {
        send_about_still(
            server, rank,
            (smp_envelope){.kind = SMP_MSG_PROBE, .call = server->search.round}, false);
    }
}

/* How many collectives all ranks with this pp_rank have issued.  In a sequence a
 * TP_GROUP is not all of these: what any rank has issued, others will, or the sequence
 * says that they differ. */
static uint64_t
issued_by_all(const smp_server *server, int rank)
{
    const int pp_rank = rank % server->size;
    uint64_t  least = UINT64_MAX;

    if (server->sequence != NULL) {
        return server->search.of[rank].issued;
    }

    for (int t = 0; t < server->pipelines; t++) {
        const uint64_t issued = server->search.of[t * server->size + pp_rank].issued;

        least = issued < least ? issued : least;
    }
    return least;
}

/* Whether a collective that all have issued is not over yet on a rank. */
static bool
a_collective_is_under_way(const smp_server *server)
{
    for (int rank = 0; rank < smp_comm_size(server->comm); rank++) {
        if (server->search.of[rank].over < issued_by_all(server, rank)) {
            return true;
        }
    }
    return false;
}

/* This rank, number 0, has nothing to run.  Whether none has, and no message is under
 * way.  An idle rank runs again only when a message comes, or a collective is over, so
 * it is so when two rounds, in which each rank answered while it was idle, found as
 * many messages received as sent, and no more in the second than in the first, and no
 * collective under way.  [the four-counter method] */
static bool
all_are_still(smp_server *server)
{
    search   *search = &server->search;
    const int size = smp_comm_size(server->comm);
    uint64_t  sent = smp_comm_sent(server->comm) - server->about_still;
    uint64_t  received = server->received;

    if (search->round == 0 || search->answers < size - 1) {
        return false;
    }
    search->of[0].issued = smp_lineup_issued(server->lineup);
    search->of[0].over = server->over;
    for (int rank = 1; rank < size; rank++) {
        sent += search->of[rank].sent;
        received += search->of[rank].received;
    }
    if (sent != received || a_collective_is_under_way(server)) {
        search->again = false;
        search->answers = 0; /* asks when it has been idle for long again */
        return false;
    }
    if (search->again && search->total == sent) {
        smp_board_read(server->board, &search->of[0].standing);
        return true;
    }
    search->again = true;
    search->total = sent;
    ask_all(server);
    return false;
}

/* A collective that a rank has called and others have not; key NULL: none. */
typedef struct {
    int            rank; /* of the comm */
    const smp_key *key;
} lone_call;

/* Waits that a board shows: 0 .. most_shown() - 1. */
static int32_t
most_shown(const smp_standing *standing)
{
    return standing->nshown < SMP_STANDING_WAITS ? standing->nshown
                                                 : SMP_STANDING_WAITS;
}

/* Tries the calls of tp_rank 0 that this rank, of another tp_rank, has not made, beside
 * `own`.  Of one microbatch, a call on each side is what differs: it is at one place at
 * a time.  True: *left is such a call; else perhaps some call. */
static bool
find_other_call(const smp_server *server, int tp_rank, const smp_key *own,
                lone_call *left)
{
    for (int p = 0; p < server->size; p++) {
        const smp_standing *its = &server->search.of[p].standing;
        const uint64_t issued = server->search.of[tp_rank * server->size + p].issued;

        for (int32_t i = 0; i < most_shown(its); i++) {
            const smp_wait *wait = &its->waits[i];

            if (wait->kind != SMP_WAIT_COLLECTIVE || wait->issued < issued) {
                continue;
            }
            if (own == NULL || (wait->key.microbatch == own->microbatch &&
                                !smp_key_equal(&wait->key, own))) {
                *left = (lone_call){p, &wait->key};
                return true;
            }
        }
    }
    return false;
}

/* What this tp_rank and tp_rank 0 have called of the same microbatch, each alone; else
 * what one of them has.  False: nothing. */
static bool
find_lone_calls(const smp_server *server, int tp_rank, lone_call *left,
                lone_call *right)
{
    for (int p = 0; p < server->size; p++) {
        const int           rank = tp_rank * server->size + p;
        const smp_standing *its = &server->search.of[rank].standing;

        for (int32_t i = 0; i < most_shown(its); i++) {
            if (its->waits[i].kind == SMP_WAIT_ISSUE) {
                *right = (lone_call){rank, &its->waits[i].key};
                if (find_other_call(server, tp_rank, right->key, left)) {
                    return true;
                }
            }
        }
    }
    return (right->key == NULL && find_other_call(server, tp_rank, NULL, left)) ||
           right->key != NULL;
}

/* All ranks are still.  Whether it is because tp_rank 0 and another one do not make the
 * same calls: says which. */
static bool
says_who_differs(smp_server *server)
{
    for (int t = 1; t < server->pipelines; t++) {
        lone_call left = {.rank = 0};
        lone_call right = {.rank = t * server->size};
        char      its[2 * SMP_KEY_PATH] = "nothing";
        char      own[2 * SMP_KEY_PATH] = "nothing";

        if (!find_lone_calls(server, t, &left, &right)) {
            continue;
        }
        if (left.key != NULL) {
            (void)smp_key_write(left.key, its, sizeof(its));
        } else {
            left.rank = right.rank % server->size;
        }
        if (right.key != NULL) {
            (void)smp_key_write(right.key, own, sizeof(own));
        } else {
            right.rank = t * server->size + left.rank;
        }
        snprintf(server->mismatch, sizeof(server->mismatch),
                 "%s has called %s, and %s has called %s", server->names[left.rank],
                 its, server->names[right.rank], own);
        return true;
    }
    return false;
}

static void
ask_after_a_pause(smp_server *server)
{
    search *search = &server->search;
    int64_t now = smp_clock_ns();

    if (now >= search->next_ns) {
        search->next_ns = now + search->pause_ns;
        search->pause_ns = search->pause_ns < MOST_PAUSE_NS
                               ? 2 * search->pause_ns + IDLE_NS
                               : MOST_PAUSE_NS;
        ask_all(server);
    }
}

/* Nothing can run here before a message comes.  Waits for one. */
static void
be_idle(smp_server *server)
{
    int left;

    smp_board_idle(server->board);
    tell_followers(server);
    if (server->asked != 0) {
        send_about_still(server, 0,
                         (smp_envelope){.kind = SMP_MSG_STILL, .call = server->asked},
                         true);
        server->asked = 0;
    }
    if (searches(server) && all_are_still(server)) {
        fail_with(server,
                  says_who_differs(server) ? SMP_ERR_MISMATCH : SMP_ERR_DEADLOCK);
        return;
    }
    left = who_left(server);
    if (read_comm(server, IDLE_NS)) {
        return;
    }
    if (left >= 0) { /* and what it sent before has been read */
        server->left = left;
        fail_with(server, SMP_ERR_UNREACHABLE);
    } else if (searches(server)) {
        server->search.again = false;
        ask_after_a_pause(server);
    }
}

/* ------------------------------------------------------------- the hand-over */

/* Gives the baton to `to`.  The caller then waits in its own seat, or ends. */
static void
give(worker *to, reason why)
{
    to->why = why;
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
no_work_is_left(const smp_server *server)
{
    return server->schedule != NULL ? smp_schedule_finished(server->schedule)
                                    : server->end != NULL;
}

static void
ask_whether_all_is_well(smp_server *server)
{
    smp_envelope question = {.kind = SMP_MSG_SETTLE, .step = server->step};
    size_t       nbytes = sizeof(question) + server->ndescribed;
    char        *bytes = malloc(nbytes);

    server->settling = true;
    if (bytes == NULL) {
        fail_with(server, SMP_ERR_NO_MEMORY);
        return;
    }
    memcpy(bytes, &question, sizeof(question));
    if (server->ndescribed > 0) {
        memcpy(bytes + sizeof(question), server->described, server->ndescribed);
    }
    for (int rank = 1; rank < server->size; rank++) {
        /* To one that has gone: see be_idle(). */
        (void)smp_comm_send(server->comm, rank_of_comm(server, rank), bytes, nbytes,
                            NULL, 0);
    }
    free(bytes);
    end_collectives(server);
}

/* pp_rank 0 returns when the others have acted on all that it sent: what it does not
 * wait for (the end of a microbatch, a release) may fail too.  Not what such a message
 * made one of them send to a third rank. */
static bool
step_is_over(smp_server *server)
{
    if (!no_work_is_left(server)) {
        return false;
    }
    if (server->schedule == NULL) {
        return true;
    }
    if (!server->settling) {
        ask_whether_all_is_well(server);
    }
    return server->settled == server->size - 1 && !server->peer_failed &&
           smp_lineup_is_over(server->lineup);
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
    w->task = request == NULL ? smp_call_of_root(microbatch)
                              : smp_message_envelope(request)->number;
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

/* The microbatch begins a phase. */
static bool
start_turn(worker *self, smp_phase phase, int32_t microbatch)
{
    smp_server *server = self->server;

    smp_schedule_start(server->schedule, phase, microbatch);
    if (phase == SMP_FORWARD) {
        if (assign(self, WHY_ROOT, NULL, microbatch)) {
            return true;
        }
        fail_with(server, SMP_ERR_NO_THREAD);
        return false;
    }
    for (worker *w = server->workers; w != NULL; w = w->next) {
        if (w->state == WORKER_PENDING && w->wait.kind == SMP_WAIT_SCHEDULE &&
            w->microbatch == microbatch) {
            return pass(self, w, WHY_BACKWARD);
        }
    }
    assert(false && "a microbatch that is ready has a worker");
    return false;
}

static worker *
worker_number(const smp_server *server, size_t number)
{
    worker *w = server->workers;

    while (w->number != number) {
        w = w->next;
    }
    return w;
}

/* ---------------------------------------------------------------- what could run */

/* Room in server->ready for every message, worker and turn. */
static bool
make_room(smp_server *server)
{
    size_t     room = server->ninbox + server->nworkers + SMP_PHASES;
    smp_ready *more;

    if (room <= server->ready_room) {
        return true;
    }
    more = realloc(server->ready, 2 * room * sizeof(*more));
    if (more == NULL) {
        fail_with(server, SMP_ERR_NO_MEMORY);
        return false;
    }
    server->ready = more;
    server->ready_room = 2 * room;
    return true;
}

/* The messages of this step.  A response that nobody waits for yet stays: its worker
 * will ask. */
static size_t
add_messages(smp_server *server, size_t n)
{
    for (size_t i = 0; i < server->ninbox; i++) {
        const smp_envelope *e = smp_message_envelope(server->inbox[i].message);
        const bool          response = e->kind == SMP_MSG_RESPONSE;
        const worker       *w = response ? pending_on(server, e->call) : NULL;

        if (e->step == server->step && (!response || w != NULL)) {
            server->ready[n++] =
                (smp_ready){.kind = response ? SMP_READY_RESPONSE : SMP_READY_REQUEST,
                            .phase = (smp_phase)e->phase,
                            .microbatch = e->microbatch,
                            .call = response ? w->task : e->number,
                            .arrival = server->inbox[i].arrival,
                            .index = i};
        }
    }
    return n;
}

/* Whether what the worker waits for has come about, where no message says so. */
static bool
may_go_on(const smp_server *server, const worker *w, smp_ready_kind *kind)
{
    if (w->state != WORKER_PENDING) {
        return false;
    }
    switch ((smp_wait_kind)w->wait.kind) {
    case SMP_WAIT_GATE:
        *kind = SMP_READY_GATE;
        return server->turns != NULL &&
               smp_turns_may_enter(server->turns, w->gate, w->microbatch);
    case SMP_WAIT_ISSUE:
        *kind = SMP_READY_ISSUE;
        return smp_lineup_may_issue(server->lineup, &w->wait.key);
    case SMP_WAIT_COLLECTIVE:
        *kind = SMP_READY_OVER;
        return atomic_load(w->over);
    default:
        return false;
    }
}

static size_t
add_workers(smp_server *server, size_t n)
{
    smp_ready_kind kind;

    for (worker *w = server->workers; w != NULL; w = w->next) {
        if (may_go_on(server, w, &kind)) {
            server->ready[n++] = (smp_ready){.kind = kind,
                                             .phase = w->phase,
                                             .microbatch = w->microbatch,
                                             .call = w->task,
                                             .index = w->number};
        }
    }
    return n;
}

static size_t
add_turns(smp_server *server, size_t n)
{
    for (int phase = 0; server->schedule != NULL && phase < SMP_PHASES; phase++) {
        smp_ready turn = {.kind = SMP_READY_TURN, .phase = (smp_phase)phase};

        if (smp_schedule_next(server->schedule, turn.phase, &turn.microbatch)) {
            turn.call = smp_call_of_root(turn.microbatch);
            server->ready[n++] = turn;
        }
    }
    return n;
}

/* What goes first of all that could run.  False: nothing. */
static bool
choose(smp_server *server, smp_ready *next)
{
    const size_t n = add_turns(server, add_workers(server, add_messages(server, 0)));
    const bool   follows =
        server->sequence != NULL && !smp_sequence_leads(server->sequence);
    const ptrdiff_t best = follows
                               ? smp_sequence_find(server->sequence, server->ready, n)
                               : smp_choose(server->ready, n, &server->overtaken);

    if (best < 0) {
        return false;
    }
    *next = server->ready[best];
    if (server->sequence == NULL) {
        return true;
    }
    if (smp_sequence_run(server->sequence, next) != SMP_OK) {
        fail_with(server, SMP_ERR_NO_MEMORY);
        return false;
    }
    tell_followers(server);
    return true;
}

/* Runs that.  False: there is nothing, or no thread for it. */
static bool
run_next(worker *self)
{
    smp_server *server = self->server;
    smp_ready   next;

    if (!make_room(server) || !choose(server, &next)) {
        return false;
    }
    switch (next.kind) {
    case SMP_READY_GATE:
        return pass(self, worker_number(server, next.index), WHY_TURN);
    case SMP_READY_ISSUE:
        return pass(self, worker_number(server, next.index), WHY_ISSUE);
    case SMP_READY_OVER:
        return pass(self, worker_number(server, next.index), WHY_OVER);
    case SMP_READY_TURN:
        return start_turn(self, next.phase, next.microbatch);
    default:
        return act_on(self, inbox_remove(server, next.index));
    }
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

static smp_work
work_of(const worker *self)
{
    return (smp_work){
        .microbatch = self->microbatch, .entry = self->entry, .phase = self->phase};
}

/* What ran in a sequence gives the baton away. */
static void
come_to_rest(const worker *self)
{
    smp_server    *server = self->server;
    const smp_wait over = {.work = work_of(self), .kind = SMP_WAIT_NOTHING};

    if (server->sequence != NULL && !server->failed) {
        smp_sequence_rest(server->sequence,
                          self->state == WORKER_PENDING ? &self->wait : &over);
        fail_if_runs_differ(server);
    }
}

/* Self has nothing to do: finds who has.  Returns when self was given a reason to go
 * on (self->why). */
static void
dispatch(worker *self)
{
    smp_server *server = self->server;

    if (self->why == WHY_SERVE) {
        self->why = WHY_NOTHING;
        sort_again(server);
    }
    come_to_rest(self);
    for (;;) {
        (void)read_comm(server, 0);
        if (atomic_exchange(&server->interrupted, false) && !server->promised) {
            fail_with(server, SMP_ERR_INTERRUPTED);
        }
        if (!server->failed && no_work_is_left(server) &&
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
            smp_rest_give(&server->rest);
            smp_seat_wait(&self->seat, 0);
            return;
        }
        if (run_next(self)) {
            return;
        }
        if (!server->failed) {
            be_idle(server);
        }
    }
}

/* --------------------------------------------------------------- the workers */

static _Thread_local worker *this_worker;

static void
begin_work(worker *self)
{
    note_event(self, SMP_EVENT_BEGIN);
    smp_board_work(self->server->board, work_of(self));
}

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
        begin_work(self);
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
        begin_work(self);
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
smp_server_create(smp_comm *comm, const smp_server_place *place, int spin_us,
                  const smp_server_ops *ops, void *ctx, smp_server **out)
{
    const int   size = smp_comm_size(comm);
    smp_server *server = calloc(1, sizeof(*server));
    smp_status  status;

    if (server == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    server->comm = comm;
    server->size = size / place->pipelines;
    server->rank = place->rank % server->size;
    server->pipeline = place->rank / server->size;
    server->pipelines = place->pipelines;
    server->names = place->names;
    server->left = -1;
    server->forward = -1;
    server->search.of = calloc((size_t)size, sizeof(*server->search.of));
    if (server->search.of == NULL) {
        status = SMP_ERR_NO_MEMORY;
        goto err_free_server;
    }
    status = smp_lineup_create(server->pipeline, place->pipelines, place->in_sequence,
                               &server->lineup);
    if (status != SMP_OK) {
        goto err_free_search;
    }
    if (place->in_sequence) {
        status = smp_sequence_create(server->pipeline == 0, &server->sequence);
    }
    if (status != SMP_OK) {
        goto err_destroy_lineup;
    }
    status = smp_board_create(place->rank, server->size,
                              place->in_sequence ? "dp_rank" : "tp_rank", place->names,
                              &server->board);
    if (status != SMP_OK) {
        goto err_destroy_sequence;
    }
    status = smp_rest_init(&server->rest);
    if (status != SMP_OK) {
        goto err_destroy_board;
    }
    server->spin_us = spin_us;
    server->ops = *ops;
    server->ctx = ctx;
    *out = server;
    return SMP_OK;

err_destroy_board:
    smp_board_destroy(server->board);
err_destroy_sequence:
    smp_sequence_destroy(server->sequence);
err_destroy_lineup:
    smp_lineup_destroy(server->lineup);
err_free_search:
    free(server->search.of);
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
    free(server->ready);
    smp_rest_fini(&server->rest);
    smp_board_destroy(server->board);
    smp_sequence_destroy(server->sequence);
    smp_lineup_destroy(server->lineup);
    free(server->search.of);
    free(server);
}

/* What the ranks of the same pp_rank do together begins. */
static void
begin_together(smp_server *server, uint32_t step)
{
    server->step = step;
    smp_lineup_begin(server->lineup);
    if (server->sequence != NULL) {
        smp_sequence_begin(server->sequence);
    }
    server->over = 0;
    server->in_order = false;
    server->peer_failed = false;
    server->mismatch[0] = '\0';
}

/* A step has failed here; of its messages only other ranks' last words count. */
static void
hear_after(smp_server *server, smp_message *message)
{
    const smp_envelope *e = smp_message_envelope(message);

    if (e == NULL || e->step < server->step ||
        (e->step == server->step && e->kind != SMP_MSG_ISSUED)) {
        server->received +=
            e != NULL && e->kind != SMP_MSG_PROBE && e->kind != SMP_MSG_STILL;
        smp_message_free(message);
        return;
    }
    count_in(server, message);
}

void
smp_server_leave_out(smp_server *server, uint32_t step)
{
    begin_together(server, step);
    server->failed = true;
    end_collectives(server);
}

smp_status
smp_server_step(smp_server *server, uint32_t step, smp_schedule *schedule,
                smp_message **end)
{
    worker    *first;
    bool       interrupted = false;
    smp_status status = SMP_OK;

    *end = NULL;
    begin_together(server, step);
    server->overtaken = false;
    server->schedule = schedule;
    server->settling = false;
    server->settled = 0;
    server->asker = -1;
    server->promised = false;
    server->failed = false;
    server->failure = SMP_OK;
    server->timeline.count = 0;
    server->search.next_ns = 0;
    server->search.pause_ns = IDLE_NS;
    server->search.round = 0;
    server->search.answers = 0;
    server->search.again = false;
    server->asked = 0; /* in the last step, whose rounds had the same numbers */
    server->left = -1;
    server->awaited[0] = '\0';
    first = idle_worker(server);
    if (first == NULL) {
        smp_schedule_destroy(schedule);
        server->schedule = NULL;
        return SMP_ERR_NO_THREAD;
    }
    smp_board_begin(server->board, step);
    give(first, WHY_SERVE);
    while (!smp_rest_wait(&server->rest, server->forward)) {
        if (!server->ops.check_signals(server->ctx) && !interrupted) {
            interrupted = true;
            smp_server_interrupt(server);
        }
    }
    atomic_store(&server->interrupted, false);
    smp_board_end(server->board);
    if (server->failed) {
        status = server->failure == SMP_OK ? SMP_ERR_CLOSED : server->failure;
        end_collectives(server);
        inbox_forget(server, step);
    }
    if (interrupted && (server->failed || server->end == NULL)) {
        status = SMP_ERR_INTERRUPTED;
    }
    *end = server->end;
    server->end = NULL;
    smp_server_describe(server, NULL, 0);
    smp_schedule_destroy(server->schedule);
    server->schedule = NULL;
    return status;
}

void
smp_server_describe(smp_server *server, const void *bytes, size_t nbytes)
{
    server->described = bytes;
    server->ndescribed = nbytes;
}

uint64_t
smp_server_next_call(smp_server *server)
{
    return ((uint64_t)(unsigned)server->rank << 48) | ++server->calls;
}

/* Leaves the baton until `why_wanted`.  SMP_ERR_CLOSED when the step failed. */
static smp_status
wait_for(worker *self, smp_wait what, reason why_wanted)
{
    what.work = work_of(self);
    self->state = WORKER_PENDING;
    self->wait = what;
    note_event(self, SMP_EVENT_WAIT);
    smp_board_wait(self->server->board, self->number, what);
    dispatch(self);
    smp_board_go(self->server->board, self->number);
    self->state = WORKER_EXECUTING;
    self->call = 0;
    if (self->why != why_wanted) {
        assert(self->why == WHY_FAILED);
        return SMP_ERR_CLOSED;
    }
    note_event(self, SMP_EVENT_GO);
    return SMP_OK;
}

smp_status
smp_server_wait(smp_server *server, uint64_t call, smp_wait_kind kind, int32_t entry,
                int owner, smp_message **response)
{
    worker    *self = this_worker;
    smp_status status;

    if (server->failed) {
        return SMP_ERR_CLOSED;
    }
    for (size_t i = 0; i < server->ninbox && server->sequence == NULL; i++) {
        const smp_envelope *e = smp_message_envelope(server->inbox[i].message);

        if (e->kind == SMP_MSG_RESPONSE && e->call == call) {
            *response = inbox_remove(server, i);
            return SMP_OK;
        }
    }
    smp_jitter();
    self->call = call;
    status = wait_for(
        self, (smp_wait){.kind = (int32_t)kind, .wanted = entry, .asked = owner},
        WHY_RESPONSE);
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
    status = wait_for(self, (smp_wait){.kind = SMP_WAIT_SCHEDULE}, WHY_BACKWARD);
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
    if (server->turns == NULL ||
        (server->sequence == NULL &&
         smp_turns_may_enter(server->turns, gate, microbatch))) {
        return SMP_OK;
    }
    if (server->failed) {
        return SMP_ERR_CLOSED;
    }
    this_worker->gate = gate;
    return wait_for(this_worker, (smp_wait){.kind = SMP_WAIT_GATE, .wanted = gate},
                    WHY_TURN);
}

smp_status
smp_server_line_up(smp_server *server, const smp_key *key)
{
    if (!smp_lineup_may_issue(server->lineup, key)) {
        fail_if_calls_differ(server, key);
    }
    if (server->failed) {
        return SMP_ERR_CLOSED;
    }
    if (smp_lineup_may_issue(server->lineup, key)) {
        return SMP_OK;
    }
    smp_jitter();
    return wait_for(this_worker, (smp_wait){.kind = SMP_WAIT_ISSUE, .key = *key},
                    WHY_ISSUE);
}

smp_status
smp_server_issued(smp_server *server, const smp_key *key)
{
    struct {
        smp_envelope envelope;
        smp_key      key;
    } message = {{.kind = SMP_MSG_KEY, .step = server->step}, *key};

    if (smp_lineup_issue(server->lineup, key) != SMP_OK) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int t = 1;
         server->pipeline == 0 && server->sequence == NULL && t < server->pipelines;
         t++) {
        (void)smp_comm_send(server->comm, peer(server, t), &message, sizeof(message),
                            NULL, 0);
    }
    fail_if_calls_differ(server, NULL);
    return SMP_OK;
}

smp_status
smp_server_await_collective(smp_server *server, const smp_key *key, uint64_t before,
                            const _Atomic bool *over)
{
    worker    *self = this_worker;
    smp_status status = SMP_OK;

    if (server->failed) {
        return SMP_ERR_CLOSED;
    }
    if (server->sequence != NULL || !atomic_load(over)) {
        smp_jitter();
        self->over = over;
        status = wait_for(
            self,
            (smp_wait){.kind = SMP_WAIT_COLLECTIVE, .issued = before, .key = *key},
            WHY_OVER);
    }
    server->over += status == SMP_OK;
    return status;
}

uint64_t
smp_server_issued_so_far(const smp_server *server)
{
    return smp_lineup_issued(server->lineup);
}

bool
smp_server_collectives_ended(smp_server *server, int64_t timeout_ns, uint64_t *least,
                             uint64_t *most)
{
    smp_message *message;
    bool         all_have = false;

    while (!all_have) {
        smp_status status;

        all_have = true;
        for (int t = 0; t < server->pipelines; t++) {
            all_have = all_have && (smp_lineup_has_ended(server->lineup, t) ||
                                    smp_comm_left(server->comm, peer(server, t)));
        }
        if (all_have) {
            break;
        }
        status = smp_comm_receive(server->comm, timeout_ns, &message);
        if (status == SMP_OK) {
            hear_after(server, message);
        } else if (status == SMP_ERR_TIMED_OUT) {
            return false;
        } else if (status != SMP_ERR_INTERRUPTED) {
            break; /* the job comes to its end */
        }
    }
    smp_lineup_range(server->lineup, least, most);
    return true;
}

bool
smp_server_ended_in_order(const smp_server *server)
{
    return server->in_order;
}

bool
smp_server_all_ended_in_order(const smp_server *server)
{
    return server->in_order && !server->peer_failed;
}

void
smp_server_hear(smp_server *server)
{
    smp_message *message;

    while (server->end == NULL &&
           smp_comm_receive(server->comm, 0, &message) == SMP_OK) {
        count_in(server, message);
    }
}

void
smp_server_interrupt(smp_server *server)
{
    atomic_store(&server->interrupted, true);
    smp_comm_wake(server->comm);
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

smp_board *
smp_server_board(smp_server *server)
{
    return server->board;
}

const char *
smp_server_mismatch(const smp_server *server)
{
    return server->mismatch;
}

const char *
smp_server_awaited(const smp_server *server)
{
    return server->awaited;
}

int
smp_server_left(const smp_server *server)
{
    return server->left;
}

size_t
smp_server_write_deadlock(smp_server *server, char *out, size_t room)
{
    size_t used = 0;

    for (int rank = 0; rank < smp_comm_size(server->comm); rank++) {
        used += smp_board_write(server->board, rank, &server->search.of[rank].standing,
                                out + used, room - used);
    }
    return used;
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
