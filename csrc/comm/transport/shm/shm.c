/* The shared memory transport.
 *
 * Each ordered pair of ranks has a ring in the receiver's segment.  The sending thread
 * itself writes the message there and rings the receiver's doorbell; blocks lie in the
 * sender's arena and are used in place.  No other thread stands in between.
 *
 * Two things can be full, and neither is waited for.  A full ring: the record waits in
 * this process, and the progress thread moves it when the receiver, seeing the ring
 * hungry, writes to our eventfd.  A full arena: the block's bytes go through the pair's
 * socket, and its message waits for them at the receiver.  Order is kept: records are
 * put into the ring, and blocks into the socket, in the order of the sends.  The
 * receiver takes both in that order.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "comm/memory/block.h"
#include "comm/transport/shm/meet.h"
#include "comm/transport/shm/record.h"
#include "comm/transport/shm/stream.h"
#include "comm/transport/socket.h"
#include "comm/transport/transport.h"
#include "common/fork.h"
#include "common/jitter.h"
#include "common/lock.h"

#ifndef SO_PEERPIDFD /* older C libraries */
#    define SO_PEERPIDFD 77
#endif

/* A record waiting for room in the ring. */
typedef struct waiting {
    struct waiting *next; /* owned */
    size_t          bytes;
    uint64_t        record[];
} waiting;

/* The most time of a process's end once it has closed its connections. */
#define DYING_MS 1000

typedef struct shm shm;

typedef struct {
    shm         *self; /* borrowed */
    int          rank;
    pid_t        pid;      /* 0: not seen from this pid namespace */
    char         file[64]; /* removed by the rank when it has met all, if it lives */
    smp_segment *segment;  /* owned: one reference; the peer's */
    int          pid_fd;   /* owned: readable when it is dead; -1: the socket tells */
    int          kick_fd;  /* owned: wakes its progress thread */
    smp_stream   stream;

    smp_ring_consumer consumer; /* receiving thread only, like all up to `broken` */
    smp_message      *partial;  /* owned: waits for blocks from the stream */
    smp_record_kind   partial_kind;
    size_t            missing; /* of partial's blocks */
    bool              broken;  /* its ring is not read any more */

    smp_watch socket_watch; /* progress thread only, like all up to `gone` */
    smp_watch pid_watch;
    bool      writable_wanted; /* epoll announces room in the socket */
    bool      gone;            /* nothing more comes or goes */

    smp_lock          lock; /* guards all below; also the order of stream's blocks */
    smp_ring_producer producer;
    waiting          *first; /* owned */
    waiting          *last;
} peer;

struct shm {
    const smp_host *host; /* borrowed */
    smp_shm_door    door;
    int             next;  /* receiving thread: the rank to look at first */
    peer          **peers; /* owned: [size]; NULL: not reached */
};

static void
peer_destroy(peer *p)
{
    if (p == NULL) {
        return;
    }
    while (p->first != NULL) {
        waiting *next = p->first->next;

        free(p->first);
        p->first = next;
    }
    smp_message_free(p->partial);
    smp_fork_forget_fd(p->stream.fd);
    smp_fork_forget_fd(p->kick_fd);
    smp_stream_fini(&p->stream);
    if (p->pid_fd >= 0) {
        smp_fork_forget_fd(p->pid_fd);
        close(p->pid_fd);
    }
    close(p->kick_fd);
    smp_lock_fini(&p->lock);
    smp_segment_unref(p->segment);
    free(p);
}

/* ------------------------------------------------------------------ sending */

/* Moves waiting records into the ring; asks for a call when it stays full. */
static void
flush_waiting(peer *p)
{
    waiting   *moved = NULL;
    bool       asked = false;
    smp_status status = SMP_OK;

    smp_lock_acquire(&p->lock);
    while (p->first != NULL && status == SMP_OK) {
        waiting *w = p->first;
        void    *to = NULL;

        status = smp_ring_reserve(&p->producer, w->bytes, &to);
        if (status == SMP_OK && to != NULL) {
            memcpy(to, w->record, w->bytes);
            smp_ring_commit(&p->producer);
            p->first = w->next;
            w->next = moved;
            moved = w;
        } else if (status == SMP_OK && !asked) {
            smp_ring_ask_for_room(&p->producer);
            asked = true; /* and look once more: it may have been emptied before */
        } else {
            break;
        }
    }
    smp_lock_release(&p->lock);
    if (status != SMP_OK) {
        p->self->host->ended(p->self->host->comm, p->rank, status);
    }
    smp_jitter();
    if (moved != NULL) {
        smp_doorbell_ring(p->segment->doorbell);
    }
    while (moved != NULL) {
        waiting *next = moved->next;

        free(moved);
        moved = next;
    }
}

/* A place for a record of `bytes`: in the ring, or else in a new *late record.  Caller
 * holds the lock. */
static smp_status
place_record(peer *p, size_t bytes, void **to, waiting **late)
{
    smp_status status;

    *to = NULL;
    *late = NULL;
    if (p->first == NULL) {
        status = smp_ring_reserve(&p->producer, bytes, to);
        if (status != SMP_OK || *to != NULL) {
            return status;
        }
    }
    *late = malloc(sizeof(waiting) + bytes);
    if (*late == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    (*late)->next = NULL;
    (*late)->bytes = bytes;
    *to = (*late)->record;
    return SMP_OK;
}

/* Writes one record and lets its blocks go: those of `spilled` (the record in
 * blocks[0]) after blocks[0] itself.  On failure nothing has happened. */
static smp_status
put_record(peer *p, smp_record_kind kind, const void *bytes, size_t nbytes,
           smp_block *const *blocks, size_t nblocks, smp_block *const *spilled,
           size_t nspilled)
{
    const smp_host *host = p->self->host;
    bool            streams = false;
    waiting        *late;
    void           *to;
    smp_status      status;

    smp_lock_acquire(&p->lock);
    status = place_record(p, smp_record_bytes(nbytes, blocks, nblocks, host->segment),
                          &to, &late);
    if (status != SMP_OK) {
        smp_lock_release(&p->lock);
        return status;
    }
    smp_record_write(to, kind, bytes, nbytes, blocks, nblocks, host->segment);
    for (size_t i = 0; i < nblocks + nspilled; i++) {
        smp_block *block = i < nblocks ? blocks[i] : spilled[i - nblocks];

        switch (smp_record_place(block, host->segment)) {
        case SMP_IN_ARENA: /* the receiver has it now */
            smp_block_forget(block);
            break;
        case SMP_ON_DEVICE:
        case SMP_IN_LANDING:
            smp_block_hand_over(block);
            break;
        case SMP_IN_RECORD:
            smp_block_release(block);
            break;
        case SMP_IN_STREAM:
            smp_stream_put(&p->stream, block);
            streams = true;
            break;
        }
    }
    if (late == NULL) {
        smp_ring_commit(&p->producer);
    } else if (p->first == NULL) {
        p->first = late;
        p->last = late;
    } else {
        p->last->next = late;
        p->last = late;
    }
    smp_lock_release(&p->lock);
    smp_jitter();
    if (late == NULL) {
        smp_doorbell_ring(p->segment->doorbell);
    }
    if (late != NULL || streams) {
        host->kick(host->comm);
    }
    return SMP_OK;
}

static smp_status
shm_block(void *arg, size_t bytes, smp_block **out)
{
    const shm *self = arg;

    if (bytes <= SMP_RECORD_INLINE) {
        return smp_block_private(bytes, out);
    }
    return self->host->block(self->host->comm, bytes, out);
}

static smp_status
shm_send(void *arg, int dest, const void *bytes, size_t nbytes,
         smp_block *const *blocks, size_t nblocks)
{
    const shm         *self = arg;
    const smp_segment *own = self->host->segment;
    peer              *p = self->peers[dest];
    size_t             record = smp_record_bytes(nbytes, blocks, nblocks, own);
    smp_block         *body = NULL;
    smp_status         status;

    if (record <= SMP_RING_ENTRY_BYTES) {
        status =
            put_record(p, SMP_RECORD_WHOLE, bytes, nbytes, blocks, nblocks, NULL, 0);
    } else {
        status = self->host->block(self->host->comm, record, &body);
        if (status == SMP_OK) {
            smp_record_write(body->data, SMP_RECORD_WHOLE, bytes, nbytes, blocks,
                             nblocks, own);
            status =
                put_record(p, SMP_RECORD_SPILLED, NULL, 0, &body, 1, blocks, nblocks);
        }
    }
    if (status != SMP_OK) {
        smp_block_release(body);
    }
    return status;
}

/* ---------------------------------------------------------------- receiving */

/* Makes partial of the record at `from`. */
static smp_status
read_record(peer *p, const void *from, size_t bytes, smp_message **out)
{
    return smp_record_read(from, bytes, p->rank, p->segment, p->self->host->segment,
                           out, &p->partial_kind, &p->missing);
}

/* Takes the next record out of the ring; partial stays NULL when there is none. */
static smp_status
take_record(peer *p)
{
    const uint64_t one = 1;
    const void    *from;
    size_t         bytes;
    smp_status     status = smp_ring_peek(&p->consumer, &from, &bytes);

    if (status != SMP_OK || from == NULL) {
        return status;
    }
    status = read_record(p, from, bytes, &p->partial);
    if (status == SMP_OK && smp_ring_advance(&p->consumer)) {
        /* A full eventfd is a kick too, so there is nothing to check. */
        (void)!write(p->kick_fd, &one, sizeof(one));
    }
    return status;
}

/* Replaces a spilled record's message by the message in its block. */
static smp_status
unspill(peer *p)
{
    smp_message *outer = p->partial;
    smp_status   status;

    status = read_record(p, smp_block_data(outer->blocks[0]),
                         smp_block_bytes(outer->blocks[0]), &p->partial);
    if (status != SMP_OK) {
        p->partial = outer;
        return status;
    }
    smp_message_free(outer);
    return p->partial_kind == SMP_RECORD_WHOLE ? SMP_OK : SMP_ERR_MALFORMED;
}

/* Puts the blocks from the socket into partial. */
static void
fill_partial(peer *p)
{
    for (size_t i = 0; p->missing != 0; i++) {
        if (p->partial->blocks[i] == NULL) {
            p->partial->blocks[i] = smp_stream_get(&p->stream);
            p->missing--;
        }
    }
}

static smp_status
poll_peer(peer *p, smp_message **out)
{
    smp_status status = SMP_OK;

    if (p->partial == NULL) {
        status = take_record(p);
    }
    while (status == SMP_OK && p->partial != NULL) {
        if (p->missing != 0 && smp_stream_arrived(&p->stream) < p->missing) {
            return SMP_OK;
        }
        fill_partial(p);
        if (p->partial_kind == SMP_RECORD_WHOLE) {
            *out = p->partial;
            p->partial = NULL;
            return SMP_OK;
        }
        status = unspill(p);
    }
    return status;
}

static smp_status
shm_poll(void *arg, smp_message **out)
{
    shm *self = arg;
    int  size = self->host->size;
    int  rank = self->next;

    *out = NULL;
    for (int i = 0; i < size; i++) {
        peer *p = self->peers[rank];

        rank = rank + 1 < size ? rank + 1 : 0;
        if (p != NULL && !p->broken) {
            smp_status status = poll_peer(p, out);

            if (status == SMP_ERR_MALFORMED) {
                p->broken = true;
                self->host->ended(self->host->comm, p->rank, status);
            } else if (status != SMP_OK) {
                return status;
            }
            if (*out != NULL) {
                self->next = rank; /* fair: this peer comes last the next time */
                return SMP_OK;
            }
        }
    }
    return SMP_OK;
}

/* ---------------------------------------------------------- progress thread */

/* Nothing more comes from it or goes there. */
static void
peer_ended(peer *p, smp_status why)
{
    const smp_host *host = p->self->host;

    p->gone = true;
    host->unwatch(host->comm, p->stream.fd);
    if (p->pid_fd >= 0) {
        host->unwatch(host->comm, p->pid_fd);
    }
    host->ended(host->comm, p->rank, why);
}

/* Reads the socket and acts on its frames. */
static smp_socket_event
read_stream(peer *p)
{
    const smp_host  *host = p->self->host;
    size_t           blocks;
    smp_socket_event event = smp_stream_read(&p->stream, &blocks);

    if (blocks != 0) {
        host->arrived(host->comm);
    }
    if (smp_socket_end(event) != SMP_OK) {
        peer_ended(p, smp_socket_end(event));
    }
    return event;
}

static void
write_stream(peer *p)
{
    const smp_host  *host = p->self->host;
    uint64_t         before = p->stream.out_total;
    smp_socket_event event = smp_stream_write(&p->stream);
    bool             wanted = event == SMP_SOCKET_BLOCKED || event == SMP_SOCKET_MORE;

    if (p->stream.out_total != before) {
        host->moved(host->comm);
    }
    smp_socket_want_room(host, p->stream.fd, &p->socket_watch, wanted,
                         &p->writable_wanted);
}

static void
socket_ready(void *arg, uint32_t events)
{
    peer *p = arg;

    if (!p->gone && (events & ~(uint32_t)EPOLLOUT) != 0) {
        read_stream(p);
    }
    if (!p->gone && (events & EPOLLOUT) != 0) {
        write_stream(p);
    }
}

/* The peer is dead: its last bytes are still in the socket, then nothing more comes.
 * Its forked children may hold the socket open, so the socket alone does not tell. */
static void
pid_ready(void *arg, uint32_t events)
{
    peer            *p = arg;
    smp_socket_event event = SMP_SOCKET_MORE;

    (void)events;
    while (!p->gone && event == SMP_SOCKET_MORE) {
        event = read_stream(p);
    }
    if (!p->gone) {
        peer_ended(p, SMP_ERR_PEER_LOST);
    }
}

static int64_t
shm_progress(void *arg)
{
    const shm *self = arg;

    for (int r = 0; r < self->host->size; r++) {
        peer *p = self->peers[r];

        if (p != NULL && !p->gone) {
            flush_waiting(p);
            write_stream(p);
        }
    }
    return -1;
}

static void
shm_neighbour(void *arg, int rank, smp_neighbour *out)
{
    const shm *self = arg;

    *out = (smp_neighbour){self->peers[rank]->segment, self->peers[rank]->pid};
}

static bool
shm_finish(void *arg)
{
    const shm *self = arg;
    bool       done = true;

    for (int r = 0; r < self->host->size; r++) {
        peer *p = self->peers[r];
        bool  empty;

        if (p == NULL || p->gone) {
            continue;
        }
        smp_lock_acquire(&p->lock);
        empty = p->first == NULL;
        smp_lock_release(&p->lock);
        if (empty) {
            smp_stream_say_goodbye(&p->stream);
            write_stream(p);
        }
        done = done && p->stream.out_ended;
    }
    return done;
}

/* -------------------------------------------------------- setup and teardown */

/* A descriptor, readable once the process at the other end is dead; -1: none.  Asking
 * the socket works across pid namespaces (Linux 6.5). */
static int
open_pidfd(const smp_shm_guest *guest)
{
    int       fd;
    socklen_t bytes = sizeof(fd);

    if (getsockopt(guest->socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &bytes) == 0) {
        return fd;
    }
    return guest->pid == 0 ? -1 : (int)syscall(SYS_pidfd_open, guest->pid, 0);
}

/* Takes the guest's descriptors, whatever it returns. */
static smp_status
peer_create(shm *self, int rank, const smp_shm_guest *guest, const char *file,
            peer **out)
{
    const smp_host *host = self->host;
    smp_status      status;
    peer           *p = calloc(1, sizeof(*p));

    if (p == NULL) {
        status = SMP_ERR_NO_MEMORY;
        goto err_close;
    }
    status = smp_segment_attach(guest->segment_fd, host->size, guest->arena_bytes,
                                &p->segment);
    if (status != SMP_OK) {
        goto err_free;
    }
    close(guest->segment_fd);
    p->self = self;
    p->rank = rank;
    p->pid = guest->pid;
    snprintf(p->file, sizeof(p->file), "%s", file);
    p->kick_fd = guest->kick_fd;
    p->pid_fd = open_pidfd(guest);
    p->consumer.ring = &host->segment->rings[rank];
    p->producer.ring = &p->segment->rings[host->rank];
    p->socket_watch = (smp_watch){socket_ready, p};
    p->pid_watch = (smp_watch){pid_ready, p};
    smp_lock_init(&p->lock, SMP_LOCK_PEER);
    smp_stream_init(&p->stream, guest->socket);
    if (smp_fork_close_in_child(p->stream.fd) != SMP_OK ||
        smp_fork_close_in_child(p->kick_fd) != SMP_OK ||
        (p->pid_fd >= 0 && smp_fork_close_in_child(p->pid_fd) != SMP_OK)) {
        status = SMP_ERR_NO_MEMORY;
        goto err_destroy;
    }
    status = host->watch(host->comm, p->stream.fd, EPOLLIN, &p->socket_watch);
    if (status == SMP_OK && p->pid_fd >= 0) {
        status = host->watch(host->comm, p->pid_fd, EPOLLIN, &p->pid_watch);
    }
    if (status != SMP_OK) {
        goto err_destroy;
    }
    *out = p;
    return SMP_OK;

err_destroy:
    peer_destroy(p);
    return status;
err_free:
    free(p);
err_close:
    close(guest->segment_fd);
    close(guest->kick_fd);
    close(guest->socket);
    return status;
}

/* A rank killed before it had met all has left its file.  Its connection to us may end
 * a moment before its listening socket. */
static void
remove_file_of_dead(const peer *p)
{
    struct pollfd hung_up = {.fd = p->stream.fd, .events = POLLRDHUP};
    struct pollfd dead = {.fd = p->pid_fd, .events = POLLIN};

    if (access(p->file, F_OK) == 0 &&
        (p->self->host->gone(p->self->host->comm, p->rank) ||
         poll(&hung_up, 1, 0) > 0)) {
        if (p->pid_fd >= 0) {
            poll(&dead, 1, DYING_MS);
        }
        smp_shm_remove_dead(p->file);
    }
}

static void
shm_destroy(void *arg)
{
    shm *self = arg;

    if (self->peers != NULL) {
        for (int r = 0; r < self->host->size; r++) {
            if (self->peers[r] != NULL) {
                remove_file_of_dead(self->peers[r]);
            }
            peer_destroy(self->peers[r]);
        }
    }
    smp_shm_door_close(&self->door);
    free(self->peers);
    free(self);
}

static smp_status
shm_create(const smp_host *host, void **out, const void **card, size_t *card_bytes)
{
    shm       *self = calloc(1, sizeof(*self));
    smp_status status = SMP_ERR_NO_MEMORY;

    if (self == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    self->host = host;
    self->peers = calloc((size_t)host->size, sizeof(peer *));
    if (self->peers == NULL) {
        goto err_free;
    }
    status = smp_shm_door_open(host->rank, &self->door);
    if (status != SMP_OK) {
        goto err_free;
    }
    *out = self;
    *card = &self->door.card;
    *card_bytes = sizeof(self->door.card);
    return SMP_OK;

err_free:
    free(self->peers);
    free(self);
    return status;
}

/* The cards in readable form, NULL for a missing one.  *failed: the rank of a malformed
 * one. */
static smp_status
read_cards(int size, const void *const *cards, const size_t *card_bytes,
           const bool *wanted, smp_shm_card *copies, const smp_shm_card **out,
           int *failed)
{
    for (int r = 0; r < size; r++) {
        out[r] = NULL;
        if (!wanted[r] || cards[r] == NULL) {
            continue;
        }
        if (!smp_shm_card_ok(cards[r], card_bytes[r], r)) {
            *failed = r;
            return SMP_ERR_MALFORMED;
        }
        memcpy(&copies[r], cards[r], sizeof(copies[r]));
        out[r] = &copies[r];
    }
    return SMP_OK;
}

static smp_status
shm_connect(void *arg, const void *const *cards, const size_t *card_bytes,
            const bool *wanted, const smp_deadline *deadline, bool *reached,
            int *failed)
{
    shm                 *self = arg;
    const smp_host      *host = self->host;
    size_t               size = (size_t)host->size;
    smp_shm_card        *copies = calloc(size, sizeof(*copies));
    const smp_shm_card **readable = calloc(size, sizeof(smp_shm_card *));
    smp_shm_guest       *guests = calloc(size, sizeof(*guests));
    smp_shm_self         me = {
                .rank = host->rank,
                .size = host->size,
                .job = host->job,
                .arena_bytes = host->segment->arena_bytes,
                .segment_fd = host->segment->fd,
                .kick_fd = host->kick_fd,
    };
    smp_status status = SMP_ERR_NO_MEMORY;

    if (copies == NULL || readable == NULL || guests == NULL) {
        goto out;
    }
    status =
        read_cards(host->size, cards, card_bytes, wanted, copies, readable, failed);
    if (status != SMP_OK) {
        goto out;
    }
    status =
        smp_shm_meet(&self->door, &me, readable, deadline, guests, reached, failed);
    for (int r = 0; r < host->size; r++) {
        if (reached[r]) {
            smp_status made =
                peer_create(self, r, &guests[r], readable[r]->path, &self->peers[r]);

            if (made != SMP_OK && status == SMP_OK) {
                status = made;
                *failed = r;
            }
        }
    }

out:
    free(copies);
    free(readable);
    free(guests);
    return status;
}

const smp_transport smp_transport_shm = {
    .abi = SMP_TRANSPORT_ABI,
    .name = "shm",
    .same_host = true,
    .polls = false,
    .create = shm_create,
    .connect = shm_connect,
    .block = shm_block,
    .send = shm_send,
    .poll = shm_poll,
    .progress = shm_progress,
    .neighbour = shm_neighbour,
    .finish = shm_finish,
    .destroy = shm_destroy,
};
