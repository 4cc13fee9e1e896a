/* The order of adding gradients: the same bits for every schedule and timing.
 *
 * Floating-point sums depend on their order, and requests finish in any order.  So a
 * contribution to a parameter's gradient waits here until its turn:
 *
 *   1. a request's contributions are summed by themselves, as the engine does;
 *   2. a microbatch's requests are summed by themselves, later ones first (the order of
 *      their backwards' ends in one process);
 *   3. the model.backward calls of a microbatch (mostly one) are added up in order;
 *   4. the sums are added to the gradient in microbatch order, each when no request of
 *      an earlier microbatch can contribute any more.
 *
 * A microbatch is finished for a parameter when its backward has begun and no open
 * forward may use the parameter, or when pp_rank 0 says so.
 *
 * The engine adds up a request's contributions before it gives them away: a request has
 * one term for a parameter.  So a term need not wait for the end of its own request:
 * else a whole backward's gradients would wait here, as large as the parameters.  Only
 * engines inside the request's (checkpoints entered again) give several.  The first
 * step with terms for a parameter is taken to hold: where each request gave one, later
 * steps expect one.  An unexpected second one is added on arrival, right within
 * rounding, and from then on both wait.
 *
 * Ownership  Terms are opaque; the ledger owns its terms and gives them to ops->add,
 *            ops->fold or ops->drop.
 * Threads    The holder of the server's baton.
 * Errors     SMP_ERR_NO_MEMORY, or an op's.
 */
#ifndef SMP_SERVER_LEDGER_H
#define SMP_SERVER_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

typedef struct smp_ledger smp_ledger;

typedef struct {
    /* *sum += term; takes term. */
    smp_status (*add)(void *ctx, void **sum, void *term);
    /* Adds sum to the parameter's gradient; takes sum. */
    smp_status (*fold)(void *ctx, int32_t parameter, void *sum);
    /* The parameter's gradient is complete for this step. */
    smp_status (*complete)(void *ctx, int32_t parameter);
    void (*drop)(void *ctx, void *term);
} smp_ledger_ops;

/* Entry e (0 <= e < nentries) may use the parameters uses[first[e]] ... uses[first[e+1]
 * - 1], ascending.  Entry -1, the step function, may use all.  The arrays are copied,
 * ops too; ctx is borrowed. */
smp_status smp_ledger_create(int32_t nparameters, int32_t nentries,
                             const int32_t *first, const int32_t *uses,
                             const smp_ledger_ops *ops, void *ctx, smp_ledger **out);
void       smp_ledger_destroy(smp_ledger *ledger);

/* Whether the entry may use a parameter that one of the others may use. */
bool smp_ledger_share(const smp_ledger *ledger, int32_t entry, const int32_t *others,
                      size_t nothers);

/* A step begins; backwards: how often the step function calls model.backward. */
smp_status smp_ledger_begin(smp_ledger *ledger, int32_t microbatches,
                            int32_t backwards);

/* A forward of `entry` keeps a graph: its backward, or release, will close it. */
smp_status smp_ledger_open(smp_ledger *ledger, int32_t microbatch, uint64_t order,
                           int32_t entry);
smp_status smp_ledger_close(smp_ledger *ledger, int32_t microbatch, uint64_t order,
                            int32_t entry);

/* A forward of `entry` in a checkpoint's first call: the second call, with a graph, has
 * this order, too.  Terms of lower order wait for it, at most until smp_ledger_done().
 */
smp_status smp_ledger_promise(smp_ledger *ledger, int32_t microbatch, uint64_t order,
                              int32_t entry);

/* A forward of `entry` without a graph: a checkpoint may run it again in backward, with
 * an order of its own. */
smp_status smp_ledger_suspect(smp_ledger *ledger, int32_t microbatch, int32_t entry);

/* Backward number `backward` (from 0) of the microbatch has begun. */
smp_status smp_ledger_backward(smp_ledger *ledger, int32_t microbatch,
                               int32_t backward);

/* A term for the parameter from the request with this order, in this model.backward
 * call of the microbatch; takes term. */
smp_status smp_ledger_add(smp_ledger *ledger, int32_t microbatch, int32_t backward,
                          uint64_t order, int32_t parameter, void *term);

/* The microbatch is done: nothing of it is to come. */
smp_status smp_ledger_done(smp_ledger *ledger, int32_t microbatch);

/* The step is over: end folds the remaining terms, in order; abandon drops them, after
 * a failure. */
smp_status smp_ledger_end(smp_ledger *ledger);
void       smp_ledger_abandon(smp_ledger *ledger);

/* Terms held now, for tests and reports. */
size_t smp_ledger_held(const smp_ledger *ledger);

/* Calls visit with each of them, in no order, until a call returns another status than
 * SMP_OK, and returns that status.  A term is lent for the call; visit must not call
 * the ledger. */
smp_status smp_ledger_visit(const smp_ledger *ledger,
                            smp_status (*visit)(void *ctx, void *term), void *ctx);

#endif
