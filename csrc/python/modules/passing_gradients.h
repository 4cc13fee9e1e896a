/* The backward of a chain over several owners (passing.h):
 *
 *     caller -> last owner -> ... -> first owner -> caller
 *
 * Each owner adds the terms of its inputs to those of the owners before it.
 *
 * Threads    The GIL is held, by the holder of the baton.
 * Errors     0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_MODULES_PASSING_GRADIENTS_H
#define SMP_PYTHON_MODULES_PASSING_GRADIENTS_H

#include "python/modules/context.h"
#include "python/modules/stretch.h"
#include "python/values/pack.h"

/* Appends the gradients of all but the last stretch to the caller's request.
 *
 * gradients  of the outputs of the whole chain in the graph. */
int smp_pass_pack_gradients(smp_pack *pack, const smp_stretch *stretches,
                            size_t nstretches, PyObject *const *gradients);

/* Gradients on their way from owner to owner. */
typedef struct {
    int       reply_to;
    uint64_t  reply;
    PyObject *gradients; /* owned: list, by stretch before: list of its outputs' */
    PyObject *terms;     /* owned: list, by stretch before and here: list of (number of
                            the output, gradient) */
    PyObject *caller;    /* owned: list: the caller's */
    PyObject *kept;      /* owned: list of places (context.h); NULL: none */
} smp_pass_gradients;

int  smp_pass_read_gradients(smp_pass_gradients *passed, smp_unpack *unpack, int source,
                             uint64_t call);
void smp_pass_gradients_fini(smp_pass_gradients *passed);

/* Appends the edges of the context's outputs with terms of later stretches to the
 * roots, and the terms to the gradients; both lists. */
int smp_pass_add_roots(const smp_pass_gradients *passed, const smp_context *context,
                       PyObject *roots, PyObject *grads);

/* Appends gradients of the context's inputs, and answers the caller or passes them on.
 *
 * state      travels with it; NULL: none.
 * envelope   the request's. */
int smp_pass_gradients_on(smp_pass_gradients *passed, const smp_context *context,
                          PyObject *state, smp_envelope envelope);

#endif
