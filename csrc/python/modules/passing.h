/* A chain over several owners: each runs a stretch of its calls in a context of its
 * own, and passes the rest on to the next one.
 *
 *     caller -> first owner -> ... -> last owner -> caller
 *
 * The backward goes the other way (passing_gradients.h).
 *
 * A request that is passed on looks like one of the caller: values around tensors, and
 * further calls.  Its place (served.h) says whom to answer, and what the calls so far
 * have given.
 *
 * Autograd   A tensor with grad in the request has an origin: the stretch that made it
 *            with the number among its outputs in the graph, or None for the caller.
 *            Its gradients are terms of the sum there: last calls first, behind the
 *            caller's own.
 * Threads    The GIL is held, by the holder of the baton.
 * Errors     0, or -1 with an exception.
 */
#ifndef SMP_PYTHON_MODULES_PASSING_H
#define SMP_PYTHON_MODULES_PASSING_H

#include "python/modules/context.h"
#include "python/modules/served.h"
#include "python/modules/stretch.h"

/* Appends the place of the caller's request.
 *
 * stretches  NULL: the chain has one owner.
 * agreed     smp_chain_plan's. */
int smp_place_pack(smp_pack *pack, const smp_stretch *stretches, size_t nstretches,
                   uint64_t agreed);

/* Reads it, from the rank of the comm for the call. */
int smp_place_read(smp_place *place, smp_unpack *unpack, int source, uint64_t call);

void smp_place_fini(smp_place *place);

/* The next owner's request. */
typedef struct {
    smp_pack          pack;
    const smp_unpack *first;   /* borrowed: this owner's request */
    smp_written_call *calls;   /* owned */
    PyObject         *outputs; /* borrowed: list: of this owner's calls, in the graph */
    PyObject         *origins; /* owned: list, by tensor of the pack */
    PyObject         *described; /* owned: list of bytes */
} smp_pass;

/* Reads the calls behind this owner's, and packs their tensors.
 *
 * outputs   list of its own calls' outputs in the graph; borrowed until fini. */
int smp_pass_begin(smp_pass *pass, const smp_served_chain *chain, smp_unpack *first,
                   PyObject *outputs);

/* Sends the request, once the context is kept. */
int smp_pass_send(smp_pass *pass, const smp_served_chain *chain,
                  const smp_context *context, const smp_envelope *envelope);

void smp_pass_fini(smp_pass *pass);

/* Notes in the context what its backward needs, before it is kept. */
int smp_pass_note(smp_context *context, const smp_served_chain *chain);

/* The caller's unreached tensors up to this owner (reach.h); counts them all. */
uint64_t smp_pass_unreached(const smp_served_chain *chain, const smp_context *context,
                            size_t *ninputs);

#endif
