/* The tree of nodes: modules joined by shared parameters, under one parent each.
 *
 * Nodes are numbered breadth first from the root's node, so a parent has a smaller
 * number than its children.  One pass in either direction needs no stack.
 *
 * Ownership  The arrays lie in the scratch given to smp_tree_lay_out().
 * Threads    The caller's.
 */
#ifndef SMP_PARTITION_TREE_H
#define SMP_PARTITION_TREE_H

#include <stdint.h>

#include "common/status.h"
#include "partition/input.h"
#include "partition/scratch.h"

typedef struct {
    int32_t  nnodes;
    int32_t *node_of;       /* [nmodules] */
    int32_t *parameter_of;  /* [nparameters]: its first user, or -1 */
    int32_t *parent;        /* [nnodes]; -1 for the root's node */
    int32_t *first_child;   /* [nnodes]: children of i are children[first_child[i] ..
                               first_child[i] + nchildren[i]), in execution order */
    int32_t *nchildren;     /* [nnodes] */
    int32_t *children;      /* [nnodes] */
    int32_t *pin;           /* [nnodes]: a device, or -1 */
    uint8_t *chain;         /* [nnodes] */
    uint8_t *has_parameter; /* [nnodes]: of its own */

    /* Needed while building only. */
    int32_t *joined;      /* [nmodules]: union-find, then the set's node */
    int32_t *set_next;    /* [nmodules]: next module of the same set, or -1 */
    int32_t *set_first;   /* [nmodules]: by set, its first module */
    int32_t *edge_start;  /* [nmodules + 1]: by module, its first edge in edge_child */
    int32_t *edge_child;  /* [nedges] */
    int32_t *module_pin;  /* [nmodules]: a device, or SMP_PIN_NONE */
    int64_t *node_run;    /* [nmodules]: first execution in the subtree */
    int32_t *sort_buffer; /* [nmodules] */
    int32_t *sort_other;  /* [nmodules] */
} smp_tree;

/* Sets the arrays' places; writes nothing into them. */
void smp_tree_lay_out(smp_tree *tree, const smp_partition_input *input,
                      smp_scratch *scratch);

/* Builds the tree of an input with all numbers in range.  SMP_ERR_INVALID: a module
 * without an edge from a smaller one (conflict[0] == -1), or different pins of a shared
 * parameter's modules (conflict: two of them). */
smp_status smp_tree_build(smp_tree *tree, const smp_partition_input *input,
                          int32_t conflict[2]);

#endif
