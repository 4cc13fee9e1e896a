/* A list under a lock, and its length outside. */
#include "comm/inbox.h"

#include "common/jitter.h"

void
smp_inbox_init(smp_inbox *inbox)
{
    *inbox = (smp_inbox){.first = NULL};
    atomic_init(&inbox->count, 0);
    smp_lock_init(&inbox->lock, SMP_LOCK_INBOX);
}

void
smp_inbox_fini(smp_inbox *inbox)
{
    smp_message *message;

    while ((message = smp_inbox_get(inbox)) != NULL) {
        smp_message_free(message);
    }
    smp_lock_fini(&inbox->lock);
}

void
smp_inbox_put(smp_inbox *inbox, smp_message *message)
{
    message->next = NULL;
    smp_jitter();
    smp_lock_acquire(&inbox->lock);
    if (inbox->first == NULL) {
        inbox->first = message;
    } else {
        inbox->last->next = message;
    }
    inbox->last = message;
    atomic_fetch_add(&inbox->count, 1);
    smp_lock_release(&inbox->lock);
}

smp_message *
smp_inbox_get(smp_inbox *inbox)
{
    smp_message *message;

    if (atomic_load(&inbox->count) == 0) {
        return NULL;
    }
    smp_jitter();
    smp_lock_acquire(&inbox->lock);
    message = inbox->first;
    inbox->first = message->next;
    message->next = NULL;
    atomic_fetch_sub(&inbox->count, 1);
    smp_lock_release(&inbox->lock);
    return message;
}
