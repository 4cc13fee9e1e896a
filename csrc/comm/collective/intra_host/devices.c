/* What members show each other of their devices, and what becomes of it. */
#include "comm/collective/intra_host/devices.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In the slot of the first step; without the card in that of the second. */
typedef struct {
    uint64_t          willing;
    char              why[SMP_DRIVER_TEXT];
    smp_exchange_card card;
} word;

/* A member's word in step `step`. */
static word *
word_of(const smp_devices *devices, int member, uint64_t step)
{
    smp_slot *slot = smp_epoch_barrier_slot(devices->barrier, member, step);

    return (word *)(void *)(slot->data + devices->skip);
}

/* The own one, in the step that will be posted next. */
static word *
next_word(const smp_devices *devices)
{
    const smp_epoch_barrier *barrier = devices->barrier;

    return word_of(devices, barrier->self, barrier->step + 1);
}

/* The first member that is not willing says why, to all alike; true: there is none. */
static bool
all_willing(smp_devices *devices)
{
    for (int m = 0; m < devices->barrier->size; m++) {
        const word *its = word_of(devices, m, devices->barrier->step);

        if (!its->willing) {
            snprintf(devices->why, sizeof(devices->why), "rank %d: %.*s",
                     smp_comm_name(devices->barrier->comm,
                                   devices->barrier->members[m].rank),
                     (int)sizeof(its->why) - 1, its->why);
            return false;
        }
    }
    return true;
}

void
smp_devices_offer(smp_devices *devices, const smp_device_offer *offer)
{
    const smp_epoch_barrier *barrier = devices->barrier;
    word                    *own = next_word(devices);

    smp_devices_fini(
        devices); /* what an earlier meeting left, in which calls differed */
    memset(own, 0, sizeof(*own));
    if (offer->bytes < 128) {
        snprintf(own->why, sizeof(own->why), "comm_device_gather_bytes is %zu",
                 offer->bytes);
        return;
    }
    devices->exchange = smp_exchange_create(offer->number, offer->bytes, barrier->size,
                                            barrier->self, &own->card, own->why);
    own->willing = devices->exchange != NULL;
}

void
smp_devices_open(smp_devices *devices)
{
    const smp_epoch_barrier *barrier = devices->barrier;
    smp_exchange_card       *cards;
    word                    *own = next_word(devices);

    own->willing = 0;
    if (!all_willing(devices)) {
        return;
    }
    cards = calloc((size_t)barrier->size, sizeof(*cards));
    if (cards == NULL) {
        memcpy(own->why, "out of memory", sizeof("out of memory"));
        return;
    }
    for (int m = 0; m < barrier->size; m++) {
        cards[m] = word_of(devices, m, barrier->step)->card;
    }
    /* Before it is said that all is open: see smp_exchange_retire(). */
    atomic_store(&barrier->members[barrier->self].control->holds, 1);
    own->willing = smp_exchange_open(devices->exchange, cards, own->why);
    free(cards);
}

void
smp_devices_decide(smp_devices *devices)
{
    /* Who was not willing at first has said so to all already. */
    devices->met = devices->why[0] == '\0' && all_willing(devices);
    if (!devices->met) {
        smp_devices_fini(devices);
    }
    atomic_store(&devices->decided, true);
}

void
smp_devices_fini(smp_devices *devices)
{
    const smp_epoch_barrier *barrier = devices->barrier;
    smp_exchange            *exchange = devices->exchange;
    smp_user                *readers;
    bool                     closed;

    if (exchange == NULL) {
        return;
    }
    devices->exchange = NULL;
    closed = smp_exchange_close(exchange);
    if (closed) {
        atomic_store(&barrier->members[barrier->self].control->holds, 0);
    }
    readers = smp_epoch_barrier_users(barrier);
    smp_exchange_retire(exchange, readers, readers == NULL ? 0 : barrier->size,
                        !closed || readers == NULL);
}
