/* The connection of two ranks over UCX, and its end.
 *
 * They meet over TCP (comm/transport/connecting/meet.h), tell each other their workers'
 * addresses (introduction.h), and say hello over UCX.  Two patterns follow the hello,
 * one as a head and one as a block.  A rank is reached when each side has heard the
 * other's hello, found the patterns right, and told so.  Otherwise the pair is not
 * reached over UCX, for good, and the next transport is tried: so for other bytes,
 * errors and late patterns, with a warning on that side (smp_warn).
 *
 * Status   UCX has run over TCP and shared memory, on no InfiniBand or RoCE yet.
 * Threads  the one allowed to call UCX; see transfer.h.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_CONNECTION_H
#define SMP_COMM_TRANSPORT_UCX_CONNECTION_H

#include "comm/transport/ucx/state.h"

/* As smp_transport's. */
smp_status smp_ucx_connect(void *self, const void *const *cards,
                           const size_t *card_bytes, const bool *wanted,
                           const smp_deadline *deadline, bool *reached, int *failed);

/* Closes UCX's connection, with all messages on their way.  Again: does nothing. */
void smp_ucx_close_connection(smp_ucx_peer *p);

/* Closes all, lets UCX finish with them, and ends the worker: messages still on their
 * way are then ours again. */
void smp_ucx_close_worker(smp_ucx *self);

/* Takes NULL. */
void smp_ucx_peer_destroy(smp_ucx_peer *p);

#endif
