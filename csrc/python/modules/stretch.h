/* A stretch: one owner's calls in a chain of several owners (passing.h), as the chain's
 * caller has them.
 */
#ifndef SMP_PYTHON_MODULES_STRETCH_H
#define SMP_PYTHON_MODULES_STRETCH_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int      owner; /* pp_rank */
    uint64_t call;
    uint64_t number;   /* of its first call */
    size_t   first;    /* its first call's number in the chain */
    size_t   noutputs; /* of all of its calls, in the graph */
} smp_stretch;

#endif
