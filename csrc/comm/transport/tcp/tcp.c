/* The TCP transport: one connection for each pair of ranks.
 *
 * The sending thread itself writes as much as the socket takes.  The rest waits in this
 * process; the progress thread writes it when the socket has room again.  The progress
 * thread reads everything.
 *
 * A dying peer closes its connection.  A dying host says nothing: when bytes stay
 * unacknowledged for SILENCE_NS the peer is lost, and on an idle connection the kernel
 * probes once a second.  (TCP_USER_TIMEOUT would also end the connection to a merely
 * stopped rank, with an answering kernel and full buffers.)  A rank's child from a bare
 * clone() keeps its connections open, so the rank's death is then seen only by the
 * other transports' ranks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/transport/connecting/meet.h"
#include "comm/transport/tcp/frame.h"
#include "comm/transport/transport.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/jitter.h"
#include "common/lock.h"

/* The most time of a host's silence after bytes to it, and the interval of our looks
 * while something is on its way. */
#define SILENCE_NS (2 * SMP_NS_PER_S)
#define LOOK_NS (SMP_NS_PER_S / 4)

/* Unanswered full windows before a silent host is given up. */
#define PROBES 2

typedef struct tcp tcp;

typedef struct {
    tcp *self; /* borrowed */
    int  rank;
    int  fd; /* owned */

    smp_tcp_reader reader; /* progress thread only, like all up to `unacked` */
    smp_watch      watch;
    bool           writable_wanted; /* epoll announces room in the socket */
    bool           gone;            /* nothing more comes or goes */
    bool           said_goodbye;    /* it is queued */
    uint64_t       acked;           /* bytes acknowledged ... */
    int64_t        acked_ns;        /* ... when this last grew, or all were */
    bool           unacked;         /* some are not */

    _Atomic bool waiting; /* frames are queued: seen without the lock */

    smp_lock       lock; /* guards all below */
    smp_tcp_writer writer;
    smp_status     closed; /* why no frame is taken any more; SMP_OK: they are */
} peer;

struct tcp {
    const smp_host *host; /* borrowed */
    smp_tcp_door    door;
    int64_t         looked_ns; /* progress thread: at the acknowledgements */
    peer           *peers[];   /* owned: [size]; NULL: not reached */
};

static void
peer_destroy(peer *p)
{
    if (p == NULL) {
        return;
    }
    smp_tcp_frames_free(&p->writer.frames);
    smp_tcp_reader_fini(&p->reader);
    smp_lock_fini(&p->lock);
    smp_fork_forget_fd(p->fd);
    close(p->fd);
    free(p);
}

/* ------------------------------------------------------------------ sending */

/* Writes the queue; caller holds the lock. */
static smp_socket_event
write_locked(peer *p, smp_tcp_frames *done)
{
    smp_socket_event event = smp_tcp_write(&p->writer, done);

    atomic_store(&p->waiting, p->writer.frames.first != NULL);
    return event;
}

static smp_status
tcp_send(void *arg, int dest, const void *bytes, size_t nbytes,
         smp_block *const *blocks, size_t nblocks)
{
    const tcp       *self = arg;
    peer            *p = self->peers[dest];
    smp_tcp_frames   done = {0};
    smp_socket_event event = SMP_SOCKET_IDLE;
    smp_tcp_frame   *frame;
    smp_status status = smp_tcp_frame_create(bytes, nbytes, blocks, nblocks, &frame);

    if (status != SMP_OK) {
        return status;
    }
    smp_lock_acquire(&p->lock);
    status = p->closed;
    if (status == SMP_OK) {
        bool first = p->writer.frames.first == NULL;

        smp_tcp_writer_put(&p->writer, frame);
        if (first) { /* else the progress thread is at it already */
            event = write_locked(p, &done);
        }
    }
    smp_lock_release(&p->lock);
    smp_jitter();
    if (event == SMP_SOCKET_BLOCKED || event == SMP_SOCKET_MORE) {
        self->host->kick(self->host->comm);
    }
    smp_tcp_frames_free(&done);
    if (status != SMP_OK) { /* without the blocks */
        free(frame);
    }
    return status;
}

/* ---------------------------------------------------------- progress thread */

/* Nothing more comes from it or goes there. */
static void
peer_ended(peer *p, smp_status why)
{
    const smp_host *host = p->self->host;
    smp_tcp_frames  dropped;

    /* The comm first: a sender asks it for the rank after this error. */
    host->ended(host->comm, p->rank, why);
    p->gone = true;
    host->unwatch(host->comm, p->fd);
    smp_lock_acquire(&p->lock);
    p->closed = why == SMP_ERR_CLOSED ? SMP_ERR_CLOSED : SMP_ERR_PEER_LOST;
    dropped = p->writer.frames;
    p->writer.frames = (smp_tcp_frames){0};
    atomic_store(&p->waiting, false);
    smp_lock_release(&p->lock);
    smp_tcp_frames_free(&dropped);
    if (why != SMP_ERR_CLOSED) {
        shutdown(p->fd, SHUT_RDWR); /* tells the rank, too */
    }
}

static void
read_peer(peer *p)
{
    const smp_host  *host = p->self->host;
    size_t           bytes;
    smp_socket_event event = smp_tcp_read(&p->reader, &bytes);

    if (bytes != 0) {
        host->moved(host->comm);
    }
    if (smp_socket_end(event) != SMP_OK) {
        peer_ended(p, smp_socket_end(event));
    }
}

/* A failed write decides nothing yet: the peer's earlier bytes, perhaps its goodbye,
 * are still to be read. */
static void
write_peer(peer *p)
{
    const smp_host *host = p->self->host;
    smp_tcp_frames  done = {0};
    bool            wanted;
    bool            moved;

    smp_lock_acquire(&p->lock);
    moved = p->writer.frames.first != NULL;
    write_locked(p, &done);
    wanted = p->writer.frames.first != NULL;
    smp_lock_release(&p->lock);
    if (moved) {
        host->moved(host->comm);
    }
    smp_tcp_frames_free(&done);
    smp_socket_want_room(host, p->fd, &p->watch, wanted, &p->writable_wanted);
}

static void
socket_ready(void *arg, uint32_t events)
{
    peer *p = arg;

    if (!p->gone && (events & ~(uint32_t)EPOLLOUT) != 0) {
        read_peer(p);
    }
    if (!p->gone && (events & EPOLLOUT) != 0) {
        write_peer(p);
    }
}

/* Whether the peer's kernel has been silent for too long. */
static bool
is_silent(peer *p, int64_t now)
{
    struct tcp_info info = {0};
    socklen_t       bytes = sizeof(info);

    if (getsockopt(p->fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) {
        return false;
    }
    p->unacked = info.tcpi_unacked != 0 || info.tcpi_probes >= PROBES;
    if (!p->unacked || info.tcpi_bytes_acked != p->acked) {
        p->acked = info.tcpi_bytes_acked;
        p->acked_ns = now;
    }
    return now - p->acked_ns >= SILENCE_NS &&
           info.tcpi_last_ack_recv >= SILENCE_NS / SMP_NS_PER_MS;
}

/* Looks for silent peers; returns the time until the next look, or -1. */
static int64_t
look_for_silence(tcp *self)
{
    int64_t now = smp_clock_ns();
    bool    unacked = false;
    bool    look = now - self->looked_ns >= LOOK_NS;

    if (look) {
        self->looked_ns = now;
    }
    for (int r = 0; r < self->host->size; r++) {
        peer *p = self->peers[r];

        if (p == NULL || p->gone) {
            continue;
        }
        if (look && is_silent(p, now)) {
            peer_ended(p, SMP_ERR_PEER_LOST);
        }
        unacked = unacked || p->unacked;
    }
    return unacked ? LOOK_NS : -1;
}

static int64_t
tcp_progress(void *arg)
{
    tcp *self = arg;

    for (int r = 0; r < self->host->size; r++) {
        peer *p = self->peers[r];

        if (p != NULL && !p->gone && !p->writable_wanted && atomic_load(&p->waiting)) {
            write_peer(p);
        }
    }
    return look_for_silence(self);
}

/* Whether the peer's kernel has everything: only then nothing is lost when we close. */
static bool
is_acknowledged(const peer *p)
{
    int left = 0;

    return ioctl(p->fd, SIOCOUTQ, &left) != 0 || left == 0;
}

static void
say_goodbye(peer *p)
{
    smp_tcp_frame *frame;

    if (smp_tcp_frame_goodbye(&frame) != SMP_OK) {
        return; /* again later */
    }
    smp_lock_acquire(&p->lock);
    smp_tcp_writer_put(&p->writer, frame);
    p->closed = SMP_ERR_CLOSED;
    smp_lock_release(&p->lock);
    p->said_goodbye = true;
    write_peer(p);
}

static bool
tcp_finish(void *arg)
{
    const tcp *self = arg;
    bool       done = true;

    for (int r = 0; r < self->host->size; r++) {
        peer *p = self->peers[r];

        if (p == NULL || p->gone) {
            continue;
        }
        if (!p->said_goodbye) {
            say_goodbye(p);
        }
        done =
            done && p->said_goodbye && !atomic_load(&p->waiting) && is_acknowledged(p);
    }
    return done;
}

/* -------------------------------------------------------- setup and teardown */

/* Takes the descriptor, whatever it returns. */
static smp_status
take_socket(void *arg, int rank, int fd)
{
    tcp            *self = arg;
    const smp_host *host = self->host;
    smp_status      status = SMP_ERR_NO_MEMORY;
    peer           *p = calloc(1, sizeof(*p));

    if (p == NULL) {
        close(fd);
        return SMP_ERR_NO_MEMORY;
    }
    *p = (peer){.self = self,
                .rank = rank,
                .fd = fd,
                .watch = {socket_ready, p},
                .acked_ns = smp_clock_ns(),
                .writer = {.fd = fd}};
    smp_lock_init(&p->lock, SMP_LOCK_PEER);
    if (smp_tcp_reader_init(&p->reader, fd, host, rank) != SMP_OK ||
        smp_fork_close_in_child(fd) != SMP_OK) {
        goto err_destroy;
    }
    status = host->watch(host->comm, fd, EPOLLIN, &p->watch);
    if (status != SMP_OK) {
        goto err_destroy;
    }
    self->peers[rank] = p;
    return SMP_OK;

err_destroy:
    peer_destroy(p);
    return status;
}

static void
tcp_destroy(void *arg)
{
    tcp *self = arg;

    for (int r = 0; r < self->host->size; r++) {
        peer_destroy(self->peers[r]);
    }
    smp_tcp_door_close(&self->door);
    free(self);
}

static smp_status
tcp_create(const smp_host *host, void **out, const void **card, size_t *card_bytes)
{
    tcp       *self = calloc(1, sizeof(*self) + (size_t)host->size * sizeof(peer *));
    smp_status status;

    if (self == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    self->host = host;
    status = smp_tcp_door_open(host->rank, host->interface, &self->door);
    if (status != SMP_OK) {
        free(self);
        return status;
    }
    *out = self;
    *card = &self->door.card;
    *card_bytes = sizeof(self->door.card);
    return SMP_OK;
}

static smp_status
tcp_connect(void *arg, const void *const *cards, const size_t *card_bytes,
            const bool *wanted, const smp_deadline *deadline, bool *reached,
            int *failed)
{
    tcp         *self = arg;
    smp_tcp_self me = {
        .rank = self->host->rank, .size = self->host->size, .job = self->host->job};

    return smp_tcp_connect(&self->door, &me, cards, card_bytes, wanted, deadline,
                           take_socket, self, reached, failed);
}

const smp_transport smp_transport_tcp = {
    .abi = SMP_TRANSPORT_ABI,
    .name = "tcp",
    .same_host = false,
    .polls = false,
    .create = tcp_create,
    .connect = tcp_connect,
    .send = tcp_send,
    .poll = NULL,
    .progress = tcp_progress,
    .finish = tcp_finish,
    .destroy = tcp_destroy,
};
