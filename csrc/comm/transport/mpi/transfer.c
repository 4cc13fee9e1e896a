/* Requests in and out, and the progress thread's intervals of looks. */
#define _GNU_SOURCE
#include "comm/transport/mpi/transfer.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "comm/transport/connecting/lifeline.h"
#include "comm/transport/mpi/head.h"
#include "common/clock.h"
#include "common/jitter.h"

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

/* The time of hard polling after a transfer's move; the same while the receiver sleeps;
 * the longest pauses afterwards. */
#define HARD_NS 100000
#define HARD_WAITING_NS 5000000
#define PAUSE_NS 1000000
#define PAUSE_WAITING_NS 100000

enum { TAG_HEAD = 1, TAG_BLOCK = 2 };

/* ------------------------------------------------------------------- inside MPI */

bool
smp_mpi_enter(smp_mpi *self)
{
    atomic_store(&self->busy, true);
    if (self->over || atomic_load(&self->ended)) {
        atomic_store(&self->busy, false);
        return false;
    }
    return true;
}

void
smp_mpi_leave(smp_mpi *self)
{
    atomic_store(&self->busy, false);
}

/* Nothing more comes from it or goes there. */
static void
peer_gone(smp_mpi_peer *p)
{
    p->gone = true;
    epoll_ctl(p->self->epoll, EPOLL_CTL_DEL, p->fd, NULL);
}

/* The rank is lost. */
static void
give_up(smp_mpi *self, int rank, smp_status why)
{
    smp_mpi_peer *p = &self->peers[rank];

    self->over = true;
    if (!p->gone) {
        self->host->ended(self->host->comm, rank, why);
        peer_gone(p);
        shutdown(p->fd, SHUT_RDWR); /* tells the rank, too */
    }
}

/* A request of t has failed.  A message on its way to a departed rank is no loss. */
static void
request_failed(smp_mpi *self, const smp_mpi_transfer *t)
{
    if (t->incoming || !self->peers[t->rank].gone) {
        give_up(self, t->rank, SMP_ERR_PEER_LOST);
    }
}

static void
hear(smp_mpi_peer *p)
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
            host->ended(host->comm, p->rank, SMP_ERR_CLOSED);
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
look_at_lifelines(smp_mpi *self)
{
    struct epoll_event events[EVENTS];
    int                n = epoll_wait(self->epoll, events, EVENTS, 0);

    for (int i = 0; i < n; i++) {
        hear(events[i].data.ptr);
    }
}

/* Starts one request of t; there is room. */
static bool
start(smp_mpi *self, smp_mpi_transfer *t, void *data, size_t bytes, int tag)
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
start_block(smp_mpi *self, smp_mpi_transfer *t, const smp_block *block)
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

/* Reads the head of t: its message, and receives for the next blocks. */
static void
parse(smp_mpi *self, smp_mpi_transfer *t)
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
advance(smp_mpi *self, int rank)
{
    smp_mpi_peer      *p = &self->peers[rank];
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
            self->host->ended(self->host->comm, rank, SMP_ERR_CLOSED);
        }
        smp_mpi_transfer_free(self->host, t);
    }
}

/* Begins to receive the next head, if there is one. */
static bool
probe(smp_mpi *self)
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
enqueue(smp_mpi *self, smp_mpi_transfer *t)
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

smp_status
smp_mpi_send(void *arg, int dest, const void *bytes, size_t nbytes,
             smp_block *const *blocks, size_t nblocks)
{
    smp_mpi          *self = arg;
    const smp_host   *host = self->host;
    size_t            total = smp_mpi_head_bytes(host, nbytes, blocks, nblocks);
    smp_mpi_transfer *t = NULL;

    if (total <= INT32_MAX) { /* more cannot be one MPI message */
        t = smp_mpi_new_outgoing(dest, total, nblocks);
    }
    if (t == NULL) {
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

/* Gives the oldest queued message to MPI. */
static bool
start_next(smp_mpi *self)
{
    smp_mpi_transfer *t;
    smp_mpi_peer     *p;

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

/* The queue goes nowhere any more. */
static void
drop_queue(smp_mpi *self)
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
ended(smp_mpi *self, smp_mpi_transfer *t, bool failed)
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

/* The time until the next look. */
static int64_t
pause_for(smp_mpi *self)
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
test_some(smp_mpi *self, smp_mpi_requests *all)
{
    smp_mpi_transfer *owners[SMP_MPI_TESTED];
    bool              failed[SMP_MPI_TESTED];
    size_t            n = smp_mpi_test(all, owners, failed);

    for (size_t i = 0; i < n; i++) {
        ended(self, owners[i], failed[i]);
    }
    return n != 0;
}

int64_t
smp_mpi_progress(void *arg)
{
    smp_mpi *self = arg;
    int64_t  pause;
    bool     moved = false;
    int      rounds;

    if (self->npeers == 0) {
        return -1;
    }
    look_at_lifelines(self);
    if (!smp_mpi_enter(self)) {
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
    smp_mpi_leave(self);
    return pause;
}

bool
smp_mpi_say_goodbye(smp_mpi *self, int rank)
{
    smp_mpi_transfer *t = smp_mpi_new_outgoing(rank, SMP_MPI_GOODBYE_BYTES, 0);

    if (t == NULL) {
        return false;
    }
    smp_mpi_goodbye_write(t->head);
    enqueue(self, t);
    return true;
}
