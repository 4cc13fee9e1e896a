/* What a group is made of: for the files of the group alone. */
#ifndef SMP_COMM_COLLECTIVE_GROUP_STATE_H
#define SMP_COMM_COLLECTIVE_GROUP_STATE_H

#include "comm/collective/inter_host/hierarchical.h"
#include "comm/collective/inter_host/wire.h"
#include "comm/collective/intra_host/collective.h"
#include "comm/collective/intra_host/epoch_barrier.h"
#include "common/fork.h"

typedef struct smp_group smp_group;

struct smp_group {
    int               size;
    int               self;
    int              *ranks;           /* owned: [size] */
    int              *scratch;         /* owned: [size], for lists of ranks */
    smp_epoch_barrier barrier;         /* of the members on this host */
    smp_collective    op;              /* theirs */
    bool              is_hierarchical; /* there are others: */
    smp_wire          wire;
    smp_hierarchical  hier;
    char              name[64];
    int64_t           timeout_ns;
    uint64_t          sequence;   /* of the last operation */
    bool              active;     /* it is under way */
    bool              agreed;     /* all members call the same */
    int64_t           started_ns; /* when somebody was found missing; 0: nobody was */
    smp_status        broken;     /* what every later call returns, */
    char              end[SMP_WHY_BYTES]; /* ... and what it was, in words */
    _Atomic uint64_t  operations;         /* begun, for smp_group_count() */
    _Atomic uint64_t  bytes;
    _Atomic uint64_t  device_operations;
    _Atomic uint64_t  device_bytes;
    char              error[SMP_GROUP_TEXT];
    uint32_t keys[2]; /* of the two calls that it names last, as smp_refusal has them */
};

/* Whether this process is forked from the one that is the member. */
static inline bool
smp_group_is_child(const smp_group *group)
{
    return group->barrier.generation != smp_fork_generation();
}

#endif
