/* Messages to and from the other ranks, and waiting for them.
 *
 * The receiving thread looks at the rings itself and sleeps on the segment's doorbell.
 */
#include <assert.h>
#include <sched.h>
#include <stdatomic.h>

#include "comm/memory/block.h"
#include "comm/memory/doorbell.h"
#include "comm/memory/message.h"
#include "comm/messaging/comm.h"
#include "comm/messaging/comm_state.h"
#include "common/clock.h"
#include "common/jitter.h"
#include "common/spin.h"

/* Looks between two looks at the clock, when they take no time to speak of. */
#define LOOKS 32

/* Whether messages can go to `dest`. */
static smp_status
check_dest(const smp_comm *comm, int dest)
{
    if (smp_comm_is_child(comm)) {
        return SMP_ERR_CLOSED;
    }
    if (dest < 0 || dest >= comm->size) {
        return SMP_ERR_INVALID;
    }
    switch (smp_peers_state(&comm->peers, dest)) {
    case SMP_PEER_OPEN:
        return SMP_OK;
    case SMP_PEER_LEFT:
        return SMP_ERR_CLOSED;
    case SMP_PEER_LOST:
        return SMP_ERR_PEER_LOST;
    case SMP_PEER_UNKNOWN:
        break;
    }
    return SMP_ERR_INVALID;
}

smp_status
smp_comm_block(smp_comm *comm, int dest, size_t bytes, smp_block **out)
{
    smp_status          status = check_dest(comm, dest);
    const smp_endpoint *route;

    if (status != SMP_OK) {
        return status;
    }
    route = comm->routes[dest];
    return route->ops->block != NULL ? route->ops->block(route->self, bytes, out)
                                     : comm->host.block(comm, bytes, out);
}

smp_status
smp_comm_block_for_device(smp_comm *comm, int dest, int device, size_t bytes,
                          smp_block **out)
{
    smp_status status = check_dest(comm, dest);

    if (status != SMP_OK) {
        return status;
    }
    smp_pinned_use_device(comm->pinned, device);
    return bytes < SMP_PINNED_LEAST ? smp_comm_block(comm, dest, bytes, out)
                                    : comm->host.pinned_block(comm, bytes, out);
}

smp_status
smp_comm_send(smp_comm *comm, int dest, const void *bytes, size_t nbytes,
              smp_block *const *blocks, size_t nblocks)
{
    smp_status status = check_dest(comm, dest);
    uint64_t   total = nbytes;

    if (status == SMP_OK && nblocks > INT32_MAX) {
        status = SMP_ERR_INVALID;
    }
    if (status == SMP_OK) {
        const smp_endpoint *route = comm->routes[dest];

        for (size_t i = 0; i < nblocks; i++) {
            /* A device pool is for ranks with this rank's segment. */
            assert(blocks[i]->data != NULL || route->ops->neighbour != NULL);
            total += blocks[i]->bytes;
        }
        smp_jitter();
        status = route->ops->send(route->self, dest, bytes, nbytes, blocks, nblocks);
    }
    if (status == SMP_OK) {
        atomic_fetch_add_explicit(&comm->traffic[dest].messages, 1,
                                  memory_order_relaxed);
        atomic_fetch_add_explicit(&comm->traffic[dest].bytes, total,
                                  memory_order_relaxed);
    } else {
        for (size_t i = 0; i < nblocks; i++) {
            smp_block_release(blocks[i]);
        }
    }
    return status;
}

/* SMP_ERR_TIMED_OUT: nothing is there. */
static smp_status
look(smp_comm *comm, smp_message **out)
{
    /* Read before the queues: an ended peer's messages are in them by then. */
    bool       alone = smp_peers_all_closed(&comm->peers);
    smp_status fault = smp_peers_fault(&comm->peers);

    if (atomic_load(&comm->woken) && atomic_exchange(&comm->woken, false)) {
        return SMP_ERR_INTERRUPTED;
    }
    for (int i = 0; i < comm->endpoints.n; i++) {
        const smp_endpoint *c = &comm->endpoints.list[i];
        smp_status          status = SMP_OK;
        smp_message        *message = NULL;

        if (c->ops->poll != NULL) {
            status = c->ops->poll(c->self, &message);
        }
        if (status != SMP_OK) {
            return status;
        }
        if (message != NULL && smp_post_is(message)) {
            smp_post_put(&comm->post, message);
        } else if (message != NULL) {
            *out = message;
            return SMP_OK;
        }
    }
    *out = smp_inbox_get(&comm->inbox);
    if (*out != NULL) {
        return SMP_OK;
    }
    if (fault != SMP_OK) {
        return fault;
    }
    return alone ? SMP_ERR_CLOSED : SMP_ERR_TIMED_OUT;
}

/* Looks until something is there or `until_ns`. */
static smp_status
look_for_a_while(smp_comm *comm, int64_t until_ns, smp_message **out)
{
    int        looks = comm->spins ? LOOKS : 1;
    smp_status status;

    do {
        for (int i = 0; i < looks; i++) {
            status = look(comm, out);
            if (status != SMP_ERR_TIMED_OUT) {
                return status;
            }
            if (comm->spins) {
                smp_spin_pause();
            } else {
                sched_yield();
            }
        }
    } while (smp_clock_ns() < until_ns);
    return status;
}

smp_status
smp_comm_receive(smp_comm *comm, int64_t timeout_ns, smp_message **out)
{
    smp_doorbell *doorbell = comm->segment->doorbell;
    smp_message  *message = NULL;
    smp_status    status;
    int64_t       deadline;
    int64_t       looked;

    if (smp_comm_is_child(comm)) {
        return SMP_ERR_CLOSED;
    }
    status = look(comm, &message);
    if (status == SMP_ERR_TIMED_OUT && timeout_ns != 0) {
        deadline = smp_clock_deadline(timeout_ns);
        if (comm->look_ns != 0) {
            looked = smp_clock_ns() + comm->look_ns;
            status =
                look_for_a_while(comm, looked < deadline ? looked : deadline, &message);
        }
        while (status == SMP_ERR_TIMED_OUT) {
            smp_doorbell_lie_down(doorbell);
            status = look(comm, &message);
            if (status != SMP_ERR_TIMED_OUT || smp_clock_ns() >= deadline) {
                break;
            }
            if (comm->polls) { /* it may use this thread's core now */
                smp_loop_kick(&comm->loop);
            }
            smp_doorbell_sleep(doorbell, deadline);
        }
        smp_doorbell_get_up(doorbell);
    }
    if (status == SMP_OK) {
        *out = message;
    }
    return status;
}

void
smp_comm_wake(smp_comm *comm)
{
    if (!smp_comm_is_child(comm)) {
        atomic_store(&comm->woken, true);
        smp_doorbell_ring(comm->segment->doorbell);
    }
}

void
smp_comm_sent_to(const smp_comm *comm, int rank, uint64_t *messages, uint64_t *bytes)
{
    const smp_traffic *t = &comm->traffic[rank];

    *messages = atomic_load_explicit(&t->messages, memory_order_relaxed);
    *bytes = atomic_load_explicit(&t->bytes, memory_order_relaxed);
}

uint64_t
smp_comm_sent(const smp_comm *comm)
{
    uint64_t sent = 0;

    for (int rank = 0; rank < comm->size; rank++) {
        sent +=
            atomic_load_explicit(&comm->traffic[rank].messages, memory_order_relaxed);
    }
    return sent;
}
