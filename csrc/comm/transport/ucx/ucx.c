/* The UCX transport: active messages, all of them by the progress thread.
 *
 * A message travels as one active message with the head (sizes of all blocks, the
 * bytes, the small blocks; see arrivals.h) and one more for each larger block: UCX
 * announces it first (rendezvous), and its bytes go straight into a block of the
 * receiver's.  UCX may deliver them in another order.
 *
 * Beside UCX there is a lifeline to each rank (comm/transport/connecting/lifeline.h).
 * A rank is reached when each side has heard the other over UCX.  A rank at its end
 * says goodbye over UCX and waits until the other confirms all earlier messages over
 * the lifeline: closing a connection of UCX may throw away messages on their way.
 *
 * The progress thread sleeps on the worker's descriptor.  UCX has threads of its own
 * for new connections.
 */
#include <stdlib.h>
#include <sys/socket.h>

#include "comm/transport/connecting/lifeline.h"
#include "comm/transport/transport.h"
#include "comm/transport/ucx/connection.h"
#include "comm/transport/ucx/devices.h"
#include "comm/transport/ucx/introduction.h"
#include "comm/transport/ucx/library.h"
#include "comm/transport/ucx/state.h"
#include "comm/transport/ucx/transfer.h"
#include "common/jitter.h"

/* Rounds of progress() before it returns to the loop. */
#define ROUNDS 64

/* Messages given to UCX in one round: a thread with nothing but sends must not keep us
 * from arrivals. */
#define STARTS 16

/* ----------------------------------------------------------------- progress thread */

/* Nothing more comes from it or goes there. */
static void
peer_gone(smp_ucx_peer *p)
{
    const smp_host *host = p->self->host;

    p->gone = true;
    host->unwatch(host->comm, p->fd);
    smp_ucx_close_connection(p);
}

/* Draws the conclusions from a peer's flags.  Its goodbye first: after it the peer
 * closes its connections. */
static void
see_to(smp_ucx_peer *p)
{
    const smp_host *host = p->self->host;

    if (p->gone) {
        return;
    }
    if (p->goodbye_came) {
        smp_lifeline_say(p->fd, SMP_UCX_ARRIVED);
        host->ended(host->comm, p->rank, SMP_ERR_CLOSED);
        peer_gone(p);
    } else if (p->fault != SMP_OK || p->ended) {
        host->ended(host->comm, p->rank,
                    p->fault != SMP_OK ? p->fault : SMP_ERR_PEER_LOST);
        peer_gone(p);
        shutdown(p->fd, SHUT_RDWR); /* tells the rank, too */
    }
}

/* progress() follows. */
static void
worker_ready(void *arg, uint32_t events)
{
    (void)arg;
    (void)events;
}

/* One round: sends, arrivals, conclusions.  False: nothing to do. */
static bool
move(smp_ucx *self)
{
    bool moved = false;

    for (int i = 0; i < STARTS && smp_ucx_start_next(self); i++) {
        moved = true;
    }
    if (self->ucp->ucp_worker_progress(self->worker) != 0) {
        moved = true;
    }
    if (self->news) {
        self->news = false;
        for (int r = 0; r < self->host->size; r++) {
            if (self->peers[r] != NULL) {
                see_to(self->peers[r]);
            }
        }
        moved = true;
    }
    return moved;
}

static int64_t
ucx_progress(void *arg)
{
    smp_ucx *self = arg;
    bool     moved = false;

    if (self->npeers == 0) {
        return -1;
    }
    atomic_store(&self->awake, true);
    for (int round = 0; round < ROUNDS; round++) {
        if (move(self)) {
            moved = true;
            continue;
        }
        atomic_store(&self->awake, false); /* from here on senders kick ... */
        smp_jitter();
        if (atomic_load(&self->queued) ==
                0 && /* ... one before may have relied on us */
            self->ucp->ucp_worker_arm(self->worker) == SMP_UCS_OK) {
            break;
        }
        atomic_store(&self->awake, true);
    }
    if (moved) {
        self->host->moved(self->host->comm);
    }
    return atomic_load(&self->awake) ? 0 : -1;
}

static bool
ucx_finish(void *arg)
{
    smp_ucx *self = arg;
    bool     done = true;

    for (int r = 0; r < self->host->size; r++) {
        smp_ucx_peer *p = self->peers[r];

        if (p == NULL || p->gone) {
            continue;
        }
        p->said_goodbye = p->said_goodbye || smp_ucx_say_goodbye(p);
        done = done && p->arrived;
    }
    return done;
}

/* -------------------------------------------------------------- setup and teardown */

static void
ucx_destroy(void *arg)
{
    smp_ucx *self = arg;

    if (self->worker != NULL) {
        smp_ucx_close_worker(self);
    }
    if (self->context != NULL) {
        self->ucp->ucp_cleanup(self->context);
    }
    smp_ucx_transfers_free(self);
    for (int r = 0; r < self->host->size; r++) {
        smp_ucx_peer_destroy(self->peers[r]);
    }
    smp_tcp_door_close(&self->door);
    smp_lock_fini(&self->lock);
    free(self);
}

/* SMP_ERR_SYSTEM, as without the library: UCX is not asked for by name, and this host
 * has no device worth it. */
static smp_status
ucx_create(const smp_host *host, void **out, const void **card, size_t *card_bytes)
{
    smp_status     status;
    smp_ucx       *self;
    const smp_ucp *ucp;

    if (!host->named && !smp_ucx_fast_devices()) {
        return SMP_ERR_SYSTEM;
    }
    status = smp_ucx_library(&ucp);
    if (status != SMP_OK) {
        return status;
    }
    self = calloc(1, sizeof(*self) + (size_t)host->size * sizeof(smp_ucx_peer *));
    if (self == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    *self = (smp_ucx){.host = host,
                      .ucp = ucp,
                      .only = host->interface != NULL,
                      .named = host->named,
                      .efd = -1,
                      .watch = {worker_ready, self}};
    status = smp_tcp_door_open(host->rank, host->interface, &self->door);
    if (status != SMP_OK) {
        free(self);
        return status;
    }
    smp_lifeline_secret(host->job, "ucx", self->secret);
    smp_lock_init(&self->lock, SMP_LOCK_OUTBOX);
    *out = self;
    *card = &self->door.card;
    *card_bytes = sizeof(self->door.card);
    return SMP_OK;
}

const smp_transport smp_transport_ucx = {
    .abi = SMP_TRANSPORT_ABI,
    .name = "ucx",
    .same_host = false,
    .polls = false,
    .create = ucx_create,
    .connect = smp_ucx_connect,
    .send = smp_ucx_send,
    .poll = NULL,
    .progress = ucx_progress,
    .finish = ucx_finish,
    .destroy = ucx_destroy,
};
