/* The meeting of members' devices, and its outcome. */
#include "comm/collective/intra_host/devices.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/device/port.h"
#include "comm/messaging/neighbour.h"
#include "common/log.h"

/* In a slot of the meeting; the card in the first step's alone, the input in that of
 * the patterns' gather where they lie. */
typedef struct {
    uint32_t           willing;
    uint32_t           tried; /* ... and this is why it is not willing */
    char               why[SMP_DRIVER_TEXT];
    smp_exchange_card  card;
    smp_exchange_input input;
} vote;

/* In a slot of a gather where tensors lie: the input in the first step, the vote in the
 * second. */
typedef struct {
    smp_exchange_input input;
    uint32_t           refused; /* as in smp_devices */
} showing;

/* The step of the meeting in which the patterns are shown where they lie. */
#define SHOWS ((size_t)SMP_TRIAL_ROUNDS + 1)

/* A member's vote in step `step`. */
static vote *
vote_of(const smp_devices *devices, int member, uint64_t step)
{
    smp_slot *slot = smp_epoch_barrier_slot(devices->barrier, member, step);

    return (vote *)(void *)(slot->data + devices->skip);
}

/* The own one, in the next step. */
static vote *
next_vote(const smp_devices *devices)
{
    const smp_epoch_barrier *barrier = devices->barrier;

    return vote_of(devices, barrier->self, barrier->step + 1);
}

/* The first unwilling member's reason, alike for all; true: none. */
static bool
all_willing(smp_devices *devices)
{
    const smp_epoch_barrier *barrier = devices->barrier;

    for (int m = 0; m < barrier->size; m++) {
        const vote *its = vote_of(devices, m, barrier->step);

        if (its->willing) {
            continue;
        }
        snprintf(devices->why, sizeof(devices->why), "rank %d: %.*s",
                 smp_comm_name(barrier->comm, barrier->members[m].rank),
                 (int)sizeof(its->why) - 1, its->why);
        if (its->tried) {
            smp_device_distrust(smp_comm_device(barrier->comm));
        }
        if (its->tried && m == barrier->self) {
            smp_warn("all-gathers of the GPUs of this host go through NCCL: the way "
                     "between their memories was tried and cannot be relied on: %s",
                     devices->why);
        }
        return false;
    }
    return true;
}

static void
offer_exchange(smp_devices *devices, const smp_device_offer *offer)
{
    const smp_epoch_barrier *barrier = devices->barrier;
    vote                    *own = next_vote(devices);

    smp_devices_fini(devices); /* left by an earlier meeting with different calls */
    memset(own, 0, sizeof(*own));
    if (smp_device_is_distrusted(smp_comm_device(barrier->comm))) {
        snprintf(own->why, sizeof(own->why), "a trial in another group failed");
        return;
    }
    if (offer->bytes < 128) {
        snprintf(own->why, sizeof(own->why), "comm_device_gather_bytes is %zu",
                 offer->bytes);
        return;
    }
    devices->exchange = smp_exchange_create(offer->number, offer->bytes, barrier->size,
                                            barrier->self, &own->card, own->why);
    own->willing = devices->exchange != NULL;
}

static void
open_exchange(smp_devices *devices, vote *own)
{
    const smp_epoch_barrier *barrier = devices->barrier;
    smp_exchange_card       *cards;

    cards = calloc((size_t)barrier->size, sizeof(*cards));
    if (cards == NULL) {
        own->willing = 0;
        memcpy(own->why, "out of memory", sizeof("out of memory"));
        return;
    }
    for (int m = 0; m < barrier->size; m++) {
        cards[m] = vote_of(devices, m, barrier->step)->card;
    }
    /* Before the vote that all is open: see smp_exchange_retire(). */
    atomic_store(&barrier->members[barrier->self].control->holds, 1);
    own->willing = smp_exchange_open(devices->exchange, cards, own->why);
    free(cards);
}

/* The outcome of a part of the trial goes into the own slot. */
static void
say(vote *own, bool well)
{
    own->willing = own->willing && well;
    own->tried = !own->willing;
}

void
smp_devices_prepare(smp_devices *devices, size_t step, const smp_device_offer *offer)
{
    vote *own = next_vote(devices);

    if (step == 0) {
        offer_exchange(devices, offer);
    } else if (step <= SMP_TRIAL_ROUNDS && own->willing) {
        say(own, smp_exchange_try_fill(devices->exchange, (int)step - 1, own->why));
    } else if (step == SHOWS && own->willing) {
        say(own, smp_exchange_try_show(devices->exchange, &own->input, own->why));
    }
}

/* The part of the trial after the posts of its step. */
static bool
try_collect(smp_devices *devices, size_t step, char why[SMP_DRIVER_TEXT])
{
    const smp_epoch_barrier *barrier = devices->barrier;
    smp_exchange            *exchange = devices->exchange;

    if (step < SHOWS) {
        return smp_exchange_try_drain(exchange, (int)step - 1, why);
    }
    if (step > SHOWS) {
        return smp_exchange_tried(exchange, why);
    }
    for (int m = 0; m < barrier->size; m++) {
        if (!smp_exchange_open_input(exchange, m,
                                     &vote_of(devices, m, barrier->step)->input, why)) {
            return false;
        }
    }
    return smp_exchange_try_read(exchange, why);
}

void
smp_devices_collect(smp_devices *devices, size_t step)
{
    bool  last = step + 1 == SMP_DEVICES_STEPS;
    bool  willing = devices->why[0] == '\0' && all_willing(devices);
    vote *own = last ? NULL : next_vote(devices);

    if (!willing) {
        smp_devices_fini(devices);
    }
    if (last) {
        devices->met = willing;
        atomic_store(&devices->decided, true);
        return;
    }
    own->willing = willing;
    own->tried = 0;
    if (willing && step == 0) {
        open_exchange(devices, own);
    } else if (willing) {
        say(own, try_collect(devices, step, own->why));
    }
}

/* --------------------------------------------------------- tensors where they lie */

static showing *
showing_of(const smp_devices *devices, int member, uint64_t step)
{
    smp_slot *slot = smp_epoch_barrier_slot(devices->barrier, member, step);

    return (showing *)(void *)(slot->data + devices->skip);
}

static showing *
next_showing(const smp_devices *devices)
{
    const smp_epoch_barrier *barrier = devices->barrier;

    return showing_of(devices, barrier->self, barrier->step + 1);
}

bool
smp_devices_show(const smp_devices *devices, const smp_device_gather *gather,
                 size_t bytes, char why[SMP_DRIVER_TEXT])
{
    return smp_exchange_show(devices->exchange, gather, bytes,
                             &next_showing(devices)->input, why);
}

smp_devices_next
smp_devices_see(smp_devices *devices, char why[SMP_DRIVER_TEXT])
{
    const smp_epoch_barrier *barrier = devices->barrier;
    smp_export_state         least = SMP_EXPORT_OPEN;

    for (int m = 0; m < barrier->size; m++) {
        const smp_exchange_input *its = &showing_of(devices, m, barrier->step)->input;

        smp_exchange_drop_gone(devices->exchange, m, its);
        least = its->state < least ? its->state : least;
    }
    if (least == SMP_EXPORT_CLOSED) {
        return SMP_DEVICES_ROUNDS;
    }
    devices->refused = 0;
    for (int m = 0; m < barrier->size && devices->refused == 0; m++) {
        const smp_exchange_input *its = &showing_of(devices, m, barrier->step)->input;

        if (!smp_exchange_open_input(devices->exchange, m, its, why)) {
            devices->refused = (uint32_t)m + 1;
        }
    }
    return least == SMP_EXPORT_NEW ? SMP_DEVICES_VOTES
           : devices->refused != 0 ? SMP_DEVICES_FAILED
                                   : SMP_DEVICES_READ;
}

void
smp_devices_vote(const smp_devices *devices)
{
    next_showing(devices)->refused = devices->refused;
}

smp_devices_next
smp_devices_count(const smp_devices *devices)
{
    const smp_epoch_barrier *barrier = devices->barrier;
    smp_devices_next         next = SMP_DEVICES_READ;
    bool                     own_refused = false;

    for (int m = 0; m < barrier->size; m++) {
        uint32_t refused = showing_of(devices, m, barrier->step)->refused;

        next = refused == 0 ? next : SMP_DEVICES_ROUNDS;
        own_refused = own_refused || refused == (uint32_t)barrier->self + 1;
    }
    if (own_refused) {
        smp_exchange_settle(devices->exchange, SMP_EXPORT_CLOSED);
    } else if (next == SMP_DEVICES_READ) {
        smp_exchange_settle(devices->exchange, SMP_EXPORT_OPEN);
    }
    return next;
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
