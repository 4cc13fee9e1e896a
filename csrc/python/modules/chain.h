/* Chains: calls of remote modules that feed each other, in one request.
 *
 * A caller learns which call follows which (links.h).  The next request of the first
 * one takes the others along (chain_plan.h); their owner runs them one after another
 * (serve_chain.h), and answers once.  The caller's Python then makes each call itself:
 * a call as foreseen has its outputs at once, as placeholders, and the last call's as
 * tensors.  Any other call goes to its owner, as without a chain, and what was foreseen
 * is left without a use.  [schedules.md, section 2]
 *
 *     request    the first call's values | tensors of calls before it | count |
 *                for each further call: head, values around its tensors, the source of
 *                each of these
 *     response   for each call but the last: descriptions of its outputs, and of the
 *                contents of changed objects | the last one's
 *
 * Autograd   One Send and one Recv serve the whole chain.  Recv's outputs are those of
 *            all calls; an untouched placeholder has no gradient.
 * Threads    The GIL is held, by the holder of the baton.
 */
#ifndef SMP_PYTHON_MODULES_CHAIN_H
#define SMP_PYTHON_MODULES_CHAIN_H

#include "python/modules/chain_plan.h"
#include "python/modules/nodes.h"
#include "python/modules/session.h"

/* Whether the call is the one foreseen: 1, with *value (new); 0: it is not, or none
 * was; -1 with an exception. */
int smp_chain_replay(smp_task *task, smp_call_site *site, PyObject **value);

/* The owner has undone the chain: its call number `at` is in none any more.  Takes the
 * response.  0, or -1 with an exception. */
int smp_chain_undone(const smp_call_site *site, const smp_chain_plan *plan,
                     smp_call_object *call, smp_message *response);

/* An argument of the entry's call has changed while other tasks ran.  -1, with an
 * exception. */
int smp_chain_refuse_changed(const smp_entry *entry);

/* The task is over, or goes on to its backward. */
void smp_chain_leave(smp_task *task);

/* Adds the functions.  0, or -1 with an exception. */
int smp_chain_add(PyObject *module);

#endif
