/* A comm: chooses a transport for each peer, keeps what has arrived, and waits.
 *
 * The receiving thread looks at the rings itself and sleeps on the segment's doorbell.
 * The progress thread does everything else; it rings the same doorbell.
 */
#define _GNU_SOURCE
#include "comm/comm.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "comm/device/port.h"
#include "comm/inbox.h"
#include "comm/loop.h"
#include "comm/memory/arena.h"
#include "comm/memory/block.h"
#include "comm/memory/doorbell.h"
#include "comm/memory/message.h"
#include "comm/memory/segment.h"
#include "comm/neighbour.h"
#include "comm/post.h"
#include "comm/transport/card.h"
#include "comm/transport/transport.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/jitter.h"
#include "common/log.h"

/* The pool's limit is this part of the machine's memory, if nobody says otherwise;
 * and this where that is not known. */
#define POOL_MEMORY_SHARE 4
#define DEFAULT_POOL_BYTES ((size_t)256 << 20)

/* All pools that a comm maps take at most this part of an address space that is
 * limited: the process has several comms, and more to map than them. */
#define POOL_ADDRESS_SHARE 8
#define LEAST_POOL_BYTES ((size_t)1 << 20)

/* How long a waiter looks before it sleeps, when it decides by itself.  Several times a
 * sleep and a wake-up (100 us on virtual machines): with less, ranks that have slept
 * once find each other asleep for ever. */
#define LOOK_US 1000

/* Looks between two looks at the clock, when they take no time to speak of. */
#define LOOKS 32

/* The progress thread looks at what has no descriptor (forked children that have
 * ended) this often, and more often while something waits for one. */
#define IDLE_NS (1 * SMP_NS_PER_S)
#define SWEEP_NS (20 * SMP_NS_PER_MS)

/* How long destroy waits while nothing moves, and how often it looks. */
#define FINISH_NS (1 * SMP_NS_PER_S)
#define FINISH_STEP_NS (1 * SMP_NS_PER_MS)

/* A peer's life goes from left to right; only OPEN has two ways on. */
typedef enum { PEER_UNKNOWN, PEER_OPEN, PEER_LEFT, PEER_LOST } peer_state;

/* What a waiter does between two looks, before it sleeps. */
typedef enum { WAIT_SPIN, WAIT_YIELD } wait_kind;

typedef struct {
    const smp_transport *ops;
    void                *self;      /* owned */
    bool                 connected; /* connect() has returned with whom it reaches */
} carrier;

/* What was sent to a rank. */
typedef struct {
    _Atomic uint64_t messages;
    _Atomic uint64_t bytes;
} traffic;

struct smp_comm {
    int              rank; /* set at create, like all up to ncarriers */
    int              size;
    int             *names; /* owned: [size] */
    int              spin_us;
    char             job[64];
    uint32_t         generation; /* smp_fork_generation() of the process that made it */
    smp_segment     *segment;    /* owned: one reference */
    smp_arena       *arena;      /* owned */
    smp_device_port *device;     /* owned */
    smp_loop         loop;
    smp_host         host;
    smp_card        *card; /* owned */
    carrier          carriers[SMP_TRANSPORTS];
    int              ncarriers;

    carrier *
        *routes; /* owned: [size] of borrowed; set by connect, like all up to thread */
    wait_kind wait;
    int64_t   look_ns;
    bool      polls;   /* a route's transport does */
    bool      started; /* the thread runs */
    pthread_t thread;

    _Atomic uint8_t *states;      /* owned: [size] of peer_state */
    _Atomic int      open;        /* how many are PEER_OPEN */
    _Atomic uint64_t fault;       /* the first lost rank and why; see fault_of() */
    _Atomic bool     woken;       /* smp_comm_wake() */
    _Atomic bool     stopping;    /* the progress thread is to finish */
    _Atomic bool     pages_asked; /* it has been told that the arena wants pages */

    int64_t moved_ns; /* progress thread: when a transport moved something */

    traffic         *traffic; /* owned: [size] */
    _Atomic uint64_t pool_blocks;
    _Atomic uint64_t pool_fallbacks;

    smp_inbox inbox;
    smp_post  post;
};

static _Atomic bool someone_died; /* a peer of any comm of this process; for good */

/* A forked child has the struct, but neither the thread nor the descriptors. */
static bool
is_child(const smp_comm *comm)
{
    return comm->generation != smp_fork_generation();
}

/* --------------------------------------------------- what a comm does as a host */

static uint64_t
fault_of(int rank, smp_status why)
{
    return (uint64_t)why << 32 | ((uint64_t)rank + 1);
}

static int
fault_rank(uint64_t fault)
{
    return (int)(fault & UINT32_MAX) - 1;
}

static smp_status
fault_why(uint64_t fault)
{
    return (smp_status)(fault >> 32);
}

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

/* Moves a peer out of PEER_OPEN, if it is there.  `fault`: 0, or why it is lost. */
static void
close_peer(smp_comm *comm, int rank, peer_state to, uint64_t fault)
{
    uint8_t  from = PEER_OPEN;
    uint64_t none = 0;

    if (!atomic_compare_exchange_strong(&comm->states[rank], &from, (uint8_t)to)) {
        return;
    }
    if (fault != 0) {
        atomic_compare_exchange_strong(&comm->fault, &none, fault);
    }
    if (fault != 0) {
        smp_log(SMP_LOG_INFO, "rank %d is lost, over %s: %s", rank,
                comm->routes[rank] != NULL ? comm->routes[rank]->ops->name : "nothing",
                smp_status_text(fault_why(fault)));
    }
    if (fault_why(fault) == SMP_ERR_PEER_LOST) {
        atomic_store(&someone_died, true);
    }
    smp_jitter();
    /* Last: who sees that nobody is left sees why; look() reads them in this order. */
    atomic_fetch_sub(&comm->open, 1);
}

static void
host_left(smp_comm *comm, int rank)
{
    close_peer(comm, rank, PEER_LEFT, 0);
    smp_doorbell_ring_hard(comm->segment->doorbell);
}

static void
host_lost(smp_comm *comm, int rank, smp_status why)
{
    /* Who has heard our goodbye closes without one of its own. */
    if (why == SMP_ERR_PEER_LOST && atomic_load(&comm->stopping)) {
        host_left(comm, rank);
        return;
    }
    close_peer(comm, rank, PEER_LOST, fault_of(rank, why));
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
    status = smp_block_shared(comm->segment, slot, offset, bytes, out);
    if (status != SMP_OK) {
        atomic_store(&comm->segment->states[slot], SMP_SLOT_FREE);
        return status;
    }
    atomic_fetch_add_explicit(&comm->pool_blocks, 1, memory_order_relaxed);
    if (smp_arena_wants_pages(comm->arena) &&
        !atomic_exchange(&comm->pages_asked, true)) {
        host_kick(comm);
    }
    return SMP_OK;
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

/* What is to be done now; how long to wait then. */
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
    for (int i = 0; i < comm->ncarriers; i++) {
        const carrier *c = &comm->carriers[i];
        int64_t        its = c->connected ? c->ops->progress(c->self) : -1;

        if (its >= 0 && its < wait) {
            wait = its;
        }
    }
    return wait;
}

static bool
finish(smp_comm *comm)
{
    bool done = true;

    for (int i = 0; i < comm->ncarriers; i++) {
        const carrier *c = &comm->carriers[i];

        done = (!c->connected || c->ops->finish(c->self)) && done;
    }
    return done;
}

/* Until all is sent and goodbye is said, or nothing moves any more. */
static void
finish_all(smp_comm *comm)
{
    host_moved(comm);
    while (!finish(comm) && smp_clock_ns() < comm->moved_ns + FINISH_NS) {
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

/* Signals are the other threads' business. */
static smp_status
start_thread(smp_comm *comm)
{
    sigset_t all;
    sigset_t before;
    int      error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&comm->thread, NULL, progress_main, comm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        return SMP_ERR_NO_THREAD;
    }
    pthread_setname_np(comm->thread, "smp-progress");
    comm->started = true;
    return SMP_OK;
}

/* ----------------------------------------------------------- setup and teardown */

/* What this process may still map (ulimit -v); SIZE_MAX: no limit. */
static size_t
address_space_left(void)
{
    struct rlimit limit;
    char          statm[64]; /* begins with the pages that are mapped */
    FILE         *file;
    size_t        mapped = 0;

    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return SIZE_MAX;
    }
    file = fopen("/proc/self/statm", "re");
    if (file != NULL) {
        if (fgets(statm, sizeof(statm), file) != NULL) {
            mapped = strtoull(statm, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE);
        }
        fclose(file);
    }
    return mapped < limit.rlim_cur ? (size_t)limit.rlim_cur - mapped : 0;
}

static size_t
default_pool_bytes(int ranks)
{
    long   pages = sysconf(_SC_PHYS_PAGES);
    long   page = sysconf(_SC_PAGESIZE);
    size_t room = address_space_left() / POOL_ADDRESS_SHARE / (size_t)ranks;
    size_t bytes = DEFAULT_POOL_BYTES;

    if (pages > 0 && page > 0) {
        bytes = (size_t)pages * (size_t)page / POOL_MEMORY_SHARE;
    }
    if (room < LEAST_POOL_BYTES) {
        room = LEAST_POOL_BYTES;
    }
    return bytes < room ? bytes : room;
}

size_t
smp_comm_pool_bytes(const smp_comm_config *config)
{
    return config->pool_bytes != 0 ? config->pool_bytes
                                   : default_pool_bytes(config->size);
}

/* Makes this rank's end of one transport and its section of the card. */
static smp_status
add_carrier(smp_comm *comm, const smp_transport *ops)
{
    carrier    *c = &comm->carriers[comm->ncarriers];
    const void *section;
    size_t      bytes;
    smp_status  status;

    assert(comm->ncarriers < SMP_TRANSPORTS);
    c->ops = ops;
    status = ops->create(&comm->host, &c->self);
    if (status != SMP_OK) {
        return status;
    }
    comm->ncarriers++; /* destroy sees to it from here on */
    section = ops->card(c->self, &bytes);
    return smp_card_add(comm->card, ops->name, section, bytes) ? SMP_OK
                                                               : SMP_ERR_INVALID;
}

/* Those that the user named, in that order: each must be there. */
static smp_status
add_named(smp_comm *comm, const char *names)
{
    while (*names != '\0') {
        size_t               length = strcspn(names, ",");
        const smp_transport *ops = smp_transport_find(names, length);
        smp_status           status;

        if (ops == NULL || comm->ncarriers == SMP_TRANSPORTS) {
            return SMP_ERR_INVALID;
        }
        status = add_carrier(comm, ops);
        if (status != SMP_OK) {
            return status;
        }
        names += length + (names[length] == ',');
    }
    return SMP_OK;
}

/* Whether the list "^shm,^tcp" has the name. */
static bool
is_left_out(const char *names, const char *name)
{
    size_t length = strlen(name);

    while (*names != '\0') {
        size_t n = strcspn(names, ",");

        if (n == length + 1 && names[0] == '^' &&
            memcmp(names + 1, name, length) == 0) {
            return true;
        }
        names += n + (names[n] == ',');
    }
    return false;
}

/* All that are registered, but those left out; one that cannot work here is passed
 * over. */
static smp_status
add_registered(smp_comm *comm, const char *left_out)
{
    const smp_transport *all[SMP_TRANSPORTS];
    int                  n = smp_transport_all(all);
    smp_status           status = SMP_ERR_INVALID;

    for (int i = 0; i < n; i++) {
        smp_status its;

        if (is_left_out(left_out, all[i]->name)) {
            continue;
        }
        its = add_carrier(comm, all[i]);
        if (its != SMP_OK) {
            smp_log(SMP_LOG_INFO, "transport %s is passed over: %s", all[i]->name,
                    smp_status_text(its));
        }
        if (comm->ncarriers == 0) {
            status = its;
        }
    }
    return comm->ncarriers != 0 ? SMP_OK : status;
}

/* Makes the transports that `names` stands for; see smp_comm_config. */
static smp_status
add_carriers(smp_comm *comm, const char *names)
{
    comm->host.named = names != NULL && names[0] != '^';
    return comm->host.named ? add_named(comm, names)
                            : add_registered(comm, names != NULL ? names : "");
}

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
        .block_data = smp_block_data,
        .block_bytes = smp_block_bytes,
        .block_release = smp_block_release,
        .message = smp_message_create,
        .message_free = smp_message_free,
        .deliver = host_deliver,
        .arrived = host_arrived,
        .moved = host_moved,
        .lost = host_lost,
        .left = host_left,
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
    comm->routes = calloc((size_t)comm->size, sizeof(carrier *));
    comm->states = calloc((size_t)comm->size, sizeof(*comm->states));
    comm->traffic = calloc((size_t)comm->size, sizeof(*comm->traffic));
    comm->card = malloc(SMP_CARD_BYTES);
    comm->names = malloc((size_t)comm->size * sizeof(int));
    if (comm->routes == NULL || comm->states == NULL || comm->traffic == NULL ||
        comm->card == NULL || comm->names == NULL) {
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
    if (comm->device == NULL) {
        status = SMP_ERR_NO_MEMORY;
        goto err_destroy;
    }
    fill_host(comm, config->interface);
    smp_card_begin(comm->card, comm->rank, comm->size);
    if (comm->size > 1) {
        status = add_carriers(comm, config->transports);
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

/* Connects by one transport to those ranks that have no route yet; lost: but this one.
 */
static smp_status
connect_by(smp_comm *comm, carrier *c, const void *const *cards,
           const smp_deadline *deadline, int lost, int *failed)
{
    size_t       size = (size_t)comm->size;
    const void **sections = calloc(size, sizeof(*sections));
    size_t      *bytes = calloc(size, sizeof(*bytes));
    bool        *wanted = calloc(size, sizeof(*wanted));
    bool        *reached = calloc(size, sizeof(*reached));
    smp_status   status = SMP_ERR_NO_MEMORY;

    if (sections == NULL || bytes == NULL || wanted == NULL || reached == NULL) {
        goto out;
    }
    for (int r = 0; r < comm->size; r++) {
        wanted[r] = r != comm->rank && r != lost && comm->routes[r] == NULL;
        if (r != comm->rank) {
            sections[r] = smp_card_find(cards[r], c->ops->name, &bytes[r]);
        }
    }
    status =
        c->ops->connect(c->self, sections, bytes, wanted, deadline, reached, failed);
    c->connected = status == SMP_OK || status == SMP_ERR_PEER_LOST;
    for (int r = 0; r < comm->size; r++) {
        if (c->connected && reached[r]) {
            comm->routes[r] = c;
            atomic_store(&comm->states[r], PEER_OPEN);
            atomic_fetch_add(&comm->open, 1);
        }
    }

out:
    free(sections);
    free(bytes);
    free(wanted);
    free(reached);
    return status;
}

/* Spinning pays only where each rank of this machine has a core for itself, and needs
 * only that one: the waiter would keep the one from working for whom it waits, its own
 * progress thread too (TCP, two ranks on two cores: 64 B there and back in 49 us, with
 * yields in 12). */
static void
decide_how_to_wait(smp_comm *comm, const void *const *cards)
{
    uint64_t cores[SMP_CARD_CORES / 64] = {0};
    int      ncores = 0;
    int      busy = 0;          /* threads that may want a core */
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
    comm->wait = ncores >= busy && !delivered ? WAIT_SPIN : WAIT_YIELD;
    comm->look_ns = LOOK_US * SMP_NS_PER_US;
    if (comm->spin_us >= 0) {
        comm->wait = WAIT_SPIN;
        comm->look_ns = comm->spin_us * SMP_NS_PER_US;
    }
}

static void
log_routes(const smp_comm *comm)
{
    for (int i = 0; i < comm->ncarriers && smp_log_has(SMP_LOG_INFO); i++) {
        int n = 0;

        for (int r = 0; r < comm->size; r++) {
            n += comm->routes[r] == &comm->carriers[i];
        }
        smp_log(SMP_LOG_INFO, "%d of %d other ranks are reached by %s", n,
                comm->size - 1, comm->carriers[i].ops->name);
    }
}

smp_status
smp_comm_connect(smp_comm *comm, const void *const *cards, const size_t *card_bytes,
                 const smp_deadline *deadline, int *failed)
{
    int        lost = -1;
    smp_status status;

    if (is_child(comm) || comm->started) {
        return SMP_ERR_CLOSED;
    }
    smp_status_forget();
    for (int r = 0; r < comm->size; r++) {
        if (r != comm->rank && !smp_card_ok(cards[r], card_bytes[r], r, comm->size)) {
            *failed = r;
            return SMP_ERR_MALFORMED;
        }
    }
    for (int i = 0; i < comm->ncarriers; i++) {
        status = connect_by(comm, &comm->carriers[i], cards, deadline, lost, failed);
        if (status == SMP_ERR_PEER_LOST && lost < 0) {
            lost = *failed; /* the others are met all the same; see destroy */
        } else if (status != SMP_OK && status != SMP_ERR_PEER_LOST) {
            return status;
        }
    }
    if (lost >= 0) {
        *failed = lost;
        return SMP_ERR_PEER_LOST;
    }
    for (int r = 0; r < comm->size; r++) {
        if (r != comm->rank && comm->routes[r] == NULL) {
            *failed = r;
            return SMP_ERR_UNREACHABLE;
        }
    }
    log_routes(comm);
    smp_segment_close_fd(comm->segment);
    decide_how_to_wait(comm, cards);
    return comm->size > 1 ? start_thread(comm) : SMP_OK;
}

void
smp_comm_destroy(smp_comm *comm)
{
    if (comm == NULL || is_child(comm)) {
        return;
    }
    if (comm->started) { /* 1. send what is queued, say goodbye */
        atomic_store(&comm->stopping, true);
        smp_loop_kick(&comm->loop);
        pthread_join(comm->thread, NULL);
    } else if (atomic_load(&comm->open) != 0) { /* they must not take us for dead */
        finish_all(comm);
    }
    smp_device_port_destroy(comm->device);    /* 2. end what the device does */
    for (int i = comm->ncarriers; i-- > 0;) { /* 3. close what leads to the peers */
        comm->carriers[i].ops->destroy(comm->carriers[i].self);
    }
    smp_inbox_fini(&comm->inbox); /* 4. nobody else sees the rest now */
    smp_post_fini(&comm->post);
    smp_arena_destroy(comm->arena);
    smp_segment_unref(comm->segment);
    smp_loop_fini(&comm->loop);
    free(comm->card);
    free(comm->traffic);
    free(comm->states);
    free(comm->routes);
    free(comm->names);
    free(comm);
}

/* --------------------------------------------------------- sending and receiving */

/* Whether messages can go to `dest`. */
static smp_status
check_dest(const smp_comm *comm, int dest)
{
    if (is_child(comm)) {
        return SMP_ERR_CLOSED;
    }
    if (dest < 0 || dest >= comm->size) {
        return SMP_ERR_INVALID;
    }
    switch (
        (peer_state)atomic_load_explicit(&comm->states[dest], memory_order_relaxed)) {
    case PEER_OPEN:
        return SMP_OK;
    case PEER_LEFT:
        return SMP_ERR_CLOSED;
    case PEER_LOST:
        return SMP_ERR_PEER_LOST;
    case PEER_UNKNOWN:
        break;
    }
    return SMP_ERR_INVALID;
}

smp_status
smp_comm_block(smp_comm *comm, int dest, size_t bytes, smp_block **out)
{
    smp_status status = check_dest(comm, dest);

    if (status != SMP_OK) {
        return status;
    }
    return comm->routes[dest]->ops->block(comm->routes[dest]->self, dest, bytes, out);
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
    if (status != SMP_OK) {
        for (size_t i = 0; i < nblocks; i++) {
            smp_block_release(blocks[i]);
        }
        return status;
    }
    for (size_t i = 0; i < nblocks; i++) {
        /* A device pool is for those who have this rank's segment. */
        assert(blocks[i]->data != NULL || comm->routes[dest]->ops->neighbour != NULL);
        total += blocks[i]->bytes;
    }
    smp_jitter();
    status = comm->routes[dest]->ops->send(comm->routes[dest]->self, dest, bytes,
                                           nbytes, blocks, nblocks);
    if (status == SMP_OK) {
        atomic_fetch_add_explicit(&comm->traffic[dest].messages, 1,
                                  memory_order_relaxed);
        atomic_fetch_add_explicit(&comm->traffic[dest].bytes, total,
                                  memory_order_relaxed);
    }
    return status;
}

/* SMP_ERR_TIMED_OUT: nothing is there. */
static smp_status
look(smp_comm *comm, smp_message **out)
{
    /* Read before the queues: what an ended peer sent is in them by then. */
    bool     alone = atomic_load(&comm->open) == 0 && comm->size > 1;
    uint64_t fault = atomic_load(&comm->fault);

    if (atomic_load(&comm->woken) && atomic_exchange(&comm->woken, false)) {
        return SMP_ERR_INTERRUPTED;
    }
    for (int i = 0; i < comm->ncarriers; i++) {
        const carrier *c = &comm->carriers[i];
        smp_status     status = SMP_OK;
        smp_message   *message = NULL;

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
    if (fault != 0) {
        return fault_why(fault);
    }
    return alone ? SMP_ERR_CLOSED : SMP_ERR_TIMED_OUT;
}

static void
pause_between_looks(wait_kind kind)
{
    if (kind == WAIT_YIELD) {
        sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Looks until something is there or `until_ns`. */
static smp_status
look_for_a_while(smp_comm *comm, int64_t until_ns, smp_message **out)
{
    int        looks = comm->wait == WAIT_SPIN ? LOOKS : 1;
    smp_status status;

    do {
        for (int i = 0; i < looks; i++) {
            status = look(comm, out);
            if (status != SMP_ERR_TIMED_OUT) {
                return status;
            }
            pause_between_looks(comm->wait);
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

    if (is_child(comm)) {
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
                host_kick(comm);
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
    if (!is_child(comm)) {
        atomic_store(&comm->woken, true);
        smp_doorbell_ring(comm->segment->doorbell);
    }
}

int
smp_comm_lost(const smp_comm *comm)
{
    int rank = fault_rank(atomic_load(&comm->fault));

    /* A sender may learn of the loss from the state, a moment earlier. */
    for (int r = 0; rank < 0 && r < comm->size; r++) {
        if (atomic_load(&comm->states[r]) == PEER_LOST) {
            rank = r;
        }
    }
    return rank;
}

bool
smp_comm_someone_died(void)
{
    return atomic_load(&someone_died);
}

bool
smp_comm_left(const smp_comm *comm, int rank)
{
    return atomic_load(&comm->states[rank]) == PEER_LEFT;
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
smp_comm_sent_to(const smp_comm *comm, int rank, uint64_t *messages, uint64_t *bytes)
{
    const traffic *t = &comm->traffic[rank];

    *messages = atomic_load_explicit(&t->messages, memory_order_relaxed);
    *bytes = atomic_load_explicit(&t->bytes, memory_order_relaxed);
}

static void
count_sent(const smp_comm *comm, uint64_t *messages, uint64_t *bytes)
{
    *messages = 0;
    *bytes = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        uint64_t m, b;

        smp_comm_sent_to(comm, rank, &m, &b);
        *messages += m;
        *bytes += b;
    }
}

uint64_t
smp_comm_sent(const smp_comm *comm)
{
    uint64_t messages, bytes;

    count_sent(comm, &messages, &bytes);
    return messages;
}

void
smp_comm_keep(smp_comm *comm, const void *address, size_t bytes, smp_user *users, int n,
              uint64_t last)
{
    uintptr_t from = (uintptr_t)comm->segment->arena;
    uintptr_t at = (uintptr_t)address;

    if (users == NULL || at < from || at - from >= comm->segment->arena_bytes) {
        smp_user_forget(users, n);
        return;
    }
    smp_arena_keep(comm->arena, at - from, bytes, users, n, last);
}

void
smp_comm_expect(smp_comm *comm, uint64_t bytes)
{
    smp_arena_expect(comm->arena, bytes);
    if (!is_child(comm)) {
        host_kick(comm);
    }
}

void
smp_comm_counters(smp_comm *comm, smp_comm_stats *out)
{
    smp_arena_use use;

    smp_arena_measure(comm->arena, &use);
    *out = (smp_comm_stats){
        .pool_blocks = atomic_load(&comm->pool_blocks),
        .pool_fallbacks = atomic_load(&comm->pool_fallbacks),
        .pool_in_use = use.in_use,
        .pool_high = use.high,
        .pool_made = use.made,
        .pool_size = use.size,
    };
    count_sent(comm, &out->messages, &out->bytes);
}

const char *
smp_comm_transport(const smp_comm *comm, int rank)
{
    const carrier *c = comm->routes[rank];

    return c == NULL ? NULL : c->ops->name;
}

smp_device_port *
smp_comm_device(smp_comm *comm)
{
    return comm->device;
}

/* ------------------------------------------------------------------ neighbours */

smp_post *
smp_comm_post(smp_comm *comm)
{
    return &comm->post;
}

bool
smp_comm_neighbour(const smp_comm *comm, int rank, smp_neighbour *out)
{
    const carrier *c = comm->routes[rank];

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
    return rank != comm->rank && atomic_load(&comm->states[rank]) != PEER_OPEN;
}

int
smp_comm_rank(const smp_comm *comm)
{
    return comm->rank;
}

bool
smp_comm_spins(const smp_comm *comm)
{
    return comm->wait == WAIT_SPIN;
}
