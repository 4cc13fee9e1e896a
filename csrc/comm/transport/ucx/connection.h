/* How two ranks come to be connected over UCX, and how that ends.
 *
 * They meet over TCP (comm/transport/connecting/meet.h), tell each other where their
 * workers are (introduction.h), say hello over UCX, and send two patterns after it, one
 * as heads travel and one as blocks do.  A rank is reached when each side has heard the
 * other's hello, found the patterns right, and told so.  A pair in which one side has
 * not is not reached over UCX, for good, and the next transport is tried: so it is for
 * other bytes, errors and patterns that do not come in time, for which that side warns
 * (smp_warn).
 *
 * Status   UCX has run over TCP and shared memory, on no InfiniBand or RoCE yet.
 * Threads  whichever may call UCX; see transfer.h.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_CONNECTION_H
#define SMP_COMM_TRANSPORT_UCX_CONNECTION_H

#include "comm/transport/ucx/state.h"

/* As smp_transport's. */
smp_status smp_ucx_connect(void *self, const void *const *cards,
                           const size_t *card_bytes, const bool *wanted,
                           const smp_deadline *deadline, bool *reached, int *failed);

/* Closes UCX's connection, with all that is on its way.  Again: does nothing. */
void smp_ucx_close_connection(smp_ucx_peer *p);

/* Closes all, lets UCX finish with them, and ends the worker: what then still was on
 * its way is ours again. */
void smp_ucx_close_worker(smp_ucx *self);

/* Takes NULL. */
void smp_ucx_peer_destroy(smp_ucx_peer *p);

#endif
