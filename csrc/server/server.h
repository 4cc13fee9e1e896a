/* The module server: one rank's requests, workers and baton.
 *
 * During a step exactly one thread of the rank works: it holds the baton.  A worker
 * with its remote call under way hands the baton on.  A holder with nothing to run
 * waits on the comm's doorbell itself: no thread stands between a message and its
 * worker.  [paper, section 4.2; design.md, section 4]
 *
 *     IDLE --task--> EXECUTING --remote call--> PENDING
 *      ^                 |  ^                      |
 *      +-----done--------+  +------response--------+
 *
 * Ownership  The server borrows the comm.  Messages handed to ops->execute and
 *            returned by smp_server_wait() are the receiver's.
 * Threads    create, step, destroy: the main thread.  wait, backward_point, fail,
 *            next_call: the worker with the baton.  No function needs the GIL; blocking
 *            ones must be called without it.
 */
#ifndef SMP_SERVER_SERVER_H
#define SMP_SERVER_SERVER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "comm/messaging/comm.h"
#include "common/status.h"
#include "server/ballots.h"
#include "server/board.h"
#include "server/envelope.h"
#include "server/replay.h"
#include "server/schedule.h"
#include "server/timeline.h"
#include "server/turns.h"

typedef struct smp_server smp_server;

/* The server's callbacks, called by the baton's holder, with no lock. */
typedef struct {
    /* On a worker thread, before its first and after its last task. */
    void (*worker_begin)(void *ctx);
    void (*worker_end)(void *ctx);

    /* Executes a request (SMP_MSG_FORWARD or SMP_MSG_BACKWARD); takes it. */
    void (*execute)(void *ctx, smp_message *request);

    /* Runs the step function for one microbatch (pp_rank 0). */
    void (*run_root)(void *ctx, int32_t microbatch);

    /* A note without a task (SMP_MSG_RELEASE, _CLOSED, _FORWARD_DONE); takes it.
     * SMP_MSG_SETTLE: pp_rank 0 ran another step than smp_server_describe() said. */
    void (*note)(void *ctx, smp_message *note);

    /* On the main thread, while it waits for the end of the step, after a signal.
     * False ends the step. */
    bool (*check_signals)(void *ctx);
} smp_server_ops;

/* A rank of the comm, with its pipelines one behind the other: pipeline * pp_size +
 * pp_rank. */
typedef struct {
    int  rank;      /* of the comm */
    int  pipelines; /* of an MP_GROUP, by tp_rank; or in_sequence of all, by dp_rank */
    bool in_sequence;         /* all ranks of a pp_rank run the same in one order
                                 (server/sequence.h) */
    int recording_steps;      /* of static mode (server/replay.h); 0: none.  In a
                                 sequence its leader records */
    const char *const *names; /* the ranks' names in errors, by rank of the comm */
} smp_server_place;

/* place and ops are copied, ctx, comm and names are borrowed until destroy.
 * SMP_ERR_NO_MEMORY, SMP_ERR_SYSTEM. */
smp_status smp_server_create(smp_comm *comm, const smp_server_place *place, int spin_us,
                             const smp_server_ops *ops, void *ctx, smp_server **out);

/* Joins the workers.  Not during a step.  Takes NULL. */
void smp_server_destroy(smp_server *server);

/* Runs one step and returns when it ended.  schedule: pp_rank 0's, taken; NULL on the
 * other ranks: they serve until SMP_MSG_STEP_END comes, and *end is that message (the
 * caller's).  step numbers the steps of the job, from 1, alike on all ranks.
 *
 * SMP_ERR_CLOSED       the step failed: smp_server_fail() here, or SMP_MSG_ABORT from
 *                      another rank, then *end.
 * SMP_ERR_INTERRUPTED  check_signals said so.  Not when pp_rank 0 had ended the step by
 *                      then: SMP_OK, it went well on every rank.
 * SMP_ERR_PEER_LOST    a rank died; smp_server_awaited() has the wait.
 * SMP_ERR_DEADLOCK     on rank 0 of the comm: no rank has anything to run and no
 *                      message or collective is under way; smp_server_write_deadlock()
 *                      has the waits of all ranks.
 * SMP_ERR_MISMATCH     the tp_ranks make different calls of modules with collectives,
 *                      or in a sequence the ranks' runs differ; smp_server_mismatch()
 *                      names them.
 * SMP_ERR_UNREACHABLE  rank smp_server_left() has left the job, with fewer steps.
 * SMP_ERR_MALFORMED, SMP_ERR_NO_THREAD.
 *
 * After a failure no worker is inside a task and the server can run the next step. */
smp_status smp_server_step(smp_server *server, uint32_t step, smp_schedule *schedule,
                           smp_message **end);

/* The description of this rank's next step, for comparison with pp_rank 0's; borrowed
 * until the step is over.  The default is no bytes. */
void smp_server_describe(smp_server *server, const void *bytes, size_t nbytes);

/* A call's number: unique among this rank's. */
uint64_t smp_server_next_call(smp_server *server);

/* Waits for the response to `call`, with the baton given away.  kind, entry and owner:
 * the wait on the board.  SMP_ERR_CLOSED: the step failed, unwind. */
smp_status smp_server_wait(smp_server *server, uint64_t call, smp_wait_kind kind,
                           int32_t entry, int owner, smp_message **response);

/* The running request goes on with another entry: the next call of a chain, on the
 * board and in the timeline. */
void smp_server_go_on_with(smp_server *server, int32_t entry);

/* An event of the running task in the timeline, with an entry called by the task. */
void smp_server_note(smp_server *server, smp_event_kind kind, int32_t entry,
                     int32_t about);

/* The step function of `microbatch` calls no module for the first time any more. */
void smp_server_forward_done(smp_server *server, int32_t microbatch);

/* The step function of `microbatch` reached model.backward: waits for its turn.
 * SMP_ERR_CLOSED: the step failed, unwind. */
smp_status smp_server_backward_point(smp_server *server, int32_t microbatch);

/* The gates of this rank's modules with changing buffers; borrowed until replaced. */
void smp_server_set_turns(smp_server *server, smp_turns *turns);

/* Waits until the microbatch may pass the gate.  SMP_ERR_CLOSED: unwind. */
smp_status smp_server_await_turn(smp_server *server, int32_t gate, int32_t microbatch);

/* A collective of a module; all by the calling worker, in this order.
 *
 * line_up           waits until it is this rank's next to issue.  SMP_ERR_CLOSED:
 *                   unwind.
 * issued            reports the issue, before the baton is given away.
 *                   SMP_ERR_NO_MEMORY.
 * await_collective  waits until *over: any thread may set it and then call
 *                   smp_comm_wake(); before: smp_server_issued_so_far() before
 *                   `issued`.  SMP_ERR_CLOSED: unwind. */
smp_status smp_server_line_up(smp_server *server, const smp_key *key);
smp_status smp_server_issued(smp_server *server, const smp_key *key);
smp_status smp_server_await_collective(smp_server *server, const smp_key *key,
                                       uint64_t before, const _Atomic bool *over);
uint64_t   smp_server_issued_so_far(const smp_server *server);

/* The end of a ballot here. */
typedef struct {
    size_t outcome;
    bool   complete; /* all ranks have cast */
} smp_agreement;

/* Casts a list in a ballot (server/ballots.h), and waits for its outcome with the baton
 * given away; an empty one has outcome 0 at once.  for_all: waits until all have cast.
 * SMP_ERR_CLOSED: unwind; SMP_ERR_NO_MEMORY. */
smp_status smp_server_agree(smp_server *server, const smp_ballot_list *list,
                            bool for_all, smp_agreement *out);

/* After a failed step: the fewest and the most collectives issued in it by a rank of
 * the same pp_rank.  False: a rank's number is missing timeout_ns after the last
 * message.  The main thread. */
bool smp_server_collectives_ended(smp_server *server, int64_t timeout_ns,
                                  uint64_t *least, uint64_t *most);

/* Whether this rank had done all its part of the last step before its failure.
 * Likewise all of the same pp_rank, known after smp_server_collectives_ended(). */
bool smp_server_ended_in_order(const smp_server *server);
bool smp_server_all_ended_in_order(const smp_server *server);

/* This rank leaves out this failed step: it issues nothing in it.  The main thread. */
void smp_server_leave_out(smp_server *server, uint32_t step);

/* Reads the arrived messages, and those within timeout_ns: the step may have failed
 * elsewhere already. */
void smp_server_hear(smp_server *server, int64_t timeout_ns);

/* Ends the step when the running task ends or waits.  check_signals calls this before
 * it gives back the things that workers wait for; returning false does it too, later.
 * The main thread, in a step. */
void smp_server_interrupt(smp_server *server);

/* Ends the step; the calling worker then unwinds. */
void smp_server_fail(smp_server *server);

/* Whether the step under way has failed (the worker with the baton). */
bool smp_server_failed(const smp_server *server);

/* The board of this rank; lives as long as the server. */
smp_board *smp_server_board(smp_server *server);

/* After SMP_ERR_MISMATCH: the different calls. */
const char *smp_server_mismatch(const smp_server *server);

/* A task's wait in the last step when a rank was lost; "" for none. */
const char *smp_server_awaited(const smp_server *server);

/* The departed rank of the comm, after SMP_ERR_UNREACHABLE. */
int smp_server_left(const smp_server *server);

/* After SMP_ERR_DEADLOCK, and SMP_ERR_MISMATCH on rank 0 of the comm: the waits of each
 * rank, as smp_board_write(). */
size_t smp_server_write_deadlock(smp_server *server, char *out, size_t room);

/* The descriptor for a signal handler's bytes, one for each signal
 * (signal.set_wakeup_fd); those bytes go on to `forward`, -1 for nowhere.  The main
 * thread, between steps. */
int  smp_server_signal_fd(const smp_server *server);
void smp_server_forward_signals(smp_server *server, int forward);

/* On pp_rank 0 after a good step: the verdict to go with STEP_END, all zero without
 * static mode; and its effect here, once it is sent. */
smp_replay_verdict smp_server_verdict(const smp_server *server);
void               smp_server_end_replay(smp_server *server);

/* The record of the last step. */
smp_timeline *smp_server_timeline(smp_server *server);

#endif
