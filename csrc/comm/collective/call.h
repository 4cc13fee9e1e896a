/* One member's call of an operation: whether it makes sense by itself, what it moves,
 * and what the other members are told of it. */
#ifndef SMP_COMM_COLLECTIVE_CALL_H
#define SMP_COMM_COLLECTIVE_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/group.h"
#include "comm/shm/shelf.h"

/* A range of elements, and where it goes. */
typedef struct {
    size_t from; /* in the source's `in` */
    size_t to;   /* in the receiver's `out` */
    size_t count;
} smp_range;

/* What of it comes after `skip` elements, at most `most`. */
smp_range smp_range_window(smp_range range, size_t skip, size_t most);

bool smp_operation_reduces(smp_operation operation);
bool smp_operation_has_root(smp_operation operation);

/* Copies a call of a group of n, without what its operation does not use; false: there
 * is no such operation, reduction, root or count. */
bool smp_call_copy(const smp_call *call, int n, smp_call *out);

/* Bytes of the tensor that member `self` gives, or that it gets where it gives none. */
uint64_t smp_call_bytes(const smp_call *call, int n, int self);

/* How many lists of split sizes it has. */
size_t smp_call_lists(const smp_call *call);

/* What goes from `source` to `receiver`, as member `self` knows it: for SMP_ALL_TO_ALL
 * with counts, only where one of them is `self`, and each knows but its own place. */
smp_range smp_call_range(const smp_call *call, int self, int source, int receiver);

/* The most elements that go from one member to another, the same on all; not for
 * SMP_ALL_TO_ALL with counts. */
size_t smp_call_longest(const smp_call *call, int n);

/* Fills the notice, all but its step, and the lists: counts[lists * n]. */
void smp_call_say(const smp_call *call, int n, uint64_t sequence, smp_notice *notice,
                  uint64_t *counts);

#endif
