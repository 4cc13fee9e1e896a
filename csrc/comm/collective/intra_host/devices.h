/* Gathers of tensors on the devices of a group's members (comm/device/exchange.h), all
 * on one host.
 *
 * They *meet* once, in an operation of SMP_DEVICES_STEPS steps: each shows the others
 * the handles of its device's memory, and opens theirs.  Each gathers patterns with
 * them in the rounds of a trial, and votes in each step.  Without all votes, no member
 * uses the device ever after: the answer is the same on all.  After a failed trial one
 * of them has warned (smp_warn), and no other group of the comm tries.
 *
 * Then each gather is a number of rounds, one step each: before a member posts the step
 * its device is told to fill its half, and after all posts, to drain the others'.
 *
 * A gather of tensors where they lie has other steps.  In the first one each member
 * shows its input.  Where others cannot read one, the rounds follow.  Where one is new
 * to the others, a step of votes follows: each has opened the new ones, or refuses.
 * Without all votes, the rounds follow.  Before the last step each has told its device
 * to read; behind it the inputs are taken back.
 *
 * Status   The rounds were run by ranks on one shared H100, not yet between two GPUs.
 *          Tensors read where they lie were not yet run on a GPU.  The tests have a
 *          stand-in for the driver (tests/core/stand_in.c).  A group of several hosts
 *          does not meet: its all-gathers of GPUs go through NCCL.
 * Threads  one at a time; reads: any.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_DEVICES_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_DEVICES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "comm/collective/intra_host/epoch_barrier.h"
#include "comm/device/exchange.h"

/* The offer, the rounds of the trial, a gather where the patterns lie, the last vote.
 */
#define SMP_DEVICES_STEPS (4 + SMP_TRIAL_ROUNDS)

/* Room for a rank and its reason. */
#define SMP_DEVICES_TEXT (SMP_DRIVER_TEXT + 32)

typedef struct {
    smp_epoch_barrier *barrier;  /* borrowed */
    smp_exchange      *exchange; /* owned; NULL: there is none, or no longer */
    size_t             skip;     /* bytes of a slot before this module's */
    uint32_t           refused;  /* 1 + the member with an input that cannot be opened
                                    here; 0: none */
    _Atomic uint64_t reads;      /* gathers of tensors where they lie */
    _Atomic bool decided; /* any thread may look; the two below do not change then */
    bool         met;     /* all members use the exchange */
    char         why[SMP_DEVICES_TEXT]; /* ... or none does, for this */
} smp_devices;

/* Step `step` of a meeting is posted next: does its work before the post, and completes
 * the own slot.  The first one makes the offer's memory. */
void smp_devices_prepare(smp_devices *devices, size_t step,
                         const smp_device_offer *offer);

/* All have posted it: does its work after the posts, and begins the slot of the next
 * step.  The last one decides. */
void smp_devices_collect(smp_devices *devices, size_t step);

/* The next step of a gather where tensors lie. */
typedef enum {
    SMP_DEVICES_ROUNDS, /* the first of the rounds */
    SMP_DEVICES_VOTES,
    SMP_DEVICES_READ, /* the inputs are open: the last step, after reads */
    SMP_DEVICES_FAILED
} smp_devices_next;

/* Step 0 is posted next: this member's tensor of so many bytes is shown. */
bool smp_devices_show(const smp_devices *devices, const smp_device_gather *gather,
                      size_t bytes, char why[SMP_DRIVER_TEXT]);

/* All have posted it: opens what is open or new. */
smp_devices_next smp_devices_see(smp_devices *devices, char why[SMP_DRIVER_TEXT]);

/* The vote is posted next; all have posted it: not SMP_DEVICES_VOTES. */
void             smp_devices_vote(const smp_devices *devices);
smp_devices_next smp_devices_count(const smp_devices *devices);

/* Gives the device's memory back; before the epoch barrier's end. */
void smp_devices_fini(smp_devices *devices);

#endif
