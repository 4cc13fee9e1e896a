/* The decision from front to back: check, build the tree, cost, place, add up. */
#include "partition/partition.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "partition/cost.h"
#include "partition/place.h"
#include "partition/scratch.h"
#include "partition/tree.h"

/* The contents of the scratch. */
typedef struct {
    smp_tree  tree;
    smp_place place;
    int64_t  *units; /* [nmodules] */
    int64_t  *sum;   /* [devices] */
} work;

static void
lay_out(work *w, const smp_partition_input *input, smp_scratch *scratch)
{
    smp_tree_lay_out(&w->tree, input, scratch);
    smp_place_lay_out(&w->place, input, scratch);
    w->units = smp_scratch_take(scratch, (size_t)input->nmodules, sizeof(int64_t));
    w->sum = smp_scratch_take(scratch, (size_t)input->devices, sizeof(int64_t));
}

static bool
counts_are_valid(const smp_partition_input *input)
{
    return input->devices >= 1 && input->devices <= SMP_PARTITION_MAX_DEVICES &&
           input->memory_weight >= 0 && input->memory_weight <= 1 &&
           input->default_device >= -1 && input->default_device < input->devices &&
           input->nmodules >= 1 && input->nedges >= 0 && input->nparameters >= 0 &&
           input->nuses >= 0;
}

static bool
indices_are_valid(const int32_t *index, int32_t count, int32_t limit)
{
    for (int32_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= limit) {
            return false;
        }
    }
    return true;
}

static bool
pins_are_valid(const smp_partition_input *input)
{
    for (int32_t m = 0; input->pin != NULL && m < input->nmodules; m++) {
        if (input->pin[m] < SMP_PIN_NONE || input->pin[m] >= input->devices) {
            return false;
        }
    }
    return true;
}

static bool
costs_are_valid(const smp_partition_input *input)
{
    for (int32_t m = 0; m < input->nmodules; m++) {
        if (input->activation_bytes != NULL && input->activation_bytes[m] < 0) {
            return false;
        }
        if (input->seconds != NULL &&
            !(input->seconds[m] >= 0 && isfinite(input->seconds[m]))) {
            return false;
        }
    }
    for (int32_t p = 0; p < input->nparameters; p++) {
        if (input->parameter_bytes[p] < 0) {
            return false;
        }
    }
    return true;
}

static bool
is_valid(const smp_partition_input *input)
{
    return counts_are_valid(input) &&
           indices_are_valid(input->edge_parent, input->nedges, input->nmodules) &&
           indices_are_valid(input->edge_child, input->nedges, input->nmodules) &&
           indices_are_valid(input->use_module, input->nuses, input->nmodules) &&
           indices_are_valid(input->use_parameter, input->nuses, input->nparameters) &&
           pins_are_valid(input) && costs_are_valid(input);
}

/* Fills the output from the finished work. */
static void
report(const work *w, const smp_partition_input *input, smp_partition_output *output)
{
    int64_t total = 0;
    double  unit;

    for (int32_t d = 0; d < input->devices; d++) {
        w->sum[d] = 0;
    }
    for (int32_t m = 0; m < input->nmodules; m++) {
        int32_t node = w->tree.node_of[m];

        output->device[m] = w->place.device[node];
        w->sum[output->device[m]] += w->units[m];
        total += w->units[m];
        if (output->node != NULL) {
            output->node[m] = node;
        }
    }
    unit = total > 0 ? 1.0 / (double)total : 0.0;
    for (int32_t d = 0; d < input->devices && output->cost != NULL; d++) {
        output->cost[d] = (double)w->sum[d] * unit;
    }
    for (int32_t m = 0; m < input->nmodules && output->own_cost != NULL; m++) {
        output->own_cost[m] = (double)w->units[m] * unit;
    }
}

size_t
smp_partition_scratch_bytes(const smp_partition_input *input)
{
    smp_scratch measure = {NULL, 0};
    work        w;

    if (!counts_are_valid(input)) {
        return 0;
    }
    lay_out(&w, input, &measure);
    return measure.used;
}

smp_status
smp_partition_decide(const smp_partition_input *input, void *scratch,
                     size_t scratch_bytes, smp_partition_output *output,
                     int32_t conflict[2])
{
    smp_scratch room = {scratch, 0};
    smp_status  status;
    work        w;

    conflict[0] = -1;
    conflict[1] = -1;
    if (!is_valid(input)) {
        return SMP_ERR_INVALID;
    }
    if (scratch == NULL || scratch_bytes < smp_partition_scratch_bytes(input)) {
        return SMP_ERR_NO_MEMORY;
    }
    lay_out(&w, input, &room);
    status = smp_tree_build(&w.tree, input, conflict);
    if (status != SMP_OK) {
        return status;
    }
    smp_cost_modules(input, w.tree.parameter_of, w.units);
    smp_place_nodes(&w.place, input, &w.tree, w.units);
    report(&w, input, output);
    return SMP_OK;
}

/* Mixes eight bytes into the state (the finalizer of splitmix64). */
static uint64_t
mix(uint64_t state, uint64_t word)
{
    uint64_t x = (state ^ word) + UINT64_C(0x9e3779b97f4a7c15);

    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint64_t
mix_bytes(uint64_t state, const void *bytes, size_t count)
{
    const uint8_t *from = bytes;
    uint64_t       word;

    state = mix(state, count);
    for (; count >= sizeof(word); count -= sizeof(word), from += sizeof(word)) {
        memcpy(&word, from, sizeof(word));
        state = mix(state, word);
    }
    if (count > 0) {
        word = 0;
        memcpy(&word, from, count);
        state = mix(state, word);
    }
    return state;
}

uint64_t
smp_partition_hash(const int32_t *device, int32_t nmodules, const void *names,
                   size_t names_bytes)
{
    uint64_t state = mix_bytes(0, device, (size_t)nmodules * sizeof(*device));

    return mix_bytes(state, names, names_bytes);
}
