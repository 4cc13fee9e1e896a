/* Chains: calls of remote modules that feed each other, in one request.
 *
 * A caller learns which call follows which: its arguments are the former call's
 * arguments and outputs, arguments of some calls before that, and values.  The next
 * request of the first one takes the others along; their owner runs them one after
 * another, and answers once.  The caller's Python then makes each call itself: a call
 * as foreseen has its outputs at once, as placeholders, and the last call's as tensors.
 * Any other call goes to its owner, as without a chain, and what was foreseen is left
 * without a use. [schedules.md, section 2]
 *
 *     request    the first call's values | tensors of calls before it | count | for
 * each further call: head, values around its tensors, the source of each of these
 *     response   for each call but the last: descriptions of its outputs, and of the
 *                contents of changed objects | the last one's
 *
 * Autograd   One Send and one Recv serve the whole chain.  Recv's outputs are those of
 *            all calls; an untouched placeholder has no gradient.
 * Threads    The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_CHAIN_H
#define SMP_PYTHON_MODULES_CHAIN_H

#include "python/modules/nodes.h"
#include "python/modules/session.h"
#include "python/modules/task.h"
#include "python/values/pack.h"

/* The most calls of a chain, but the first. */
#define SMP_CHAIN_MOST 63

/* A further call, on the wire. */
typedef struct {
    uint64_t seed;
    uint64_t number; /* server/calls.h */
    int32_t  entry;
    uint32_t nsources;
} smp_chain_head;

/* A tensor of a call, by its place: back << 24 | number << 1 | is an output.  back: 0:
 * at the former call; an argument of so many calls before that; SMP_CHAIN_OF_REQUEST: a
 * tensor of the request. */
typedef uint32_t smp_chain_source;

/* How far back an argument's call is. */
enum { SMP_CHAIN_FARTHEST = 8, SMP_CHAIN_OF_REQUEST = 255 };

static inline smp_chain_source
smp_chain_source_of(unsigned back, size_t number, bool output)
{
    return (smp_chain_source)(back << 24 | (number & 0x7fffff) << 1 | output);
}

static inline unsigned
smp_chain_back(smp_chain_source source)
{
    return source >> 24;
}

static inline size_t
smp_chain_number(smp_chain_source source)
{
    return source >> 1 & 0x7fffff;
}

static inline bool
smp_chain_is_output(smp_chain_source source)
{
    return source & 1;
}

/* One call by this rank's Python. */
typedef struct {
    int32_t   entry;
    PyObject *args;   /* borrowed */
    PyObject *kwargs; /* borrowed; or NULL */
    PyObject *state;  /* borrowed: travels with it; NULL: none */
    uint64_t  seed;   /* of its random numbers, once drawn */
    bool      drawn;
    uint32_t  before; /* calls of the entry by the task until now */
    bool      grad;
    bool      chains; /* it may be a chain's */
} smp_call_site;

typedef struct {
    struct smp_link     *links[SMP_CHAIN_MOST]; /* borrowed */
    struct smp_follower *calls[SMP_CHAIN_MOST]; /* owned, until smp_chain_let_go() */
    uint64_t             seeds[SMP_CHAIN_MOST];
    smp_chain_source    *sources[SMP_CHAIN_MOST]; /* owned: of each, in the request */
    size_t               n;                       /* further calls */
} smp_chain_plan;

/* Draws the call's seed, unless it is drawn.  0, or -1 with an exception. */
int smp_call_draw(smp_call_site *site);

/* Whether the call is the one foreseen: 1, with *value (new); 0: it is not, or none
 * was; -1 with an exception. */
int smp_chain_replay(smp_task *task, smp_call_site *site, PyObject **value);

/* The calls after this one, as learned.  0, or -1 with an exception. */
int smp_chain_foresee(smp_task *task, smp_call_site *site, smp_chain_plan *plan);

/* Whether one of them has parameters with requires_grad. */
bool smp_chain_trains(const smp_chain_plan *plan);

void smp_chain_let_go(smp_chain_plan *plan);

/* Appends them to the request, and tensors of calls before it. */
int smp_chain_pack(smp_pack *pack, const smp_task *task, smp_chain_plan *plan);

/* Begins the replay: makes the first call's value (new) of the response, which it
 * takes. NULL with an exception. */
PyObject *smp_chain_begin(smp_task *task, const smp_call_site *site,
                          const smp_chain_plan *plan, smp_call_object *call,
                          const smp_pack *pack, smp_message *response);

/* The owner has undone the chain: its call number `at` is in none any more.  Takes the
 * response.  0, or -1 with an exception. */
int smp_chain_undone(const smp_call_site *site, const smp_chain_plan *plan,
                     smp_message *response);

/* Learns from a call outside a chain: once its arguments are packed, and once its
 * outputs are here.  The second is for calls without a change of their caller's
 * tensors. 0, or -1 with an exception. */
int smp_chain_called(smp_task *task, const smp_call_site *site, const smp_pack *pack);
int smp_chain_returned(smp_task *task, const smp_call_site *site, const smp_pack *pack,
                       const smp_unpack *outputs);

/* The task is over, or goes on to its backward. */
void smp_chain_leave(smp_task *task);

/* Forgets all links: the entries change. */
void smp_chain_forget(void);

/* Adds the functions.  0, or -1 with an exception. */
int smp_chain_add(PyObject *module);

#endif
