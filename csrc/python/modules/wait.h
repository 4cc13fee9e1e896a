/* Waits of a task for another rank.
 *
 * Threads  A worker with a task, with the GIL and the baton: it gives both away.
 */
#ifndef SMP_PYTHON_MODULES_WAIT_H
#define SMP_PYTHON_MODULES_WAIT_H

#include "comm/messaging/comm.h"
#include "python/values/torch_api.h"
#include "server/server.h"

/* Waits for a response; kind and entry: the wait on the board.  NULL with an exception:
 * `aborted` when the step failed. */
smp_message *smp_session_wait(uint64_t call, smp_wait_kind kind, int32_t entry);

/* The subjects of ballots about a chain, with the place of a call in it; their call is
 * the chain's first one. */
enum {
    SMP_BALLOT_PLAN = 0,         /* a word for each call */
    SMP_BALLOT_SERVED = 1 << 16, /* 1: the owner's call went well; 1: so may the next */
    SMP_BALLOT_MADE = 2 << 16,   /* 1: the caller makes the foreseen call */
};

/* Casts a list in a ballot (server/ballots.h).  complete: waits for the lists of all
 * tp_ranks; *complete: they are here, which a standstill may prevent.  NULL: waits for
 * the outcome alone.  The outcome, or -1 with an exception: `aborted` when the step
 * failed. */
int smp_session_agree(const smp_ballot *ballot, const uint32_t *words, size_t n,
                      bool *complete);

#endif
