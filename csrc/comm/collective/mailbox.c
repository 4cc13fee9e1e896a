/* Letterboxes that wait for letters, and letters that wait for letterboxes. */
#define _GNU_SOURCE
#include "comm/collective/mailbox.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/neighbour.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/lock.h"

/* A waiter looks this often whether its source has ended. */
#define LOOK_NS (20 * SMP_NS_PER_MS)

/* ... and this often when a rank is lost: the comm says so and waits no more. */
#define LOST_LOOK_NS (1 * SMP_NS_PER_MS)

/* One that no letterbox wants yet. */
typedef struct letter {
    smp_address    address;
    int            source;
    void          *data;  /* in the block, or owned */
    smp_block     *block; /* owned, or NULL */
    struct letter *next;
} letter;

struct smp_mailbox {
    smp_comm *comm;       /* borrowed */
    uint32_t  generation; /* smp_fork_generation() */

    smp_lock        lock;    /* guards all below, and the letterboxes */
    pthread_cond_t  changed; /* a letterbox is over, or nobody sorts any more */
    bool            sorting; /* a thread is in smp_comm_receive() */
    bool            ended;   /* nothing comes any more but from this rank itself */
    smp_letterbox  *boxes;   /* in the order in which they were put up */
    smp_letterbox **boxes_last;
    letter         *letters; /* in the order of their arrival */
    letter        **letters_last;
};

static size_t
bytes_of(const smp_address *address)
{
    return address->count * smp_dtype_bytes(address->dtype);
}

static bool
is_for(const smp_letterbox *box, const smp_address *address, int source)
{
    return box->want.group == address->group && box->want.tag == address->tag &&
           (box->source == SMP_ANY_SOURCE || box->source == source);
}

static void
free_letter(letter *l)
{
    if (l->block != NULL) {
        smp_block_release(l->block);
    } else {
        free(l->data);
    }
    free(l);
}

static void
remove_box(smp_mailbox *mailbox, smp_letterbox *box)
{
    smp_letterbox **at = &mailbox->boxes;

    while (*at != NULL && *at != box) {
        at = &(*at)->next;
    }
    if (*at != NULL) {
        *at = box->next;
        if (*at == NULL) {
            mailbox->boxes_last = at;
        }
    }
}

static void
finish(smp_mailbox *mailbox, smp_letterbox *box, smp_status status, int from)
{
    remove_box(mailbox, box);
    box->status = status;
    box->from = from;
    box->over = true;
    pthread_cond_broadcast(&mailbox->changed);
}

static void
fill(smp_mailbox *mailbox, smp_letterbox *box, const letter *l)
{
    bool fits = box->want.dtype == l->address.dtype &&
                box->want.kind == l->address.kind &&
                box->want.count == l->address.count;

    box->got = l->address;
    if (fits && bytes_of(&l->address) != 0) {
        memcpy(box->out, l->data, bytes_of(&l->address));
    }
    finish(mailbox, box, fits ? SMP_OK : SMP_ERR_MISMATCH, l->source);
}

/* Takes the letter; the lock is held. */
static void
deliver(smp_mailbox *mailbox, letter *l)
{
    for (smp_letterbox *box = mailbox->boxes; box != NULL; box = box->next) {
        if (is_for(box, &l->address, l->source)) {
            fill(mailbox, box, l);
            free_letter(l);
            return;
        }
    }
    l->next = NULL;
    *mailbox->letters_last = l;
    mailbox->letters_last = &l->next;
}

/* Takes the message.  SMP_ERR_MALFORMED, SMP_ERR_NO_MEMORY. */
static smp_status
open_message(smp_message *message, letter **out)
{
    letter    *l = calloc(1, sizeof(*l));
    smp_status status = SMP_OK;

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
        free_letter(l);
    } else {
        *out = l;
    }
    return status;
}

/* Waits for what other threads do; the lock is held. */
static void
wait_for_others(smp_mailbox *mailbox, int64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / SMP_NS_PER_S),
                             .tv_nsec = (long)(until_ns % SMP_NS_PER_S)};

    pthread_cond_timedwait(&mailbox->changed, &mailbox->lock.mutex, &until);
}

/* Nothing is there: SMP_ERR_TIMED_OUT, or why a rank is lost.  Nothing more comes for
 * the letterbox if its source was gone before; if another rank is lost, the letterbox
 * stays.  The lock is held. */
static void
look_for_source(smp_mailbox *mailbox, smp_letterbox *box, bool gone, smp_status status,
                int64_t until_ns)
{
    int  lost = smp_comm_lost(mailbox->comm);
    bool fault = status != SMP_ERR_TIMED_OUT;

    if (box->over) { /* another thread has sent to this rank */
        return;
    }
    if (gone) {
        bool left = smp_comm_left(mailbox->comm, box->source);

        finish(mailbox, box,
               left                           ? SMP_ERR_CLOSED
               : fault && lost == box->source ? status
                                              : SMP_ERR_PEER_LOST,
               box->source);
    } else if (fault && (box->source == SMP_ANY_SOURCE || lost < 0)) {
        finish(mailbox, box, status, lost);
    } else if (fault) {
        int64_t look_ns = smp_clock_ns() + LOST_LOOK_NS;

        wait_for_others(mailbox, look_ns < until_ns ? look_ns : until_ns);
    }
}

/* Sorts in what arrives until something has, or until_ns.  The lock is held, and nobody
 * sorts. */
static void
sort_in(smp_mailbox *mailbox, smp_letterbox *box, int64_t until_ns)
{
    int64_t limit_ns = until_ns - smp_clock_ns();
    /* Read before the messages: what it sent is among them by then. */
    bool gone =
        box->source != SMP_ANY_SOURCE && smp_comm_gone(mailbox->comm, box->source);
    smp_message *message;
    letter      *l = NULL;
    int          sender = SMP_ANY_SOURCE;
    smp_status   status;

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
    } else if (sender != SMP_ANY_SOURCE) { /* nobody knows for whom it was */
        if (!box->over) {
            finish(mailbox, box, status, sender);
        }
    } else if (status == SMP_ERR_CLOSED) {
        mailbox->ended = true;
    } else if (status != SMP_ERR_INTERRUPTED) {
        look_for_source(mailbox, box, gone, status, until_ns);
    }
}

smp_status
smp_mailbox_create(smp_comm *comm, smp_mailbox **out)
{
    smp_mailbox       *mailbox = calloc(1, sizeof(*mailbox));
    pthread_condattr_t monotonic;

    if (mailbox == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    mailbox->comm = comm;
    mailbox->generation = smp_fork_generation();
    mailbox->boxes_last = &mailbox->boxes;
    mailbox->letters_last = &mailbox->letters;
    smp_lock_init(&mailbox->lock, SMP_LOCK_MAILBOX);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&mailbox->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *out = mailbox;
    return SMP_OK;
}

void
smp_mailbox_destroy(smp_mailbox *mailbox)
{
    if (mailbox == NULL || mailbox->generation != smp_fork_generation()) {
        return; /* the child may not trust the lock, nor `changed` with its waiters */
    }
    while (mailbox->letters != NULL) {
        letter *l = mailbox->letters;

        mailbox->letters = l->next;
        free_letter(l);
    }
    pthread_cond_destroy(&mailbox->changed);
    smp_lock_fini(&mailbox->lock);
    free(mailbox);
}

/* To this rank itself. */
static smp_status
keep(smp_mailbox *mailbox, const smp_address *address, const void *in)
{
    letter *l = calloc(1, sizeof(*l));
    size_t  bytes = bytes_of(address);
    bool    sorting;

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
    if (sorting) { /* it may be the one who waits for this, asleep in its comm */
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
smp_letterbox_put_up(smp_mailbox *mailbox, smp_letterbox *box)
{
    letter **at;

    box->over = false;
    box->next = NULL;
    smp_lock_acquire(&mailbox->lock);
    *mailbox->boxes_last = box;
    mailbox->boxes_last = &box->next;
    for (at = &mailbox->letters; *at != NULL; at = &(*at)->next) {
        letter *l = *at;

        if (is_for(box, &l->address, l->source)) {
            *at = l->next;
            if (*at == NULL) {
                mailbox->letters_last = at;
            }
            fill(mailbox, box, l);
            free_letter(l);
            break;
        }
    }
    smp_lock_release(&mailbox->lock);
}

bool
smp_letterbox_wait(smp_mailbox *mailbox, smp_letterbox *box, int64_t until_ns)
{
    bool over;

    smp_lock_acquire(&mailbox->lock);
    while (!box->over) {
        bool by_itself = box->source == smp_comm_rank(mailbox->comm);

        if (mailbox->ended && !by_itself) {
            finish(mailbox, box, SMP_ERR_CLOSED, box->source);
        } else if (!mailbox->ended && !mailbox->sorting) {
            sort_in(mailbox, box, until_ns);
        } else {
            wait_for_others(mailbox, until_ns);
        }
        if (smp_clock_ns() >= until_ns) {
            break;
        }
    }
    over = box->over;
    smp_lock_release(&mailbox->lock);
    return over;
}

bool
smp_letterbox_take_down(smp_mailbox *mailbox, smp_letterbox *box)
{
    bool over;

    smp_lock_acquire(&mailbox->lock);
    remove_box(mailbox, box);
    over = box->over;
    smp_lock_release(&mailbox->lock);
    return over;
}
