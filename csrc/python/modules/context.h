/* A forward's graph on its owner, from the request to its backward or release.
 *
 *     x... = Enter(leaf)     the request's tensors, as non-leaf, non-view tensors
 *     y    = module(x...)
 *
 * A context keeps y's gradient edge, not its data, and Enter's gradients.
 *
 * Threads  The GIL is held, by the holder of the baton.
 * Errors   0, or -1 or NULL with an exception.
 */
#ifndef SMP_PYTHON_MODULES_CONTEXT_H
#define SMP_PYTHON_MODULES_CONTEXT_H

#include "python/values/unpack_tensor.h"
#include "server/envelope.h"

typedef struct {
    PyObject  ob_base;
    int32_t   entry;
    PyObject *path; /* owned; the graph may outlive its entry */
    int32_t   microbatch;
    uint64_t  order;
    PyObject *inputs;    /* while Enter is built: list of the request's tensors */
    PyObject *edges;     /* tuple: gradient edges of outputs with requires_grad */
    PyObject *gradients; /* list: gradients at Enter, or None; NULL: none yet */
    size_t    ninputs;   /* tensors of the request with requires_grad: reach.h */
    uint64_t  unreached; /* of them */
    PyObject *node;    /* Enter's, of the request's own call, while the forward runs */
    PyObject *enters;  /* dict: each Enter's node -> its first input; likewise */
    uint64_t  count;   /* requests of the microbatch when the forward ended */
    uint64_t  seed;    /* the request's */
    int32_t  *entries; /* owned: of a chain's calls; NULL: entry alone */
    size_t    nentries;
    PyObject *held;  /* of a chain: list of lists of its calls' outputs, or None after
                    the backward; NULL: none */
    uint32_t  first; /* number of its first call in the chain */
    int32_t   entry_now;       /* of the call in its backward */
    bool      several;         /* of a chain of several owners (passing.h): */
    uint32_t  stretch;         /* ... its own, from 0 */
    int       previous;        /* ... the rank of the comm with the stretch before */
    uint64_t  previous_call;   /* ... */
    uint64_t  previous_number; /* ... */
    int32_t   previous_entry;  /* ... */
    PyObject *origins;         /* ... owned: list, by input */
    bool      in_ledger;       /* its request is open in the ledger */
    bool      running;         /* inside its own backward */
} smp_context;

/* Adds the functions of Enter. */
int smp_context_add(PyObject *module);

/* The context of a forward without a graph (new). */
smp_context *smp_context_new(const smp_envelope *envelope);

/* The context of another forward (new); an Enter node's outputs replace the tensors
 * with requires_grad. */
smp_context *smp_context_enter(smp_unpack *unpack, const smp_envelope *envelope);

/* Enter once more, for a further call of a chain.
 *
 * inputs   list of tensors.
 * Returns  Enter's outputs, a tuple (new). */
PyObject *smp_context_enter_again(smp_context *context, PyObject *inputs);

/* Keeps the graph of the outputs with requires_grad, a list, until the backward of
 * `call`; and held, where it is set.  Without either, nothing. */
int smp_context_keep(smp_context *context, PyObject *outputs, uint64_t call);

/* Finds the arguments unreached by the outputs, a list: `unreached`.  For a context
 * that is not kept. */
int smp_context_find_unreached(smp_context *context, PyObject *outputs);

/* Keeps outputs in `held`, out of their graph, past the backward of `call`: another
 * context takes the place of the one that the backward has taken.
 *
 * places  list of (number of the call in the chain, number among its tensors); those of
 *         other owners are left alone. */
int smp_context_hold(const smp_context *context, uint64_t call, PyObject *places);

/* Ends what smp_context_hold() has kept of a microbatch: its caller is done (CLOSED).
 */
int smp_context_let_go(int32_t microbatch);

/* The gradients of its backward are complete. */
int smp_context_close(const smp_context *context);

/* Removes and returns the context of a forward. */
smp_context *smp_context_take(uint64_t call);

/* The same, borrowed: it stays. */
smp_context *smp_context_find(uint64_t call);

/* Takes the reference, and its graph: Enter's node leads back to the context, unseen by
 * the garbage collector.  Takes NULL. */
void smp_context_drop(smp_context *context);

/* No backward of the call will come.  False with an exception. */
bool smp_context_release(uint64_t call);

/* The step is over: forwards without a backward are forgotten. */
void smp_context_forget(void);

#endif
