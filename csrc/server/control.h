/* The control plane of a step: messages beside requests and responses, and the step's
 * state: under way, failed, or over.
 *
 * It reads all messages.  Requests and responses go to the backlog; the others start no
 * task and are acted on at once:
 *
 *     RELEASE, CLOSED, FORWARD_DONE   ops->note
 *     KEY, RUNS, BALLOT, ISSUED       server/stage.h
 *     SETTLE, SETTLED, STEP_END,
 *     ABORT                           server/commit.h
 *     PROBE, STILL                    server/detection.h
 *     LEAVE, and words of SETTLED,
 *     ISSUED and STEP_END             server/replay.h; LEAVE: server/ballots.h, too
 *
 * Errors   A failure of the step is kept as its status; smp_control_failed() is true
 *          from then on, and smp_control_end() returns the status.
 * Threads  None: the holder of the server's baton, or the main thread between steps.
 */
#ifndef SMP_SERVER_CONTROL_H
#define SMP_SERVER_CONTROL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/messaging/comm.h"
#include "common/status.h"
#include "server/backlog.h"
#include "server/board.h"
#include "server/grid.h"
#include "server/lineup.h"
#include "server/replay.h"
#include "server/stage.h"
#include "server/turns.h"

typedef struct smp_control smp_control;

typedef struct {
    /* A RELEASE, CLOSED or FORWARD_DONE, or the SETTLE of another step; takes it. */
    void (*note)(void *ctx, smp_message *note);

    /* A worker's collective waiting to be issued, where all workers wait for one; NULL:
     * none.  Borrowed for a moment. */
    const smp_key *(*wanted)(void *ctx);

    /* The number of collectives that are over, with workers that wait still. */
    uint64_t (*over)(void *ctx);
} smp_control_ops;

/* Its other parts, borrowed until destroy. */
typedef struct {
    smp_comm          *comm;
    const char *const *names; /* the ranks' names in errors, by rank of the comm */
    smp_board         *board;
    smp_backlog       *backlog;
    smp_stage         *stage;
    smp_replay        *replay; /* NULL: no static mode */
} smp_control_parts;

/* parts, grid and ops: copied; ctx: borrowed until destroy.  SMP_ERR_NO_MEMORY. */
smp_status smp_control_create(const smp_control_parts *parts, const smp_grid *grid,
                              const smp_control_ops *ops, void *ctx, smp_control **out);
void       smp_control_destroy(smp_control *control); /* takes NULL */

/* A step begins; its early messages are acted on, in the order of their arrival.
 */
void smp_control_begin(smp_control *control, uint32_t step);
void smp_control_sort_early(smp_control *control);

/* This rank leaves out this failed step. */
void smp_control_leave_out(smp_control *control, uint32_t step);

/* The step is over.  SMP_OK: it went well.  *end: the message at its end, the caller's;
 * NULL: none. */
smp_status smp_control_end(smp_control *control, smp_message **end);

/* The step's description; see server/commit.h. */
void smp_control_describe(smp_control *control, const void *bytes, size_t nbytes);

/* The gates to tell of finished forwards; borrowed until replaced. */
void smp_control_set_turns(smp_control *control, smp_turns *turns);

/* Reads the arrived messages, without a wait. */
void smp_control_read(smp_control *control);

/* The same, and messages within timeout_ns, until the step has failed.  The comm's end
 * is no failure of this step here. */
void smp_control_hear(smp_control *control, int64_t timeout_ns);

/* Nothing can run here before a message comes: answers a probe, waits for one message,
 * and looks for a deadlock, or for a departed rank, when none comes. */
void smp_control_idle(smp_control *control);

/* The step has failed; why: the first one but SMP_OK counts. */
void smp_control_fail(smp_control *control, smp_status why);
bool smp_control_failed(const smp_control *control);

/* Fails the step if the ranks of the stage by now show different collectives, or in a
 * sequence different runs.  wanted: this rank's collective, called and not to be issued
 * yet; NULL: none. */
void smp_control_check(smp_control *control, const smp_key *wanted);

/* Whether an end of the step has come; whether pp_rank 0 alone may end it. */
bool smp_control_has_end(const smp_control *control);
bool smp_control_has_voted(const smp_control *control);

/* On pp_rank 0, with every microbatch done: whether all ranks are well and through with
 * the step.  The first call asks them. */
bool smp_control_is_settled(smp_control *control);

/* On pp_rank 0, after a good step in static mode: the verdict for the others, all zero
 * without static mode; then, once they are told, its end for this rank's replay. */
smp_replay_verdict smp_control_verdict(const smp_control *control);
void               smp_control_end_replay(smp_control *control);

/* After a failed step: waits for each stage rank's number of issued collectives.
 * False: one is missing timeout_ns after the last message. */
bool smp_control_await_stage(smp_control *control, int64_t timeout_ns);

/* See smp_server_mismatch(), smp_server_awaited(), smp_server_left() and
 * smp_server_write_deadlock(). */
const char *smp_control_mismatch(const smp_control *control);
const char *smp_control_awaited(const smp_control *control);
int         smp_control_left(const smp_control *control);
size_t      smp_control_write_deadlock(smp_control *control, char *out, size_t room);

#endif
