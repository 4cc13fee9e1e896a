/* The two autograd nodes of a remote call on its caller's rank.
 *
 *     token = Send(leaf, x...)      x: the inputs of the owner's outputs (reach.h)
 *     y...  = Recv(token)
 *
 * Both are made when the response is here, with its list of these x.  In backward, Recv
 * posts the request for the gradients and returns, and Send waits for them: between the
 * two the engine runs independent nodes.  [design.md, section 3]
 *
 * Checkpoints  In the first forward of a torch.utils.checkpoint without re-entrance,
 * the owner forgets the graph.  Recv saves a tensor with the call's number.  To unpack
 * this tensor, the checkpoint calls again; the second call's Recv has saved its own
 * number, and Recv's backward is that call's.
 *
 * Threads  The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_NODES_H
#define SMP_PYTHON_MODULES_NODES_H

#include "python/modules/stretch.h"
#include "python/values/pack.h"
#include "python/values/torch_api.h"

/* One remote call, kept alive by its two nodes: the script may keep these longer than
 * the session's entries. */
typedef struct {
    PyObject     ob_base;
    uint32_t     opened; /* its session and step */
    uint32_t     step;
    int32_t      entry;
    int          owner;
    PyObject    *path; /* owned; the entry's */
    int32_t      microbatch;
    uint64_t     number;     /* of the forward: server/calls.h */
    uint64_t     call;       /* of the forward */
    uint64_t     backward;   /* of the backward; 0: not begun */
    bool         open;       /* the owner keeps a graph, or values past the backward */
    uint16_t     checkpoint; /* SMP_FLAG_FIRST, SMP_FLAG_AGAIN; 0: in none */
    PyObject    *outputs;    /* while Recv is built: list of the tensors it gives out */
    PyObject    *placeholders; /* of a chain: list of weak references; NULL: none */
    smp_stretch *stretches;    /* owned; NULL: the chain has one owner */
    size_t       nstretches;
} smp_call_object;

/* A new one, of zeros; NULL with an exception. */
smp_call_object *smp_call_new(void);

/* Tells the owners, of so many stretches, that the call gets no backward any more;
 * once. */
void smp_call_release(smp_call_object *call, size_t nstretches);

/* Runs Send on the inputs, without the unreached, and Recv.
 *
 * call       its outputs: a list, not empty.
 * inputs     list of the request's tensors with requires_grad; in a chain, of each call
 *            in turn.
 * unreached  reach.h.
 * last_first their gradients come in the opposite order: those of a chain.
 * Returns    Recv's outputs, a tuple (new); NULL with an exception. */
PyObject *smp_nodes_apply(smp_call_object *call, PyObject *inputs, uint64_t unreached,
                          bool last_first);

/* Whether the call's step is under way.  After the step the owner has no graph, and the
 * call's numbers may be another one's. */
bool smp_call_is_of_this_step(const smp_call_object *call);

/* Adds the nodes' functions.  0, or -1 with an exception. */
int smp_nodes_add(PyObject *module);

#endif
