/* The UCX transport: active messages, all of them by the progress thread.
 *
 * A message travels as one active message with the head (sizes of all blocks, the
 * bytes, the small blocks; see arrivals.h) and one more for each larger block, which
 * UCX announces first (rendezvous), so that its bytes go straight into a block of the
 * receiver's.  UCX may deliver them in another order.
 *
 * Beside UCX there is a lifeline to each rank (see lifeline.h).  A rank is reached when
 * each side has heard the other over UCX.  Who ends says goodbye over UCX and waits
 * until the other says over the lifeline that all before it has arrived: closing a
 * connection of UCX may throw away what is on its way.
 *
 * The progress thread sleeps on the worker's descriptor.  UCX has threads of its own,
 * which see to new connections.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/clock.h"
#include "comm/fork.h"
#include "comm/tcp/meet.h"
#include "comm/transport.h"
#include "comm/ucx/am.h"
#include "comm/ucx/arrivals.h"
#include "comm/ucx/devices.h"
#include "comm/ucx/library.h"
#include "comm/ucx/lifeline.h"
#include "common/jitter.h"
#include "common/lock.h"

/* Rounds of progress() before it returns to the loop. */
#define ROUNDS 64

/* Messages given to UCX in one round: a thread that does nothing but send must not keep
 * us from what comes in. */
#define STARTS 16

/* How long destroy lets UCX close its connections. */
#define CLOSE_NS (1 * SMP_NS_PER_S)

/* The transports between two ranks that are looked at. */
#define ENTRIES 16

typedef struct ucx  ucx;
typedef struct peer peer;

/* A message on its way out. */
typedef struct outgoing {
    struct outgoing *next; /* in the queue, then among those under way */
    struct outgoing *previous;
    peer            *to;      /* borrowed */
    size_t           pending; /* active messages under way */
    smp_ucx_am      *heads;   /* owned: [1 + nblocks] */
    uint8_t         *body;    /* owned */
    size_t           body_bytes;
    smp_block      **blocks; /* owned: those not in the body */
    size_t           nblocks;
} outgoing;

/* Bytes that UCX is fetching. */
typedef struct incoming {
    struct incoming *next;
    struct incoming *previous;
    peer            *from; /* borrowed */
    smp_ucx_am       head;
    smp_block       *block; /* owned: where they go, or ... */
    uint8_t         *body;  /* ... owned */
    size_t           body_bytes;
} incoming;

struct peer {
    ucx      *self; /* borrowed */
    int       rank;
    int       fd; /* owned: the lifeline */
    smp_watch watch;
    ucp_ep   *ep;         /* owned; NULL: closed */
    bool      closing;    /* UCX is closing it */
    uint64_t  their_pass; /* for what we send */
    uint64_t  our_pass;   /* in what it sends */
    bool      heard;      /* its hello has come */
    bool      told;       /* that has been said to it */
    bool      agreed;     /* it has heard ours, and said so */
    bool      met;        /* both */

    /* The progress thread's, once connected. */
    uint64_t         sent;         /* messages */
    bool             gone;         /* nothing more comes or goes */
    bool             ended;        /* the lifeline's other end is closed */
    smp_status       fault;        /* what UCX or its messages said; SMP_OK: nothing */
    bool             said_goodbye; /* it is queued */
    bool             goodbye_came;
    bool             arrived; /* the other side has all up to the goodbye */
    smp_ucx_arrivals arrivals;
};

struct ucx {
    const smp_host *host;  /* borrowed */
    const smp_ucp  *ucp;   /* the library's */
    bool            only;  /* comm_interface names what may be used */
    bool            named; /* comm_transports asks for it */
    char            secret[2 * SMP_PROOF_BYTES + 1];
    smp_tcp_door    door;
    ucp_context    *context; /* owned; NULL: nobody is wanted */
    ucp_worker     *worker;  /* owned */
    int             efd;     /* the worker's; -1 */
    smp_watch       watch;
    int             npeers;
    peer          **peers; /* owned: [size]; NULL: not reached */

    outgoing *sending; /* owned: under way; progress thread only, like the next */
    incoming *fetching;
    bool      news; /* a peer's flags have changed */

    _Atomic bool   awake;  /* the progress thread looks at the queue: no kick needed */
    _Atomic size_t queued; /* messages in queue */
    smp_lock       lock;   /* guards the queue */
    outgoing      *queue;  /* owned: oldest first, not yet given to UCX */
    outgoing      *queue_last;
};

/* ------------------------------------------------------------------ what is owned */

static void
outgoing_free(const smp_host *host, outgoing *o)
{
    for (size_t i = 0; i < o->nblocks; i++) {
        host->block_release(o->blocks[i]);
    }
    free(o->blocks);
    free(o->body);
    free(o->heads);
    free(o);
}

static void
outgoing_link(ucx *self, outgoing *o)
{
    o->previous = NULL;
    o->next = self->sending;
    if (o->next != NULL) {
        o->next->previous = o;
    }
    self->sending = o;
}

static void
outgoing_unlink(ucx *self, outgoing *o)
{
    if (o->previous != NULL) {
        o->previous->next = o->next;
    } else {
        self->sending = o->next;
    }
    if (o->next != NULL) {
        o->next->previous = o->previous;
    }
}

static void
incoming_free(const smp_host *host, incoming *i)
{
    if (i->block != NULL) {
        host->block_release(i->block);
    }
    free(i->body);
    free(i);
}

static void
incoming_link(ucx *self, incoming *i)
{
    i->previous = NULL;
    i->next = self->fetching;
    if (i->next != NULL) {
        i->next->previous = i;
    }
    self->fetching = i;
}

static void
incoming_unlink(ucx *self, incoming *i)
{
    if (i->previous != NULL) {
        i->previous->next = i->next;
    } else {
        self->fetching = i->next;
    }
    if (i->next != NULL) {
        i->next->previous = i->previous;
    }
}

/* Something is wrong with a peer: see_to() acts on it. */
static void
blame(peer *p, smp_status why)
{
    if (p->fault == SMP_OK) {
        p->fault = why;
    }
    p->self->news = true;
}

/* ---------------------------------------------------------------------- receiving */

/* Gives out what is complete. */
static void
give_out(peer *p)
{
    const smp_host *host = p->self->host;
    smp_message    *message;
    smp_ucx_next    next;

    while ((next = smp_ucx_arrivals_next(&p->arrivals, &message)) == SMP_UCX_MESSAGE) {
        smp_jitter();
        host->deliver(host->comm, message);
    }
    if (next == SMP_UCX_GOODBYE) {
        p->goodbye_came = true;
        p->self->news = true;
    }
}

/* The bytes of a head or a block are there; takes the block. */
static void
take_in(peer *p, const smp_ucx_am *head, const void *body, size_t n, smp_block *block)
{
    smp_status status;

    if (head->kind == SMP_UCX_AM_HEAD) {
        status = smp_ucx_arrivals_head(&p->arrivals, head->number, body, n, head->first,
                                       head->second);
    } else {
        status = smp_ucx_arrivals_block(&p->arrivals, head->number, head->first, block);
    }
    if (status != SMP_OK) {
        blame(p, status);
    } else {
        give_out(p);
    }
}

/* Ends an incoming: all is there, or an error. */
static void
fetched(incoming *i, ucs_code code)
{
    peer *p = i->from;

    smp_jitter();
    incoming_unlink(p->self, i);
    if (code != SMP_UCS_OK) {
        blame(p, SMP_ERR_PEER_LOST);
    } else if (!p->gone) {
        smp_block *block = i->block;

        i->block = NULL;
        take_in(p, &i->head, i->body, i->body_bytes, block);
    }
    incoming_free(p->self->host, i);
}

static void
on_fetched(void *request, ucs_code code, size_t length, void *arg)
{
    incoming *i = arg;

    (void)length;
    i->from->self->ucp->ucp_request_free(request);
    fetched(i, code);
}

/* Memory for n bytes of a head or a block. */
static incoming *
new_incoming(peer *p, const smp_ucx_am *head, size_t n)
{
    const smp_host *host = p->self->host;
    incoming       *i = calloc(1, sizeof(*i));

    if (i == NULL) {
        return NULL;
    }
    i->from = p;
    i->head = *head;
    if (head->kind == SMP_UCX_AM_BLOCK) {
        if (host->block(host->comm, n, &i->block) != SMP_OK) {
            free(i);
            return NULL;
        }
        return i;
    }
    i->body = malloc(n + 1);
    i->body_bytes = n;
    if (i->body == NULL) {
        free(i);
        return NULL;
    }
    return i;
}

/* Lets UCX fetch what it has announced. */
static void
fetch(peer *p, const smp_ucx_am *head, void *announced, size_t n)
{
    ucx              *self = p->self;
    incoming         *i = new_incoming(p, head, n);
    ucp_request_param how = {.op_attr_mask = SMP_UCP_OP_ATTR_FIELD_CALLBACK |
                                             SMP_UCP_OP_ATTR_FIELD_USER_DATA |
                                             SMP_UCP_OP_ATTR_FIELD_MEMORY_TYPE,
                             .cb.recv_am = on_fetched,
                             .user_data = i,
                             .memory_type = SMP_UCS_MEMORY_TYPE_HOST};
    ucs_code_ptr      started;

    if (i == NULL) {
        blame(p, SMP_ERR_NO_MEMORY);
        return;
    }
    incoming_link(self, i);
    started = self->ucp->ucp_am_recv_data_nbx(
        self->worker, announced,
        i->block != NULL ? self->host->block_data(i->block) : i->body, n, &how);
    if (started == NULL) {
        fetched(i, SMP_UCS_OK);
    } else if (smp_ucs_is_error(started)) {
        fetched(i, SMP_UCS_ERR_LAST);
    }
}

/* A head or a block that came with the active message itself. */
static void
copy_in(peer *p, const smp_ucx_am *head, const void *data, size_t n)
{
    const smp_host *host = p->self->host;
    smp_block      *block = NULL;

    if (head->kind == SMP_UCX_AM_BLOCK) {
        if (host->block(host->comm, n, &block) != SMP_OK) {
            blame(p, SMP_ERR_NO_MEMORY);
            return;
        }
        if (n != 0) {
            memcpy(host->block_data(block), data, n);
        }
    }
    take_in(p, head, data, n, block);
}

/* Who may say this; NULL: nobody. */
static peer *
sender_of(const ucx *self, const smp_ucx_am *head)
{
    peer *p;

    if (head->from < 0 || head->from >= self->host->size) {
        return NULL;
    }
    p = self->peers[head->from];
    return p != NULL && head->pass == p->our_pass ? p : NULL;
}

/* An active message has come.  One without the pass is no rank's: it is dropped. */
static ucs_code
on_message(void *arg, const void *header, size_t header_bytes, void *data, size_t n,
           const ucp_am_recv_param *param)
{
    ucx       *self = arg;
    smp_ucx_am head;
    peer      *p;

    if (header_bytes != sizeof(head)) {
        return SMP_UCS_OK;
    }
    memcpy(&head, header, sizeof(head));
    p = sender_of(self, &head);
    if (p == NULL || p->gone || p->fault != SMP_OK) {
        return SMP_UCS_OK;
    }
    smp_jitter();
    switch (head.kind) {
    case SMP_UCX_AM_HELLO:
        p->heard = true;
        break;
    case SMP_UCX_AM_HEAD:
    case SMP_UCX_AM_BLOCK:
        if ((param->recv_attr & SMP_UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
            fetch(p, &head, data, n);
        } else {
            copy_in(p, &head, data, n);
        }
        break;
    case SMP_UCX_AM_GOODBYE:
        if (smp_ucx_arrivals_goodbye(&p->arrivals, head.number) != SMP_OK) {
            blame(p, SMP_ERR_MALFORMED);
        } else {
            give_out(p);
        }
        break;
    default:
        blame(p, SMP_ERR_MALFORMED);
        break;
    }
    return SMP_UCS_OK;
}

/* ------------------------------------------------------------------------ sending */

static void
part_sent(outgoing *o, bool failed)
{
    ucx *self = o->to->self;

    if (failed) {
        blame(o->to, SMP_ERR_PEER_LOST);
    }
    o->pending--;
    if (o->pending == 0) {
        outgoing_unlink(self, o);
        outgoing_free(self->host, o);
    }
}

static void
on_sent(void *request, ucs_code code, void *arg)
{
    outgoing *o = arg;

    smp_jitter();
    o->to->self->ucp->ucp_request_free(request);
    part_sent(o, code != SMP_UCS_OK);
}

static void
send_part(outgoing *o, const smp_ucx_am *head, const void *data, size_t n,
          uint32_t flags)
{
    const peer       *p = o->to;
    ucp_request_param how = {
        .op_attr_mask = SMP_UCP_OP_ATTR_FIELD_CALLBACK |
                        SMP_UCP_OP_ATTR_FIELD_USER_DATA | SMP_UCP_OP_ATTR_FIELD_FLAGS |
                        SMP_UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .flags = flags,
        .cb.send = on_sent,
        .user_data = o,
        .memory_type = SMP_UCS_MEMORY_TYPE_HOST,
    };
    ucs_code_ptr started;

    o->pending++;
    started = p->self->ucp->ucp_am_send_nbx(p->ep, SMP_UCX_AM_ID, head, sizeof(*head),
                                            data, n, &how);
    if (started == NULL || smp_ucs_is_error(started)) {
        part_sent(o, started != NULL);
    }
}

/* Gives the oldest queued message to UCX. */
static bool
start_next(ucx *self)
{
    outgoing *o;
    peer     *p;

    if (atomic_load(&self->queued) == 0) {
        return false;
    }
    smp_jitter();
    smp_lock_acquire(&self->lock);
    o = self->queue;
    self->queue = o->next;
    atomic_fetch_sub(&self->queued, 1);
    smp_lock_release(&self->lock);
    p = o->to;
    if (p->gone || p->fault != SMP_OK) {
        outgoing_free(self->host, o);
        return true;
    }
    outgoing_link(self, o);
    o->pending = 1; /* it must outlive the sending of all parts */
    for (size_t i = 0; i <= o->nblocks; i++) {
        o->heads[i].number = p->sent;
        o->heads[i].pass = p->their_pass;
        o->heads[i].from = self->host->rank;
    }
    p->sent++;
    send_part(o, &o->heads[0], o->body, o->body_bytes, 0);
    for (size_t i = 0; i < o->nblocks; i++) {
        send_part(o, &o->heads[i + 1], self->host->block_data(o->blocks[i]),
                  self->host->block_bytes(o->blocks[i]), SMP_UCP_AM_SEND_FLAG_RNDV);
    }
    part_sent(o, false);
    return true;
}

/* A message with a body of n bytes, which is not filled, and room for nblocks. */
static outgoing *
new_outgoing(peer *to, smp_ucx_am_kind kind, size_t n, size_t nblocks)
{
    outgoing *o = calloc(1, sizeof(*o));

    if (o == NULL) {
        return NULL;
    }
    o->to = to;
    o->heads = calloc(nblocks + 1, sizeof(smp_ucx_am));
    o->blocks = calloc(nblocks + 1, sizeof(smp_block *));
    o->body = malloc(n + 1);
    o->body_bytes = n;
    if (o->heads == NULL || o->blocks == NULL || o->body == NULL) {
        free(o->heads);
        free(o->blocks);
        free(o->body);
        free(o);
        return NULL;
    }
    o->heads[0].kind = (uint32_t)kind;
    return o;
}

static void
enqueue(ucx *self, outgoing *o)
{
    smp_jitter();
    o->next = NULL;
    smp_lock_acquire(&self->lock);
    if (self->queue == NULL) {
        self->queue = o;
    } else {
        self->queue_last->next = o;
    }
    self->queue_last = o;
    atomic_fetch_add(&self->queued, 1);
    smp_lock_release(&self->lock);
    smp_jitter();
    if (!atomic_load(&self->awake)) {
        self->host->kick(self->host->comm);
    }
}

/* Bytes of the body of a message. */
static size_t
body_bytes(const smp_host *host, size_t nbytes, smp_block *const *blocks,
           size_t nblocks)
{
    size_t total = nblocks * sizeof(uint64_t) + smp_ucx_padded(nbytes);

    for (size_t i = 0; i < nblocks; i++) {
        size_t size = host->block_bytes(blocks[i]);

        total += size <= SMP_UCX_INLINE ? smp_ucx_padded(size) : 0;
    }
    return total;
}

/* Writes n bytes and, up to a multiple of 8, zeros. */
static uint8_t *
write_padded(uint8_t *at, const void *bytes, size_t n)
{
    if (n != 0) {
        memcpy(at, bytes, n);
    }
    memset(at + n, 0, smp_ucx_padded(n) - n);
    return at + smp_ucx_padded(n);
}

static smp_status
ucx_send(void *arg, int dest, const void *bytes, size_t nbytes,
         smp_block *const *blocks, size_t nblocks)
{
    ucx            *self = arg;
    const smp_host *host = self->host;
    outgoing       *o = new_outgoing(self->peers[dest], SMP_UCX_AM_HEAD,
                                     body_bytes(host, nbytes, blocks, nblocks), nblocks);
    uint8_t        *at;

    if (o == NULL) {
        for (size_t i = 0; i < nblocks; i++) {
            host->block_release(blocks[i]);
        }
        return SMP_ERR_NO_MEMORY;
    }
    o->heads[0].first = nbytes;
    o->heads[0].second = nblocks;
    at = write_padded(o->body + nblocks * sizeof(uint64_t), bytes, nbytes);
    for (size_t i = 0; i < nblocks; i++) {
        uint64_t size = host->block_bytes(blocks[i]);

        memcpy(o->body + i * sizeof(size), &size, sizeof(size));
        if (size <= SMP_UCX_INLINE) {
            at = write_padded(at, host->block_data(blocks[i]), size);
            host->block_release(blocks[i]);
        } else {
            o->blocks[o->nblocks++] = blocks[i];
            o->heads[o->nblocks].kind = SMP_UCX_AM_BLOCK;
            o->heads[o->nblocks].first = i;
        }
    }
    enqueue(self, o);
    return SMP_OK;
}

static smp_status
ucx_block(void *arg, int dest, size_t bytes, smp_block **out)
{
    const ucx *self = arg;

    (void)dest;
    return self->host->block(self->host->comm, bytes, out);
}

/* ----------------------------------------------------------------- progress thread */

static void
on_closed(void *request, ucs_code code, void *arg)
{
    peer *p = arg;

    (void)code;
    p->self->ucp->ucp_request_free(request);
    p->closing = false;
}

/* Closes UCX's connection, with all that is on its way. */
static void
close_connection(peer *p)
{
    ucp_request_param how = {.op_attr_mask = SMP_UCP_OP_ATTR_FIELD_FLAGS |
                                             SMP_UCP_OP_ATTR_FIELD_CALLBACK |
                                             SMP_UCP_OP_ATTR_FIELD_USER_DATA,
                             .flags = SMP_UCP_EP_CLOSE_FLAG_FORCE,
                             .cb.send = on_closed,
                             .user_data = p};
    ucs_code_ptr      closing;

    if (p->ep == NULL) {
        return;
    }
    closing = p->self->ucp->ucp_ep_close_nbx(p->ep, &how);
    p->ep = NULL;
    p->closing = closing != NULL && !smp_ucs_is_error(closing);
}

/* Nothing more comes from it or goes there. */
static void
peer_gone(peer *p)
{
    const smp_host *host = p->self->host;

    p->gone = true;
    host->unwatch(host->comm, p->fd);
    close_connection(p);
}

/* Draws the conclusions from a peer's flags.  Its goodbye first: who has said it closes
 * its connections. */
static void
see_to(peer *p)
{
    const smp_host *host = p->self->host;

    if (p->gone) {
        return;
    }
    if (p->goodbye_came) {
        smp_ucx_lifeline_say(p->fd, SMP_UCX_ARRIVED);
        host->left(host->comm, p->rank);
        peer_gone(p);
    } else if (p->fault != SMP_OK || p->ended) {
        host->lost(host->comm, p->rank,
                   p->fault != SMP_OK ? p->fault : SMP_ERR_PEER_LOST);
        peer_gone(p);
        shutdown(p->fd, SHUT_RDWR); /* so that it knows too */
    }
}

static void
lifeline_ready(void *arg, uint32_t events)
{
    peer *p = arg;
    char  what;

    (void)events;
    switch (smp_ucx_lifeline_hear(p->fd, &what)) {
    case SMP_UCX_QUIET:
        break;
    case SMP_UCX_SAID:
        p->arrived = p->arrived || what == SMP_UCX_ARRIVED;
        break;
    case SMP_UCX_HUNG_UP:
        p->ended = true;
        p->self->news = true;
        break;
    }
}

/* progress() follows. */
static void
worker_ready(void *arg, uint32_t events)
{
    (void)arg;
    (void)events;
}

static void
on_fault(void *arg, ucp_ep *ep, ucs_code code)
{
    (void)ep;
    (void)code;
    blame(arg, SMP_ERR_PEER_LOST);
}

/* One round: what is to be sent, what has come, what follows.  False: nothing. */
static bool
move(ucx *self)
{
    bool moved = false;

    for (int i = 0; i < STARTS && start_next(self); i++) {
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
    ucx *self = arg;
    bool moved = false;

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
    ucx *self = arg;
    bool done = true;

    for (int r = 0; r < self->host->size; r++) {
        peer     *p = self->peers[r];
        outgoing *goodbye;

        if (p == NULL || p->gone) {
            continue;
        }
        if (!p->said_goodbye &&
            (goodbye = new_outgoing(p, SMP_UCX_AM_GOODBYE, 0, 0)) != NULL) {
            enqueue(self, goodbye);
            p->said_goodbye = true;
        }
        done = done && p->arrived;
    }
    return done;
}

/* -------------------------------------------------------------- setup and teardown */

static void
peer_destroy(peer *p)
{
    if (p == NULL) {
        return;
    }
    smp_ucx_arrivals_fini(&p->arrivals);
    smp_fork_forget_fd(p->fd);
    close(p->fd);
    free(p);
}

/* Takes the descriptor, whatever it returns. */
static smp_status
peer_create(ucx *self, int rank, int fd, peer **out)
{
    smp_status status = SMP_ERR_NO_MEMORY;
    peer      *p = calloc(1, sizeof(*p));

    if (p == NULL) {
        close(fd);
        return SMP_ERR_NO_MEMORY;
    }
    *p = (peer){.self = self, .rank = rank, .fd = fd, .watch = {lifeline_ready, p}};
    smp_ucx_arrivals_init(&p->arrivals, self->host, rank);
    if (smp_fork_close_in_child(fd) != SMP_OK) {
        goto err_destroy;
    }
    status = SMP_ERR_SYSTEM;
    if (!smp_ucx_lifeline_watch_over(fd) ||
        getrandom(&p->our_pass, sizeof(p->our_pass), 0) != sizeof(p->our_pass)) {
        goto err_destroy;
    }
    *out = p;
    return SMP_OK;

err_destroy:
    peer_destroy(p);
    return status;
}

/* Gives a peer up before it was reached. */
static void
drop_peer(peer *p)
{
    p->gone = true;
    close_connection(p);
    shutdown(p->fd, SHUT_RDWR);
}

/* UCX's threads are no place for the process's signals. */
static ucs_code
init_library(ucx *self, const ucp_config *config)
{
    const ucp_params        params = {.field_mask = SMP_UCP_PARAM_FIELD_FEATURES |
                                                    SMP_UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
                                      .features = SMP_UCP_FEATURE_AM | SMP_UCP_FEATURE_WAKEUP,
                                      .estimated_num_eps = (size_t)self->host->size};
    const ucp_worker_params worker = {.field_mask =
                                          SMP_UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                      .thread_mode = SMP_UCS_THREAD_MODE_SERIALIZED};
    sigset_t                all;
    sigset_t                before;
    ucs_code                code;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = self->ucp->ucp_init_version(SMP_UCP_MAJOR, SMP_UCP_MINOR, &params, config,
                                       &self->context);
    if (code != SMP_UCS_OK) {
        self->context = NULL;
    } else {
        code = self->ucp->ucp_worker_create(self->context, &worker, &self->worker);
        if (code != SMP_UCS_OK) {
            self->worker = NULL;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

/* What the user's UCX_... variables do not say.  Shared memory is not UCX's business
 * here, and it would take its buffers out of the few segments that System V has. */
static ucs_code
configure(const ucx *self, ucp_config *config, const char *devices)
{
    ucs_code code = SMP_UCS_OK;

    if (self->only || getenv("UCX_NET_DEVICES") == NULL) {
        code = self->ucp->ucp_config_modify(config, "NET_DEVICES", devices);
    }
    if (code == SMP_UCS_OK && getenv("UCX_TLS") == NULL) {
        code = self->ucp->ucp_config_modify(config, "TLS", "^shm");
    }
    return code;
}

/* A worker on the devices that belong to `address`. */
static smp_status
open_worker(ucx *self, const smp_tcp_address *address)
{
    const ucp_am_handler_param handler = {
        .field_mask =
            SMP_UCP_AM_HANDLER_PARAM_FIELD_ID | SMP_UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
            SMP_UCP_AM_HANDLER_PARAM_FIELD_CB | SMP_UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = SMP_UCX_AM_ID,
        .flags = SMP_UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_message,
        .arg = self};
    char        devices[SMP_UCX_DEVICES_BYTES];
    ucp_config *config;
    smp_status  status = smp_ucx_devices(address, self->only, devices);
    ucs_code    code;

    if (status != SMP_OK) {
        return status;
    }
    if (self->ucp->ucp_config_read(NULL, NULL, &config) != SMP_UCS_OK) {
        return SMP_ERR_SYSTEM;
    }
    code = configure(self, config, devices);
    if (code == SMP_UCS_OK) {
        code = init_library(self, config);
    }
    self->ucp->ucp_config_release(config);
    if (code != SMP_UCS_OK ||
        self->ucp->ucp_worker_set_am_recv_handler(self->worker, &handler) !=
            SMP_UCS_OK ||
        self->ucp->ucp_worker_get_efd(self->worker, &self->efd) != SMP_UCS_OK) {
        return SMP_ERR_SYSTEM;
    }
    return SMP_OK;
}

/* Tells each peer where our worker is and how to speak to it. */
static smp_status
introduce(ucx *self)
{
    ucp_worker_attr attr = {.field_mask = SMP_UCP_WORKER_ATTR_FIELD_ADDRESS |
                                          SMP_UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS,
                            .address_flags = SMP_UCP_WORKER_ADDRESS_FLAG_NET_ONLY};

    if (self->ucp->ucp_worker_query(self->worker, &attr) != SMP_UCS_OK) {
        return SMP_ERR_SYSTEM;
    }
    for (int r = 0; r < self->host->size; r++) {
        peer *p = self->peers[r];

        if (p != NULL && (attr.address_length > SMP_UCX_ADDRESS_BYTES ||
                          !smp_ucx_lifeline_introduce(p->fd, p->our_pass, attr.address,
                                                      attr.address_length))) {
            drop_peer(p);
        }
    }
    self->ucp->ucp_worker_release_address(self->worker, attr.address);
    return SMP_OK;
}

/* Hears where a peer's worker is and says hello to it. */
static bool
call_peer(ucx *self, peer *p, int64_t deadline_ns)
{
    ucp_ep_params params = {.field_mask = SMP_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                          SMP_UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                          SMP_UCP_EP_PARAM_FIELD_ERR_HANDLER,
                            .err_mode = SMP_UCP_ERR_HANDLING_MODE_PEER,
                            .err_handler = {on_fault, p}};
    outgoing     *hello;
    void         *address;
    ucs_code      code;

    if (smp_ucx_lifeline_meet(p->fd, deadline_ns, &p->their_pass, &address) != SMP_OK) {
        return false;
    }
    params.address = address;
    code = self->ucp->ucp_ep_create(self->worker, &params, &p->ep);
    free(address);
    if (code != SMP_UCS_OK) {
        p->ep = NULL;
        return false;
    }
    hello = new_outgoing(p, SMP_UCX_AM_HELLO, 0, 0);
    if (hello == NULL) {
        return false;
    }
    hello->heads[0].pass = p->their_pass;
    hello->heads[0].from = self->host->rank;
    outgoing_link(self, hello);
    hello->pending = 1;
    send_part(hello, &hello->heads[0], hello->body, 0, 0);
    part_sent(hello, false);
    return true;
}

/* Whether UCX reaches it by something else than the kernel's TCP. */
static bool
is_fast(const peer *p)
{
    ucp_transport_entry entries[ENTRIES] = {{0}};
    ucp_ep_attr         attr = {.field_mask = SMP_UCP_EP_ATTR_FIELD_TRANSPORTS,
                                .transports = {.entries = entries,
                                               .num_entries = ENTRIES,
                                               .entry_size = sizeof(entries[0])}};

    if (p->self->ucp->ucp_ep_query(p->ep, &attr) != SMP_UCS_OK) {
        return false;
    }
    for (unsigned i = 0; i < attr.transports.num_entries && i < ENTRIES; i++) {
        const char *name = entries[i].transport_name;

        if (name != NULL && strcmp(name, "tcp") != 0) {
            return true;
        }
    }
    return false;
}

/* Sees how far the meeting with a peer is. */
static void
attend(const ucx *self, peer *p)
{
    char what;

    if (p->fault != SMP_OK) {
        drop_peer(p);
        return;
    }
    if (p->heard && !p->told) {
        p->told = true;
        if ((!self->named && !is_fast(p)) ||
            !smp_ucx_lifeline_say(p->fd, SMP_UCX_AGREED)) {
            drop_peer(p);
            return;
        }
    }
    if (!p->agreed) {
        switch (smp_ucx_lifeline_hear(p->fd, &what)) {
        case SMP_UCX_QUIET:
            break;
        case SMP_UCX_SAID:
            p->agreed = what == SMP_UCX_AGREED;
            break;
        case SMP_UCX_HUNG_UP:
            drop_peer(p);
            return;
        }
    }
    p->met = p->told && p->agreed;
}

/* Sleeps until something happens at UCX or at a lifeline of those not yet met. */
static void
sleep_until_news(const ucx *self, struct pollfd *polled, int64_t deadline_ns)
{
    int64_t left_ms = (deadline_ns - smp_clock_ns()) / SMP_NS_PER_MS + 1;
    nfds_t  n = 0;

    polled[n++] = (struct pollfd){.fd = self->efd, .events = POLLIN};
    for (int r = 0; r < self->host->size; r++) {
        const peer *p = self->peers[r];

        if (p != NULL && !p->gone && !p->agreed) {
            polled[n++] = (struct pollfd){.fd = p->fd, .events = POLLIN};
        }
    }
    poll(polled, n, left_ms < 0 ? 0 : (left_ms < 1000 ? (int)left_ms : 1000));
}

/* Until each peer is met or dropped. */
static smp_status
attend_all(ucx *self, int64_t deadline_ns)
{
    struct pollfd *polled = calloc((size_t)self->host->size + 1, sizeof(*polled));
    bool           pending = true;

    if (polled == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    while (pending && smp_clock_ns() < deadline_ns) {
        while (self->ucp->ucp_worker_progress(self->worker) != 0) {
        }
        pending = false;
        for (int r = 0; r < self->host->size; r++) {
            peer *p = self->peers[r];

            if (p != NULL && !p->gone && !p->met) {
                attend(self, p);
                pending = pending || (!p->gone && !p->met);
            }
        }
        if (pending && self->ucp->ucp_worker_arm(self->worker) == SMP_UCS_OK) {
            sleep_until_news(self, polled, deadline_ns);
        }
    }
    free(polled);
    return SMP_OK;
}

/* Watches what was met, drops what was not. */
static smp_status
settle(ucx *self, bool *reached, int *failed)
{
    const smp_host *host = self->host;

    for (int r = 0; r < host->size; r++) {
        peer *p = self->peers[r];

        if (p != NULL && !p->gone && !p->met) {
            drop_peer(p);
        }
        if (p == NULL || p->gone) {
            continue;
        }
        if (host->watch(host->comm, p->fd, EPOLLIN, &p->watch) != SMP_OK) {
            *failed = r;
            return SMP_ERR_SYSTEM;
        }
        reached[r] = true;
        self->npeers++;
    }
    self->news = true; /* something may have happened to those that were met early */
    return self->npeers == 0
               ? SMP_OK
               : host->watch(host->comm, self->efd, EPOLLIN, &self->watch);
}

/* A peer for each lifeline, which it takes. */
static smp_status
take_lifelines(ucx *self, const int *fds, const bool *met, int *failed)
{
    smp_status status = SMP_OK;

    for (int r = 0; r < self->host->size; r++) {
        smp_status its =
            met[r] ? peer_create(self, r, fds[r], &self->peers[r]) : SMP_OK;

        if (its != SMP_OK && status == SMP_OK) {
            *failed = r;
            status = its;
        }
    }
    return status;
}

/* Half of the time, so that a network that swallows everything leaves the other half to
 * the transports that come after. */
static int64_t
patience(int64_t deadline_ns)
{
    int64_t now = smp_clock_ns();

    return deadline_ns == SMP_NEVER ? SMP_NEVER : now + (deadline_ns - now) / 2;
}

/* UCX between us and those at the other end of the lifelines.  Where it does not work
 * nobody is reached, and the others hear at once that we hung up. */
static smp_status
meet_over_ucx(ucx *self, const smp_tcp_address *own, int64_t deadline_ns)
{
    if (open_worker(self, own) != SMP_OK || introduce(self) != SMP_OK) {
        return SMP_OK;
    }
    for (int r = 0; r < self->host->size; r++) {
        peer *p = self->peers[r];

        if (p != NULL && !p->gone && !call_peer(self, p, deadline_ns)) {
            drop_peer(p);
        }
    }
    return attend_all(self, deadline_ns);
}

static smp_status
ucx_connect(void *arg, const void *const *cards, const size_t *card_bytes,
            const bool *wanted, int64_t deadline_ns, bool *reached, int *failed)
{
    ucx            *self = arg;
    const smp_host *host = self->host;
    size_t          size = (size_t)host->size;
    smp_tcp_self    me = {.rank = host->rank, .size = host->size, .job = self->secret};
    smp_tcp_cards   others;
    smp_tcp_address own;
    int            *fds = calloc(size, sizeof(*fds));
    bool           *met = calloc(size, sizeof(*met));
    smp_status      status = SMP_ERR_NO_MEMORY;

    deadline_ns = patience(deadline_ns);
    if (fds == NULL || met == NULL) {
        goto out;
    }
    status = smp_tcp_cards_read(host->size, cards, card_bytes, &others, failed);
    if (status != SMP_OK) {
        goto out;
    }
    if (smp_tcp_own_address(&self->door, &me, others.readable, &own)) {
        status = smp_tcp_meet(&self->door, &me, others.readable, wanted, deadline_ns,
                              fds, met);
    }
    smp_tcp_cards_free(&others);
    if (status == SMP_OK) {
        status = take_lifelines(self, fds, met, failed);
    }
    for (int r = 0; r < host->size && status == SMP_OK; r++) {
        if (self->peers[r] != NULL) {
            status = meet_over_ucx(self, &own, deadline_ns);
            break;
        }
    }
    if (status == SMP_OK) {
        status = settle(self, reached, failed);
    }

out:
    free(fds);
    free(met);
    return status;
}

/* Lets UCX finish with all connections; what then still belongs to it is ours again
 * when the worker is gone. */
static void
close_worker(ucx *self)
{
    int64_t until = smp_clock_ns() + CLOSE_NS;
    bool    closing = true;

    for (int r = 0; r < self->host->size; r++) {
        if (self->peers[r] != NULL) {
            self->peers[r]->gone = true;
            close_connection(self->peers[r]);
        }
    }
    while (closing && smp_clock_ns() < until) {
        self->ucp->ucp_worker_progress(self->worker);
        closing = self->sending != NULL || self->fetching != NULL;
        for (int r = 0; r < self->host->size; r++) {
            closing = closing || (self->peers[r] != NULL && self->peers[r]->closing);
        }
    }
    self->ucp->ucp_worker_destroy(self->worker);
}

static void
ucx_destroy(void *arg)
{
    ucx *self = arg;

    if (self->worker != NULL) {
        close_worker(self);
    }
    if (self->context != NULL) {
        self->ucp->ucp_cleanup(self->context);
    }
    while (self->queue != NULL) {
        outgoing *o = self->queue;

        self->queue = o->next;
        outgoing_free(self->host, o);
    }
    while (self->sending != NULL) {
        outgoing *o = self->sending;

        self->sending = o->next;
        outgoing_free(self->host, o);
    }
    while (self->fetching != NULL) {
        incoming *i = self->fetching;

        self->fetching = i->next;
        incoming_free(self->host, i);
    }
    for (int r = 0; r < self->host->size; r++) {
        peer_destroy(self->peers[r]);
    }
    smp_tcp_door_close(&self->door);
    smp_lock_fini(&self->lock);
    free(self->peers);
    free(self);
}

/* The lifelines' secret follows from the job's, so that nothing that is said at a port
 * of the TCP transport proves anything here. */
static void
derive_secret(const char *job, char secret[2 * SMP_PROOF_BYTES + 1])
{
    static const char purpose[] = "ucx";
    uint8_t           proof[SMP_PROOF_BYTES];

    smp_proof(job, purpose, sizeof(purpose), proof);
    for (size_t i = 0; i < SMP_PROOF_BYTES; i++) {
        snprintf(secret + 2 * i, 3, "%02x", proof[i]);
    }
}

/* SMP_ERR_SYSTEM, as without the library: nobody asked for UCX by name, and this host
 * has no device for which it is worth while. */
static smp_status
ucx_create(const smp_host *host, void **out)
{
    smp_status     status;
    ucx           *self;
    const smp_ucp *ucp;

    if (!host->named && !smp_ucx_fast_devices()) {
        return SMP_ERR_SYSTEM;
    }
    status = smp_ucx_library(&ucp);
    if (status != SMP_OK) {
        return status;
    }
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    *self = (ucx){.host = host,
                  .ucp = ucp,
                  .only = host->interface != NULL,
                  .named = host->named,
                  .efd = -1,
                  .watch = {worker_ready, self},
                  .peers = calloc((size_t)host->size, sizeof(peer *))};
    status = SMP_ERR_NO_MEMORY;
    if (self->peers == NULL) {
        goto err_free;
    }
    status = smp_tcp_door_open(host->rank, host->interface, &self->door);
    if (status != SMP_OK) {
        goto err_free;
    }
    derive_secret(host->job, self->secret);
    smp_lock_init(&self->lock, SMP_LOCK_OUTBOX);
    *out = self;
    return SMP_OK;

err_free:
    free(self->peers);
    free(self);
    return status;
}

static const void *
ucx_card(void *arg, size_t *bytes)
{
    const ucx *self = arg;

    *bytes = sizeof(self->door.card);
    return &self->door.card;
}

const smp_transport smp_transport_ucx = {
    .abi = SMP_TRANSPORT_ABI,
    .name = "ucx",
    .same_host = false,
    .polls = false,
    .create = ucx_create,
    .card = ucx_card,
    .connect = ucx_connect,
    .block = ucx_block,
    .send = ucx_send,
    .poll = NULL,
    .progress = ucx_progress,
    .finish = ucx_finish,
    .destroy = ucx_destroy,
};
