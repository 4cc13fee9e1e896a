/* One operation of a group, as steps of its members
 * (comm/collective/intra_host/epoch_barrier.h).
 *
 * Every operation is a set of pulls: each member takes ranges of the others' `in` and
 * copies or reduces them into its `out`.  There are four ways.
 *
 *   SLOTS   In each step a member puts the next piece of its `in` into its slot: one
 *           for all, or a cell for each member.  Data come with the first step.
 *           Columns of matrices always go so, straight from and into their rows.
 *   SPLIT   All-reduce through the slots when it is not small: of each piece, every
 *           member reduces a part in one step, and takes the other parts in the next.
 *   MEMORY  A member reads the others' memory, at the addresses that came with the
 *           first step; the last step says that the reading is over.  All-reduce has
 *           one between: every member reduces a part, and takes the others'.  What lies
 *           in a pool is read where it is mapped, without system calls; and if all
 *           outputs of an all-gather do, members write into them, which reads each
 *           input once instead of once for each member.  Whether it does turns out in
 *           the first step: what the slots have by then is left there.
 *
 *   DEVICE  An all-gather of tensors on devices: steps are the rounds of
 *           comm/device/exchange.h.  MEETING: the operation before the first such
 *           (comm/collective/intra_host/devices.h).
 *
 * Threads  one at a time.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_COLLECTIVE_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_COLLECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/checks/agreement.h"
#include "comm/collective/checks/call.h"
#include "comm/collective/intra_host/devices.h"
#include "comm/collective/intra_host/epoch_barrier.h"
#include "comm/collective/kernels/reduce.h"
#include "common/status.h"

typedef enum {
    SMP_BY_SLOTS,
    SMP_BY_SPLIT,
    SMP_BY_MEMORY,
    SMP_BY_DEVICE,
    SMP_BY_MEETING
} smp_way;

/* A node of the tree over a larger group: its term goes to `out`, at the range's `to`.
 * With one member below it, that one's tensor itself. */
typedef struct {
    int      first; /* member, and how many from it */
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

    const smp_partial *partials;  /* borrowed: what a reduction is to give instead of */
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
    bool     is_small;    /* so that only the slots come into question */
    bool     is_large;    /* so that what is copied goes past the caches */
    size_t   data_step;   /* by slots: the first with data */
    size_t   steps;       /* of the operation */
    size_t   step;        /* now */
    int      turn;        /* by memory: pulls that are done, and */
    size_t   turn_offset; /* elements of the next */
} smp_collective;

/* SMP_ERR_NO_MEMORY.  fini takes one that is all zero. */
smp_status smp_collective_init(smp_collective *op, smp_epoch_barrier *barrier);
void       smp_collective_fini(smp_collective *op);

/* Begins an operation: fills the slot of the epoch barrier's next step.
 * SMP_ERR_INVALID: no such operation, reduction, root, or count. */
smp_status smp_collective_begin(smp_collective *op, const smp_call *call,
                                uint64_t sequence);

/* By device: tells it what belongs to the present step, before that is posted.
 * SMP_ERR_SYSTEM, with op->why. */
smp_status smp_collective_prepare(smp_collective *op);

/* By device: the operation is over before its time, perhaps. */
void smp_collective_finish(smp_collective *op);

/* A part of an operation of a larger group, of which these members are on one host.
 * They are known to call the same. */
typedef struct {
    smp_operation operation; /* SMP_ALL_GATHER: each has one range for others,
                                SMP_ALL_TO_ALL: one for each other, and
                                SMP_REDUCE_SCATTER: one that it reduces */
    const void        *in;
    void              *out;
    size_t             most;     /* elements of the longest range; the same on all */
    const smp_partial *partials; /* of SMP_REDUCE_SCATTER; borrowed until it is over */
    int                npartials;
} smp_local_part;

/* Begins it, with op->pulls and op->pushes, which the caller has filled; `notice` is
 * what the slots say of the larger operation. */
void smp_collective_begin_part(smp_collective *op, const smp_call *call,
                               const smp_local_part *part, const smp_notice *notice);

/* What all said in the first step of a part, which they have posted. */
void smp_collective_see(smp_collective *op);

/* Whether all members call the same, once they have posted the first step; else says
 * who calls what. */
bool smp_collective_agreed(smp_collective *op, char *text, size_t bytes);

/* Reads what the members posted; *whole: the step is done.  SMP_ERR_SYSTEM: *member's
 * memory cannot be read; if that is this one, its device failed (op->why).
 * SMP_ERR_PEER_LOST, SMP_ERR_CLOSED: it has none any more. What *member gave up with:
 * it is not for others to use any more. */
smp_status smp_collective_collect(smp_collective *op, bool *whole, int *member);

/* Bytes of `out` into which all members write, if op->writes. */
size_t smp_collective_written(const smp_collective *op);

/* Goes to the next step and fills its slot; false: there is none. */
bool smp_collective_next(smp_collective *op);

#endif
