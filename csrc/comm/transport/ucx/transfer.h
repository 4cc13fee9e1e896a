/* Messages to and from the ranks reached over UCX, in their parts.
 *
 * Status     UCX has run over TCP and shared memory, on no InfiniBand or RoCE yet.
 * Ownership  A sent message belongs to the transport until UCX has done with it; an
 *            arrived one is delivered to the host.
 * Threads    send: any.  The rest: the one allowed to call UCX: the connecting thread,
 *            then the progress thread, then the destroying one.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_TRANSFER_H
#define SMP_COMM_TRANSPORT_UCX_TRANSFER_H

#include "comm/transport/ucx/state.h"

/* As smp_transport's. */
smp_status smp_ucx_send(void *self, int dest, const void *bytes, size_t nbytes,
                        smp_block *const *blocks, size_t nblocks);

/* An active message has come.  One without the pass is no rank's: it is dropped. */
ucs_code smp_ucx_on_message(void *self, const void *header, size_t header_bytes,
                            void *data, size_t n, const ucp_am_recv_param *param);

/* Something is wrong with a peer: progress() acts on it. */
void smp_ucx_blame(smp_ucx_peer *p, smp_status why);

/* Gives the oldest queued message to UCX.  False: there is none. */
bool smp_ucx_start_next(smp_ucx *self);

/* At once, hello with the patterns; in its turn, behind the queue.  False: no
 * memory. */
bool smp_ucx_say_hello(smp_ucx_peer *p);
bool smp_ucx_say_goodbye(smp_ucx_peer *p);

/* Frees the unfinished arrivals.  UCX's worker is gone. */
void smp_ucx_transfers_free(smp_ucx *self);

#endif
