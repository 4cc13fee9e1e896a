/* A comm: the host of its transports, its progress thread, its beginning and end.
 *
 * The receiving thread (comm/messaging/messages.c) looks at the rings itself and sleeps
 * on the segment's doorbell.  The progress thread does everything else; it rings the
 * same doorbell.
 */
#define _GNU_SOURCE
#include "comm/messaging/comm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/memory/block.h"
#include "comm/memory/doorbell.h"
#include "comm/messaging/comm_state.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"
#include "common/jitter.h"
#include "common/log.h"
#include "common/thread.h"

/* The time of a waiter's look before its sleep, by default.  Several times a sleep and
 * a wake-up (100 us on virtual machines): with less, ranks find each other asleep for
 * ever after the first sleep. */
#define LOOK_US 1000

/* The progress thread looks for events without a descriptor (the end of forked
 * children) this often, and more often while a block waits for one. */
#define IDLE_NS (1 * SMP_NS_PER_S)
#define SWEEP_NS (20 * SMP_NS_PER_MS)

/* The time of destroy's wait without a transfer's move, and the interval of its
 * looks. */
#define FINISH_NS (1 * SMP_NS_PER_S)
#define FINISH_STEP_NS (1 * SMP_NS_PER_MS)

/* --------------------------------------------------- a comm as a host */

static void
host_arrived(smp_comm *comm)
{
    smp_doorbell_ring(comm->segment->doorbell);
}

static void
host_kick(smp_comm *comm)
{
    smp_loop_kick(&comm->loop);
}

static void
host_ended(smp_comm *comm, int rank, smp_status why)
{
    /* After our goodbye a peer closes without one of its own. */
    if (why == SMP_ERR_PEER_LOST && atomic_load(&comm->stopping)) {
        why = SMP_ERR_CLOSED;
    }
    smp_peers_close(&comm->peers, rank, why,
                    comm->routes[rank] != NULL ? comm->routes[rank]->ops->name
                                               : "nothing");
    /* It may have died between clearing the doorbell and waking us. */
    smp_doorbell_ring_hard(comm->segment->doorbell);
}

static void
host_deliver(smp_comm *comm, smp_message *message)
{
    if (smp_post_is(message)) {
        smp_post_put(&comm->post, message);
        return;
    }
    smp_inbox_put(&comm->inbox, message);
    host_arrived(comm);
}

/* A block in a taken slot of the own segment. */
static smp_status
block_in(smp_comm *comm, uint32_t slot, uint64_t offset, size_t bytes, smp_block **out)
{
    smp_status status = smp_block_shared(comm->segment, slot, offset, bytes, out);

    if (status == SMP_OK) {
        atomic_fetch_add_explicit(&comm->pool_blocks, 1, memory_order_relaxed);
    } else {
        atomic_store(&comm->segment->states[slot], SMP_SLOT_FREE);
    }
    return status;
}

static smp_status
host_block(smp_comm *comm, size_t bytes, smp_block **out)
{
    uint32_t   slot;
    uint64_t   offset;
    smp_status status;

    if (!smp_arena_take(comm->arena, bytes, &slot, &offset)) {
        status = smp_block_private(bytes, out);
        if (status == SMP_OK) {
            atomic_fetch_add_explicit(&comm->pool_fallbacks, 1, memory_order_relaxed);
            smp_log(SMP_LOG_DEBUG, "a tensor of %zu bytes found no room in the pool",
                    bytes);
        }
        return status;
    }
    status = block_in(comm, slot, offset, bytes, out);
    if (status != SMP_OK) {
        return status;
    }
    if (smp_arena_wants_pages(comm->arena) &&
        !atomic_exchange(&comm->pages_asked, true)) {
        host_kick(comm);
    }
    return SMP_OK;
}

static smp_status
host_pinned_block(smp_comm *comm, size_t bytes, smp_block **out)
{
    uint32_t slot;
    uint64_t offset;

    return smp_pinned_take(comm->pinned, bytes, &slot, &offset)
               ? block_in(comm, slot, offset, bytes, out)
               : host_block(comm, bytes, out);
}

static void
host_moved(smp_comm *comm)
{
    comm->moved_ns = smp_clock_ns();
}

static bool
host_waiting(const smp_comm *comm)
{
    return atomic_load(&comm->segment->doorbell->asleep) != 0;
}

static smp_status
host_watch(smp_comm *comm, int fd, uint32_t events, smp_watch *watch)
{
    return smp_loop_watch(&comm->loop, fd, events, watch);
}

static void
host_unwatch(smp_comm *comm, int fd)
{
    smp_loop_unwatch(&comm->loop, fd);
}

/* --------------------------------------------------------- the progress thread */

/* Does the present work, and returns the time to wait then. */
static int64_t
progress(smp_comm *comm)
{
    int64_t wait = IDLE_NS;

    atomic_store(&comm->pages_asked, false);
    if (smp_arena_wants_pages(comm->arena)) {
        smp_arena_make_pages(comm->arena);
        wait = 0;
    }
    if (smp_fork_sweep() && wait > SWEEP_NS) {
        wait = SWEEP_NS;
    }
    return smp_endpoints_progress(&comm->endpoints, wait);
}

/* Until all is sent and goodbye is said, or nothing moves any more. */
static void
finish_all(smp_comm *comm)
{
    host_moved(comm);
    while (!smp_endpoints_finish(&comm->endpoints) &&
           smp_clock_ns() < comm->moved_ns + FINISH_NS) {
        progress(comm);
        smp_loop_wait(&comm->loop, FINISH_STEP_NS);
    }
}

static void *
progress_main(void *arg)
{
    smp_comm *comm = arg;

    while (!atomic_load(&comm->stopping)) {
        smp_loop_wait(&comm->loop, progress(comm));
        smp_jitter();
    }
    finish_all(comm);
    return NULL;
}

/* ----------------------------------------------------------- setup and teardown */

static void
fill_host(smp_comm *comm, const char *interface)
{
    comm->host = (smp_host){
        .comm = comm,
        .rank = comm->rank,
        .size = comm->size,
        .job = comm->job,
        .segment = comm->segment,
        .interface = interface,
        .block = host_block,
        .pinned_block = host_pinned_block,
        .block_data = smp_block_data,
        .block_bytes = smp_block_bytes,
        .block_release = smp_block_release,
        .message = smp_message_create,
        .message_free = smp_message_free,
        .deliver = host_deliver,
        .arrived = host_arrived,
        .moved = host_moved,
        .ended = host_ended,
        .gone = smp_comm_gone,
        .name = smp_comm_name,
        .waiting = host_waiting,
        .kick = host_kick,
        .kick_fd = comm->loop.kick_fd,
        .watch = host_watch,
        .unwatch = host_unwatch,
        .close_in_child = smp_fork_close_in_child,
        .forget_fd = smp_fork_forget_fd,
    };
}

smp_status
smp_comm_create(const smp_comm_config *config, smp_comm **out)
{
    smp_comm  *comm;
    smp_status status;

    if (config->size < 1 || config->rank < 0 || config->rank >= config->size ||
        memchr(config->job, '\0', sizeof(config->job)) == NULL) {
        return SMP_ERR_INVALID;
    }
    smp_status_forget();
    smp_jitter_init();
    status = smp_fork_init();
    if (status != SMP_OK) {
        return status;
    }
    comm = calloc(1, sizeof(*comm));
    if (comm == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    status = smp_loop_init(&comm->loop);
    if (status != SMP_OK) {
        free(comm);
        return status;
    }
    smp_inbox_init(&comm->inbox);
    smp_post_init(&comm->post);
    comm->rank = config->rank;
    comm->size = config->size;
    comm->spin_us = config->spin_us;
    comm->generation = smp_fork_generation();
    memcpy(comm->job, config->job, sizeof(comm->job));
    comm->routes = calloc((size_t)comm->size, sizeof(smp_endpoint *));
    comm->traffic = calloc((size_t)comm->size, sizeof(*comm->traffic));
    comm->card = malloc(SMP_CARD_BYTES);
    comm->names = malloc((size_t)comm->size * sizeof(int));
    if (smp_peers_init(&comm->peers, comm->size) != SMP_OK || comm->routes == NULL ||
        comm->traffic == NULL || comm->card == NULL || comm->names == NULL) {
        status = SMP_ERR_NO_MEMORY;
        goto err_destroy;
    }
    for (int r = 0; r < comm->size; r++) {
        comm->names[r] = config->names != NULL ? config->names[r] : r;
    }
    status =
        smp_segment_create(comm->size, smp_comm_pool_bytes(config), &comm->segment);
    if (status != SMP_OK) {
        goto err_destroy;
    }
    status = smp_arena_create(comm->segment, &comm->arena);
    if (status != SMP_OK) {
        goto err_destroy;
    }
    comm->device = smp_device_port_create(
        &(smp_device_peers){comm, smp_comm_neighbour, smp_comm_gone, smp_comm_left,
                            smp_comm_name},
        comm->segment, comm->rank, comm->size, config->device_pool_bytes);
    comm->pinned = smp_pinned_create(comm->segment, comm->arena);
    if (comm->device == NULL || comm->pinned == NULL) {
        status = SMP_ERR_NO_MEMORY;
        goto err_destroy;
    }
    fill_host(comm, config->interface);
    smp_card_begin(comm->card, comm->rank, comm->size);
    if (comm->size > 1) {
        status = smp_endpoints_create(&comm->endpoints, &comm->host, config->transports,
                                      comm->card);
        if (status != SMP_OK) {
            goto err_destroy;
        }
    }
    comm->host.interface = NULL;
    *out = comm;
    return SMP_OK;

err_destroy:
    smp_comm_destroy(comm);
    return status;
}

const void *
smp_comm_card(const smp_comm *comm, size_t *bytes)
{
    *bytes = comm->card->bytes;
    return comm->card;
}

/* Spinning pays only where each rank of this machine has a core for itself, and needs
 * only that one: a waiter would keep the awaited rank from working, or its own progress
 * thread (TCP, two ranks on two cores: 64 B there and back in 49 us, with yields in
 * 12). */
static void
decide_how_to_wait(smp_comm *comm, const void *const *cards)
{
    uint64_t cores[SMP_CARD_CORES / 64] = {0};
    int      ncores = 0;
    int      busy = 0;          /* threads in need of a core */
    bool     delivered = false; /* a route's messages come from the progress thread */

    for (int r = 0; r < comm->size; r++) {
        const smp_card *card = r == comm->rank ? comm->card : cards[r];

        if (r != comm->rank) {
            comm->polls = comm->polls || comm->routes[r]->ops->polls;
            delivered = delivered || comm->routes[r]->ops->poll == NULL;
        }
        if (r == comm->rank || comm->routes[r]->ops->same_host) {
            busy++;
            for (size_t i = 0; i < SMP_CARD_CORES / 64; i++) {
                cores[i] |= card->cores[i];
            }
        }
    }
    for (size_t i = 0; i < SMP_CARD_CORES / 64; i++) {
        ncores += __builtin_popcountll(cores[i]);
    }
    comm->spins = ncores >= busy && !delivered;
    comm->look_ns = LOOK_US * SMP_NS_PER_US;
    if (comm->spin_us >= 0) {
        comm->spins = true;
        comm->look_ns = comm->spin_us * SMP_NS_PER_US;
    }
}

smp_status
smp_comm_connect(smp_comm *comm, const void *const *cards, const size_t *card_bytes,
                 const smp_deadline *deadline, int *failed)
{
    smp_status status;

    if (smp_comm_is_child(comm) || comm->started) {
        return SMP_ERR_CLOSED;
    }
    smp_status_forget();
    for (int r = 0; r < comm->size; r++) {
        if (r != comm->rank && !smp_card_ok(cards[r], card_bytes[r], r, comm->size)) {
            *failed = r;
            return SMP_ERR_MALFORMED;
        }
    }
    status = smp_endpoints_connect(&comm->endpoints, &comm->host, cards, deadline,
                                   &comm->peers, comm->routes, failed);
    if (status != SMP_OK) {
        return status;
    }
    smp_segment_close_fd(comm->segment);
    decide_how_to_wait(comm, cards);
    status = comm->size > 1
                 ? smp_thread_start(&comm->thread, "smp-progress", progress_main, comm)
                 : SMP_OK;
    comm->started = comm->size > 1 && status == SMP_OK;
    return status;
}

void
smp_comm_destroy(smp_comm *comm)
{
    if (comm == NULL || smp_comm_is_child(comm)) {
        return;
    }
    if (comm->started) { /* 1. send the queue, say goodbye */
        atomic_store(&comm->stopping, true);
        smp_loop_kick(&comm->loop);
        pthread_join(comm->thread, NULL);
    } else if (atomic_load(&comm->peers.open) != 0) {
        finish_all(comm); /* they must not take us for dead */
    }
    smp_device_port_destroy(comm->device);   /* 2. end the device's work */
    smp_endpoints_destroy(&comm->endpoints); /* 3. close the ways to the peers */
    smp_inbox_fini(&comm->inbox);            /* 4. no other thread sees the rest now */
    smp_post_fini(&comm->post);
    smp_pinned_destroy(comm->pinned);
    smp_arena_destroy(comm->arena);
    smp_segment_unref(comm->segment);
    smp_loop_fini(&comm->loop);
    free(comm->card);
    free(comm->traffic);
    smp_peers_fini(&comm->peers);
    free(comm->routes);
    free(comm->names);
    free(comm);
}

/* ------------------------------------------------------------- the other ranks */

int
smp_comm_lost(const smp_comm *comm)
{
    return smp_peers_lost(&comm->peers);
}

bool
smp_comm_someone_died(void)
{
    return smp_peers_someone_died();
}

bool
smp_comm_left(const smp_comm *comm, int rank)
{
    return smp_peers_state(&comm->peers, rank) == SMP_PEER_LEFT;
}

int
smp_comm_size(const smp_comm *comm)
{
    return comm->size;
}

int
smp_comm_name(const smp_comm *comm, int rank)
{
    return rank >= 0 && rank < comm->size ? comm->names[rank] : rank;
}

void
smp_comm_keep(smp_comm *comm, const void *address, size_t bytes, smp_user *users, int n,
              uint64_t last)
{
    uintptr_t  from = (uintptr_t)comm->segment->arena;
    uintptr_t  at = (uintptr_t)address;
    uint64_t   offset = at - from;
    smp_arena *slab;

    if (users == NULL || at < from || offset >= comm->segment->arena_bytes) {
        smp_user_forget(users, n);
        return;
    }
    slab = smp_pinned_slab_at(comm->pinned, &offset);
    smp_arena_keep(slab != NULL ? slab : comm->arena, offset, bytes, users, n, last);
}

void
smp_comm_expect(smp_comm *comm, uint64_t bytes)
{
    smp_arena_expect(comm->arena, bytes);
    if (!smp_comm_is_child(comm)) {
        host_kick(comm);
    }
}

void
smp_comm_counters(smp_comm *comm, smp_comm_stats *out)
{
    smp_arena_use  use;
    smp_pinned_use pinned;

    smp_pinned_measure(comm->pinned, &pinned); /* first: slabs only become more */
    smp_arena_measure(comm->arena, &use);
    *out = (smp_comm_stats){
        .pool_blocks = atomic_load(&comm->pool_blocks),
        .pool_fallbacks = atomic_load(&comm->pool_fallbacks),
        .pool_in_use = use.in_use - pinned.taken + pinned.in_use,
        .pool_high = use.high - pinned.taken + pinned.high, /* at most */
        .pool_made = use.made,
        .pool_size = use.size,
    };
    for (int rank = 0; rank < comm->size; rank++) {
        uint64_t messages, bytes;

        smp_comm_sent_to(comm, rank, &messages, &bytes);
        out->messages += messages;
        out->bytes += bytes;
    }
}

const char *
smp_comm_transport(const smp_comm *comm, int rank)
{
    const smp_endpoint *c = comm->routes[rank];

    return c == NULL ? NULL : c->ops->name;
}

smp_device_port *
smp_comm_device(smp_comm *comm)
{
    return comm->device;
}

smp_pinned *
smp_comm_pinned(smp_comm *comm)
{
    return comm->pinned;
}

smp_post *
smp_comm_post(smp_comm *comm)
{
    return &comm->post;
}

bool
smp_comm_neighbour(const smp_comm *comm, int rank, smp_neighbour *out)
{
    const smp_endpoint *c = comm->routes[rank];

    if (rank == comm->rank) {
        *out = (smp_neighbour){comm->segment, getpid()};
        return true;
    }
    if (c == NULL || c->ops->neighbour == NULL) {
        return false;
    }
    c->ops->neighbour(c->self, rank, out);
    return true;
}

bool
smp_comm_gone(const smp_comm *comm, int rank)
{
    return rank != comm->rank && smp_peers_state(&comm->peers, rank) != SMP_PEER_OPEN;
}

int
smp_comm_rank(const smp_comm *comm)
{
    return comm->rank;
}

bool
smp_comm_spins(const smp_comm *comm)
{
    return comm->spins;
}
