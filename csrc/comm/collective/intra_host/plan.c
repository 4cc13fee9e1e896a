/* Ranges, and their way. */
#include "comm/collective/intra_host/plan.h"

/* An all-reduce is done in one step by everyone while all tensors together are at most
 * this large: reading them all costs less than another step. */
#define FLAT_BYTES ((size_t)64 << 10)

/* From here on, members use each other's memory: its further step pays, and the system
 * calls for unmapped memory. */
#define MEMORY_BYTES ((size_t)128 << 10)

/* From here on (bytes for all members), copies go past the caches: a reader would not
 * find the beginning there. */
#define UNCACHED_BYTES ((size_t)32 << 20)

/* Up to here, the device's second copy is taken to cost less than a second step, and a
 * second wait of one device for another.  Not measured. */
#define ROUND_BYTES ((size_t)256 << 10)

const uint64_t *
smp_plan_counts(const smp_collective *op, int member)
{
    const smp_slot *slot =
        smp_epoch_barrier_slot(op->barrier, member, op->barrier->step);

    return (const uint64_t *)(const void *)slot->data;
}

smp_range
smp_plan_part(const smp_collective *op, size_t count, int member)
{
    size_t n = (size_t)op->barrier->size;
    size_t line = 64 / op->element;
    size_t each = (count + n - 1) / n;
    size_t first;
    size_t end;

    each = (each + line - 1) / line * line;
    first = (size_t)member * each;
    first = first < count ? first : count;
    end = first + each < count ? first + each : count;
    return (smp_range){first, first, end - first};
}

void
smp_plan_ranges(smp_collective *op)
{
    int    self = op->barrier->self;
    size_t in = 0;
    size_t out = 0;

    for (int m = 0; m < op->barrier->size; m++) {
        op->pulls[m] = smp_call_range(&op->call, self, m, self);
        op->pushes[m] = smp_call_range(&op->call, self, self, m);
        in += op->pushes[m].count;
        out += op->pulls[m].count;
    }
    if (op->call.in_rows != 0) {
        op->in_stride = in * op->element / op->call.in_rows;
    }
    if (op->call.out_rows != 0) {
        op->out_stride = out * op->element / op->call.out_rows;
    }
}

/* Whether members read unmapped memory.  Never to reduce-scatter: slots were faster
 * wherever benchmarks/core/collective.c has measured it. */
static bool
reads(const smp_collective *op)
{
    return op->barrier->reads && op->call.operation != SMP_REDUCE_SCATTER;
}

void
smp_plan_rounds(smp_collective *op, size_t first)
{
    size_t most = smp_call_longest(&op->call, op->barrier->size) * op->element;
    size_t half = smp_exchange_half(op->devices.exchange);

    op->way = SMP_BY_DEVICE;
    op->data_step = first;
    op->steps = first + (most + half - 1) / half;
    op->steps += most == 0;
}

void
smp_plan_on_devices(smp_collective *op)
{
    size_t most = smp_call_longest(&op->call, op->barrier->size) * op->element;

    op->is_small = true; /* no address in the notices */
    if (op->call.offer != NULL) {
        op->way = SMP_BY_MEETING;
        op->steps = SMP_DEVICES_STEPS;
    } else if (most <= ROUND_BYTES && most <= smp_exchange_half(op->devices.exchange)) {
        smp_plan_rounds(op, 0);
    } else {
        op->way = SMP_BY_READING;
        op->steps = 2;
    }
}

static void
take_memory(smp_collective *op)
{
    op->way = SMP_BY_MEMORY;
    op->steps = op->call.operation == SMP_ALL_REDUCE ? 3 : 2;
}

void
smp_plan_way(smp_collective *op, size_t most)
{
    size_t n = (size_t)op->barrier->size;
    size_t cells = op->shared ? 1 : n;
    size_t all = most * op->element * cells;
    size_t elements;

    op->cell = (SMP_SLOT_BYTES - op->header) / cells;
    op->cell = op->cell >= 64 ? op->cell / 64 * 64 : op->cell / 8 * 8;
    elements = op->cell / op->element;
    op->is_small = all < MEMORY_BYTES || smp_call_has_columns(&op->call);
    op->is_large = most * op->element * n * n >= UNCACHED_BYTES;
    if (!op->is_small && reads(op)) {
        take_memory(op);
    } else if (op->call.operation == SMP_ALL_REDUCE && n > 1 &&
               (all > op->cell || all * n > FLAT_BYTES)) {
        op->way = SMP_BY_SPLIT;
        op->steps = 2 * ((most + elements - 1) / elements);
    } else {
        op->way = SMP_BY_SLOTS;
        op->steps = op->data_step + (most + elements - 1) / elements;
        op->steps += op->steps == 0;
    }
}

static bool
all_in_arenas(const smp_collective *op, const uint64_t *addresses, size_t bytes)
{
    for (int m = 0; m < op->barrier->size; m++) {
        if (!smp_epoch_barrier_in_arena(op->barrier, m, addresses[m], bytes)) {
            return false;
        }
    }
    return true;
}

void
smp_plan_mapped(smp_collective *op)
{
    size_t all = 0;

    if (op->is_small) {
        return;
    }
    for (int m = 0; m < op->barrier->size; m++) {
        all += op->call.operation == SMP_REDUCE_SCATTER ? op->pushes[m].count
                                                        : op->pulls[m].count;
    }
    all *= op->element;
    switch (op->call.operation) {
    case SMP_ALL_GATHER:
        op->writes = all_in_arenas(op, op->outs, all);
        for (int m = 0; op->writes && m < op->barrier->size; m++) {
            op->targets[m] = smp_epoch_barrier_mapped(op->barrier, m, op->outs[m], all);
        }
        if (op->writes) {
            take_memory(op);
        }
        break;
    case SMP_REDUCE_SCATTER:
        if (all_in_arenas(op, op->ins, all)) {
            take_memory(op);
        }
        break;
    case SMP_ALL_REDUCE:
        all = op->call.count * op->element;
        if (all_in_arenas(op, op->ins, all) && all_in_arenas(op, op->outs, all)) {
            take_memory(op);
        }
        break;
    default:
        break;
    }
}

void
smp_plan_all_to_all(smp_collective *op, size_t most)
{
    for (int m = 0; m < op->barrier->size; m++) {
        size_t from = 0;

        for (int to = 0; to < op->barrier->self; to++) {
            from += smp_plan_counts(op, m)[to];
        }
        op->pulls[m].from = from;
    }
    smp_plan_way(op, most);
}
