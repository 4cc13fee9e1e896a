/* A list under a lock, and its length outside. */
#include "comm/messaging/inbox.h"

#include "common/jitter.h"

void
smp_inbox_init(smp_inbox *inbox)
{
    *inbox = (smp_inbox){.count = 0};
    atomic_init(&inbox->count, 0);
    smp_lock_init(&inbox->lock, SMP_LOCK_INBOX);
}

void
smp_inbox_fini(smp_inbox *inbox)
{
    smp_message_list_clear(&inbox->messages);
    smp_lock_fini(&inbox->lock);
}

void
smp_inbox_put(smp_inbox *inbox, smp_message *message)
{
    smp_jitter();
    smp_lock_acquire(&inbox->lock);
    smp_message_list_put(&inbox->messages, message);
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
    message = smp_message_list_get(&inbox->messages);
    atomic_fetch_sub(&inbox->count, 1);
    smp_lock_release(&inbox->lock);
    return message;
}
