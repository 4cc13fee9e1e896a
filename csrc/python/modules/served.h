/* A chain on one of its owners, while its calls run (serve_chain.c, passing.c).
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_SERVED_H
#define SMP_PYTHON_MODULES_SERVED_H

#include "python/modules/links.h"
#include "python/modules/task.h"
#include "python/values/pack.h"
#include "python/values/unpack.h"

/* An argument, by the place it came from. */
typedef struct {
    PyObject *tensor;  /* borrowed: of the request, or an output of a call */
    bool      request; /* the former */
    size_t    number;  /* then */
} smp_argument;

/* One call under way or done. */
typedef struct {
    smp_unpack   *unpack; /* its arguments: the request's for the first, else own */
    smp_unpack    own;
    smp_pack      pack;     /* its outputs: described for all but the chain's last */
    long         *versions; /* owned: of its tensors, before it ran */
    smp_argument *from;     /* owned: of its tensors; NULL: all are the request's */
} smp_served_call;

/* The place of an owner's calls in a chain of several owners; of zeros in others, but
 * for the first field. */
typedef struct {
    uint64_t  agreed; /* smp_chain_plan's */
    bool      several;
    uint32_t  stretch;       /* this owner's, from 0 */
    uint32_t  first;         /* number of its first call in the chain */
    int       reply_to;      /* the caller's rank of the comm, */
    uint64_t  reply;         /* ... and call */
    uint64_t  previous_call; /* of the stretch before; 0: none */
    uint64_t  previous_number;
    int32_t   previous_entry;
    PyObject *calls;     /* owned: tuple: calls of the stretches behind */
    PyObject *described; /* owned: list of bytes: outputs of the calls before */
    PyObject *origins;   /* owned: list, by tensor of the request: see passing.h */
    uint64_t  unreached; /* of the caller's tensors with grad, in the calls before, */
    size_t    ninputs;   /* ... so many */
} smp_place;

typedef struct {
    smp_served_call *calls;   /* owned */
    int32_t         *entries; /* owned, by call */
    size_t           n;       /* this owner's */
    size_t           done;    /* with a pack */
    size_t           rest;    /* calls of other owners behind them */
    smp_place        place;
    const uint16_t   flags;
    const smp_task  *task;
    const uint64_t   count; /* of the microbatch's requests, when it began */
    bool             nests; /* a call has called other ranks */
    const int        source;
} smp_served_chain;

/* A call as it stands in the request. */
typedef struct {
    smp_chain_head head;
    const char    *values; /* borrowed from the request */
    uint32_t       nvalues;
    const char    *sources; /* borrowed likewise: of smp_chain_source, unaligned */
} smp_written_call;

static inline smp_chain_source
smp_written_source(const smp_written_call *call, size_t i)
{
    smp_chain_source source;

    memcpy(&source, call->sources + i * sizeof(source), sizeof(source));
    return source;
}

/* An argument of an earlier call of this owner. */
static inline smp_argument
smp_served_argument(const smp_served_call *call, size_t number)
{
    return call->from == NULL
               ? (smp_argument){call->unpack->tensors[number], true, number}
               : call->from[number];
}

/* Reads the next call.  0, or -1 with an exception. */
int smp_served_read(smp_unpack *from, smp_written_call *call);

/* The flags of a further call, of those of the first one. */
static inline uint16_t
smp_served_flags(uint16_t flags, const smp_chain_head *head)
{
    return (uint16_t)((flags & (uint32_t)~SMP_FLAG_INPUTS) |
                      (head->flags & (uint32_t)SMP_FLAG_INPUTS));
}

#endif
