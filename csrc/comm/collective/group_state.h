/* The parts of a group, for its own files alone. */
#ifndef SMP_COMM_COLLECTIVE_GROUP_STATE_H
#define SMP_COMM_COLLECTIVE_GROUP_STATE_H

#include <assert.h>
#include <stdbool.h>

#include "comm/collective/inter_host/hierarchical.h"
#include "comm/collective/inter_host/wire.h"
#include "comm/collective/intra_host/collective.h"
#include "comm/collective/intra_host/epoch_barrier.h"
#include "common/fork.h"

typedef struct smp_group smp_group;

typedef enum {
    SMP_GROUP_IDLE,   /* no operation is under way */
    SMP_GROUP_SHOWS,  /* one is: members show each other their calls; on several hosts
                         until it is over */
    SMP_GROUP_AGREES, /* ... all call the same, and do it */
    SMP_GROUP_ENDED,  /* there will be none any more */
} smp_group_phase;

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
    smp_group_phase   phase;      /* smp_group_enter() alone writes it, and `broken` */
    int64_t           started_ns; /* when a member was found missing; 0: none was */
    smp_status        broken;     /* ENDED: the status of every later call, */
    char              end[SMP_WHY_BYTES]; /* ... and its text */
    _Atomic uint64_t  operations;         /* begun, for smp_group_count() */
    _Atomic uint64_t  bytes;
    _Atomic uint64_t  device_operations;
    _Atomic uint64_t  device_bytes;
    char              error[SMP_GROUP_TEXT];
    uint32_t          keys[2]; /* of the two calls named last, as in smp_refusal */
};

/* broken: SMP_OK but for SMP_GROUP_ENDED. */
static inline void
smp_group_enter(smp_group *group, smp_group_phase phase, smp_status broken)
{
    assert((phase == SMP_GROUP_ENDED) == (broken != SMP_OK));
    assert(group->phase != SMP_GROUP_ENDED || phase == SMP_GROUP_ENDED);
    assert(phase != SMP_GROUP_SHOWS || group->phase == SMP_GROUP_IDLE);
    assert(phase != SMP_GROUP_AGREES || group->phase == SMP_GROUP_SHOWS);
    group->phase = phase;
    group->broken = broken;
}

/* Whether an operation is under way. */
static inline bool
smp_group_is_active(const smp_group *group)
{
    return group->phase == SMP_GROUP_SHOWS || group->phase == SMP_GROUP_AGREES;
}

/* Whether this process is forked from the member's. */
static inline bool
smp_group_is_child(const smp_group *group)
{
    return group->barrier.generation != smp_fork_generation();
}

#endif
