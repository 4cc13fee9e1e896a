/* The tree partitioning algorithm, breadth first, without recursion.
 *
 * A node has a range of devices and sits on the first of them.  The range is divided
 * among its children: cut into segments of nearly equal cost, devices shared among the
 * segments, and again for a segment with several devices and nodes.  The first device's
 * earlier load (the node's own cost, and its ancestors' there) is the front of the row:
 * a load of the first segment.  [paper 4.5, C.4]
 */
#include "partition/place.h"

#include <stdbool.h>
#include <stddef.h>

#include "partition/pack.h"
#include "partition/segment.h"
#include "partition/share.h"

static void
lay_out_division(smp_division *division, size_t devices, smp_scratch *scratch)
{
    division->cut = smp_scratch_take(scratch, devices + 1, sizeof(int32_t));
    division->seats = smp_scratch_take(scratch, devices, sizeof(int32_t));
    division->cost = smp_scratch_take(scratch, devices, sizeof(int64_t));
    division->capacity = smp_scratch_take(scratch, devices, sizeof(int32_t));
}

void
smp_place_lay_out(smp_place *place, const smp_partition_input *input,
                  smp_scratch *scratch)
{
    size_t n = (size_t)input->nmodules; /* there are no more nodes than modules */
    size_t devices = (size_t)input->devices;

    place->device = smp_scratch_take(scratch, n, sizeof(int32_t));
    place->own = smp_scratch_take(scratch, n, sizeof(int64_t));
    place->load = smp_scratch_take(scratch, devices, sizeof(int64_t));
    place->kind = smp_scratch_take(scratch, n, sizeof(uint8_t));
    place->parameters = smp_scratch_take(scratch, n, sizeof(uint8_t));
    place->pins = smp_scratch_take(scratch, n, sizeof(uint8_t));
    place->host = smp_scratch_take(scratch, n, sizeof(int32_t));
    place->capacity = smp_scratch_take(scratch, n, sizeof(int32_t));
    place->free = smp_scratch_take(scratch, n, sizeof(int64_t));
    place->first = smp_scratch_take(scratch, n, sizeof(int32_t));
    place->ndevices = smp_scratch_take(scratch, n, sizeof(int32_t));
    place->row = smp_scratch_take(scratch, n, sizeof(int32_t));
    place->row_capacity = smp_scratch_take(scratch, n, sizeof(int32_t));
    place->prefix = smp_scratch_take(scratch, n + 1, sizeof(int64_t));
    place->jobs = smp_scratch_take(scratch, n, sizeof(smp_place_job));
    place->preload = smp_scratch_take(scratch, devices, sizeof(int64_t));
    lay_out_division(&place->shared, devices, scratch);
    lay_out_division(&place->packed, devices, scratch);
}

/* Sums over the subtrees, children before parents: parameters, pins, and the number of
 * nodes with parameters and without a pin. */
static void
look_below(smp_place *place, const smp_tree *tree)
{
    for (int32_t n = 0; n < tree->nnodes; n++) {
        place->parameters[n] = tree->has_parameter[n];
        place->pins[n] = tree->pin[n] >= 0;
        place->capacity[n] = tree->has_parameter[n] && tree->pin[n] < 0;
    }
    for (int32_t n = tree->nnodes - 1; n > 0; n--) {
        int32_t parent = tree->parent[n];

        place->parameters[parent] |= place->parameters[n];
        place->pins[parent] |= place->pins[n];
        place->capacity[parent] += place->capacity[n];
    }
}

/* Decides which nodes ride with another: with the parent, or in a chain with the child
 * before.  So a chain does not go back to the parent for an activation function between
 * two layers of another device. */
static void
find_hosts(smp_place *place, const smp_tree *tree)
{
    place->kind[0] = SMP_NODE_SHARED_OUT;
    for (int32_t n = 0; n < tree->nnodes; n++) {
        const int32_t *child = tree->children + tree->first_child[n];
        int32_t        host = place->kind[n] == SMP_NODE_RIDES ? place->host[n] : n;

        for (int32_t i = 0; i < tree->nchildren[n]; i++) {
            int32_t c = child[i];

            place->kind[c] = SMP_NODE_SHARED_OUT;
            if (!place->parameters[c] && !place->pins[c]) {
                place->kind[c] = SMP_NODE_RIDES;
                place->host[c] = host;
                place->own[host] += place->own[c];
            } else if (tree->chain[n]) {
                host = c;
            }
        }
    }
}

/* The device of a node with nothing to place below: its first child's, so a container
 * of pinned modules is called on their device. */
static int32_t
device_below(const smp_place *place, const smp_tree *tree, int32_t node)
{
    const int32_t *child = tree->children + tree->first_child[node];

    for (int32_t i = 0; i < tree->nchildren[node]; i++) {
        if (place->kind[child[i]] == SMP_NODE_PINNED) {
            return place->device[child[i]];
        }
    }
    return 0; /* not reached: there is a pin below, or the node would ride */
}

/* Sets the devices of pinned nodes, and counts the rest. */
static void
settle_pins(smp_place *place, const smp_partition_input *input, const smp_tree *tree)
{
    for (int32_t d = 0; d < input->devices; d++) {
        place->load[d] = 0;
    }
    for (int32_t n = 0; n < tree->nnodes; n++) {
        place->free[n] = 0;
    }
    for (int32_t n = tree->nnodes - 1; n >= 0; n--) {
        int32_t pin = tree->pin[n];

        if (place->kind[n] == SMP_NODE_RIDES) {
            continue;
        }
        if (pin < 0) {
            if (input->default_device >= 0) {
                pin = input->default_device;
            } else if (n > 0 && place->capacity[n] == 0) {
                pin = device_below(place, tree, n);
            }
        }
        if (pin >= 0) {
            place->kind[n] = SMP_NODE_PINNED;
            place->device[n] = pin;
            place->load[pin] += place->own[n];
        } else {
            place->free[n] += place->own[n];
        }
        if (n > 0) {
            place->free[tree->parent[n]] += place->free[n];
        }
    }
    if (input->default_device >= 0) {
        for (int32_t n = 0; n < tree->nnodes; n++) {
            place->capacity[n] = 0;
        }
    }
}

/* Sets the devices of a node: as many as it can use. */
static void
set_devices(smp_place *place, int32_t node, int32_t device, int32_t ndevices)
{
    int32_t capacity = place->capacity[node];

    place->first[node] = device;
    place->ndevices[node] = ndevices < capacity ? ndevices : capacity;
    if (place->kind[node] != SMP_NODE_PINNED) {
        place->device[node] = device;
    }
}

/* Gives devices to a node of the row.  With one only, its whole cost ends up there. */
static void
give(smp_place *place, int32_t node, int32_t device, int32_t ndevices)
{
    set_devices(place, node, device, ndevices);
    if (place->ndevices[node] == 1) {
        place->load[device] += place->free[node];
    }
}

/* Puts row[first .. end) on one device. */
static void
give_all(smp_place *place, int32_t first, int32_t end, int32_t device)
{
    for (int32_t i = first; i < end; i++) {
        give(place, place->row[i], device, 1);
    }
}

/* The load of the job's device number s before the row is divided. */
static int64_t
load_before(const smp_place *place, const smp_place_job *job, int32_t s)
{
    return s > 0 || job->front ? place->load[job->device + s] : 0;
}

/* Fills cost and capacity of the segments from the cuts.  `loads`: the number of
 * devices, from the first on, counted with their earlier load. */
static void
weigh(const smp_place *place, const smp_place_job *job, int32_t loads, smp_division *d)
{
    const int64_t *prefix = place->prefix + job->first;

    for (int32_t s = 0; s < d->segments; s++) {
        int64_t capacity = d->cut[s] == d->cut[s + 1]; /* for the earlier load */

        for (int32_t i = d->cut[s]; i < d->cut[s + 1]; i++) {
            capacity += place->row_capacity[job->first + i];
        }
        d->capacity[s] = (int32_t)(capacity < job->ndevices ? capacity : job->ndevices);
        d->cost[s] = prefix[d->cut[s + 1]] - prefix[d->cut[s]] +
                     (s < loads ? load_before(place, job, s) : 0);
    }
}

/* Cuts the job's row into a segment for each device, or for each node if these are
 * fewer.  Shares the devices among the segments by highest averages. */
static void
cut_and_share(smp_place *place, const smp_place_job *job, int32_t loads)
{
    smp_division *d = &place->shared;

    d->segments = job->count < job->ndevices ? job->count : job->ndevices;
    for (int32_t s = 0; s < d->segments; s++) {
        place->preload[s] = s < loads ? load_before(place, job, s) : 0;
    }
    if (job->count < job->ndevices) {
        for (int32_t s = 0; s <= d->segments; s++) {
            d->cut[s] = s;
        }
    } else {
        smp_segment(place->prefix + job->first, job->count, place->preload, d->segments,
                    d->cut);
    }
    weigh(place, job, loads, d);
    d->spare =
        smp_share_devices(d->cost, d->capacity, d->segments, job->ndevices, d->seats);
}

static bool
one_each(const smp_division *d)
{
    for (int32_t s = 0; s < d->segments; s++) {
        if (d->seats[s] != 1) {
            return false;
        }
    }
    return true;
}

/* The greatest load of a device, if a segment with several divides evenly and one
 * without sits on the first. */
static int64_t
greatest_load(const smp_division *d)
{
    int64_t without = 0;
    int64_t greatest = 0;
    bool    first = true;

    for (int32_t s = 0; s < d->segments; s++) {
        without += d->seats[s] == 0 ? d->cost[s] : 0;
    }
    for (int32_t s = 0; s < d->segments; s++) {
        if (d->seats[s] > 0) {
            int64_t load = d->cost[s] / d->seats[s] + (first ? without : 0);

            greatest = load > greatest ? load : greatest;
            first = false;
        }
    }
    return greatest;
}

/* A lower bound of every division's greatest load. */
static int64_t
least_load(const smp_place *place, const smp_place_job *job)
{
    const int64_t *prefix = place->prefix + job->first;
    int64_t        front = load_before(place, job, 0);
    int64_t        least = (front + prefix[job->count] - prefix[0]) / job->ndevices;

    for (int32_t i = 0; i < job->count; i++) {
        int64_t load =
            (prefix[i + 1] - prefix[i]) / place->row_capacity[job->first + i];

        least = load > least ? load : least;
    }
    return front > least ? front : least;
}

/* The division of the job's devices: by highest averages, unless the segments then
 * without a device would overload the first one. */
static const smp_division *
choose_division(smp_place *place, const smp_place_job *job)
{
    smp_division *d = &place->packed;
    int64_t       greatest;

    /* With one device for each segment, each counts with its load.  If a segment
     * deserves two, the order of devices and segments is open, and only the first load
     * is certain. */
    cut_and_share(place, job, job->ndevices);
    if (one_each(&place->shared)) {
        return &place->shared;
    }
    cut_and_share(place, job, 1);
    greatest = greatest_load(&place->shared);
    if (greatest - greatest / 8 <= least_load(place, job)) {
        return &place->shared;
    }
    d->segments = smp_pack(place->prefix + job->first, place->row_capacity + job->first,
                           job->count, load_before(place, job, 0), job->ndevices,
                           d->cut, d->seats);
    d->spare = job->ndevices;
    for (int32_t s = 0; s < d->segments; s++) {
        d->spare -= d->seats[s];
    }
    weigh(place, job, 1, d);
    d->spare = smp_share_more(d->cost, d->capacity, d->segments, d->spare, d->seats);
    if (d->segments == 1 || greatest_load(d) > greatest - greatest / 8) {
        return &place->shared;
    }
    return d;
}

/* Takes devices with a full share from the front of the job. */
static void
skip_full_devices(const smp_place *place, smp_place_job *job)
{
    const int64_t *prefix = place->prefix + job->first;
    int64_t        rest = prefix[job->count] - prefix[0];

    while (job->front && job->ndevices > 1) {
        int64_t front = place->load[job->device];

        if (front == 0 || rest == 0 || front * job->ndevices < front + rest) {
            break;
        }
        job->device++;
        job->ndevices--;
    }
}

/* Divides the devices of one job among its row.  A segment without one goes to the
 * first device of the job; in a chain to the device of the segment before, its input's.
 * Pushes the jobs to divide again, and returns the new height of the stack.  Each of
 * these has fewer nodes, or as many and no front, so the loop ends at any costs. */
static int32_t
divide(smp_place *place, smp_place_job job, bool chain, int32_t height)
{
    const smp_division *d;
    int32_t             beside = job.device;
    int32_t             device;

    skip_full_devices(place, &job);
    if (job.ndevices == 1) {
        give_all(place, job.first, job.first + job.count, job.device);
        return height;
    }
    d = choose_division(place, &job);
    device = job.device;
    if (d->spare > 0 && load_before(place, &job, 0) > 0 && d->cut[1] > 0) {
        device++; /* no segment needs the first more than its earlier load */
    }
    for (int32_t s = 0; s < d->segments; s++) {
        int32_t first = job.first + d->cut[s];
        int32_t end = job.first + d->cut[s + 1];
        int32_t seats = d->seats[s];

        if (seats == 0) {
            give_all(place, first, end, beside);
            continue;
        }
        if (end - first == 1) {
            give(place, place->row[first], device, seats);
        } else if (seats == 1) {
            give_all(place, first, end, device);
        } else {
            place->jobs[height++] = (smp_place_job){
                .first = first,
                .count = end - first,
                .device = device,
                .ndevices = seats,
                .front = end - first < job.count,
            };
        }
        if (chain) {
            beside = end - first == 1 ? device : device + seats - 1;
        }
        device += seats;
    }
    return height;
}

/* Lists the node's children in need of a device; returns their number. */
static int32_t
fill_row(smp_place *place, const smp_tree *tree, int32_t node)
{
    const int32_t *child = tree->children + tree->first_child[node];
    int32_t        count = 0;

    place->prefix[0] = 0;
    for (int32_t i = 0; i < tree->nchildren[node]; i++) {
        int32_t c = child[i];

        if (place->kind[c] == SMP_NODE_RIDES || place->capacity[c] == 0) {
            continue;
        }
        place->row[count] = c;
        place->row_capacity[count] = place->capacity[c];
        place->prefix[count + 1] = place->prefix[count] + place->free[c];
        count++;
    }
    return count;
}

/* Divides the node's set of devices among its children. */
static void
place_children(smp_place *place, const smp_tree *tree, int32_t node)
{
    int32_t device = place->first[node];
    int32_t count = fill_row(place, tree, node);
    int32_t height = 0;

    if (place->ndevices[node] == 1) { /* the load was counted with the node's */
        for (int32_t i = 0; i < count; i++) {
            set_devices(place, place->row[i], device, 1);
        }
        return;
    }
    if (place->kind[node] != SMP_NODE_PINNED) { /* else it was counted before */
        place->load[device] += place->own[node];
    }
    if (count > 0) {
        place->jobs[height++] = (smp_place_job){
            .first = 0,
            .count = count,
            .device = device,
            .ndevices = place->ndevices[node],
            .front = true,
        };
    }
    while (height > 0) {
        smp_place_job job = place->jobs[--height];

        height = divide(place, job, tree->chain[node], height);
    }
}

void
smp_place_nodes(smp_place *place, const smp_partition_input *input,
                const smp_tree *tree, const int64_t *module_units)
{
    for (int32_t n = 0; n < tree->nnodes; n++) {
        place->own[n] = 0;
    }
    for (int32_t m = 0; m < input->nmodules; m++) {
        place->own[tree->node_of[m]] += module_units[m];
    }
    look_below(place, tree);
    find_hosts(place, tree);
    settle_pins(place, input, tree);

    place->first[0] = 0;
    place->ndevices[0] = input->devices;
    if (place->kind[0] != SMP_NODE_PINNED) {
        place->device[0] = 0;
    }
    for (int32_t n = 0; n < tree->nnodes; n++) {
        if (place->kind[n] == SMP_NODE_RIDES) {
            place->device[n] = place->device[place->host[n]];
        } else if (n == 0 || place->capacity[n] > 0) {
            place_children(place, tree, n);
        }
    }
}
