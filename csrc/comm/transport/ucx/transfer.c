/* Parts of messages under way, and UCX's reports of them. */
#include "comm/transport/ucx/transfer.h"

#include <stdlib.h>
#include <string.h>

#include "comm/transport/body.h"
#include "comm/transport/ucx/am.h"
#include "common/jitter.h"
#include "common/pattern.h"

/* A message on its way out. */
struct smp_ucx_outgoing {
    smp_ucx_link      link;    /* once it is under way */
    smp_ucx_outgoing *next;    /* in the queue */
    smp_ucx_peer     *to;      /* borrowed */
    size_t            pending; /* active messages under way */
    smp_ucx_am       *heads;   /* owned: [1 + nblocks] */
    uint8_t          *body;    /* owned */
    size_t            body_bytes;
    smp_block       **blocks; /* owned: those not in the body */
    size_t            nblocks;
};

/* Bytes under fetch by UCX. */
typedef struct {
    smp_ucx_link  link;
    smp_ucx_peer *from; /* borrowed */
    smp_ucx_am    head;
    smp_block    *block; /* owned: where they go, or ... */
    uint8_t      *body;  /* ... owned */
    size_t        bytes; /* of either */
} incoming;

static void
put_link(smp_ucx_link **first, smp_ucx_link *link)
{
    *link = (smp_ucx_link){.next = *first};
    if (link->next != NULL) {
        link->next->previous = link;
    }
    *first = link;
}

static void
remove_link(smp_ucx_link **first, const smp_ucx_link *link)
{
    if (link->previous != NULL) {
        link->previous->next = link->next;
    } else {
        *first = link->next;
    }
    if (link->next != NULL) {
        link->next->previous = link->previous;
    }
}

static void
outgoing_free(const smp_host *host, smp_ucx_outgoing *o)
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
incoming_free(const smp_host *host, incoming *i)
{
    if (i->block != NULL) {
        host->block_release(i->block);
    }
    free(i->body);
    free(i);
}

/* ---------------------------------------------------------------------- receiving */

/* Gives out complete messages. */
static void
give_out(smp_ucx_peer *p)
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

/* Whether it travels in a block. */
static bool
is_block(const smp_ucx_am *head)
{
    return head->kind == SMP_UCX_AM_BLOCK || head->kind == SMP_UCX_AM_TRY_BLOCK;
}

static uint64_t
seed_of(uint64_t pass, uint32_t kind)
{
    return kind == SMP_UCX_AM_TRY_BLOCK ? ~pass : pass;
}

/* A pattern is there. */
static void
look_at(smp_ucx_peer *p, const smp_ucx_am *head, const void *data, size_t n)
{
    bool  is_large = head->kind == SMP_UCX_AM_TRY_BLOCK;
    bool *tried = is_large ? &p->tried_block : &p->tried_head;

    if (*tried) {
        smp_ucx_blame(p, SMP_ERR_MALFORMED);
    } else if (n != (is_large ? SMP_UCX_TRY_BLOCK_BYTES : SMP_UCX_TRY_HEAD_BYTES) ||
               !smp_pattern_is(data, n, seed_of(p->our_pass, head->kind))) {
        p->distrust = "a pattern arrived with other bytes than it was sent with";
        smp_ucx_blame(p, SMP_ERR_MALFORMED);
    } else {
        *tried = true;
    }
}

/* The bytes of a head or a block are there; takes the block. */
static void
take_in(smp_ucx_peer *p, const smp_ucx_am *head, const void *body, size_t n,
        smp_block *block)
{
    smp_status status;

    if (head->kind == SMP_UCX_AM_TRY_HEAD) {
        look_at(p, head, body, n);
        return;
    }
    if (head->kind == SMP_UCX_AM_TRY_BLOCK) {
        look_at(p, head, p->self->host->block_data(block), n);
        p->self->host->block_release(block);
        return;
    }
    if (head->kind == SMP_UCX_AM_HEAD) {
        status = smp_ucx_arrivals_head(&p->arrivals, head->number, body, n, head->first,
                                       head->second);
    } else {
        status = smp_ucx_arrivals_block(&p->arrivals, head->number, head->first, block);
    }
    if (status != SMP_OK) {
        smp_ucx_blame(p, status);
    } else {
        give_out(p);
    }
}

/* Ends an incoming: all is there, or an error. */
static void
fetched(incoming *i, ucs_code code)
{
    smp_ucx_peer *p = i->from;

    smp_jitter();
    remove_link(&p->self->fetching, &i->link);
    if (code != SMP_UCS_OK) {
        if (i->head.kind >= SMP_UCX_AM_TRY_HEAD) {
            p->distrust = "UCX could not fetch a pattern";
        }
        smp_ucx_blame(p, SMP_ERR_PEER_LOST);
    } else if (!p->gone) {
        smp_block *block = i->block;

        i->block = NULL;
        take_in(p, &i->head, i->body, i->bytes, block);
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
new_incoming(smp_ucx_peer *p, const smp_ucx_am *head, size_t n)
{
    const smp_host *host = p->self->host;
    incoming       *i = calloc(1, sizeof(*i));

    if (i == NULL) {
        return NULL;
    }
    i->from = p;
    i->head = *head;
    i->bytes = n;
    if (is_block(head)) {
        if (host->pinned_block(host->comm, n, &i->block) != SMP_OK) {
            free(i);
            return NULL;
        }
        return i;
    }
    i->body = malloc(n + 1);
    if (i->body == NULL) {
        free(i);
        return NULL;
    }
    return i;
}

/* Lets UCX fetch the announced bytes. */
static void
fetch(smp_ucx_peer *p, const smp_ucx_am *head, void *announced, size_t n)
{
    smp_ucx          *self = p->self;
    incoming         *i = new_incoming(p, head, n);
    ucp_request_param how = {.op_attr_mask = SMP_UCP_OP_ATTR_FIELD_CALLBACK |
                                             SMP_UCP_OP_ATTR_FIELD_USER_DATA |
                                             SMP_UCP_OP_ATTR_FIELD_MEMORY_TYPE,
                             .cb.recv_am = on_fetched,
                             .user_data = i,
                             .memory_type = SMP_UCS_MEMORY_TYPE_HOST};
    ucs_code_ptr      started;

    if (i == NULL) {
        smp_ucx_blame(p, SMP_ERR_NO_MEMORY);
        return;
    }
    put_link(&self->fetching, &i->link);
    started = self->ucp->ucp_am_recv_data_nbx(
        self->worker, announced,
        i->block != NULL ? self->host->block_data(i->block) : i->body, n, &how);
    if (started == NULL) {
        fetched(i, SMP_UCS_OK);
    } else if (smp_ucs_is_error(started)) {
        fetched(i, SMP_UCS_ERR_LAST);
    }
}

/* A head or a block inside the active message itself. */
static void
copy_in(smp_ucx_peer *p, const smp_ucx_am *head, const void *data, size_t n)
{
    const smp_host *host = p->self->host;
    smp_block      *block = NULL;

    if (is_block(head)) {
        if (host->pinned_block(host->comm, n, &block) != SMP_OK) {
            smp_ucx_blame(p, SMP_ERR_NO_MEMORY);
            return;
        }
        if (n != 0) {
            memcpy(host->block_data(block), data, n);
        }
    }
    take_in(p, head, data, n, block);
}

/* The sender allowed to say this; NULL: none. */
static smp_ucx_peer *
sender_of(const smp_ucx *self, const smp_ucx_am *head)
{
    smp_ucx_peer *p;

    if (head->from < 0 || head->from >= self->host->size) {
        return NULL;
    }
    p = self->peers[head->from];
    return p != NULL && head->pass == p->our_pass ? p : NULL;
}

/* ------------------------------------------------------------------------ sending */

static void
part_sent(smp_ucx_outgoing *o, bool failed)
{
    smp_ucx *self = o->to->self;

    if (failed) {
        smp_ucx_blame(o->to, SMP_ERR_PEER_LOST);
    }
    o->pending--;
    if (o->pending == 0) {
        remove_link(&self->sending, &o->link);
        outgoing_free(self->host, o);
    }
}

static void
on_sent(void *request, ucs_code code, void *arg)
{
    smp_ucx_outgoing *o = arg;

    smp_jitter();
    o->to->self->ucp->ucp_request_free(request);
    part_sent(o, code != SMP_UCS_OK);
}

static void
send_part(smp_ucx_outgoing *o, const smp_ucx_am *head, const void *data, size_t n,
          uint32_t flags)
{
    const smp_ucx_peer *p = o->to;
    ucp_request_param   how = {
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

/* A message with an unfilled body of n bytes, and room for nblocks. */
static smp_ucx_outgoing *
new_outgoing(smp_ucx_peer *to, smp_ucx_am_kind kind, size_t n, size_t nblocks)
{
    smp_ucx_outgoing *o = calloc(1, sizeof(*o));

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

/* Gives all of it to UCX, as message `number`. */
static void
send_parts(smp_ucx_outgoing *o, uint64_t number)
{
    const smp_ucx_peer *p = o->to;
    smp_ucx            *self = p->self;

    put_link(&self->sending, &o->link);
    o->pending = 1; /* it must outlive the sending of all parts */
    for (size_t i = 0; i <= o->nblocks; i++) {
        o->heads[i].number = number;
        o->heads[i].pass = p->their_pass;
        o->heads[i].from = self->host->rank;
    }
    send_part(o, &o->heads[0], o->body, o->body_bytes, 0);
    for (size_t i = 0; i < o->nblocks; i++) {
        send_part(o, &o->heads[i + 1], self->host->block_data(o->blocks[i]),
                  self->host->block_bytes(o->blocks[i]), SMP_UCP_AM_SEND_FLAG_RNDV);
    }
    part_sent(o, false);
}

static void
enqueue(smp_ucx *self, smp_ucx_outgoing *o)
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

/* ------------------------------------------------------------------------- public */

void
smp_ucx_blame(smp_ucx_peer *p, smp_status why)
{
    if (p->fault == SMP_OK) {
        p->fault = why;
    }
    p->self->news = true;
}

ucs_code
smp_ucx_on_message(void *arg, const void *header, size_t header_bytes, void *data,
                   size_t n, const ucp_am_recv_param *param)
{
    smp_ucx      *self = arg;
    smp_ucx_am    head;
    smp_ucx_peer *p;

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
    case SMP_UCX_AM_TRY_HEAD:
    case SMP_UCX_AM_TRY_BLOCK:
        if ((param->recv_attr & SMP_UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
            fetch(p, &head, data, n);
        } else {
            copy_in(p, &head, data, n);
        }
        break;
    case SMP_UCX_AM_GOODBYE:
        if (smp_ucx_arrivals_goodbye(&p->arrivals, head.number) != SMP_OK) {
            smp_ucx_blame(p, SMP_ERR_MALFORMED);
        } else {
            give_out(p);
        }
        break;
    default:
        smp_ucx_blame(p, SMP_ERR_MALFORMED);
        break;
    }
    return SMP_UCS_OK;
}

bool
smp_ucx_start_next(smp_ucx *self)
{
    smp_ucx_outgoing *o;
    smp_ucx_peer     *p;

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
    send_parts(o, p->sent++);
    return true;
}

bool
smp_ucx_say_hello(smp_ucx_peer *p)
{
    const smp_host   *host = p->self->host;
    smp_ucx_outgoing *hello = new_outgoing(p, SMP_UCX_AM_HELLO, 0, 0);
    smp_ucx_outgoing *patterns =
        new_outgoing(p, SMP_UCX_AM_TRY_HEAD, SMP_UCX_TRY_HEAD_BYTES, 1);

    if (hello == NULL || patterns == NULL ||
        host->block(host->comm, SMP_UCX_TRY_BLOCK_BYTES, &patterns->blocks[0]) !=
            SMP_OK) {
        goto err_free;
    }
    patterns->nblocks = 1;
    patterns->heads[1].kind = SMP_UCX_AM_TRY_BLOCK;
    smp_pattern_write(patterns->body, SMP_UCX_TRY_HEAD_BYTES,
                      seed_of(p->their_pass, SMP_UCX_AM_TRY_HEAD));
    smp_pattern_write(host->block_data(patterns->blocks[0]), SMP_UCX_TRY_BLOCK_BYTES,
                      seed_of(p->their_pass, SMP_UCX_AM_TRY_BLOCK));
    send_parts(hello, 0);
    send_parts(patterns, 0);
    return true;

err_free:
    if (hello != NULL) {
        outgoing_free(host, hello);
    }
    if (patterns != NULL) {
        outgoing_free(host, patterns);
    }
    return false;
}

bool
smp_ucx_say_goodbye(smp_ucx_peer *p)
{
    smp_ucx_outgoing *o = new_outgoing(p, SMP_UCX_AM_GOODBYE, 0, 0);

    if (o != NULL) {
        enqueue(p->self, o);
    }
    return o != NULL;
}

smp_status
smp_ucx_send(void *arg, int dest, const void *bytes, size_t nbytes,
             smp_block *const *blocks, size_t nblocks)
{
    smp_ucx          *self = arg;
    const smp_host   *host = self->host;
    smp_ucx_outgoing *o =
        new_outgoing(self->peers[dest], SMP_UCX_AM_HEAD,
                     smp_body_bytes(host, nbytes, blocks, nblocks), nblocks);

    if (o == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    o->heads[0].first = nbytes;
    o->heads[0].second = nblocks;
    smp_body_write(host, o->body, bytes, nbytes, blocks, nblocks);
    for (size_t i = 0; i < nblocks; i++) {
        if (host->block_bytes(blocks[i]) <= SMP_BODY_INLINE) {
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

void
smp_ucx_transfers_free(smp_ucx *self)
{
    while (self->queue != NULL) {
        smp_ucx_outgoing *o = self->queue;

        self->queue = o->next;
        outgoing_free(self->host, o);
    }
    while (self->sending != NULL) {
        smp_ucx_link *link = self->sending;

        self->sending = link->next;
        outgoing_free(self->host, (smp_ucx_outgoing *)link);
    }
    while (self->fetching != NULL) {
        smp_ucx_link *link = self->fetching;

        self->fetching = link->next;
        incoming_free(self->host, (incoming *)link);
    }
}
