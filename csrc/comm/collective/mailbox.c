/* Posted receives, and unexpected messages: those without one. */
#define _GNU_SOURCE
#include "comm/collective/mailbox.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "comm/messaging/neighbour.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/lock.h"
#include "common/thread.h"

/* A waiter looks this often whether its source has ended. */
#define LOOK_NS (20 * SMP_NS_PER_MS)

/* ... and this often when a rank is lost: the comm says so and waits no more. */
#define LOST_LOOK_NS (1 * SMP_NS_PER_MS)

/* A message without a posted receive. */
typedef struct unexpected_message {
    smp_address                address;
    int                        source;
    void                      *data;  /* in the block, or owned */
    smp_block                 *block; /* owned, or NULL */
    struct unexpected_message *next;
} unexpected_message;

struct smp_mailbox {
    smp_comm *comm;       /* borrowed */
    uint32_t  generation; /* smp_fork_generation() */

    smp_lock       lock;    /* guards all below, and the posted receives */
    pthread_cond_t changed; /* a posted receive is over, or no thread sorts any more */
    bool           sorting; /* a thread is in smp_comm_receive() */
    bool           ended;   /* nothing comes any more but from this rank itself */
    smp_posted_receive  *receives; /* in the order of their posts */
    smp_posted_receive **receives_last;
    unexpected_message  *unexpected; /* in the order of their arrival */
    unexpected_message **unexpected_last;
};

static size_t
bytes_of(const smp_address *address)
{
    return address->count * smp_dtype_bytes(address->dtype);
}

static bool
is_for(const smp_posted_receive *receive, const smp_address *address, int source)
{
    return receive->want.group == address->group && receive->want.tag == address->tag &&
           (receive->source == SMP_ANY_SOURCE || receive->source == source);
}

static void
free_message(unexpected_message *l)
{
    if (l->block != NULL) {
        smp_block_release(l->block);
    } else {
        free(l->data);
    }
    free(l);
}

static void
remove_receive(smp_mailbox *mailbox, smp_posted_receive *receive)
{
    smp_posted_receive **at = &mailbox->receives;

    while (*at != NULL && *at != receive) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = receive->next;
        if (*at == NULL) {
            mailbox->receives_last = at;
        }
    }
}

static void
finish(smp_mailbox *mailbox, smp_posted_receive *receive, smp_status status, int from)
{
    remove_receive(mailbox, receive);
    receive->status = status;
    receive->from = from;
    receive->over = true;
    pthread_cond_broadcast(&mailbox->changed);
}

static void
fill(smp_mailbox *mailbox, smp_posted_receive *receive, const unexpected_message *l)
{
    bool fits = receive->want.dtype == l->address.dtype &&
                receive->want.kind == l->address.kind &&
                receive->want.count == l->address.count;

    receive->got = l->address;
    if (fits && bytes_of(&l->address) != 0) {
        memcpy(receive->out, l->data, bytes_of(&l->address));
    }
    finish(mailbox, receive, fits ? SMP_OK : SMP_ERR_MISMATCH, l->source);
}

/* Takes the message; the lock is held. */
static void
deliver(smp_mailbox *mailbox, unexpected_message *l)
{
    for (smp_posted_receive *receive = mailbox->receives; receive != NULL;
         receive = receive->next) {
        if (is_for(receive, &l->address, l->source)) {
            fill(mailbox, receive, l);
            free_message(l);
            return;
        }
    }
    l->next = NULL;
    *mailbox->unexpected_last = l;
    mailbox->unexpected_last = &l->next;
}

/* Takes the message.  SMP_ERR_MALFORMED, SMP_ERR_NO_MEMORY. */
static smp_status
open_message(smp_message *message, unexpected_message **out)
{
    unexpected_message *l = calloc(1, sizeof(*l));
    smp_status          status = SMP_OK;

    if (l == NULL) {
        status = SMP_ERR_NO_MEMORY;
        goto out;
    }
    l->source = message->source;
    if (message->nbytes != sizeof(l->address)) {
        status = SMP_ERR_MALFORMED;
        goto out;
    }
    memcpy(&l->address, message->bytes, sizeof(l->address));
    if ((unsigned)l->address.dtype >= SMP_DTYPES ||
        message->nblocks != (l->address.count != 0)) {
        status = SMP_ERR_MALFORMED;
    } else if (message->nblocks == 1) {
        l->block = smp_message_take_block(message, 0);
        l->data = smp_block_data(l->block);
        if (l->data == NULL || smp_block_bytes(l->block) != bytes_of(&l->address)) {
            status = SMP_ERR_MALFORMED; /* NULL: on a device */
        }
    }

out:
    smp_message_free(message);
    if (status != SMP_OK && l != NULL) {
        free_message(l);
    } else {
        *out = l;
    }
    return status;
}

/* Nothing is there: SMP_ERR_TIMED_OUT, or why a rank is lost.  Nothing more comes for
 * the posted receive if its source was gone before; if another rank is lost, the posted
 * receive stays.  The lock is held. */
static void
look_for_source(smp_mailbox *mailbox, smp_posted_receive *receive, bool gone,
                smp_status status, int64_t until_ns)
{
    int  lost = smp_comm_lost(mailbox->comm);
    bool fault = status != SMP_ERR_TIMED_OUT;

    if (receive->over) { /* another thread has sent to this rank */
        return;
    }
    if (gone) {
        bool left = smp_comm_left(mailbox->comm, receive->source);

        finish(mailbox, receive,
               left                               ? SMP_ERR_CLOSED
               : fault && lost == receive->source ? status
                                                  : SMP_ERR_PEER_LOST,
               receive->source);
    } else if (fault && (receive->source == SMP_ANY_SOURCE || lost < 0)) {
        finish(mailbox, receive, status, lost);
    } else if (fault) {
        int64_t look_ns = smp_clock_ns() + LOST_LOOK_NS;

        smp_cond_wait(&mailbox->changed, &mailbox->lock,
                      look_ns < until_ns ? look_ns : until_ns);
    }
}

/* Sorts in arrivals until the first, or until_ns.  The lock is held, and no thread
 * sorts. */
static void
sort_in(smp_mailbox *mailbox, smp_posted_receive *receive, int64_t until_ns)
{
    int64_t limit_ns = until_ns - smp_clock_ns();
    /* Read before the messages: all from the source are among them by then. */
    bool gone = receive->source != SMP_ANY_SOURCE &&
                smp_comm_gone(mailbox->comm, receive->source);
    smp_message        *message;
    unexpected_message *l = NULL;
    int                 sender = SMP_ANY_SOURCE;
    smp_status          status;

    mailbox->sorting = true;
    smp_lock_release(&mailbox->lock);
    status = smp_comm_receive(mailbox->comm,
                              gone || limit_ns <= 0 ? 0
                              : limit_ns < LOOK_NS  ? limit_ns
                                                    : LOOK_NS,
                              &message);
    if (status == SMP_OK) {
        sender = message->source;
        status = open_message(message, &l);
    }
    smp_lock_acquire(&mailbox->lock);
    mailbox->sorting = false;
    pthread_cond_broadcast(&mailbox->changed);
    if (status == SMP_OK) {
        deliver(mailbox, l);
    } else if (sender != SMP_ANY_SOURCE) { /* its receiver is unknown */
        if (!receive->over) {
            finish(mailbox, receive, status, sender);
        }
    } else if (status == SMP_ERR_CLOSED) {
        mailbox->ended = true;
    } else if (status != SMP_ERR_INTERRUPTED) {
        look_for_source(mailbox, receive, gone, status, until_ns);
    }
}

smp_status
smp_mailbox_create(smp_comm *comm, smp_mailbox **out)
{
    smp_mailbox *mailbox = calloc(1, sizeof(*mailbox));

    if (mailbox == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    mailbox->comm = comm;
    mailbox->generation = smp_fork_generation();
    mailbox->receives_last = &mailbox->receives;
    mailbox->unexpected_last = &mailbox->unexpected;
    smp_lock_init(&mailbox->lock, SMP_LOCK_MAILBOX);
    smp_cond_init(&mailbox->changed);
    *out = mailbox;
    return SMP_OK;
}

void
smp_mailbox_destroy(smp_mailbox *mailbox)
{
    if (mailbox == NULL || mailbox->generation != smp_fork_generation()) {
        return; /* the child may not trust the lock, nor `changed` with its waiters */
    }
    while (mailbox->unexpected != NULL) {
        unexpected_message *l = mailbox->unexpected;

        mailbox->unexpected = l->next;
        free_message(l);
    }
    pthread_cond_destroy(&mailbox->changed);
    smp_lock_fini(&mailbox->lock);
    free(mailbox);
}

/* To this rank itself. */
static smp_status
keep(smp_mailbox *mailbox, const smp_address *address, const void *in)
{
    unexpected_message *l = calloc(1, sizeof(*l));
    size_t              bytes = bytes_of(address);
    bool                sorting;

    if (l != NULL && bytes != 0) {
        l->data = malloc(bytes);
    }
    if (l == NULL || (bytes != 0 && l->data == NULL)) {
        free(l);
        return SMP_ERR_NO_MEMORY;
    }
    if (bytes != 0) {
        memcpy(l->data, in, bytes);
    }
    l->address = *address;
    l->source = smp_comm_rank(mailbox->comm);
    smp_lock_acquire(&mailbox->lock);
    deliver(mailbox, l);
    sorting = mailbox->sorting;
    smp_lock_release(&mailbox->lock);
    if (sorting) { /* it may be waiting for this, asleep in its comm */
        smp_comm_wake(mailbox->comm);
    }
    return SMP_OK;
}

smp_status
smp_mailbox_send(smp_mailbox *mailbox, int dest, const smp_address *address,
                 const void *in)
{
    smp_block *block = NULL;
    size_t     bytes = bytes_of(address);

    if (dest == smp_comm_rank(mailbox->comm)) {
        return keep(mailbox, address, in);
    }
    if (bytes != 0) {
        smp_status status = smp_comm_block(mailbox->comm, dest, bytes, &block);

        if (status != SMP_OK) {
            return status;
        }
        memcpy(smp_block_data(block), in, bytes);
    }
    return smp_comm_send(mailbox->comm, dest, address, sizeof(*address), &block,
                         block != NULL);
}

void
smp_receive_post(smp_mailbox *mailbox, smp_posted_receive *receive)
{
    unexpected_message **at;

    receive->over = false;
    receive->next = NULL;
    smp_lock_acquire(&mailbox->lock);
    *mailbox->receives_last = receive;
    mailbox->receives_last = &receive->next;
    for (at = &mailbox->unexpected; *at != NULL; at = &(*at)->next) {
        unexpected_message *l = *at;

        if (is_for(receive, &l->address, l->source)) {
            *at = l->next;
            if (*at == NULL) {
                mailbox->unexpected_last = at;
            }
            fill(mailbox, receive, l);
            free_message(l);
            break;
        }
    }
    smp_lock_release(&mailbox->lock);
}

bool
smp_receive_wait(smp_mailbox *mailbox, smp_posted_receive *receive, int64_t until_ns)
{
    bool over;

    smp_lock_acquire(&mailbox->lock);
    while (!receive->over) {
        bool by_itself = receive->source == smp_comm_rank(mailbox->comm);

        if (mailbox->ended && !by_itself) {
            finish(mailbox, receive, SMP_ERR_CLOSED, receive->source);
        } else if (!mailbox->ended && !mailbox->sorting) {
            sort_in(mailbox, receive, until_ns);
        } else {
            smp_cond_wait(&mailbox->changed, &mailbox->lock, until_ns);
        }
        if (smp_clock_ns() >= until_ns) {
            break;
        }
    }
    over = receive->over;
    smp_lock_release(&mailbox->lock);
    return over;
}

bool
smp_receive_cancel(smp_mailbox *mailbox, smp_posted_receive *receive)
{
    bool over;

    smp_lock_acquire(&mailbox->lock);
    remove_receive(mailbox, receive);
    over = receive->over;
    smp_lock_release(&mailbox->lock);
    return over;
}
