/* The MPI transport: point-to-point messages, all of them by the progress thread.
 *
 * A message travels as one MPI message with the head (head.h: sizes of all blocks, the
 * bytes, the bytes of small blocks), then one per larger block, in order.  MPI keeps
 * the order of messages with one tag between two ranks, so the receiver, which posts
 * the receives for the blocks of one head after the other, gets each into its place.
 *
 * MPI does not tell who died, so beside it there is a lifeline to each rank
 * (comm/transport/connecting/lifeline.h).  Who ends says goodbye over MPI, and the
 * other says over the lifeline that all before it has arrived.  After a loss this rank
 * calls MPI no more: Open MPI, when it sees a connection of its own end, ends the
 * process that sees it. So the lifelines are looked at before every round of calls. The
 * other ranks hear of the loss by themselves; who then ends before they have tells them
 * over the lifeline that it is not the one to name.
 *
 * MPI has no descriptor to sleep on.  The progress thread polls hard for a moment after
 * something has moved, and longer while the receiving thread sleeps (this rank's core
 * is free then); otherwise it looks once in a while.
 *
 * This file is part of another shared object than the rest of csrc/comm, and uses it
 * only through the host's table.
 */
#define _GNU_SOURCE
#include "comm/transport/mpi/mpi.h"

#include <mpi.h>

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/transport/connecting/lifeline.h"
#include "comm/transport/mpi/group.h"
#include "comm/transport/mpi/head.h"
#include "comm/transport/mpi/requests.h"
#include "comm/transport/transport.h"
#include "common/clock.h"
#include "common/jitter.h"
#include "common/lock.h"

/* A longer block travels in several pieces: MPI counts in int, and says nothing of a
 * message until it has arrived whole. */
#ifndef SMP_MPI_PIECE
#    define SMP_MPI_PIECE ((size_t)32 << 20)
#endif

/* New messages in one round. */
#define PROBED 64

/* Lifelines heard in one go. */
#define EVENTS 16

/* Rounds of progress(), while it polls hard, before it returns to the loop. */
#define ROUNDS 16

/* How long to poll hard after something moved; the same while the receiver sleeps; the
 * longest pauses afterwards. */
#define HARD_NS 100000
#define HARD_WAITING_NS 5000000
#define PAUSE_NS 1000000
#define PAUSE_WAITING_NS 100000

enum { TAG_HEAD = 1, TAG_BLOCK = 2 };

typedef struct mpi mpi;

/* Another rank.  The progress thread's, once connected. */
typedef struct {
    mpi              *self; /* borrowed */
    int               rank;
    int               fd; /* owned: the lifeline; -1: not reached by us */
    smp_mpi_transfers incoming;
    size_t            sending;      /* outgoing transfers under way */
    bool              said_goodbye; /* it is queued */
    bool              left;         /* its goodbye has come */
    bool              arrived;      /* it has all up to ours */
    bool              gone;         /* the lifeline has ended */
} peer;

struct mpi {
    const smp_host *host; /* borrowed */
    smp_mpi_card    card;
    smp_tcp_door    door;
    MPI_Comm        comm;   /* MPI_COMM_NULL until connected */
    int             keyval; /* its deletion tells that MPI ends */
    int             npeers; /* set by connect: how many are reached */
    peer           *peers;  /* owned: [size] */
    int             epoll;  /* owned: all lifelines; -1 */
    smp_watch       watch;  /* of that */

    /* The progress thread's, up to `over`. */
    smp_mpi_requests sends;
    smp_mpi_requests receives; /* apart: they must not wait behind sends */
    int64_t          moved_ns;
    bool             over; /* a rank is lost: no more calls */

    _Atomic bool busy;  /* the progress thread is inside MPI */
    _Atomic bool ended; /* MPI_Finalize has begun: no more calls */
    _Atomic bool awake; /* the progress thread polls: no kick needed */

    _Atomic size_t    queued; /* messages in queue */
    smp_lock          lock;   /* guards queue */
    smp_mpi_transfers queue;  /* owned: not yet given to MPI */
};

/* ------------------------------------------------------------------- inside MPI */

/* False: MPI has ended, or is not to be called.  Else leave() must follow. */
static bool
enter(mpi *self)
{
    atomic_store(&self->busy, true);
    if (self->over || atomic_load(&self->ended)) {
        atomic_store(&self->busy, false);
        return false;
    }
    return true;
}

static void
leave(mpi *self)
{
    atomic_store(&self->busy, false);
}

/* Nothing more comes from it or goes there. */
static void
peer_gone(peer *p)
{
    p->gone = true;
    epoll_ctl(p->self->epoll, EPOLL_CTL_DEL, p->fd, NULL);
}

/* That rank is lost. */
static void
give_up(mpi *self, int rank, smp_status why)
{
    peer *p = &self->peers[rank];

    self->over = true;
    if (!p->gone) {
        self->host->lost(self->host->comm, rank, why);
        peer_gone(p);
        shutdown(p->fd, SHUT_RDWR); /* so that it knows too */
    }
}

/* A request of t has failed.  What was on its way to one that has left is no loss. */
static void
request_failed(mpi *self, const smp_mpi_transfer *t)
{
    if (t->incoming || !self->peers[t->rank].gone) {
        give_up(self, t->rank, SMP_ERR_PEER_LOST);
    }
}

static void
hear(peer *p)
{
    const smp_host *host = p->self->host;
    char            what;

    switch (smp_lifeline_hear(p->fd, &what)) {
    case SMP_LIFELINE_QUIET:
        break;
    case SMP_LIFELINE_SAID:
        if (what == SMP_MPI_ARRIVED) {
            p->arrived = true;
        } else if (what == SMP_MPI_LEFT) {
            host->left(host->comm, p->rank);
            peer_gone(p);
        }
        break;
    case SMP_LIFELINE_HUNG_UP:
        if (p->left) {
            peer_gone(p);
        } else {
            give_up(p->self, p->rank, SMP_ERR_PEER_LOST);
        }
        break;
    }
}

static void
look_at_lifelines(mpi *self)
{
    struct epoll_event events[EVENTS];
    int                n = epoll_wait(self->epoll, events, EVENTS, 0);

    for (int i = 0; i < n; i++) {
        hear(events[i].data.ptr);
    }
}

/* progress() follows, and looks. */
static void
lifelines_ready(void *arg, uint32_t events)
{
    (void)arg;
    (void)events;
}

/* Starts one request of t; there is room. */
static bool
start(mpi *self, smp_mpi_transfer *t, void *data, size_t bytes, int tag)
{
    if (!smp_mpi_start(t->incoming ? &self->receives : &self->sends, self->comm, t,
                       data, bytes, tag)) {
        request_failed(self, t);
        return false;
    }
    return true;
}

/* Starts the requests for one block. */
static bool
start_block(mpi *self, smp_mpi_transfer *t, const smp_block *block)
{
    uint8_t *data = self->host->block_data(block);
    size_t   bytes = self->host->block_bytes(block);

    if (!smp_mpi_make_room(t->incoming ? &self->receives : &self->sends,
                           bytes / SMP_MPI_PIECE + 1)) {
        give_up(self, t->rank, SMP_ERR_NO_MEMORY);
        return false;
    }
    for (size_t at = 0; at < bytes; at += SMP_MPI_PIECE) {
        size_t left = bytes - at;

        if (!start(self, t, data + at, left < SMP_MPI_PIECE ? left : SMP_MPI_PIECE,
                   TAG_BLOCK)) {
            return false;
        }
    }
    return true;
}

/* --------------------------------------------------------------------- receiving */

/* What the head of t says: its message, and receives for the blocks that follow. */
static void
parse(mpi *self, smp_mpi_transfer *t)
{
    smp_status status =
        smp_mpi_head_read(self->host, t->rank, t->head, t->head_bytes, &t->message);

    if (status != SMP_OK) {
        give_up(self, t->rank, status);
        return;
    }
    t->parsed = true;
    for (size_t i = 0; t->message != NULL && i < t->message->nblocks; i++) {
        const smp_block *block = t->message->blocks[i];

        if (smp_mpi_follows(self->host, block) && !start_block(self, t, block)) {
            return;
        }
    }
}

/* Parses heads and delivers messages of one rank, both in order. */
static void
advance(mpi *self, int rank)
{
    peer              *p = &self->peers[rank];
    smp_mpi_transfers *list = &p->incoming;

    for (smp_mpi_transfer *t = list->first; t != NULL && !self->over; t = t->next) {
        if (!t->parsed) {
            if (t->pending != 0) {
                break;
            }
            parse(self, t);
        }
    }
    while (list->first != NULL && list->first->parsed && list->first->pending == 0 &&
           !self->over) {
        smp_mpi_transfer *t = smp_mpi_take_first(list);

        if (t->message != NULL) {
            self->host->deliver(self->host->comm, t->message);
            t->message = NULL;
        } else {
            p->left = true;
            smp_lifeline_say(p->fd, SMP_MPI_ARRIVED);
            self->host->left(self->host->comm, rank);
        }
        smp_mpi_transfer_free(self->host, t);
    }
}

/* Begins to receive the next head, if there is one. */
static bool
probe(mpi *self)
{
    smp_mpi_requests *all = &self->receives;
    MPI_Message       message;
    MPI_Status        found;
    smp_mpi_transfer *t;
    int               there = 0;
    int               bytes = 0;

    if (MPI_Improbe(MPI_ANY_SOURCE, TAG_HEAD, self->comm, &there, &message, &found) !=
            MPI_SUCCESS ||
        !there) {
        return false;
    }
    MPI_Get_count(&found, MPI_BYTE, &bytes);
    t = calloc(1, sizeof(*t));
    if (t == NULL || bytes < 0 || !smp_mpi_make_room(all, 1) ||
        (t->head = malloc((size_t)bytes + 1)) == NULL) {
        free(t);
        give_up(self, found.MPI_SOURCE, SMP_ERR_NO_MEMORY);
        return false;
    }
    t->rank = found.MPI_SOURCE;
    t->incoming = true;
    t->head_bytes = (size_t)bytes;
    if (!smp_mpi_start_matched(all, &message, t)) {
        smp_mpi_transfer_free(self->host, t);
        give_up(self, found.MPI_SOURCE, SMP_ERR_PEER_LOST);
        return false;
    }
    smp_mpi_put_last(&self->peers[t->rank].incoming, t);
    return true;
}

/* ----------------------------------------------------------------------- sending */

static void
enqueue(mpi *self, smp_mpi_transfer *t)
{
    smp_jitter();
    smp_lock_acquire(&self->lock);
    smp_mpi_put_last(&self->queue, t);
    atomic_fetch_add(&self->queued, 1);
    smp_lock_release(&self->lock);
    smp_jitter();
    if (!atomic_load(&self->awake)) {
        self->host->kick(self->host->comm);
    }
}

static smp_status
mpi_send(void *arg, int dest, const void *bytes, size_t nbytes,
         smp_block *const *blocks, size_t nblocks)
{
    mpi              *self = arg;
    const smp_host   *host = self->host;
    size_t            total = smp_mpi_head_bytes(host, nbytes, blocks, nblocks);
    smp_mpi_transfer *t = NULL;

    if (total <= INT32_MAX) { /* more cannot be one MPI message */
        t = smp_mpi_new_outgoing(dest, total, nblocks);
    }
    if (t == NULL) {
        for (size_t i = 0; i < nblocks; i++) {
            host->block_release(blocks[i]);
        }
        return SMP_ERR_NO_MEMORY;
    }
    smp_mpi_head_write(host, t->head, bytes, nbytes, blocks, nblocks);
    for (size_t i = 0; i < nblocks; i++) {
        if (smp_mpi_follows(host, blocks[i])) {
            t->blocks[t->nblocks++] = blocks[i];
        } else {
            host->block_release(blocks[i]);
        }
    }
    enqueue(self, t);
    return SMP_OK;
}

static smp_status
mpi_block(void *arg, int dest, size_t bytes, smp_block **out)
{
    const mpi *self = arg;

    (void)dest;
    return self->host->block(self->host->comm, bytes, out);
}

/* Gives the oldest queued message to MPI. */
static bool
start_next(mpi *self)
{
    smp_mpi_transfer *t;
    peer             *p;

    if (atomic_load(&self->queued) == 0) {
        return false;
    }
    smp_jitter();
    smp_lock_acquire(&self->lock);
    t = smp_mpi_take_first(&self->queue);
    atomic_fetch_sub(&self->queued, 1);
    smp_lock_release(&self->lock);
    p = &self->peers[t->rank];
    if (p->gone) {
        smp_mpi_transfer_free(self->host, t);
        return true;
    }
    p->sending++;
    if (!smp_mpi_make_room(&self->sends, 1)) {
        give_up(self, t->rank, SMP_ERR_NO_MEMORY);
    } else if (start(self, t, t->head, t->head_bytes, TAG_HEAD)) {
        for (size_t i = 0; i < t->nblocks && start_block(self, t, t->blocks[i]); i++) {
        }
    }
    if (t->pending == 0) {
        p->sending--;
        smp_mpi_transfer_free(self->host, t);
    }
    return true;
}

/* What is queued goes nowhere any more. */
static void
drop_queue(mpi *self)
{
    smp_mpi_transfers all;

    smp_lock_acquire(&self->lock);
    all = self->queue;
    self->queue = (smp_mpi_transfers){0};
    atomic_store(&self->queued, 0);
    smp_lock_release(&self->lock);
    smp_mpi_transfers_free(self->host, &all);
}

/* ---------------------------------------------------------------------- progress */

/* One request of t has ended. */
static void
ended(mpi *self, smp_mpi_transfer *t, bool failed)
{
    smp_jitter();
    t->pending--;
    if (failed) {
        request_failed(self, t);
    }
    if (t->incoming) {
        advance(self, t->rank);
    } else if (t->pending == 0) {
        self->peers[t->rank].sending--;
        smp_mpi_transfer_free(self->host, t);
    }
}

/* How long to wait until the next look. */
static int64_t
pause_for(mpi *self)
{
    bool    waiting = self->host->waiting(self->host->comm);
    int64_t idle = smp_clock_ns() - self->moved_ns;
    int64_t longest = waiting ? PAUSE_WAITING_NS : PAUSE_NS;

    if (idle < (waiting ? HARD_WAITING_NS : HARD_NS)) {
        atomic_store(&self->awake, true);
        return 0;
    }
    atomic_store(&self->awake, false); /* from here on senders kick ... */
    smp_jitter();
    if (atomic_load(&self->queued) != 0) {
        return 0; /* ... but one before may have relied on us */
    }
    return idle / 8 < longest ? idle / 8 : longest;
}

/* True: some have ended. */
static bool
test_some(mpi *self, smp_mpi_requests *all)
{
    smp_mpi_transfer *owners[SMP_MPI_TESTED];
    bool              failed[SMP_MPI_TESTED];
    size_t            n = smp_mpi_test(all, owners, failed);

    for (size_t i = 0; i < n; i++) {
        ended(self, owners[i], failed[i]);
    }
    return n != 0;
}

static int64_t
mpi_progress(void *arg)
{
    mpi    *self = arg;
    int64_t pause;
    bool    moved = false;
    int     rounds;

    if (self->npeers == 0) {
        return -1;
    }
    look_at_lifelines(self);
    if (!enter(self)) {
        atomic_store(&self->awake, false);
        drop_queue(self);
        return -1;
    }
    rounds = atomic_load(&self->awake) ? ROUNDS : 1;
    for (int round = 0; round < rounds && !self->over; round++) {
        bool now = false;

        for (int i = 0; i < PROBED && !self->over && start_next(self); i++) {
            now = true;
        }
        for (int i = 0; i < PROBED && !self->over && probe(self); i++) {
            now = true;
        }
        now = (!self->over && test_some(self, &self->receives)) || now;
        now = (!self->over && test_some(self, &self->sends)) || now;
        moved = moved || now;
        if (!now) {
            sched_yield(); /* the core may be this rank's only one */
        }
        look_at_lifelines(self);
    }
    if (moved) {
        self->moved_ns = smp_clock_ns();
        self->host->moved(self->host->comm);
    }
    pause = pause_for(self);
    leave(self);
    return pause;
}

static bool
say_goodbye(mpi *self, int rank)
{
    smp_mpi_transfer *t = smp_mpi_new_outgoing(rank, SMP_MPI_GOODBYE_BYTES, 0);

    if (t == NULL) {
        return false;
    }
    smp_mpi_goodbye_write(t->head);
    enqueue(self, t);
    return true;
}

/* Nothing is on its way between us any more, so nothing can arrive for a communicator
 * that does not exist. */
static bool
is_parted(const peer *p)
{
    return p->fd < 0 || (p->left && p->arrived && p->sending == 0);
}

static bool
mpi_finish(void *arg)
{
    mpi *self = arg;
    bool done = true;

    if (self->npeers == 0 || self->over || atomic_load(&self->ended)) {
        return true;
    }
    for (int r = 0; r < self->host->size; r++) {
        peer *p = &self->peers[r];

        if (p->fd >= 0 && !p->gone) {
            p->said_goodbye = p->said_goodbye || say_goodbye(self, r);
            done = done && is_parted(p);
        }
    }
    return done;
}

/* ------------------------------------------------------------ setup and teardown */

/* MPI_Finalize deletes the attributes of MPI_COMM_SELF first. */
static int
mpi_ends(MPI_Comm comm, int keyval, void *value, void *extra)
{
    mpi *self = value;

    (void)comm;
    (void)keyval;
    (void)extra;
    atomic_store(&self->ended, true);
    while (atomic_load(&self->busy)) {
        sched_yield();
    }
    return MPI_SUCCESS;
}

smp_status
smp_mpi_usable(void)
{
    int initialized = 0;
    int finalized = 0;
    int level = MPI_THREAD_SINGLE;

    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized || finalized) {
        return SMP_ERR_CLOSED;
    }
    MPI_Query_thread(&level);
    return level >= MPI_THREAD_SERIALIZED ? SMP_OK : SMP_ERR_INVALID;
}

static smp_status
mpi_create(const smp_host *host, void **out)
{
    smp_status status = smp_mpi_usable();
    mpi       *self;

    if (status != SMP_OK) {
        return status;
    }
    smp_jitter_init(); /* this object has its own */
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    self->host = host;
    self->comm = MPI_COMM_NULL;
    self->epoll = -1;
    self->watch = (smp_watch){lifelines_ready, self};
    self->peers = calloc((size_t)host->size, sizeof(peer));
    if (self->peers == NULL) {
        status = SMP_ERR_NO_MEMORY;
        goto err_free;
    }
    for (int r = 0; r < host->size; r++) {
        peer *p = &self->peers[r];

        *p = (peer){.self = self, .rank = r, .fd = -1};
    }
    status = smp_tcp_door_open(host->rank, host->interface, &self->door);
    if (status != SMP_OK) {
        goto err_free;
    }
    status = SMP_ERR_SYSTEM;
    if (MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, mpi_ends, &self->keyval, NULL) !=
        MPI_SUCCESS) {
        goto err_close_door;
    }
    if (MPI_Comm_set_attr(MPI_COMM_SELF, self->keyval, self) != MPI_SUCCESS) {
        goto err_free_keyval;
    }
    smp_lock_init(&self->lock, SMP_LOCK_OUTBOX);
    smp_mpi_card_fill(&self->card);
    self->card.door = self->door.card;
    *out = self;
    return SMP_OK;

err_free_keyval:
    MPI_Comm_free_keyval(&self->keyval);
err_close_door:
    smp_tcp_door_close(&self->door);
err_free:
    free(self->peers);
    free(self);
    return status;
}

static const void *
mpi_get_card(void *arg, size_t *bytes)
{
    const mpi *self = arg;

    *bytes = sizeof(self->card);
    return &self->card;
}

/* Makes the lifelines ours, whatever it returns. */
static smp_status
take_lifelines(mpi *self, const int *fds, int *failed)
{
    const smp_host *host = self->host;
    smp_status      status = SMP_OK;

    for (int r = 0; r < host->size; r++) {
        smp_status its = SMP_OK;

        if (fds[r] < 0) {
            continue;
        }
        self->peers[r].fd = fds[r];
        if (!smp_lifeline_watch_over(fds[r])) {
            its = SMP_ERR_SYSTEM;
        } else {
            its = host->close_in_child(fds[r]);
        }
        if (its != SMP_OK && status == SMP_OK) {
            *failed = r;
            status = its;
        }
    }
    return status;
}

/* Lifelines to those that are wanted, and a communicator of all. */
static smp_status
meet(mpi *self, const void *const *cards, const int *ranks, const bool *wanted,
     const smp_deadline *deadline, int *failed)
{
    const smp_host *host = self->host;
    smp_deadline    half = smp_deadline_half(deadline);
    int            *fds = calloc((size_t)host->size, sizeof(*fds));
    smp_status      status;
    smp_status      taken;

    if (fds == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int r = 0; r < host->size; r++) {
        fds[r] = -1;
    }
    status = smp_mpi_meet(&self->door, host->job, host->rank, host->size, cards, wanted,
                          &half, fds, failed);
    taken = take_lifelines(self, fds, failed);
    status = status == SMP_OK ? taken : status;
    if (status == SMP_OK) {
        status = smp_mpi_make_comm(host->job, ranks, host->size, fds, deadline,
                                   &self->comm, failed);
    }
    free(fds);
    return status;
}

static smp_status
watch_lifelines(mpi *self)
{
    const smp_host *host = self->host;
    smp_status      status;

    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (self->epoll < 0) {
        return smp_status_refused();
    }
    status = host->close_in_child(self->epoll);
    for (int r = 0; r < host->size && status == SMP_OK; r++) {
        peer              *p = &self->peers[r];
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = p};

        if (p->fd >= 0 && epoll_ctl(self->epoll, EPOLL_CTL_ADD, p->fd, &event) != 0) {
            status = smp_status_refused();
        }
    }
    return status == SMP_OK
               ? host->watch(host->comm, self->epoll, EPOLLIN, &self->watch)
               : status;
}

/* Ranks on one host reach one another by shared memory or not at all, so either every
 * rank of the job wants somebody, or nobody does: all come to the same answer. */
static smp_status
mpi_connect(void *arg, const void *const *cards, const size_t *card_bytes,
            const bool *wanted, const smp_deadline *deadline, bool *reached,
            int *failed)
{
    mpi            *self = arg;
    const smp_host *host = self->host;
    int             size = host->size;
    int             wants = -1;
    int            *ranks;
    smp_status      status;

    for (int r = 0; r < size && wants < 0; r++) {
        wants = wanted[r] ? r : -1;
    }
    if (wants < 0) {
        smp_tcp_door_close(&self->door);
        return SMP_OK;
    }
    ranks = calloc((size_t)size, sizeof(*ranks));
    if (ranks == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    if (!smp_mpi_world_ranks(&self->card, host->rank, size, cards, card_bytes, ranks)) {
        free(ranks);
        smp_tcp_door_close(&self->door);
        return SMP_OK; /* reaches nobody */
    }
    *failed = wants;
    status = meet(self, cards, ranks, wanted, deadline, failed);
    free(ranks);
    if (status == SMP_OK) {
        status = watch_lifelines(self);
    }
    for (int r = 0; r < size && status == SMP_OK; r++) {
        reached[r] = wanted[r];
        self->npeers += wanted[r];
    }
    self->moved_ns = smp_clock_ns();
    return status;
}

static void
end_lifeline(peer *p)
{
    const mpi *self = p->self;

    if (p->fd < 0) {
        return;
    }
    if (!p->gone) {
        smp_lifeline_say(p->fd, SMP_MPI_LEFT);
    }
    self->host->forget_fd(p->fd);
    close(p->fd);
}

static void
mpi_destroy(void *arg)
{
    mpi *self = arg;
    bool parted =
        self->comm != MPI_COMM_NULL && self->sends.n == 0 && self->receives.n == 0;

    for (int r = 0; r < self->host->size; r++) {
        smp_mpi_free_idle(self->host, &self->peers[r].incoming);
        parted = parted && is_parted(&self->peers[r]);
    }
    smp_mpi_transfers_free(self->host, &self->queue);
    if (parted && enter(self)) {
        MPI_Comm_free(&self->comm);
        leave(self);
    }
    if (!atomic_load(&self->ended)) {                      /* these speak to nobody */
        MPI_Comm_delete_attr(MPI_COMM_SELF, self->keyval); /* runs mpi_ends */
        MPI_Comm_free_keyval(&self->keyval);
    }
    for (int r = 0; r < self->host->size; r++) {
        end_lifeline(&self->peers[r]);
    }
    if (self->epoll >= 0) {
        self->host->forget_fd(self->epoll);
        close(self->epoll);
    }
    smp_tcp_door_close(&self->door);
    smp_lock_fini(&self->lock);
    smp_mpi_requests_fini(&self->sends);
    smp_mpi_requests_fini(&self->receives);
    free(self->peers);
    free(self);
}

const smp_transport smp_transport_mpi = {
    .abi = SMP_TRANSPORT_ABI,
    .name = "mpi",
    .same_host = false,
    .polls = true,
    .create = mpi_create,
    .card = mpi_get_card,
    .connect = mpi_connect,
    .block = mpi_block,
    .send = mpi_send,
    .poll = NULL,
    .progress = mpi_progress,
    .finish = mpi_finish,
    .destroy = mpi_destroy,
};
