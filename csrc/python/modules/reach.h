/* The arguments behind a call's outputs, as autograd sees them.
 *
 * A module may detach an argument.  The caller's backward must then not go on from that
 * argument as if its gradient were zeros: hooks and functions would run without a
 * counterpart in one process.  So the owner walks the graph from the outputs to Enter,
 * and names the unreached arguments in its response; the caller's Send leaves them out.
 * The walk costs 0.1 us a node, and mostly ends soon: a residual is short.
 *
 * Inputs   The outputs of Enter, counted from 0: the request's tensors with
 *          requires_grad.  In a chain each call has an Enter of its own, for such
 * tensors of the request; the counts go on.  A bit each in a word, 1 for the unreached;
 *          those past the 64th count as reached.
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_MODULES_REACH_H
#define SMP_PYTHON_MODULES_REACH_H

#include "python/values/torch_api.h"

/* Walks from the grad_fn of the outputs, each a tensor with requires_grad, to Enter's
 * nodes, of so many inputs in all.  Ends as soon as all are reached.
 *
 * enters     dict: node -> the number of its first input.
 * unreached  written.
 * Returns    0, or -1 with an exception. */
int smp_reach(PyObject *const *outputs, size_t noutputs, PyObject *enters,
              size_t ninputs, uint64_t *unreached);

static inline bool
smp_is_reached(uint64_t unreached, size_t input)
{
    return input >= 64 || (unreached >> input & 1) == 0;
}

#endif
