/* Operations, and one member's call of one: its check by itself, its ranges, and its
 * notice for the other members. */
#ifndef SMP_COMM_COLLECTIVE_CHECKS_CALL_H
#define SMP_COMM_COLLECTIVE_CHECKS_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/kernels/dtype.h"
#include "comm/collective/kernels/kind.h"
#include "comm/device/exchange.h"
#include "comm/memory/control_block.h"

/* n is the size of the group, m a member; counts are of elements. */
typedef enum {
    SMP_BARRIER,        /* nothing but waiting for all */
    SMP_ALL_REDUCE,     /* in: count.  out: count */
    SMP_REDUCE,         /* in: count.  out: count, at the root */
    SMP_REDUCE_SCATTER, /* in: n * count, out: count; or in: counts[0 .. n), out:
                           counts[m] */
    SMP_ALL_GATHER,     /* in: count, out: n * count; or in: counts[m], out: counts[0 ..
                           n) */
    SMP_BROADCAST,  /* in: count, at the root.  out: count; at the root may be NULL */
    SMP_GATHER,     /* in: count.  out: n * count, at the root */
    SMP_SCATTER,    /* in: n * count, at the root.  out: count */
    SMP_ALL_TO_ALL, /* in: n * count, out: n * count; or in: counts[0 .. n), out:
                       out_counts[0 .. n) */
    SMP_OPERATIONS
} smp_operation;

/* A call's hints: for its errors, and the length of its waits. */
typedef struct {
    uint8_t sparse; /* SMP_ALL_GATHER: its number, from 1, within an all-reduce of
                       sparse tensors, for errors; 0: of none */
    uint32_t key; /* without a root: the caller's key of this operation, or 0; the same
                     on all. Errors tell different ones (SMP_WITH_KEY). */
    uint64_t assumed; /* SMP_ALL_GATHER: a hash of all members' sizes as assumed by this
                         member; 0: it knows them. Different hashes are SMP_ERR_SIZES,
                         whatever else but the key differs. */
    int64_t timeout_ns; /* 0: the group's; < 0: no limit */
} smp_call_hints;

/* One member's call.  Fields without a use in the operation are ignored.  out may be
 * in, or this member's part of in (or in this member's part of out); not for
 * SMP_ALL_TO_ALL, and not with rows.  Either all members give rows, or none; with only
 * in_rows or only out_rows the other tensor is in one piece. */
typedef struct {
    smp_operation operation;
    smp_dtype     dtype;
    smp_kind      kind; /* the caller's meaning of the elements; the same on all */
    smp_reduction reduction;
    double        factor; /* SMP_PREMUL_SUM: of this member's `in` */
    int           root;   /* a member, not a rank */
    size_t        count;  /* where counts is NULL */
    const size_t *counts; /* uneven: one for each member; borrowed like the buffers */
    const size_t *out_counts; /* SMP_ALL_TO_ALL with counts */
    size_t in_rows;  /* SMP_REDUCE_SCATTER, SMP_ALL_TO_ALL: `in` is a matrix of so many
                        rows, and a member's part is some of its columns; 0: it is in one
                        piece */
    size_t out_rows; /* SMP_ALL_GATHER, SMP_ALL_TO_ALL: likewise `out`, with a part from
                        each member */
    const void *in;
    void       *out;

    /* SMP_ALL_GATHER of tensors on devices: in the place of `in` and `out`.  After
     * smp_group_exchange() has become one. */
    const smp_device_gather
        *gather; /* borrowed like the buffers; NULL: in host memory */

    /* Before the first such operation: moves nothing, but has all members show each
     * other memory of their devices. */
    const smp_device_offer *offer; /* the same */
    smp_call_hints          hints;
} smp_call;

/* "all-reduce"; static storage. */
const char *smp_operation_name(smp_operation operation);

/* A range of elements, and where it goes. */
typedef struct {
    size_t from; /* in the source's `in` */
    size_t to;   /* in the receiver's `out` */
    size_t count;
} smp_range;

/* Its part after `skip` elements, at most `most` long. */
smp_range smp_range_window(smp_range range, size_t skip, size_t most);

bool smp_operation_reduces(smp_operation operation);
bool smp_operation_has_root(smp_operation operation);

/* Whether it has rows. */
bool smp_call_has_columns(const smp_call *call);

/* Copies a call of a group of n, without the fields unused by its operation; false: no
 * such operation, reduction, root or count, or rows do not divide the counts. */
bool smp_call_copy(const smp_call *call, int n, smp_call *out);

/* Bytes of the tensor given by member `self`, or of its result if it gives none. */
uint64_t smp_call_bytes(const smp_call *call, int n, int self);

/* The number of its lists of split sizes. */
size_t smp_call_lists(const smp_call *call);

/* The range from `source` to `receiver`, as known to member `self`: for SMP_ALL_TO_ALL
 * with counts, only where one of them is `self`, and each knows but its own place. */
smp_range smp_call_range(const smp_call *call, int self, int source, int receiver);

/* The most elements from one member to another, the same on all; not for SMP_ALL_TO_ALL
 * with counts. */
size_t smp_call_longest(const smp_call *call, int n);

/* Fills the notice, all but its step, and the lists: counts[lists * n]. */
void smp_call_say(const smp_call *call, int n, uint64_t sequence, smp_notice *notice,
                  uint64_t *counts);

/* The same in another step, with its own step and addresses. */
void smp_call_say_again(const smp_notice *said, smp_notice *notice);

#endif
