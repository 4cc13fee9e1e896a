/* A list under a lock; its objects are taken off and destroyed without the lock. */
#include "comm/device/retired.h"

#include <stddef.h>

#include "device/streams.h"

void
smp_retired_add(smp_retired_list *list, smp_retired *one)
{
    smp_lock_acquire(&list->lock);
    one->next = list->first;
    list->first = one;
    smp_lock_release(&list->lock);
}

void
smp_retired_sweep(smp_retired_list *list)
{
    smp_retired  *done = NULL;
    smp_retired **at = &list->first;

    if (!smp_streams_rest(0)) {
        return;
    }
    smp_lock_acquire(&list->lock);
    while (*at != NULL) {
        smp_retired *one = *at;

        if (list->is_read(one)) {
            at = &one->next;
        } else {
            *at = one->next;
            one->next = done;
            done = one;
        }
    }
    smp_lock_release(&list->lock);
    while (done != NULL) {
        smp_retired *next = done->next;

        list->destroy(done);
        done = next;
    }
}
