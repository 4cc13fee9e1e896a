/* The state of a group's operation, and its ways.
 *
 * Every operation is a set of pulls: each member takes ranges of the others' `in` and
 * copies or reduces them into its `out`.  There are five ways.
 *
 *   SLOTS   In each step a member puts the next piece of its `in` into its slot: one
 *           for all, or a cell for each member.  Data come with the first step.
 *           Columns of matrices always go so, straight from and into their rows.
 *   SPLIT   A larger all-reduce through the slots: of each piece, every member reduces
 *           a part in one step, and takes the other parts in the next.
 *   MEMORY  A member reads the others' memory, at the addresses of the first step; the
 *           last step ends the reading.  All-reduce has one between: every member
 *           reduces a part, and takes the others'.  Memory of a pool is read where
 *           mapped, without system calls.  If all outputs of an all-gather lie there,
 *           members write into them, and each input is read once instead of once for
 *           each member.  The first step decides on this way: slots filled by then are
 *           left.
 *
 *   DEVICE  An all-gather of tensors on devices: steps are the rounds of
 *           comm/device/exchange.h.  MEETING: the operation before the first of these
 *           (comm/collective/intra_host/devices.h).
 *
 *   READING One of larger tensors on devices, read where they lie.  The first step may
 *           decide, and the second, that it goes on by DEVICE.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_COLLECTIVE_STATE_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_COLLECTIVE_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/agreement.h"
#include "comm/collective/checks/call.h"
#include "comm/collective/intra_host/devices.h"
#include "comm/collective/intra_host/epoch_barrier.h"
#include "comm/collective/kernels/reduce.h"

typedef enum {
    SMP_BY_SLOTS,
    SMP_BY_SPLIT,
    SMP_BY_MEMORY,
    SMP_BY_DEVICE,
    SMP_BY_READING,
    SMP_BY_MEETING
} smp_way;

/* A node of the tree over a larger group: its term goes to `out`, at the range's `to`.
 * With one member below, that member's tensor itself. */
typedef struct {
    int      first; /* member, and the number from it on */
    int      n;
    uint8_t *out; /* borrowed */
} smp_partial;

typedef struct {
    smp_epoch_barrier *barrier; /* borrowed */
    const smp_kernels *kernels;
    smp_range         *pulls;   /* owned, as all below: [n]; from each member */
    smp_range         *pushes;  /* [n]: to each member */
    uint64_t          *ins;     /* [n]: addresses in the members' memory */
    uint64_t          *outs;    /* [n] */
    uint8_t          **targets; /* [n]: the members' outputs, if members write */
    double            *factors; /* [n] */
    const void       **terms;   /* [n] */
    smp_said          *said;    /* [n] */
    size_t            *lengths; /* [n]: bytes of the members' pieces in a round */
    uint8_t           *scratch; /* for smp_reduce() */
    uint8_t           *fetched; /* pieces of the members' memory */

    smp_devices devices;
    char        why[SMP_DRIVER_TEXT]; /* a device failed, in the driver's words */

    const smp_partial *partials;  /* borrowed: a reduction's results instead of */
    int                npartials; /* ... the reduced tensors; 0: those */

    smp_call call;    /* the operation under way, like all below */
    size_t   element; /* bytes */
    uint64_t first;   /* step of the epoch barrier; its own slot has the notice */
    smp_way  way;
    bool     shared;      /* by slots: all members get the same from one */
    size_t   in_stride;   /* bytes of a row of `in`, if it has rows */
    size_t   out_stride;  /* ... of `out` */
    size_t   header;      /* bytes of the counts in a slot */
    size_t   cell;        /* bytes for one member in a slot */
    bool     writes;      /* by memory: members write into the targets */
    bool     is_small;    /* only the slots come into question */
    bool     is_large;    /* copies go past the caches */
    size_t   data_step;   /* by slots or device: the first with data */
    size_t   steps;       /* of the operation */
    size_t   step;        /* now */
    int      turn;        /* by memory: finished pulls, and */
    size_t   turn_offset; /* elements of the next */
} smp_collective;

#endif
