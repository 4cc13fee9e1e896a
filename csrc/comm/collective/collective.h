/* One operation of a group, as steps of its members (comm/collective/lockstep.h).
 *
 * Every operation is a set of pulls: each member takes ranges of the others' `in` and
 * copies or reduces them into its `out`.  There are three ways.
 *
 *   SHELVES  In each step a member puts the next piece of its `in` into its slot: one
 *           for all, or a cell for each member.  Data come with the first step.
 *   SPLIT   All-reduce through the shelves when it is not small: of each piece, every
 *           member reduces a part in one step, and takes the other parts in the next.
 *   MEMORY  A member reads the others' memory, at the addresses that came with the
 *           first step; the last step says that the reading is over.  All-reduce has
 *           one between: every member reduces a part, and takes the others'.
 *
 * Threads  one at a time.
 */
#ifndef SMP_COMM_COLLECTIVE_COLLECTIVE_H
#define SMP_COMM_COLLECTIVE_COLLECTIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/group.h"
#include "comm/collective/lockstep.h"
#include "comm/collective/reduce.h"
#include "common/status.h"

typedef enum { SMP_BY_SHELVES, SMP_BY_SPLIT, SMP_BY_MEMORY } smp_way;

/* A range of elements, and where it goes. */
typedef struct {
    size_t from; /* in the source's `in` */
    size_t to;   /* in the receiver's `out` */
    size_t count;
} smp_range;

typedef struct {
    smp_lockstep      *lockstep; /* borrowed */
    const smp_kernels *kernels;
    smp_range         *pulls;   /* owned, as all below: [n]; from each member */
    smp_range         *pushes;  /* [n]: to each member */
    uint64_t          *ins;     /* [n]: addresses in the members' memory */
    uint64_t          *outs;    /* [n] */
    double            *factors; /* [n] */
    const void       **terms;   /* [n] */
    uint8_t           *scratch; /* for smp_reduce() */
    uint8_t           *fetched; /* pieces of the members' memory */

    smp_call call;    /* the operation under way, like all below */
    size_t   element; /* bytes */
    uint64_t first;   /* step of the lockstep; its own slot has the notice */
    smp_way  way;
    bool     shared;      /* by shelves: all members get the same from one */
    size_t   header;      /* bytes of the counts in a slot */
    size_t   cell;        /* bytes for one member in a slot */
    size_t   data_step;   /* by shelves: the first with data */
    size_t   steps;       /* of the operation */
    size_t   step;        /* now */
    int      turn;        /* by memory: pulls that are done, and */
    size_t   turn_offset; /* elements of the next */
} smp_collective;

/* SMP_ERR_NO_MEMORY.  fini takes one that is all zero. */
smp_status smp_collective_init(smp_collective *op, smp_lockstep *lockstep);
void       smp_collective_fini(smp_collective *op);

/* Begins an operation: fills the slot of the lockstep's next step.  SMP_ERR_INVALID: no
 * such operation, reduction, root, or count. */
smp_status smp_collective_begin(smp_collective *op, const smp_call *call,
                                uint64_t sequence);

/* Whether all members call the same, once they have posted the first step; else says
 * who calls what. */
bool smp_collective_agreed(smp_collective *op, char *text, size_t bytes);

/* Reads what the members posted; *whole: the step is done.  SMP_ERR_SYSTEM: *member's
 * memory cannot be read. */
smp_status smp_collective_collect(smp_collective *op, bool *whole, int *member);

/* Goes to the next step and fills its slot; false: there is none. */
bool smp_collective_next(smp_collective *op);

/* "all-reduce (sum) of 8 float32", from a notice; cut off at `bytes`. */
void smp_notice_describe(const smp_notice *notice, char *out, size_t bytes);

#endif
