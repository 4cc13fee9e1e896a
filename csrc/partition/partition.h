/* Partition: each module's device in the pipeline.
 *
 * A model comes in as flat arrays, a decision goes out.  Modules joined by a shared
 * parameter form one node; the nodes form a tree.  The devices of a node are divided
 * among its children in proportion to their cost.  Children that run one after the
 * other stay together.  [paper 4.5, C; docs/partition.md]
 *
 * Ownership  Every array is the caller's: inputs are read, outputs filled.  The
 *            decision's memory is handed in as `scratch`.
 * Threads    Any; no state outside the arguments.
 * Errors     Only the statuses named below.  Outputs are written only on SMP_OK.
 * Equality   The same input gives the same decision everywhere: costs are rounded to
 *            integers first, and the first index wins every tie.
 */
#ifndef SMP_PARTITION_PARTITION_H
#define SMP_PARTITION_PARTITION_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "partition/input.h"

typedef struct {
    int32_t *device;   /* [nmodules] */
    int32_t *node;     /* [nmodules] or NULL: number of the node it belongs to */
    double  *own_cost; /* [nmodules] or NULL: its part of a model's cost of 1; a shared
                          parameter is charged to the first of its users */
    double *cost;      /* [devices] or NULL: sum of own_cost of its modules */
} smp_partition_output;

/* Bytes of scratch, 8-byte aligned, for smp_partition_decide() of an input with these
 * counts; reads no array. */
size_t smp_partition_scratch_bytes(const smp_partition_input *input);

/* Decides.  SMP_ERR_NO_MEMORY: scratch is too small.  SMP_ERR_INVALID: an index or
 * number out of range, and conflict[0] == -1; or modules conflict[0] and conflict[1]
 * share a parameter and are pinned to different devices. */
smp_status smp_partition_decide(const smp_partition_input *input, void *scratch,
                                size_t scratch_bytes, smp_partition_output *output,
                                int32_t conflict[2]);

/* A number for the ranks to compare: of the devices of all modules and of `names`, any
 * bytes unique to the modules (their paths). */
uint64_t smp_partition_hash(const int32_t *device, int32_t nmodules, const void *names,
                            size_t names_bytes);

#endif
