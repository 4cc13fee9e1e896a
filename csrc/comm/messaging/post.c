/* Channels, and unexpected messages: those from before their channel's opening. */
#include "comm/messaging/post.h"

#include <string.h>

#include "common/jitter.h"

static smp_post_head
head_of(const smp_message *message)
{
    smp_post_head head;

    memcpy(&head, message->bytes, sizeof(head));
    return head;
}

static bool
takes(const smp_channel *channel, const smp_post_head *head)
{
    return channel->address == head->address &&
           (head->nonce == 0 ? channel->is_open : channel->nonce == head->nonce);
}

/* The lock is held.  The count comes last: a thread that sees it finds the message. */
static void
put_into(smp_channel *channel, smp_message *message)
{
    smp_message_list_put(&channel->messages, message);
    smp_jitter();
    atomic_fetch_add(&channel->count, 1);
}

void
smp_post_init(smp_post *post)
{
    *post = (smp_post){.channels = NULL};
    smp_lock_init(&post->lock, SMP_LOCK_POST);
}

void
smp_post_fini(smp_post *post)
{
    smp_message_list_clear(&post->unexpected);
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
    smp_channel  *channel;

    smp_lock_acquire(&post->lock);
    for (channel = post->channels; channel != NULL && !takes(channel, &head);
         channel = channel->next) {
    }
    if (channel != NULL) {
        put_into(channel, message);
        if (channel->doorbell != NULL) { /* under the lock: it is there until close */
            smp_doorbell_ring(channel->doorbell);
        }
        message = NULL;
    } else if (head.nonce == 0) {
        smp_message_list_put(&post->unexpected, message);
        message = NULL;
    }
    smp_lock_release(&post->lock);
    smp_message_free(message);
}

void
smp_post_keep(smp_post *post, smp_message *message)
{
    smp_lock_acquire(&post->lock);
    smp_message_list_put(&post->unexpected, message);
    smp_lock_release(&post->lock);
}

void
smp_channel_open(smp_post *post, smp_channel *channel)
{
    smp_message_list rest;
    smp_message     *message;

    atomic_init(&channel->count, 0);
    channel->is_open = true;
    channel->doorbell = NULL;
    channel->messages = (smp_message_list){0};
    smp_lock_acquire(&post->lock);
    channel->next = post->channels;
    post->channels = channel;
    rest = post->unexpected;
    post->unexpected = (smp_message_list){0};
    while ((message = smp_message_list_get(&rest)) != NULL) {
        smp_post_head head = head_of(message);

        if (takes(channel, &head)) {
            put_into(channel, message);
        } else {
            smp_message_list_put(&post->unexpected, message);
        }
    }
    smp_lock_release(&post->lock);
}

void
smp_channel_narrow(smp_post *post, smp_channel *channel)
{
    smp_lock_acquire(&post->lock);
    channel->is_open = false;
    smp_lock_release(&post->lock);
}

void
smp_channel_set_name(smp_post *post, smp_channel *channel, const char *name)
{
    smp_lock_acquire(&post->lock);
    channel->name = name;
    smp_lock_release(&post->lock);
}

void
smp_channel_set_doorbell(smp_post *post, smp_channel *channel, smp_doorbell *doorbell)
{
    smp_lock_acquire(&post->lock);
    channel->doorbell = doorbell;
    smp_lock_release(&post->lock);
}

bool
smp_post_elsewhere(smp_post *post, const smp_channel *here,
                   bool (*look)(void *arg, const char *name,
                                const smp_message *message),
                   void *arg)
{
    bool found = false;

    smp_lock_acquire(&post->lock);
    for (const smp_channel *channel = post->channels; channel != NULL && !found;
         channel = channel->next) {
        const smp_message *lists[] = {channel->kept, channel->messages.first};

        for (int i = 0; i < 2 && channel != here; i++) {
            const smp_message *message = lists[i];

            for (; message != NULL && !found; message = message->next) {
                found = look(arg, channel->name != NULL ? channel->name : "", message);
            }
        }
    }
    smp_lock_release(&post->lock);
    return found;
}

void
smp_channel_close(smp_post *post, smp_channel *channel)
{
    smp_channel **at;

    smp_lock_acquire(&post->lock);
    for (at = &post->channels; *at != channel; at = &(*at)->next) {
    }
    *at = channel->next;
    smp_lock_release(&post->lock);
    smp_message_list_clear(&channel->messages);
}

smp_message *
smp_channel_get(smp_post *post, smp_channel *channel)
{
    smp_message *message;

    if (atomic_load(&channel->count) == 0) {
        return NULL;
    }
    smp_lock_acquire(&post->lock);
    message = smp_message_list_get(&channel->messages);
    atomic_fetch_sub(&channel->count, 1);
    smp_lock_release(&post->lock);
    return message;
}
