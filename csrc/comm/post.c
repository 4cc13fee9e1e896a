/* Holes, and messages that were earlier than theirs. */
#include "comm/post.h"

#include <string.h>

#include "common/jitter.h"

static void
append(smp_message **first, smp_message **last, smp_message *message)
{
    message->next = NULL;
    if (*first == NULL) {
        *first = message;
    } else {
        (*last)->next = message;
    }
    *last = message;
}

static void
free_all(smp_message *message)
{
    while (message != NULL) {
        smp_message *next = message->next;

        smp_message_free(message);
        message = next;
    }
}

static smp_post_head
head_of(const smp_message *message)
{
    smp_post_head head;

    memcpy(&head, message->bytes, sizeof(head));
    return head;
}

static bool
takes(const smp_hole *hole, const smp_post_head *head)
{
    return hole->address == head->address &&
           (head->nonce == 0 ? hole->is_open : hole->nonce == head->nonce);
}

/* The lock is held.  The count comes last: whoever sees it finds the message. */
static void
put_into(smp_hole *hole, smp_message *message)
{
    append(&hole->first, &hole->last, message);
    smp_jitter();
    atomic_fetch_add(&hole->count, 1);
}

void
smp_post_init(smp_post *post)
{
    *post = (smp_post){.holes = NULL};
    smp_lock_init(&post->lock, SMP_LOCK_POST);
}

void
smp_post_fini(smp_post *post)
{
    free_all(post->early);
    smp_lock_fini(&post->lock);
}

bool
smp_post_is(const smp_message *message)
{
    return message->nbytes >= sizeof(smp_post_head) &&
           head_of(message).mark == SMP_POST_MARK;
}

void
smp_post_put(smp_post *post, smp_message *message)
{
    smp_post_head head = head_of(message);
    smp_hole     *hole;

    smp_lock_acquire(&post->lock);
    for (hole = post->holes; hole != NULL && !takes(hole, &head); hole = hole->next) {
    }
    if (hole != NULL) {
        put_into(hole, message);
        if (hole->doorbell != NULL) { /* under the lock: it is there until close */
            smp_doorbell_ring(hole->doorbell);
        }
        message = NULL;
    } else if (head.nonce == 0) {
        append(&post->early, &post->early_last, message);
        message = NULL;
    }
    smp_lock_release(&post->lock);
    smp_message_free(message);
}

void
smp_post_keep(smp_post *post, smp_message *message)
{
    smp_lock_acquire(&post->lock);
    append(&post->early, &post->early_last, message);
    smp_lock_release(&post->lock);
}

void
smp_hole_open(smp_post *post, smp_hole *hole)
{
    smp_message *rest;

    atomic_init(&hole->count, 0);
    hole->is_open = true;
    hole->doorbell = NULL;
    hole->first = NULL;
    smp_lock_acquire(&post->lock);
    hole->next = post->holes;
    post->holes = hole;
    rest = post->early;
    post->early = NULL;
    while (rest != NULL) {
        smp_message  *message = rest;
        smp_post_head head = head_of(message);

        rest = rest->next;
        if (takes(hole, &head)) {
            put_into(hole, message);
        } else {
            append(&post->early, &post->early_last, message);
        }
    }
    smp_lock_release(&post->lock);
}

void
smp_hole_narrow(smp_post *post, smp_hole *hole)
{
    smp_lock_acquire(&post->lock);
    hole->is_open = false;
    smp_lock_release(&post->lock);
}

void
smp_hole_set_doorbell(smp_post *post, smp_hole *hole, smp_doorbell *doorbell)
{
    smp_lock_acquire(&post->lock);
    hole->doorbell = doorbell;
    smp_lock_release(&post->lock);
}

bool
smp_post_elsewhere(smp_post *post, const smp_hole *here,
                   bool (*look)(void *arg, const char *name,
                                const smp_message *message),
                   void *arg)
{
    bool found = false;

    smp_lock_acquire(&post->lock);
    for (const smp_hole *hole = post->holes; hole != NULL && !found;
         hole = hole->next) {
        const smp_message *lists[] = {hole->kept, hole->first};

        for (int i = 0; i < 2 && hole != here; i++) {
            const smp_message *message = lists[i];

            for (; message != NULL && !found; message = message->next) {
                found = look(arg, hole->name != NULL ? hole->name : "", message);
            }
        }
    }
    smp_lock_release(&post->lock);
    return found;
}

void
smp_hole_close(smp_post *post, smp_hole *hole)
{
    smp_hole **at;

    smp_lock_acquire(&post->lock);
    for (at = &post->holes; *at != hole; at = &(*at)->next) {
    }
    *at = hole->next;
    smp_lock_release(&post->lock);
    free_all(hole->first);
    hole->first = NULL;
}

smp_message *
smp_hole_get(smp_post *post, smp_hole *hole)
{
    smp_message *message;

    if (atomic_load(&hole->count) == 0) {
        return NULL;
    }
    smp_lock_acquire(&post->lock);
    message = hole->first;
    hole->first = message->next;
    message->next = NULL;
    atomic_fetch_sub(&hole->count, 1);
    smp_lock_release(&post->lock);
    return message;
}
