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
#include "common/status.h"

/* One member's signature; all borrowed. */
typedef struct {
    int               name; /* of its rank: smp_comm_name() */
    const smp_notice *notice;
    const uint64_t   *counts; /* [uneven * n]: its lists of split sizes */
} smp_said;

/* The reason of a disagreement. */
typedef struct {
    smp_status status; /* SMP_ERR_SIZES: only their assumed sizes differ; else
                          SMP_ERR_MISMATCH */
    uint32_t
         keys[2];   /* of the two calls in `text`, where these differ; 0: it has none */
    char text[320]; /* the members' calls; a different key as SMP_WITH_KEY and eight
                       hexadecimal digits */
} smp_refusal;

#define SMP_WITH_KEY " with key "

/* Fills the refusal if they do not agree.  *most: the longest range from one member to
 * another, of an all-to-all with split sizes. */
bool smp_agreement(const smp_said *said, int n, size_t *most, smp_refusal *refusal);

/* "all-reduce 3 (sum) of 8 float32", "sparse all-reduce 3 (sum)", from a notice; cut
 * off at `bytes`. */
void smp_notice_describe(const smp_notice *notice, char *out, size_t bytes);

#endif
