/* Whether all members of a group call the same.
 *
 * Everyone compares in the same order, so all come to the same words.
 */
#ifndef SMP_COMM_COLLECTIVE_CHECKS_AGREEMENT_H
#define SMP_COMM_COLLECTIVE_CHECKS_AGREEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/control_block.h"

/* What one member says; all borrowed. */
typedef struct {
    int               name; /* of its rank: smp_comm_name() */
    const smp_notice *notice;
    const uint64_t   *counts; /* [uneven * n]: its lists of split sizes */
} smp_said;

/* In what it says where members assume other sizes, and only there. */
#define SMP_SIZES_UNLIKE "assume other sizes"

/* In what it says of a call, before eight hexadecimal digits, if keys differ and this
 * one has one. */
#define SMP_WITH_KEY " with key "

/* Says who calls what if they do not agree.  *most: the longest range that one sends to
 * another, of an all-to-all with split sizes. */
bool smp_agreement(const smp_said *said, int n, size_t *most, char *text, size_t bytes);

/* "all-reduce 3 (sum) of 8 float32", "sparse all-reduce 3 (sum)", from a notice; cut
 * off at `bytes`. */
void smp_notice_describe(const smp_notice *notice, char *out, size_t bytes);

#endif
