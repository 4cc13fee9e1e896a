/* The calls of a chain whose outputs are here, before their caller's Python makes them.
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_FORESEEN_H
#define SMP_PYTHON_MODULES_FORESEEN_H

#include "python/modules/chain_plan.h"
#include "python/modules/nodes.h"

/* One further call of a chain. */
typedef struct {
    smp_link     *link; /* of the call before it */
    smp_follower *call; /* owned */
    uint64_t      seed;
    PyObject    **tensors; /* owned: the expected arguments */
    PyObject    **nodes; /* owned: grad_fn of placeholders among them, of other chains;
                            NULL: this chain's node, or none */
    long *versions;
    int  *grads;  /* owned: whether each requires grad */
    bool  shares; /* arguments with grad of the request: see links.c */
} smp_foreseen;

typedef struct smp_chain {
    uint32_t      modes;     /* its calls' */
    uint64_t      agreed;    /* smp_chain_plan's */
    size_t        n;         /* further calls */
    size_t        at;        /* the next one, from 0 */
    smp_foreseen *next;      /* owned */
    long          sequence;  /* autograd's, at the end of the call before it */
    PyObject     *node;      /* owned: Recv's; NULL: no graph */
    smp_unpack   *described; /* owned: outputs of all calls but the last */
    smp_unpack    last;
} smp_chain;

/* Begins the replay (chain.h): makes the first call's value (new) of the response,
 * which it takes.  NULL with an exception. */
PyObject *smp_chain_begin(smp_task *task, const smp_call_site *site,
                          const smp_chain_plan *plan, smp_call_object *call,
                          const smp_pack *pack, smp_message *response);

/* The value of a call (new), and its changes of objects among its arguments. */
PyObject *smp_chain_read_outputs(smp_unpack *outputs, const smp_pack *pack);

/* Takes NULL. */
void smp_chain_free(smp_chain *chain);

#endif
