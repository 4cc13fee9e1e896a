/* C(m) = alpha w(m) + (1 - alpha) psi(m), each module counted once.
 *
 * w is bytes of parameters and activations, psi seconds, or 1 for each module where
 * none were measured.  Each is divided by its own total first, so alpha weighs two
 * numbers without a unit.  A module's children are not in its w and psi: the tree
 * adds them up.  [paper C.3]
 */
#include "partition/cost.h"

#include <stddef.h>

/* Totals of both kinds over the model; 0 where there is nothing to share. */
typedef struct {
    double bytes;
    double seconds;
} totals;

static totals
add_up(const smp_partition_input *input, const int32_t *parameter_of)
{
    totals all = {0, 0};

    for (int32_t p = 0; p < input->nparameters; p++) {
        if (parameter_of[p] >= 0) {
            all.bytes += (double)input->parameter_bytes[p];
        }
    }
    for (int32_t m = 0; m < input->nmodules; m++) {
        if (input->activation_bytes != NULL) {
            all.bytes += (double)input->activation_bytes[m];
        }
        if (input->seconds != NULL) {
            all.seconds += input->seconds[m];
        }
    }
    return all;
}

/* `share` of the units, rounded. */
static int64_t
to_units(double share)
{
    return (int64_t)(share * (double)SMP_COST_UNITS + 0.5);
}

void
smp_cost_modules(const smp_partition_input *input, const int32_t *parameter_of,
                 int64_t *units)
{
    totals all = add_up(input, parameter_of);
    double memory = input->memory_weight;
    double compute = 1.0 - memory;

    for (int32_t m = 0; m < input->nmodules; m++) {
        double share = all.seconds > 0 ? input->seconds[m] / all.seconds
                                       : 1.0 / (double)input->nmodules;

        units[m] = to_units(compute * share);
        if (input->activation_bytes != NULL && all.bytes > 0) {
            share = (double)input->activation_bytes[m] / all.bytes;
            units[m] += to_units(memory * share);
        }
    }
    for (int32_t p = 0; p < input->nparameters; p++) {
        if (parameter_of[p] >= 0 && all.bytes > 0) {
            double share = (double)input->parameter_bytes[p] / all.bytes;

            units[parameter_of[p]] += to_units(memory * share);
        }
    }
}
