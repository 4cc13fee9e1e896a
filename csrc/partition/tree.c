/* Building the tree of nodes from the module hierarchy.
 *
 * Several parents are pruned to one: the nearest to the root, then the first
 * defined.  A breadth-first walk gives just that, and cannot run in a circle where
 * joined modules lie above one another.  [paper C.2]
 */
#include "partition/tree.h"

#include <string.h>

/* A digit of the radix sort. */
#define DIGIT_BITS 11
#define DIGIT_VALUES (1 << DIGIT_BITS)

void
smp_tree_lay_out(smp_tree *tree, const smp_partition_input *input, smp_scratch *scratch)
{
    size_t n = (size_t)input->nmodules;

    tree->node_of = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->parameter_of =
        smp_scratch_take(scratch, (size_t)input->nparameters, sizeof(int32_t));
    tree->parent = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->first_child = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->nchildren = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->children = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->pin = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->chain = smp_scratch_take(scratch, n, sizeof(uint8_t));
    tree->has_parameter = smp_scratch_take(scratch, n, sizeof(uint8_t));
    tree->joined = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->set_next = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->set_first = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->edge_start = smp_scratch_take(scratch, n + 1, sizeof(int32_t));
    tree->edge_child =
        smp_scratch_take(scratch, (size_t)input->nedges, sizeof(int32_t));
    tree->module_pin = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->node_run = smp_scratch_take(scratch, n, sizeof(int64_t));
    tree->sort_buffer = smp_scratch_take(scratch, n, sizeof(int32_t));
    tree->sort_other = smp_scratch_take(scratch, n, sizeof(int32_t));
}

/* The set's number: its smallest module. */
static int32_t
find_set(int32_t *joined, int32_t module)
{
    while (joined[module] != module) {
        joined[module] = joined[joined[module]];
        module = joined[module];
    }
    return module;
}

static void
join(int32_t *joined, int32_t a, int32_t b)
{
    int32_t first = find_set(joined, a);
    int32_t second = find_set(joined, b);

    if (first < second) {
        joined[second] = first;
    } else {
        joined[first] = second;
    }
}

/* Joins the users of each parameter. */
static void
join_users(smp_tree *tree, const smp_partition_input *input)
{
    for (int32_t m = 0; m < input->nmodules; m++) {
        tree->joined[m] = m;
    }
    for (int32_t p = 0; p < input->nparameters; p++) {
        tree->parameter_of[p] = -1;
    }
    for (int32_t u = 0; u < input->nuses; u++) {
        int32_t *first = &tree->parameter_of[input->use_parameter[u]];

        if (*first < 0) {
            *first = input->use_module[u];
        } else {
            join(tree->joined, *first, input->use_module[u]);
        }
    }
}

/* Lists the modules of each set in ascending order and makes `joined` the set. */
static void
list_sets(smp_tree *tree, int32_t nmodules)
{
    for (int32_t m = 0; m < nmodules; m++) {
        tree->set_first[m] = -1;
    }
    for (int32_t m = nmodules - 1; m >= 0; m--) {
        int32_t set = find_set(tree->joined, m);

        tree->joined[m] = set;
        tree->set_next[m] = tree->set_first[set];
        tree->set_first[set] = m;
    }
}

/* Groups the edges by parent, keeping their order. */
static void
group_edges(smp_tree *tree, const smp_partition_input *input)
{
    int32_t *start = tree->edge_start;

    memset(start, 0, ((size_t)input->nmodules + 1) * sizeof(*start));
    for (int32_t e = 0; e < input->nedges; e++) {
        start[input->edge_parent[e] + 1]++;
    }
    for (int32_t m = 0; m < input->nmodules; m++) {
        start[m + 1] += start[m];
    }
    for (int32_t e = 0; e < input->nedges; e++) {
        tree->edge_child[start[input->edge_parent[e]]++] = input->edge_child[e];
    }
    for (int32_t m = input->nmodules; m > 0; m--) {
        start[m] = start[m - 1];
    }
    start[0] = 0;
}

/* Gives every module its own pin or the pin of the parent on its first edge. */
static smp_status
inherit_pins(smp_tree *tree, const smp_partition_input *input)
{
    int32_t *first_parent = tree->sort_buffer;

    for (int32_t m = 0; m < input->nmodules; m++) {
        first_parent[m] = -1;
    }
    for (int32_t e = input->nedges - 1; e >= 0; e--) {
        first_parent[input->edge_child[e]] = input->edge_parent[e];
    }
    for (int32_t m = 0; m < input->nmodules; m++) {
        int32_t pin = input->pin == NULL ? SMP_PIN_INHERIT : input->pin[m];

        if (m > 0 && (first_parent[m] < 0 || first_parent[m] >= m)) {
            return SMP_ERR_INVALID;
        }
        if (pin == SMP_PIN_INHERIT) {
            pin = m == 0 ? SMP_PIN_NONE : tree->module_pin[first_parent[m]];
        }
        tree->module_pin[m] = pin;
    }
    return SMP_OK;
}

/* Adds the node of a set. */
static int32_t
add_node(smp_tree *tree, int32_t set, int32_t parent)
{
    int32_t node = tree->nnodes++;

    tree->parent[node] = parent;
    tree->nchildren[node] = 0;
    tree->children[node] = node;
    tree->node_run[node] = INT64_MAX;
    tree->has_parameter[node] = 0;
    for (int32_t m = tree->set_first[set]; m >= 0; m = tree->set_next[m]) {
        tree->node_of[m] = node;
    }
    tree->sort_buffer[node] = set;
    return node;
}

/* Numbers the nodes breadth first; children of a node get consecutive numbers. */
static void
walk(smp_tree *tree, int32_t nmodules)
{
    for (int32_t m = 0; m < nmodules; m++) {
        tree->node_of[m] = -1;
    }
    tree->nnodes = 0;
    add_node(tree, tree->joined[0], -1);
    for (int32_t node = 0; node < tree->nnodes; node++) {
        int32_t set = tree->sort_buffer[node];

        tree->first_child[node] = tree->nnodes;
        for (int32_t m = tree->set_first[set]; m >= 0; m = tree->set_next[m]) {
            for (int32_t e = tree->edge_start[m]; e < tree->edge_start[m + 1]; e++) {
                int32_t child = tree->edge_child[e];

                if (tree->node_of[child] < 0) {
                    add_node(tree, tree->joined[child], node);
                    tree->nchildren[node]++;
                }
            }
        }
    }
}

/* Sets pin and chain of each node from its modules. */
static smp_status
describe_nodes(smp_tree *tree, const smp_partition_input *input, int32_t conflict[2])
{
    for (int32_t node = 0; node < tree->nnodes; node++) {
        int32_t first = tree->set_first[tree->sort_buffer[node]];
        int32_t pinned = -1;

        for (int32_t m = first; m >= 0; m = tree->set_next[m]) {
            if (tree->module_pin[m] < 0) {
                continue;
            }
            if (pinned >= 0 && tree->module_pin[m] != tree->module_pin[pinned]) {
                conflict[0] = pinned;
                conflict[1] = m;
                return SMP_ERR_INVALID;
            }
            pinned = pinned < 0 ? m : pinned;
        }
        tree->pin[node] = pinned < 0 ? -1 : tree->module_pin[pinned];
        tree->chain[node] = input->chain != NULL && tree->set_next[first] < 0 &&
                            input->chain[first] != 0;
    }
    for (int32_t p = 0; p < input->nparameters; p++) {
        if (tree->parameter_of[p] >= 0) {
            tree->has_parameter[tree->node_of[tree->parameter_of[p]]] = 1;
        }
    }
    return SMP_OK;
}

/* Puts nodes into the order of one digit of their first execution; equal ones keep
 * their order. */
static void
sort_by_digit(const int32_t *from, int32_t *to, int32_t count, const int64_t *run,
              int shift)
{
    int32_t start[DIGIT_VALUES + 1] = {0};

    for (int32_t i = 0; i < count; i++) {
        start[((run[from[i]] >> shift) & (DIGIT_VALUES - 1)) + 1]++;
    }
    for (int32_t d = 0; d < DIGIT_VALUES; d++) {
        start[d + 1] += start[d];
    }
    for (int32_t i = 0; i < count; i++) {
        to[start[(run[from[i]] >> shift) & (DIGIT_VALUES - 1)]++] = from[i];
    }
}

/* Lists all nodes by their first execution, nodes without one behind, ties in
 * definition order; returns the list.  A radix sort, digit by digit from the lowest. */
static int32_t *
sort_by_run(smp_tree *tree)
{
    const int64_t *run = tree->node_run;
    int32_t       *nodes = tree->sort_buffer;
    int32_t       *other = tree->sort_other;
    int32_t        ran = 0;
    int32_t        rest;
    int64_t        last = 0;

    for (int32_t node = 0; node < tree->nnodes; node++) {
        if (run[node] != INT64_MAX) {
            nodes[ran++] = node;
            last = run[node] > last ? run[node] : last;
        }
    }
    for (int shift = 0; shift < 63 && last >> shift > 0; shift += DIGIT_BITS) {
        int32_t *swap = nodes;

        sort_by_digit(nodes, other, ran, run, shift);
        nodes = other;
        other = swap;
    }
    rest = ran;
    for (int32_t node = 0; node < tree->nnodes; node++) {
        if (run[node] == INT64_MAX) {
            nodes[rest++] = node;
        }
    }
    return nodes;
}

/* Puts the children of every node into execution order; nodes without a run come last,
 * in definition order.  A container without calls of its own (ModuleList) runs with its
 * first module. */
static void
order_children(smp_tree *tree, const smp_partition_input *input)
{
    int64_t *run = tree->node_run;
    int32_t *nodes;

    if (input->first_run == NULL) {
        return;
    }
    for (int32_t m = 0; m < input->nmodules; m++) {
        int64_t *first = &run[tree->node_of[m]];

        if (input->first_run[m] >= 0 && input->first_run[m] < *first) {
            *first = input->first_run[m];
        }
    }
    for (int32_t node = tree->nnodes - 1; node > 0; node--) {
        if (run[node] < run[tree->parent[node]]) {
            run[tree->parent[node]] = run[node];
        }
    }
    /* Sorted all at once, then dealt out to the parents. */
    nodes = sort_by_run(tree);
    for (int32_t i = 0; i < tree->nnodes; i++) {
        int32_t parent = tree->parent[nodes[i]];

        if (parent >= 0) {
            tree->children[tree->first_child[parent]++] = nodes[i];
        }
    }
    for (int32_t node = 0; node < tree->nnodes; node++) {
        tree->first_child[node] -= tree->nchildren[node];
    }
}

smp_status
smp_tree_build(smp_tree *tree, const smp_partition_input *input, int32_t conflict[2])
{
    smp_status status;

    join_users(tree, input);
    list_sets(tree, input->nmodules);
    group_edges(tree, input);
    status = inherit_pins(tree, input);
    if (status != SMP_OK) {
        return status;
    }
    walk(tree, input->nmodules);
    status = describe_nodes(tree, input, conflict);
    if (status != SMP_OK) {
        return status;
    }
    order_children(tree, input);
    return SMP_OK;
}
