/* The fixed part at the start of every message between ranks.
 *
 * Both ranks are processes of one job on machines of one byte order (checked when
 * they connect), so the struct travels as it is.  [paper, appendix B]
 */
#ifndef SMP_SERVER_ENVELOPE_H
#define SMP_SERVER_ENVELOPE_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/messaging/comm.h"
#include "server/schedule.h"

typedef enum {
    SMP_MSG_FORWARD = 1,  /* request: run a module */
    SMP_MSG_BACKWARD,     /* request: run the backward of an earlier forward */
    SMP_MSG_RESPONSE,     /* outputs, or gradients of the inputs */
    SMP_MSG_RELEASE,      /* the forward `call` will get no backward */
    SMP_MSG_CLOSED,       /* `microbatch` is done on pp_rank 0 */
    SMP_MSG_FORWARD_DONE, /* the forward of `microbatch` is over on pp_rank 0 */
    SMP_MSG_STEP_END,     /* the step is over; carries its outputs.  In static mode
                             `about`, `seed` and `number`: an smp_replay_verdict */
    SMP_MSG_ABORT,        /* the step failed; carries the exception */
    SMP_MSG_PROBE,        /* pp_rank 0 is idle; are the others?  `call`: the round */
    SMP_MSG_STILL,        /* the answer of an idle rank; carries an smp_still */
    SMP_MSG_SETTLE,  /* pp_rank 0 has done every microbatch: is all well?  Carries its
                        step's description */
    SMP_MSG_SETTLED, /* the answer of a rank without a failure; in static mode with its
                        smp_replay_word */
    SMP_MSG_KEY,     /* tp_rank 0 has issued a collective; carries its smp_key */
    SMP_MSG_ISSUED,  /* the sender makes no more collectives; it has issued `call`.
                        To those of the same pp_rank; in static mode with its
                        smp_replay_word */
    SMP_MSG_RUNS, /* dp_rank 0's runs, to its followers; carries an smp_sequence_word */
    SMP_MSG_LEAVE,  /* all ranks wait: leave the order under replay (server/replay.h),
                       and  the ballots (server/ballots.h) */
    SMP_MSG_BALLOT, /* the sender's smp_ballot_list, to those of the same pp_rank */
    SMP_MSG_LAST = SMP_MSG_BALLOT,
} smp_msg_kind;

/* Flags of a request: the caller's thread state, not inherited by threads. */
enum {
    SMP_FLAG_GRAD = 1 << 0,      /* grad mode on */
    SMP_FLAG_INFERENCE = 1 << 1, /* inference mode on */
    SMP_FLAG_GRAPH = 1 << 2,     /* the caller built Send and Recv: keep the graph */
    SMP_FLAG_STATE = 1 << 3,     /* more thread state follows in the payload */
    SMP_FLAG_RECOMPUTE = 1 << 4, /* a forward during the backward phase */
    SMP_FLAG_BARE = 1 << 5,      /* module.forward, not module(): no hooks */
    SMP_FLAG_RAISED = 1 << 6,    /* of a response: it brings the module's exception */
    SMP_FLAG_INPUTS = 1 << 7,    /* answer with the arguments after pre-hooks, too */
    SMP_FLAG_FAILED = 1 << 8,    /* ISSUED: because the step failed there */
    SMP_FLAG_UNUSED =
        1
        << 9, /* BACKWARD and its response: zeros may be of outputs that no loss uses */
    SMP_FLAG_CHAIN = 1 << 10, /* FORWARD and its response: further calls follow the
                                 first (python/modules/chain.h).  BACKWARD: the chain
                                 has several owners (python/modules/passing.h) */
    SMP_FLAG_RESET = 1 << 11, /* of its response: the owner has undone them all */
    SMP_FLAG_FETCH = 1 << 12, /* FORWARD: asks for an output of a chain, `about`.
                             BACKWARD: the owner keeps those that may be asked for,
                             until CLOSED */
    SMP_FLAG_FIRST =
        1 << 13, /* FORWARD: a checkpoint's first one, with GRAPH: the owner
                    forgets the graph, and the backward uses another call */
    SMP_FLAG_AGAIN = 1 << 14,  /* FORWARD: that call, in the checkpoint's second one */
    SMP_FLAG_PASSED = 1 << 15, /* FORWARD: from another owner of the chain, not from its
                                  caller */
};

typedef struct {
    uint8_t  kind;  /* smp_msg_kind */
    uint8_t  phase; /* smp_phase of the sender */
    uint16_t flags;
    int32_t  microbatch;
    uint32_t step;
    int32_t  entry;  /* requests: index of the remote entry (module or run) */
    uint64_t call;   /* the caller's number for this call; a backward's own */
    uint64_t about;  /* BACKWARD, RELEASE: the forward's call.  RESPONSE, FORWARD: the
                        microbatch's count of requests so far */
    uint64_t seed;   /* FORWARD: seeds the random numbers of this request.  BACKWARD:
                        number of the model.backward call in its microbatch.  RESPONSE
                        of a forward: its unreached (python/modules/reach.h) */
    uint64_t number; /* requests: the task's (server/calls.h) */
} smp_envelope;

/* NULL when the message is too short, or of no known kind or phase. */
static inline const smp_envelope *
smp_message_envelope(const smp_message *message)
{
    const smp_envelope *envelope = (const void *)message->bytes;

    if (message->nbytes < sizeof(*envelope) || envelope->kind < SMP_MSG_FORWARD ||
        envelope->kind > SMP_MSG_LAST || envelope->phase >= SMP_PHASES) {
        return NULL;
    }
    return envelope;
}

#endif
