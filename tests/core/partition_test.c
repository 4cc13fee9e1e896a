/* Spec: csrc/partition/partition.h, docs/partition.md, paper 4.5 and C. */
#include "partition/partition.h"

#include <stdbool.h>
#include <stdlib.h>

#include "check.h"
#include "partition/pack.h"
#include "partition/segment.h"
#include "partition/share.h"

#define MOST_MODULES 64
#define MOST_USES 96

/* A small model: module m is a child of parent[m] and owns one parameter of
 * bytes[m], if that is not 0. */
typedef struct {
    int32_t devices;
    double  memory_weight;
    int32_t default_device;
    int32_t nmodules;
    int32_t parent[MOST_MODULES];
    int64_t bytes[MOST_MODULES];
    int64_t first_run[MOST_MODULES];
    int64_t activation_bytes[MOST_MODULES];
    double  seconds[MOST_MODULES];
    uint8_t chain[MOST_MODULES];
    int32_t pin[MOST_MODULES];
    int32_t nextra; /* parameters of other modules that a module uses */
    int32_t extra_module[MOST_USES];
    int32_t extra_owner[MOST_USES];
} model;

typedef struct {
    int32_t device[MOST_MODULES];
    int32_t node[MOST_MODULES];
    double  own_cost[MOST_MODULES];
    double  cost[MOST_MODULES];
    int32_t conflict[2];
} decision;

static model
new_model(int32_t devices)
{
    model m;

    memset(&m, 0, sizeof(m));
    m.devices = devices;
    m.memory_weight = 1.0;
    m.default_device = -1;
    m.parent[0] = -1;
    m.pin[0] = SMP_PIN_INHERIT;
    m.nmodules = 1;
    return m;
}

/* Adds a module, executed after those added before; returns its number. */
static int32_t
add(model *m, int32_t parent, int64_t bytes)
{
    int32_t n = m->nmodules++;

    m->parent[n] = parent;
    m->bytes[n] = bytes;
    m->first_run[n] = n;
    m->pin[n] = SMP_PIN_INHERIT;
    return n;
}

static void
uses(model *m, int32_t module, int32_t owner)
{
    m->extra_module[m->nextra] = module;
    m->extra_owner[m->nextra++] = owner;
}

/* Decides with exactly `scratch_bytes` of scratch, or what is needed if that is -1. */
static smp_status
decide_with(const model *m, int64_t scratch_bytes, decision *d)
{
    int32_t edge_child[MOST_MODULES];
    int32_t use_module[MOST_MODULES + MOST_USES];
    int32_t use_parameter[MOST_MODULES + MOST_USES];
    int32_t nuses = 0;
    size_t  need;
    void   *scratch;

    for (int32_t i = 1; i < m->nmodules; i++) {
        edge_child[i - 1] = i;
    }
    for (int32_t i = 0; i < m->nmodules; i++) {
        if (m->bytes[i] > 0) {
            use_module[nuses] = i;
            use_parameter[nuses++] = i;
        }
    }
    for (int32_t i = 0; i < m->nextra; i++) {
        use_module[nuses] = m->extra_module[i];
        use_parameter[nuses++] = m->extra_owner[i];
    }
    smp_partition_input input = {
        .devices = m->devices,
        .memory_weight = m->memory_weight,
        .default_device = m->default_device,
        .nmodules = m->nmodules,
        .first_run = m->first_run,
        .activation_bytes = m->activation_bytes,
        .seconds = m->seconds,
        .chain = m->chain,
        .pin = m->pin,
        .nedges = m->nmodules - 1,
        .edge_parent = m->parent + 1,
        .edge_child = edge_child,
        .nparameters = m->nmodules,
        .parameter_bytes = m->bytes,
        .nuses = nuses,
        .use_module = use_module,
        .use_parameter = use_parameter,
    };
    smp_partition_output output = {d->device, d->node, d->own_cost, d->cost};

    need =
        scratch_bytes < 0 ? smp_partition_scratch_bytes(&input) : (size_t)scratch_bytes;
    scratch = malloc(need); /* exact, so that the address sanitizer sees one too many */
    smp_status status =
        smp_partition_decide(&input, scratch, need, &output, d->conflict);
    free(scratch);
    return status;
}

static smp_status
decide(const model *m, decision *d)
{
    return decide_with(m, -1, d);
}

static decision
decided(const model *m)
{
    decision d;

    CHECK_OK(decide(m, &d));
    return d;
}

/* "0 0 1 2": the devices of the modules from `first` on. */
static const char *
devices_of(const decision *d, int32_t first, int32_t count)
{
    static char text[MOST_MODULES * 12];
    size_t      at = 0;

    text[0] = '\0';
    for (int32_t i = first; i < first + count; i++) {
        at += (size_t)snprintf(text + at, sizeof(text) - at, i > first ? " %d" : "%d",
                               d->device[i]);
    }
    return text;
}

/* xorshift64*: the same numbers on every machine. */
static uint64_t random_state = UINT64_C(88172645463325252);

static uint32_t
next_random(uint32_t limit)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * UINT64_C(2685821657736338717)) >> 33) % limit;
}

/* The least greatest load over all cuts, by trying all of them. */
static int64_t
brute_force(const int64_t *prefix, int32_t items, int32_t at, const int64_t *preload,
            int32_t segments)
{
    int64_t best = INT64_MAX;

    if (segments == 1) {
        return preload[0] + prefix[items] - prefix[at];
    }
    for (int32_t end = at; end <= items; end++) {
        int64_t here = preload[0] + prefix[end] - prefix[at];
        int64_t rest = brute_force(prefix, items, end, preload + 1, segments - 1);
        int64_t worst = here > rest ? here : rest;

        best = worst < best ? worst : best;
    }
    return best;
}

TEST(the_greatest_segment_is_as_small_as_brute_force_finds)
{
    for (int round = 0; round < 10000; round++) {
        int32_t  items = (int32_t)next_random(9);
        int32_t  segments = 1 + (int32_t)next_random(5);
        uint32_t range = round % 3 == 0 ? 3 : 100; /* small: many ties and zeros */
        int64_t  prefix[10] = {0};
        int64_t  preload[5] = {0};
        int32_t  cut[6];
        int64_t  worst = 0;
        int32_t  must = 0;

        for (int32_t i = 0; i < items; i++) {
            prefix[i + 1] = prefix[i] + next_random(range);
        }
        for (int32_t s = 0; s < segments; s++) {
            preload[s] = round % 2 == 0 ? 0 : next_random(range);
            must += preload[s] == 0;
        }
        int64_t bound = smp_segment(prefix, items, preload, segments, cut);

        CHECK(bound == brute_force(prefix, items, 0, preload, segments));
        CHECK(cut[0] == 0 && cut[segments] == items);
        for (int32_t s = 0; s < segments; s++) {
            int64_t load = preload[s] + prefix[cut[s + 1]] - prefix[cut[s]];

            CHECK(cut[s] <= cut[s + 1]);
            CHECK(cut[s] < cut[s + 1] || preload[s] > 0 || items < must);
            worst = load > worst ? load : worst;
        }
        CHECK(worst == bound);
    }
}

TEST(segments_beyond_the_greatest_one_are_even_too)
{
    int64_t prefix[26];
    int64_t preload[8] = {0};
    int32_t cut[9];

    for (int32_t i = 0; i <= 25; i++) {
        prefix[i] = i;
    }
    CHECK(smp_segment(prefix, 25, preload, 8, cut) == 4);

    for (int32_t s = 0; s < 8; s++) {
        CHECK(cut[s + 1] - cut[s] >= 3);
    }
}

/* To the highest average; the first wins a tie; what nobody can use is left over. */
TEST(devices_are_shared_by_cost)
{
    static const struct {
        int64_t cost[3];
        int32_t capacity[3], segments, devices, left, seats[3];
    } rows[] = {
        {{8, 2}, {8, 8}, 2, 8, 0, {7, 1}},
        {{5, 5, 5}, {9, 9, 9}, 3, 4, 0, {2, 1, 1}},
        {{5, 0, 1}, {2, 9, 1}, 3, 8, 5, {2, 0, 1}},
    };

    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        int32_t seats[3] = {0};

        CHECK(smp_share_devices(rows[i].cost, rows[i].capacity, rows[i].segments,
                                rows[i].devices, seats) == rows[i].left);
        CHECK(memcmp(seats, rows[i].seats, sizeof(seats)) == 0);
    }
}

/* A row to pack, and whether it can be packed under a bound, by trying everything. */
typedef struct {
    int64_t prefix[8];
    int32_t capacity[7];
    int32_t items;
    int64_t bound;
} packing;

static bool
can_pack(const packing *p, int32_t at, int64_t load, int64_t devices)
{
    if (load > p->bound || devices < 0) {
        return false;
    }
    if (at == p->items) {
        return true;
    }
    int64_t cost = p->prefix[at + 1] - p->prefix[at];

    if (can_pack(p, at + 1, load + cost, devices) ||
        can_pack(p, at + 1, cost, devices - 1)) {
        return true;
    }
    for (int64_t n = 2; n <= p->capacity[at] && n <= devices + 1; n++) {
        /* Divided over n devices, with or without the one in use: then all full. */
        if ((load + cost <= n * p->bound &&
             can_pack(p, at + 1, p->bound, devices - n + 1)) ||
            (cost <= n * p->bound && can_pack(p, at + 1, p->bound, devices - n))) {
            return true;
        }
    }
    return false;
}

TEST(a_row_is_packed_under_the_least_bound_that_trying_everything_finds)
{
    for (int round = 0; round < 10000; round++) {
        packing p = {.items = 1 + (int32_t)next_random(7)};
        int64_t front = next_random(3) == 0 ? 0 : next_random(60);
        int32_t devices = 1 + (int32_t)next_random(6);
        bool    limited = next_random(2) == 0;
        int32_t cut[7];
        int32_t seats[6];
        int64_t bound = front;
        int32_t used = 0;

        for (int32_t i = 0; i < p.items; i++) {
            p.prefix[i + 1] =
                p.prefix[i] + next_random(round % 2 == 0 ? 4 : 1 + next_random(100));
            p.capacity[i] = limited ? 1 + (int32_t)next_random(4) : devices;
        }
        int32_t segments =
            smp_pack(p.prefix, p.capacity, p.items, front, devices, cut, seats);

        CHECK(segments >= 1 && segments <= devices);
        CHECK(cut[0] == 0 && cut[segments] == p.items);
        for (int32_t s = 0; s < segments; s++) {
            int64_t before = s == 0 ? front : 0; /* beside what is divided */
            int64_t last = 0;
            int32_t end = cut[s + 1];

            CHECK(cut[s] < end || s == 0);
            CHECK(seats[s] >= 1);
            used += seats[s];
            while (end > cut[s] && p.prefix[end] == p.prefix[end - 1]) {
                end--; /* costs nothing, so it is not what is divided */
            }
            if (cut[s] < end) {
                before += p.prefix[end - 1] - p.prefix[cut[s]];
                last = p.prefix[end] - p.prefix[end - 1];
                CHECK(seats[s] <= p.capacity[end - 1] || seats[s] == 1);
            }
            int64_t load = (before + last + seats[s] - 1) / seats[s];

            load = before > load ? before : load;
            bound = load > bound ? load : bound;
        }
        CHECK(used <= devices);
        p.bound = bound;
        CHECK(can_pack(&p, 0, front, devices - 1));
        p.bound = bound - 1;
        CHECK(bound <= 1 || limited || !can_pack(&p, 0, front, devices - 1));
    }
}

/* Modules that follow one another in a model; module 0 is its root. */
typedef struct {
    int32_t count;
    int32_t parent;
    int64_t bytes; /* of each one's parameter */
    int32_t pin;   /* PIN(device); 0: none */
    int64_t runs;  /* RUNS(when), the first of them; 0: in this order; -1: never */
} part;

#define PIN(device) .pin = (device) + 1
#define RUNS(when) .runs = (when) + 1

typedef struct {
    const char *says;
    const char *want; /* the devices of all modules */
    int32_t     devices;
    int64_t     root_bytes;
    bool        chain;         /* the root is one */
    int32_t     other_default; /* the default device + 1; 0: none */
    part        parts[8];
} placement;

static const placement placements[] = {
    {"parts of some size do not pile up on the parent's device",
     "0 0 0 0 0 1 1 1 2 2 2 3 3 3 4 5 6 7", 8,
     .parts = {{1, 0, 0}, {12, 1, 5}, {4, 0, 10}}},
    {"a container that is never called runs when its first module does", "0 1 0 0", 2,
     .parts = {{1, 0, 20, RUNS(2)}, {1, 0, 0, .runs = -1}, {1, 2, 20, RUNS(1)}}},
    {"what a parent owns counts against the device it sits on", "0 0 0 1 1 1 1 1", 2,
     30, .parts = {{7, 0, 10}}},
    {"a parent with its full share keeps its device for itself", "0 1 1 2 2", 3, 100,
     .parts = {{4, 0, 10}}},
    {"a part too small for a device sits with its parent",
     "0 0 0 2 0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3", 4,
     .parts = {{1, 0, 1},
               {1, 0, 0, RUNS(99)},
               {1, 0, 0, RUNS(199)},
               {8, 2, 10, RUNS(100)},
               {8, 3, 10, RUNS(200)}}},
    {"a module without parameters runs where its parent runs", "0 0 0 1 0 0", 2,
     .parts = {{1, 0, 10}, {1, 0, 0}, {1, 0, 10}, {1, 0, 0}, {1, 4, 0}}},
    {"in a chain it runs with the module before it", "0 0 0 0 1 1 1", 2, .chain = true,
     .parts = {{1, 0, 0}, {1, 0, 10}, {1, 0, 0}, {1, 0, 10}, {1, 0, 0}, {1, 5, 0}}},
    {"a container goes where the modules it holds are", "0 0 1 1", 2,
     .parts = {{1, 0, 50}, {1, 0, 0}, {1, 2, 50}}},
    {"also where they are pinned, not it", "0 1 0 0", 2,
     .parts = {{1, 0, 50}, {1, 0, 0}, {1, 2, 50, PIN(0)}}},
    {"a pinned subtree sits there and the innermost pin wins", "0 3 2 2 3 0 0 1 1 3 3",
     4,
     .parts =
         {{1, 0, 10, PIN(3)}, {1, 1, 10, PIN(2)}, {1, 2, 10}, {1, 1, 0}, {6, 0, 10}}},
    {"what is pinned to a device leaves less room for the rest",
     "0 2 0 0 0 1 1 1 2 3 3 3", 4, .parts = {{1, 0, 20, PIN(2)}, {10, 0, 10}}},
    {"with a default device only pins move a module", "1 1 3 3 1 3", 4,
     .other_default = 2,
     .parts = {{1, 0, 40},
               {1, 0, 40, PIN(3)},
               {1, 2, 40},
               {1, 2, 40, PIN(SMP_PIN_NONE)},
               {1, 2, 0}}},
    {"more devices than modules leaves some empty", "0 0 1 2", 16,
     .parts = {{2, 0, 30}, {1, 0, 1}}},
};

TEST(modules_are_placed_by_their_costs_order_and_pins)
{
    for (size_t i = 0; i < COUNT_OF(placements); i++) {
        const placement *row = &placements[i];
        model            m = new_model(row->devices);

        m.bytes[0] = row->root_bytes;
        m.chain[0] = row->chain;
        m.default_device = row->other_default - 1;
        for (const part *some = row->parts; some->count != 0; some++) {
            for (int32_t k = 0; k < some->count; k++) {
                int32_t n = add(&m, some->parent, some->bytes);

                m.pin[n] = some->pin != 0 ? some->pin - 1 : SMP_PIN_INHERIT;
                if (some->runs != 0) {
                    m.first_run[n] =
                        some->runs < 0 ? SMP_NEVER_RUN : some->runs - 1 + k;
                }
            }
        }
        decision d = decided(&m);

        check_row = row->says;
        CHECK_TEXT(devices_of(&d, 0, m.nmodules), row->want);
    }
}

TEST(equal_layers_are_spread_evenly_in_their_order)
{
    model m = new_model(4);

    for (int i = 0; i < 8; i++) {
        add(&m, 0, 10);
    }
    decision d = decided(&m);

    CHECK_TEXT(devices_of(&d, 0, 9), "0 0 0 1 1 2 2 3 3");
    for (int i = 0; i < 4; i++) {
        CHECK(d.cost[i] > 0.2499 && d.cost[i] < 0.2501);
    }
}

TEST(children_are_cut_in_execution_order_and_those_never_run_come_last)
{
    model    m = new_model(2);
    decision d;

    add(&m, 0, 10); /* 1: never runs */
    add(&m, 0, 10); /* 2: runs third */
    add(&m, 0, 10); /* 3: runs first */
    add(&m, 0, 10); /* 4: runs second */
    m.first_run[1] = SMP_NEVER_RUN;
    for (int shift = 0; shift < 60; shift++) { /* of long runs, too */
        m.first_run[2] = INT64_C(7) << shift;
        m.first_run[3] = 0;
        m.first_run[4] = INT64_C(1) << shift;
        CHECK_OK(decide(&m, &d));
        CHECK_TEXT(devices_of(&d, 1, 4), "1 1 0 0");
    }
}

TEST(modules_that_share_a_parameter_sit_together)
{
    model   m = new_model(4);
    int32_t embedding = add(&m, 0, 40);

    for (int i = 0; i < 6; i++) {
        add(&m, 0, 20);
    }
    int32_t head = add(&m, 0, 0);
    uses(&m, head, embedding);

    decision d = decided(&m);

    CHECK(d.node[head] == d.node[embedding]);
    CHECK(d.device[head] == d.device[embedding]);
    CHECK(d.device[head - 1] == 3);
}

TEST(a_parent_that_uses_a_childs_weight_lands_beside_it)
{
    model   m = new_model(2);
    int32_t first = add(&m, 0, 50);
    int32_t layer = add(&m, 0, 0);
    int32_t linear = add(&m, layer, 25);
    int32_t other = add(&m, layer, 25);

    uses(&m, layer, linear);

    decision d = decided(&m);

    CHECK(d.device[first] == 0);
    CHECK(d.device[layer] == 1 && d.device[linear] == 1 && d.device[other] == 1);
    CHECK(d.node[layer] == d.node[linear] && d.node[layer] != d.node[other]);
}

TEST(pins_that_contradict_a_shared_parameter_name_both_modules)
{
    model   m = new_model(4);
    int32_t embedding = add(&m, 0, 40);
    int32_t box = add(&m, 0, 10);
    int32_t head = add(&m, box, 0);

    uses(&m, head, embedding);
    m.pin[embedding] = 0;
    m.pin[box] = 1;

    decision d;
    memset(&d, 0x7f, sizeof(d));
    CHECK_STATUS(decide(&m, &d), SMP_ERR_INVALID);
    CHECK(d.conflict[0] == embedding && d.conflict[1] == head);
    CHECK(d.device[0] == 0x7f7f7f7f);

    m.pin[head] = 0;
    CHECK_OK(decide(&m, &d));
    CHECK(d.device[head] == 0 && d.device[box] == 1);
}

TEST(costs_of_zero_and_models_without_parameters_come_to_an_end)
{
    model m = new_model(8);

    for (int i = 0; i < 20; i++) {
        int32_t box = add(&m, 0, 0);

        add(&m, box, 0);
    }

    decision d = decided(&m);

    for (int32_t i = 0; i < m.nmodules; i++) {
        CHECK(d.device[i] == 0);
        CHECK(d.own_cost[i] == 0);
    }
    /* Parameters, but alpha 0 and all of the time in one module. */
    m.memory_weight = 0;
    for (int32_t i = 1; i < m.nmodules; i++) {
        m.bytes[i] = 1;
    }
    m.seconds[4] = 1.0;
    CHECK_OK(decide(&m, &d));
    CHECK(d.cost[d.device[4]] == 1.0);
}

TEST(the_parts_of_the_cost_have_no_unit)
{
    model m = new_model(1);

    m.memory_weight = 0.75;
    add(&m, 0, 3000);
    int32_t b = add(&m, 0, 1000);
    m.activation_bytes[b] = 4000;
    m.seconds[b] = 5e-6;
    decision d = decided(&m);

    CHECK(d.own_cost[1] > 0.28124 && d.own_cost[1] < 0.28126);
    CHECK(d.own_cost[2] > 0.71874 && d.own_cost[2] < 0.71876);
}

TEST(every_amount_of_scratch_below_the_need_is_refused_without_a_trace)
{
    model    m = new_model(3);
    decision d;
    int64_t  bytes = 0;

    for (int i = 0; i < 10; i++) {
        add(&m, i / 3, i);
    }
    for (;; bytes++) {
        memset(&d, 0x7f, sizeof(d));
        if (decide_with(&m, bytes, &d) == SMP_OK) {
            break;
        }
        CHECK_STATUS(decide_with(&m, bytes, &d), SMP_ERR_NO_MEMORY);
        CHECK(d.device[0] == 0x7f7f7f7f && d.node[0] == 0x7f7f7f7f);
    }
    CHECK(bytes > 0 && d.device[0] == 0);
}

TEST(numbers_out_of_range_are_refused)
{
    model    good = new_model(2);
    decision d;
    model    m;

    add(&good, 0, 1);
    add(&good, 1, 1);
    CHECK_OK(decide(&good, &d));
#define REFUSES(...)                                                                   \
    m = good, __VA_ARGS__;                                                             \
    CHECK_STATUS(decide(&m, &d), SMP_ERR_INVALID)
    REFUSES(m.devices = 0);
    REFUSES(m.devices = SMP_PARTITION_MAX_DEVICES + 1);
    REFUSES(m.memory_weight = 1.5);
    REFUSES(m.memory_weight = -0.5);
    REFUSES(m.memory_weight = 0.0 / (double)m.nextra);
    REFUSES(m.default_device = 2);
    REFUSES(m.default_device = -2);
    REFUSES(m.parent[2] = 3);
    REFUSES(m.parent[2] = -1);
    REFUSES(m.parent[1] = 2); /* 1 and 2 hold each other, the root neither */
    REFUSES(m.pin[1] = 2);
    REFUSES(m.pin[1] = SMP_PIN_NONE - 1);
    REFUSES(m.bytes[1] = -1);
    REFUSES(m.bytes[1] = 1, m.activation_bytes[1] = -1);
    REFUSES(m.seconds[1] = -1);
    REFUSES(m.seconds[1] = 1.0 / (double)m.nextra);
    REFUSES(m.seconds[1] = 0.0 / (double)m.nextra);
    for (int32_t wrong = -1; wrong <= 3; wrong += 4) {
        REFUSES(uses(&m, 1, wrong));
        REFUSES(uses(&m, wrong, 1));
    }
    CHECK(d.conflict[0] == -1 && d.conflict[1] == -1);
    m = good, m.devices = SMP_PARTITION_MAX_DEVICES, m.pin[1] = m.devices - 1;
    CHECK_STATUS(decide_with(&m, 8, &d), SMP_ERR_NO_MEMORY);
}

TEST(the_hash_changes_with_any_device_and_any_name)
{
    int32_t  device[3] = {0, 1, 2};
    uint64_t hash = smp_partition_hash(device, 3, "a\0b", 4);

    CHECK(hash == smp_partition_hash(device, 3, "a\0b", 4));
    CHECK(hash != smp_partition_hash(device, 2, "a\0b", 4));
    CHECK(hash != smp_partition_hash(device, 3, "a\0c", 4));
    CHECK(hash != smp_partition_hash(device, 3, "a\0b\0", 5));
    for (int32_t changed = 0; changed < 3; changed++) {
        device[changed]++;
        CHECK(hash != smp_partition_hash(device, 3, "a\0b", 4));
        device[changed]--;
    }
    char names[] = "layers.0.linear1\0layers";

    for (size_t length = 1; length < sizeof(names); length++) {
        hash = smp_partition_hash(device, 3, names, length);
        for (size_t at = 0; at < length; at++) {
            names[at] ^= 1;
            CHECK(hash != smp_partition_hash(device, 3, names, length));
            names[at] ^= 1;
        }
    }
}

/* What must hold of any decision about any model. */
static void
check_decision(const model *m, const decision *d)
{
    double  sum = 0;
    double  all[MOST_MODULES] = {0};
    bool    holds[MOST_MODULES] = {false}; /* parameters in the subtree */
    int32_t pin[MOST_MODULES];
    bool    pinned_below[MOST_MODULES] = {false};

    for (int32_t i = 0; i < m->nmodules; i++) {
        CHECK(d->device[i] >= 0 && d->device[i] < m->devices);
        CHECK(d->own_cost[i] >= 0);
        all[d->device[i]] += d->own_cost[i];
        sum += d->own_cost[i];
        holds[i] = m->bytes[i] > 0;
        pin[i] = m->pin[i] == SMP_PIN_INHERIT && i > 0 ? pin[m->parent[i]] : m->pin[i];
        if (pin[i] >= 0) {
            CHECK(d->device[i] == pin[i]);
        }
    }
    for (int32_t i = 0; i < m->nextra; i++) {
        CHECK(d->device[m->extra_module[i]] == d->device[m->extra_owner[i]]);
        CHECK(d->node[m->extra_module[i]] == d->node[m->extra_owner[i]]);
        holds[m->extra_module[i]] = true;
    }
    for (int32_t i = m->nmodules - 1; i > 0; i--) {
        pinned_below[i] |= m->pin[i] >= 0;
        holds[m->parent[i]] |= holds[i];
        pinned_below[m->parent[i]] |= pinned_below[i];
    }
    for (int32_t i = 1; i < m->nmodules; i++) {
        if (!holds[i] && !pinned_below[i] && pin[i] < 0 && !m->chain[m->parent[i]]) {
            CHECK(d->device[i] == d->device[m->parent[i]]);
        }
    }
    CHECK(sum == 0 || (sum > 0.999999 && sum < 1.000001));
    for (int32_t i = 0; i < m->devices; i++) {
        CHECK(all[i] - d->cost[i] < 1e-9 && d->cost[i] - all[i] < 1e-9);
    }
}

static model
random_model(int32_t round)
{
    model    m = new_model(1 + (int32_t)next_random(9));
    uint32_t modules = 1 + next_random(40);

    m.memory_weight = next_random(11) / 10.0;
    m.bytes[0] = next_random(3) == 0 ? next_random(100) : 0;
    for (uint32_t i = 1; i < modules; i++) {
        uint32_t depth = 1 + next_random(4);
        int32_t  parent = (int32_t)(m.nmodules > 0 ? next_random(i) / depth : 0);
        int32_t  n = add(&m, parent, next_random(3) == 0 ? 0 : next_random(100));

        m.first_run[n] = (int64_t)next_random(modules + 1) - 1;
        m.activation_bytes[n] = next_random(50);
        m.chain[n] = next_random(4) == 0;
        m.seconds[n] = round % 2 == 0 ? 0 : next_random(10);
    }
    for (uint32_t i = 0; round % 3 == 0 && i < next_random(5); i++) {
        int32_t owner = (int32_t)next_random(modules);

        if (m.bytes[owner] > 0) {
            uses(&m, (int32_t)next_random(modules), owner);
        }
    }
    for (uint32_t i = 0; round % 5 == 0 && i < next_random(4); i++) {
        m.pin[next_random(modules)] = (int32_t)next_random((uint32_t)m.devices);
    }
    return m;
}

TEST(ten_thousand_random_models_are_decided_within_the_rules)
{
    int decided = 0;

    for (int32_t round = 0; round < 10000; round++) {
        model      m = random_model(round);
        decision   d;
        decision   again;
        smp_status status = decide(&m, &d);

        if (status == SMP_ERR_INVALID) { /* a pin against a shared parameter */
            CHECK(m.nextra > 0 && d.conflict[0] >= 0);
            CHECK(d.conflict[0] != d.conflict[1]);
            continue;
        }
        CHECK_OK(status);
        check_decision(&m, &d);
        CHECK_OK(decide(&m, &again));
        CHECK(memcmp(d.device, again.device,
                     (size_t)m.nmodules * sizeof(d.device[0])) == 0);
        decided++;
    }
    CHECK(decided > 9000);
}

/* Decides about a model of `n` modules, each with one parameter, made by parent(). */
static smp_status
decide_big(int32_t n, int32_t devices, int32_t (*parent)(int32_t), int32_t *device,
           double *cost)
{
    int32_t *numbers = malloc((size_t)n * 3 * sizeof(*numbers));
    int32_t *parents = numbers + (size_t)n * 2;
    int64_t *bytes = malloc((size_t)n * sizeof(*bytes));

    for (int32_t i = 0; i < n; i++) {
        numbers[i] = i;
        numbers[n + i] = i + 1 < n ? i + 1 : 0;
        parents[i] = i + 1 < n ? parent(i + 1) : 0;
        bytes[i] = 1;
    }
    smp_partition_input input = {
        .devices = devices,
        .memory_weight = 1.0,
        .default_device = -1,
        .nmodules = n,
        .nedges = n - 1,
        .edge_child = numbers + n,
        .edge_parent = parents,
        .nparameters = n,
        .parameter_bytes = bytes,
        .nuses = n,
        .use_module = numbers,
        .use_parameter = numbers,
    };
    smp_partition_output output = {.device = device, .cost = cost};
    size_t               need = smp_partition_scratch_bytes(&input);
    void                *scratch = malloc(need);
    int32_t              conflict[2];
    smp_status status = smp_partition_decide(&input, scratch, need, &output, conflict);

    free(scratch);
    free(bytes);
    free(numbers);
    return status;
}

static int32_t
parent_in_a_chain(int32_t i)
{
    return i - 1;
}

static int32_t
parent_root(int32_t i)
{
    (void)i;
    return 0;
}

static int32_t
parent_in_a_heap(int32_t i)
{
    return (i - 1) / 16;
}

TEST(a_hundred_thousand_modules_are_spread_evenly_deep_flat_or_bushy)
{
    enum { N = 100000, DEVICES = 8 };
    static const struct {
        int32_t (*parent)(int32_t);
        double least;
        double most; /* a subtree of the bushy one has 7 % of the modules */
    } shapes[] = {
        {parent_in_a_chain, 0.1249, 0.1251},
        {parent_root, 0.1249, 0.1251},
        {parent_in_a_heap, 0.08, 0.18},
    };
    static int32_t device[N];

    for (size_t shape = 0; shape < 3; shape++) {
        double cost[DEVICES];

        CHECK_OK(decide_big(N, DEVICES, shapes[shape].parent, device, cost));
        for (int32_t i = 0; i < DEVICES; i++) {
            CHECK(cost[i] > shapes[shape].least && cost[i] < shapes[shape].most);
        }
        for (int32_t i = 1; i < N; i++) {
            CHECK(device[i] >= device[shapes[shape].parent(i)]);
        }
    }
}

RUN_TESTS
