/* The cost of each module, in integer units.
 *
 * Ownership  The array is the caller's.
 * Threads    Any.
 */
#ifndef SMP_PARTITION_COST_H
#define SMP_PARTITION_COST_H

#include <stdint.h>

#include "partition/input.h"

/* Cost of a whole model, up to rounding: fine enough for a module of one part in
 * 10^12, and times SMP_PARTITION_MAX_DEVICES still within 63 bits. */
#define SMP_COST_UNITS (INT64_C(1) << 40)

/* Fills units[nmodules].  parameter_of[p] is the module charged for parameter p, or -1
 * for an unused parameter, which costs nothing. */
void smp_cost_modules(const smp_partition_input *input, const int32_t *parameter_of,
                      int64_t *units);

#endif
