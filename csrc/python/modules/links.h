/* Links from call to call, as learned: a follower's arguments are the former call's
 * arguments and outputs, arguments of some calls before that, and values.
 *
 * A link belongs to a call of its caller's entry, known by its own entry, the count of
 * such calls before, and its modes.  The first microbatch's calls make it; two misses
 * end it.  [schedules.md, section 2]
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_LINKS_H
#define SMP_PYTHON_MODULES_LINKS_H

#include "python/modules/history.h"
#include "python/modules/task.h"
#include "python/values/pack.h"

/* A tensor of a call, by its place: back << 24 | number << 1 | is an output.  back: 0:
 * at the former call; an argument of so many calls before that; SMP_HISTORY_GIVEN: of
 * the task; SMP_CHAIN_OF_REQUEST: a tensor of the request.  SMP_CHAIN_ALIAS: the
 * caller's is an alias of that output, as x[:] is. */
typedef uint32_t smp_chain_source;

enum { SMP_CHAIN_OF_REQUEST = 255, SMP_CHAIN_ALIAS = 1 << 23 };

static inline smp_chain_source
smp_chain_source_of(unsigned back, size_t number, bool output)
{
    return (smp_chain_source)(back << 24 | (number & 0x3fffff) << 1 | output);
}

static inline unsigned
smp_chain_back(smp_chain_source source)
{
    return source >> 24;
}

static inline size_t
smp_chain_number(smp_chain_source source)
{
    return source >> 1 & 0x3fffff;
}

static inline bool
smp_chain_is_output(smp_chain_source source)
{
    return source & 1;
}

/* A further call, on the wire. */
typedef struct {
    uint64_t seed;
    uint64_t number; /* server/calls.h */
    int32_t  entry;
    uint32_t nsources;
    uint32_t flags; /* SMP_FLAG_INPUTS, or none */
    uint32_t zero;  /* no padding travels */
} smp_chain_head;

/* One call by this rank's Python. */
typedef struct {
    int32_t   entry;
    PyObject *args;   /* borrowed */
    PyObject *kwargs; /* borrowed; or NULL */
    PyObject *state;  /* borrowed: travels with it; NULL: none */
    uint64_t  seed;   /* of its random numbers, once drawn */
    bool      drawn;
    bool      grad;
    uint16_t  flags;  /* of its envelope: how hooks are called */
    uint32_t  before; /* calls of the entry by the task until now */
    uint32_t  modes;  /* grad mode, autocast and default device, as one number */
    bool      chains; /* it may be a chain's */
} smp_call_site;

/* A call, as another one's follower.  Never changed: a replay may hold a former one. */
typedef struct smp_follower {
    int               refs;
    int32_t           entry;
    uint16_t          flags;
    uint32_t          before;
    smp_buffer        values;  /* its arguments, keyword arguments and state */
    smp_chain_source *sources; /* owned */
    size_t            nsources;
    uint32_t          word; /* of all of these: server/ballots.h */
} smp_follower;

/* From a call to its follower. */
typedef struct smp_link {
    int32_t       caller; /* entry of the task; -1: the step function */
    int32_t       entry;
    uint32_t      before;
    uint32_t      modes; /* its call site's */
    smp_follower *next;  /* owned; NULL: none known */
    int           tries;
    int           misses;
} smp_link;

/* NULL: the call of the task's entry has none. */
smp_link *smp_link_find(const smp_task *task, int32_t entry, uint32_t before,
                        uint32_t modes);

/* The follower was not called. */
void smp_link_miss(smp_link *link);

/* The follower was called with or without a hook, unlike before.  The link is learned
 * again, and no try is lost; a link with another follower stays. */
void smp_link_unlearn(smp_link *link, const smp_follower *call);

/* The link ends; for_good: none is learned again. */
void smp_link_end(smp_link *link, bool for_good);

/* Takes the reference.  Takes NULL. */
void smp_follower_let_go(smp_follower *call);

/* Learns from a call outside a chain: once its arguments are packed, and once its
 * outputs are here.  The second is for calls without a change of their caller's
 * tensors. 0, or -1 with an exception. */
int smp_links_called(smp_task *task, const smp_call_site *site, const smp_pack *pack);
int smp_links_returned(smp_task *task, const smp_call_site *site, const smp_pack *pack,
                       const smp_unpack *outputs);

/* The task is over, or goes on to its backward. */
void smp_links_leave(smp_task *task);

/* The links as chains: list (new) of (caller, [entry, ...]).  NULL with an exception.
 */
PyObject *smp_links_as_chains(void);

/* Forgets all links: the entries change. */
void smp_links_forget(void);

/* The count of nodes made by autograd on this thread; -1 with an exception. */
long smp_links_sequence(void);

#endif
