/* Partition: which device of the pipeline each module of a model sits on.
 *
 * A model comes in as flat arrays, a decision goes out.  Modules joined by a shared
 * parameter form one node; the nodes form a tree; the devices of a node are divided
 * among its children in proportion to their cost, children that run one after the
 * other staying together.  [paper 4.5, C; docs/partition.md]
 *
 * Ownership  Every array is the caller's: inputs are read, outputs filled.  All
 *            memory the decision needs is handed in as `scratch`.
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

/* Seats times cost must fit into 63 bits. */
#define SMP_PARTITION_MAX_DEVICES (1 << 20)

/* Values of smp_partition_input.pin that are no device. */
#define SMP_PIN_INHERIT (-1) /* whatever the first parent has */
#define SMP_PIN_NONE (-2)    /* not pinned, although a parent is */

/* What an smp_partition_input.first_run says of a module that tracing never saw. */
#define SMP_NEVER_RUN (-1)

/* Modules are numbered in definition order: 0 is the root, and the first edge that
 * leads to a module comes from one with a smaller number.  A NULL array means: not
 * known (first_run, activation_bytes, seconds) or nowhere (chain, pin). */
typedef struct {
    int32_t devices;        /* pipeline parallel degree */
    double  memory_weight;  /* the paper's alpha, in [0, 1] */
    int32_t default_device; /* of what is not pinned; -1: decide it */

    int32_t        nmodules;
    const int64_t *first_run;        /* position of its first execution */
    const int64_t *activation_bytes; /* that it produced itself */
    const double  *seconds;          /* of its forward, without its children's */
    const uint8_t *chain;            /* 1: only hands one child's output to the next */
    const int32_t *pin;              /* device of the subtree, or SMP_PIN_... */

    int32_t        nedges; /* module hierarchy, in definition order */
    const int32_t *edge_parent;
    const int32_t *edge_child;

    int32_t        nparameters;
    const int64_t *parameter_bytes;

    int32_t        nuses; /* who owns, or uses in an operator, which parameter */
    const int32_t *use_module;
    const int32_t *use_parameter;
} smp_partition_input;

typedef struct {
    int32_t *device;   /* [nmodules] */
    int32_t *node;     /* [nmodules] or NULL: number of the node it belongs to */
    double  *own_cost; /* [nmodules] or NULL: its part of a model that costs 1; a
                          shared parameter is charged to the first of its users */
    double *cost;      /* [devices] or NULL: sum of own_cost of what sits there */
} smp_partition_output;

/* Bytes of scratch, 8-byte aligned, that smp_partition_decide() needs for an input
 * with these counts; reads no array. */
size_t smp_partition_scratch_bytes(const smp_partition_input *input);

/* Decides.  SMP_ERR_NO_MEMORY: scratch is too small.  SMP_ERR_INVALID: an index or
 * number out of range, and conflict[0] == -1; or two modules that share a parameter
 * are pinned to different devices, and they are conflict[0] and conflict[1]. */
smp_status smp_partition_decide(const smp_partition_input *input, void *scratch,
                                size_t scratch_bytes, smp_partition_output *output,
                                int32_t conflict[2]);

/* A number for the ranks to compare: of the devices of all modules and of `names`,
 * any bytes that tell the modules apart (their paths). */
uint64_t smp_partition_hash(const int32_t *device, int32_t nmodules, const void *names,
                            size_t names_bytes);

#endif
