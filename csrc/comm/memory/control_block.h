/* The members' shared state of their group's work: one control block each.
 *
 * A control block lies in its member's segment; only the member writes it (but for the
 * doorbell), and all other members read it.  Members go in steps
 * (comm/collective/intra_host/epoch_barrier.h); step s uses slot s % 2.
 *
 * Threads  take, give_back: any.  A taken control block is its group's.
 */
#ifndef SMP_COMM_MEMORY_CONTROL_BLOCK_H
#define SMP_COMM_MEMORY_CONTROL_BLOCK_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/doorbell.h"

/* The most groups of a rank at once. */
#define SMP_CONTROL_BLOCKS 256

/* The most members of a group. */
#define SMP_GROUP_MEMBERS 1024

/* Bytes of a member's text at its giving up, and of the longest text of its group about
 * it.
 */
#define SMP_WHY_BYTES 704
#define SMP_GROUP_TEXT 1024

#define SMP_SLOT_BYTES ((size_t)64 << 10)

/* A member's notice of one step: first its call (the same for all steps of an
 * operation), then, last, the number of the step. */
typedef struct {
    _Atomic uint64_t step; /* everything else here and in the slot's data is written */
    uint64_t         sequence; /* of the operation in the group; from 1 */
    uint8_t          operation;
    uint8_t          dtype;
    uint8_t          reduction;
    uint8_t          uneven; /* the slot's data begin with the counts */
    union {
        int32_t  root;
        uint32_t key; /* of an operation without a root, as in smp_call_hints */
    };
    uint64_t count;
    union {
        double   factor;
        uint64_t assumed; /* of an all-gather, as in smp_call_hints */
    };
    uint64_t in; /* addresses in the member's memory */
    uint64_t out;
    uint32_t kind;      /* smp_kind: the caller's meaning of the elements */
    uint8_t  on_device; /* SMP_NOTICE_*, or 0 */
    uint8_t  sparse;    /* as in smp_call_hints */
    uint8_t  columns;   /* 1: of matrices */
} smp_notice;

enum { SMP_NOTICE_GATHERS = 1, SMP_NOTICE_MEETS };

typedef struct {
    _Alignas(64) smp_notice notice;
    _Alignas(64) uint8_t data[SMP_SLOT_BYTES];
} smp_slot;

/* A control block's owner: none; a group; none again, with the block left to the
 * readers of a failed meeting as long as another one can be taken. */
enum { SMP_CONTROL_FREE, SMP_CONTROL_TAKEN, SMP_CONTROL_FORGOTTEN };

typedef struct {
    _Alignas(64) _Atomic uint32_t taken;
    int64_t          forgotten_ns; /* when; the owner's alone */
    _Atomic uint64_t id;    /* of the group; 0: no member looks at this control block */
    _Atomic uint64_t nonce; /* of this member's meeting */
    uint64_t         probe; /* address of the nonce in its own memory */
    uint64_t         arena; /* address of its segment's arena there */
    uint64_t         digest;            /* of the list of members */
    _Alignas(64) smp_doorbell doorbell; /* written by all members */
    _Alignas(64) _Atomic uint64_t read; /* the last step with its reading over */
    _Atomic uint64_t waits;             /* the step of the member's sleep; 0: awake */
    _Atomic uint32_t failed;            /* smp_status: the member has given up */
    _Atomic uint32_t holds; /* 1: it may have the other members' device memory open */
    char             name[64]; /* of the group, for errors */
    char             why[SMP_WHY_BYTES];
    _Alignas(64) smp_slot slots[2];
} smp_control_block;

_Static_assert(sizeof(smp_notice) <= 64, "a notice is one cache line");

/* A control block of `controls`[SMP_CONTROL_BLOCKS], blank, not yet with an id; NULL:
 * all are taken. */
smp_control_block *smp_control_block_take(smp_control_block *controls);

/* Others find it no more.  give_back: no member looks at it.  forget: others may still
 * look at the outcome of its meeting, without an operation begun; the last one to be
 * used again.  leave: never used again, because a member may still read its data. */
void smp_control_block_give_back(smp_control_block *control);
void smp_control_block_forget(smp_control_block *control);
void smp_control_block_leave(smp_control_block *control);

/* The control block with this id, or NULL. */
smp_control_block *smp_control_block_find(smp_control_block *controls, uint64_t id);

#endif
