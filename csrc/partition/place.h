/* Placing the nodes of a tree on devices.
 *
 * Ownership  The arrays lie in the scratch given to smp_place_lay_out().
 * Threads    The caller's.
 */
#ifndef SMP_PARTITION_PLACE_H
#define SMP_PARTITION_PLACE_H

#include <stdint.h>

#include "partition/input.h"
#include "partition/scratch.h"
#include "partition/tree.h"

/* The way of a node to its device. */
typedef enum {
    SMP_NODE_SHARED_OUT, /* first of its share of the parent's devices */
    SMP_NODE_PINNED,     /* the user said so, or sits where its first child is pinned */
    SMP_NODE_RIDES,      /* holds no parameter: where its host runs */
} smp_node_kind;

/* A row of children with devices to divide. */
typedef struct {
    int32_t first; /* in smp_place.row */
    int32_t count;
    int32_t device; /* first of its devices */
    int32_t ndevices;
    uint8_t front; /* the earlier load of `device` counts */
} smp_place_job;

/* One way to divide a row: into segments, each with a number of devices. */
typedef struct {
    int32_t  segments;
    int32_t  spare;    /* devices of use to no segment */
    int32_t *cut;      /* [devices + 1]: segment s is row[cut[s]] .. row[cut[s + 1]] */
    int32_t *seats;    /* [devices]: devices of each segment */
    int64_t *cost;     /* [devices]: units, with the earlier load of its first device */
    int32_t *capacity; /* [devices]: most devices of use to it */
} smp_division;

typedef struct {
    int32_t *device; /* [nnodes]: the result */
    int64_t *own;    /* [nnodes]: units of the node itself and of its riders */
    int64_t *load;   /* [devices]: units known to end up there */

    uint8_t *kind;       /* [nnodes]: smp_node_kind */
    uint8_t *parameters; /* [nnodes]: there are some in the subtree */
    uint8_t *pins;       /* [nnodes]: there are some in the subtree */
    int32_t *host;       /* [nnodes]: of a riding node */
    int32_t *capacity;   /* [nnodes]: most devices of use to the subtree, 0: none */
    int64_t *free;       /* [nnodes]: units of the subtree without a pin */
    int32_t *first;      /* [nnodes]: first device of its set */
    int32_t *ndevices;   /* [nnodes]: size of its set */

    int32_t       *row;          /* [nnodes]: children with a share of the devices */
    int32_t       *row_capacity; /* [nnodes]: theirs */
    int64_t       *prefix;       /* [nnodes + 1]: sums of free[] along the row */
    smp_place_job *jobs;         /* [nnodes]: stack */
    int64_t       *preload;      /* [devices]: of the segments */
    smp_division   shared;       /* by highest averages */
    smp_division   packed;       /* device after device */
} smp_place;

/* Sets the arrays' places; writes nothing into them. */
void smp_place_lay_out(smp_place *place, const smp_partition_input *input,
                       smp_scratch *scratch);

/* Fills place->device from the tree and the costs of the modules. */
void smp_place_nodes(smp_place *place, const smp_partition_input *input,
                     const smp_tree *tree, const int64_t *module_units);

#endif
