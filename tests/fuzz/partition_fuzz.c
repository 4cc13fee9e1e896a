/* Any numbers at all: the partition refuses them or keeps its rules.
 *
 * The input's bytes are read one after the other as counts and then as elements; a
 * small value range makes valid models likely, and 32-bit elements make wild ones.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "partition/partition.h"

#define MOST 200

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} source;

static uint8_t
next_byte(source *from)
{
    return from->at < from->end ? *from->at++ : 0;
}

/* Mostly near 0 .. limit, now and then anything. */
static int32_t
next_number(source *from, int32_t limit)
{
    uint8_t first = next_byte(from);
    int32_t number = 0;

    if (first == 255) {
        for (int i = 0; i < 4; i++) {
            number = (int32_t)((uint32_t)number << 8 | next_byte(from));
        }
        return number;
    }
    return limit > 0 ? first % limit : first;
}

static int32_t *
numbers(source *from, int32_t count, int32_t limit)
{
    int32_t *out = malloc((size_t)count * sizeof(*out) + 1);

    for (int32_t i = 0; i < count; i++) {
        out[i] = next_number(from, limit);
    }
    return out;
}

static int64_t *
wide_numbers(source *from, int32_t count)
{
    int64_t *out = malloc((size_t)count * sizeof(*out) + 1);

    for (int32_t i = 0; i < count; i++) {
        int64_t number = next_number(from, 0);

        out[i] = number * (INT64_C(1) << (next_byte(from) % 32));
    }
    return out;
}

/* Stops the fuzzer when a decision breaks a rule. */
static void
check(const smp_partition_input *input, const smp_partition_output *output)
{
    double sum = 0;

    for (int32_t m = 0; m < input->nmodules; m++) {
        if (output->device[m] < 0 || output->device[m] >= input->devices) {
            abort();
        }
        if (input->pin[m] >= 0 && output->device[m] != input->pin[m]) {
            abort();
        }
    }
    for (int32_t u = 0; u < input->nuses; u++) {
        for (int32_t v = 0; v < u; v++) {
            if (input->use_parameter[u] == input->use_parameter[v] &&
                output->device[input->use_module[u]] !=
                    output->device[input->use_module[v]]) {
                abort();
            }
        }
    }
    for (int32_t d = 0; d < input->devices; d++) {
        sum += output->cost[d];
    }
    if (!(sum >= 0 && sum < 1.000001)) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    source   from = {bytes, bytes + size};
    int32_t  modules = 1 + next_byte(&from) % MOST;
    int32_t  parameters = next_byte(&from) % MOST;
    int32_t  uses = next_byte(&from) % MOST;
    int32_t  extra_edges = next_byte(&from) % 8;
    int32_t  devices = next_byte(&from) % 32;
    uint8_t  known = next_byte(&from);
    int32_t  edges = modules - 1 + extra_edges;
    int32_t *edge_parent = numbers(&from, edges, modules);
    int32_t *edge_child = numbers(&from, edges, modules);
    int32_t *use_module = numbers(&from, uses, modules);
    int32_t *use_parameter = numbers(&from, uses, parameters);
    int32_t *pin = numbers(&from, modules, devices + 8);
    int64_t *parameter_bytes = wide_numbers(&from, parameters);
    int64_t *first_run = wide_numbers(&from, modules);
    int64_t *activation_bytes = wide_numbers(&from, modules);
    double  *seconds = malloc((size_t)modules * sizeof(*seconds));
    uint8_t *chain = malloc((size_t)modules);

    for (int32_t m = 0; m < modules; m++) {
        if (m > 0 && (known & 1) == 0) { /* a real tree */
            edge_parent[m - 1] = (int32_t)((uint32_t)edge_parent[m - 1] % (uint32_t)m);
            edge_child[m - 1] = m;
        }
        pin[m] = pin[m] >= devices && pin[m] < devices + 8 ? SMP_PIN_INHERIT : pin[m];
        seconds[m] = next_byte(&from) / 8.0;
        chain[m] = next_byte(&from) & 1;
    }
    smp_partition_input input = {
        .devices = devices,
        .memory_weight = next_byte(&from) / 250.0,
        .default_device = (known & 2) == 0 ? -1 : next_number(&from, devices),
        .nmodules = modules,
        .first_run = (known & 4) == 0 ? first_run : NULL,
        .activation_bytes = (known & 8) == 0 ? activation_bytes : NULL,
        .seconds = (known & 16) == 0 ? seconds : NULL,
        .chain = chain,
        .pin = pin,
        .nedges = edges,
        .edge_parent = edge_parent,
        .edge_child = edge_child,
        .nparameters = parameters,
        .parameter_bytes = parameter_bytes,
        .nuses = uses,
        .use_module = use_module,
        .use_parameter = use_parameter,
    };
    size_t               need = smp_partition_scratch_bytes(&input);
    void                *scratch = malloc(need + 1);
    smp_partition_output output = {
        .device = malloc((size_t)modules * sizeof(int32_t)),
        .own_cost = malloc((size_t)modules * sizeof(double)),
        .cost = malloc(((size_t)devices + 1) * sizeof(double)),
    };
    int32_t    conflict[2];
    smp_status status = smp_partition_decide(&input, scratch, need, &output, conflict);

    if (status == SMP_OK) {
        check(&input, &output);
    } else if (status != SMP_ERR_INVALID) {
        abort();
    }
    free(output.cost);
    free(output.own_cost);
    free(output.device);
    free(scratch);
    free(chain);
    free(seconds);
    free(activation_bytes);
    free(first_run);
    free(parameter_bytes);
    free(pin);
    free(use_parameter);
    free(use_module);
    free(edge_child);
    free(edge_parent);
    return 0;
}
