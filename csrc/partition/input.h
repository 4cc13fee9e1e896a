/* A model as flat arrays. */
#ifndef SMP_PARTITION_INPUT_H
#define SMP_PARTITION_INPUT_H

#include <stdint.h>

/* Seats times cost must fit into 63 bits. */
#define SMP_PARTITION_MAX_DEVICES (1 << 20)

/* Values of smp_partition_input.pin beside a device. */
#define SMP_PIN_INHERIT (-1) /* the first parent's pin */
#define SMP_PIN_NONE (-2)    /* not pinned, although a parent is */

/* The smp_partition_input.first_run of a module never seen by tracing. */
#define SMP_NEVER_RUN (-1)

/* Modules are numbered in definition order: 0 is the root, and the first edge to a
 * module comes from one with a smaller number.  A NULL array means: not known
 * (first_run, activation_bytes, seconds) or nowhere (chain, pin). */
typedef struct {
    int32_t devices;        /* pipeline parallel degree */
    double  memory_weight;  /* the paper's alpha, in [0, 1] */
    int32_t default_device; /* of modules without a pin; -1: decide it */

    int32_t        nmodules;
    const int64_t *first_run;        /* position of its first execution */
    const int64_t *activation_bytes; /* produced by the module itself */
    const double  *seconds;          /* of its forward, without its children's */
    const uint8_t *chain;            /* 1: only hands one child's output to the next */
    const int32_t *pin;              /* device of the subtree, or SMP_PIN_... */

    int32_t        nedges; /* module hierarchy, in definition order */
    const int32_t *edge_parent;
    const int32_t *edge_child;

    int32_t        nparameters;
    const int64_t *parameter_bytes;

    int32_t nuses; /* pairs of a module and a parameter that it owns or uses in an
                      operator */
    const int32_t *use_module;
    const int32_t *use_parameter;
} smp_partition_input;

#endif
