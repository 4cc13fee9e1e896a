/* How the members of a group gather tensors of their devices (comm/device/exchange.h),
 * if all are on one host.
 *
 * They *meet* once, in an operation of two steps: each shows the others what it has
 * made on its device, opens what they have made, and says whether it could.  Either all
 * could, or none uses it ever after: the answer is the same on all.  Then each gather
 * is a number of rounds, one step each: before a member posts the step its device is
 * told to fill its half, and when all have, to drain the others'.
 *
 * Threads  one at a time.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_DEVICES_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_DEVICES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/intra_host/epoch_barrier.h"
#include "comm/device/exchange.h"

/* Room for a rank and what it says. */
#define SMP_DEVICES_TEXT (SMP_DRIVER_TEXT + 32)

typedef struct {
    smp_epoch_barrier *barrier;  /* borrowed */
    smp_exchange      *exchange; /* owned; NULL: there is none, or no longer */
    size_t             skip;     /* bytes of a slot that are not this module's */
    _Atomic bool decided; /* any thread may look; the two below do not change then */
    bool         met;     /* all members use the exchange */
    char         why[SMP_DEVICES_TEXT]; /* ... or none does, for this */
} smp_devices;

/* The first step of a meeting: makes what is offered, and fills the own slot. */
void smp_devices_offer(smp_devices *devices, const smp_device_offer *offer);

/* All have posted it: opens what they show, and fills the slot of the second. */
void smp_devices_open(smp_devices *devices);

/* All have posted that. */
void smp_devices_decide(smp_devices *devices);

/* Gives back what the device has; before the epoch barrier's end. */
void smp_devices_fini(smp_devices *devices);

#endif
