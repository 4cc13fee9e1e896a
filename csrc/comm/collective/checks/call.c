/* A call's notice, and its ranges. */
#include "comm/collective/checks/call.h"

#include "comm/collective/kernels/reduce.h"

uint64_t
smp_call_bytes(const smp_call *call, int n, int self)
{
    bool gives_all = call->operation == SMP_REDUCE_SCATTER ||
                     call->operation == SMP_ALL_TO_ALL ||
                     (call->operation == SMP_SCATTER && call->root == self);
    size_t elements = call->count * (gives_all ? (size_t)n : 1);

    if (call->operation == SMP_BARRIER) {
        return 0;
    }
    if (call->counts != NULL) {
        elements = 0;
        for (int m = 0; m < n; m++) {
            elements += gives_all || m == self ? call->counts[m] : 0;
        }
    }
    return (uint64_t)elements * smp_dtype_bytes(call->dtype);
}

smp_range
smp_range_window(smp_range range, size_t skip, size_t most)
{
    if (skip >= range.count) {
        return (smp_range){range.from, range.to, 0};
    }
    range.count -= skip;
    range.count = range.count < most ? range.count : most;
    range.from += skip;
    range.to += skip;
    return range;
}

const char *
smp_operation_name(smp_operation operation)
{
    static const char *const names[SMP_OPERATIONS] = {
        [SMP_BARRIER] = "barrier",       [SMP_ALL_REDUCE] = "all-reduce",
        [SMP_REDUCE] = "reduce",         [SMP_REDUCE_SCATTER] = "reduce-scatter",
        [SMP_ALL_GATHER] = "all-gather", [SMP_BROADCAST] = "broadcast",
        [SMP_GATHER] = "gather",         [SMP_SCATTER] = "scatter",
        [SMP_ALL_TO_ALL] = "all-to-all",
    };

    return (unsigned)operation < SMP_OPERATIONS ? names[operation] : "unknown";
}

bool
smp_operation_reduces(smp_operation operation)
{
    return operation == SMP_ALL_REDUCE || operation == SMP_REDUCE ||
           operation == SMP_REDUCE_SCATTER;
}

bool
smp_operation_has_root(smp_operation operation)
{
    return operation == SMP_REDUCE || operation == SMP_BROADCAST ||
           operation == SMP_GATHER || operation == SMP_SCATTER;
}

static bool
may_be_uneven(smp_operation operation)
{
    return operation == SMP_REDUCE_SCATTER || operation == SMP_ALL_GATHER ||
           operation == SMP_ALL_TO_ALL;
}

static size_t
count_of(const size_t *counts, size_t count, int member)
{
    return counts != NULL ? counts[member] : count;
}

bool
smp_call_has_columns(const smp_call *call)
{
    return call->in_rows != 0 || call->out_rows != 0;
}

/* Whether the operation has rows on these sides, and they divide the counts. */
static bool
rows_fit(const smp_call *call, int n)
{
    bool exchanges = call->operation == SMP_ALL_TO_ALL;
    bool cuts = exchanges || call->operation == SMP_REDUCE_SCATTER;
    bool joins = exchanges || call->operation == SMP_ALL_GATHER;

    if ((call->in_rows != 0 && !cuts) || (call->out_rows != 0 && !joins)) {
        return false;
    }
    for (int m = 0; m < n; m++) {
        size_t in = count_of(call->counts, call->count, m);
        size_t out = exchanges ? count_of(call->out_counts, call->count, m) : in;

        if ((call->in_rows != 0 && in % call->in_rows != 0) ||
            (call->out_rows != 0 && out % call->out_rows != 0)) {
            return false;
        }
    }
    return true;
}

/* Whether a call makes sense by itself. */
static bool
is_valid(const smp_call *call, int size)
{
    size_t n = (size_t)size;
    size_t limit = SIZE_MAX / 16 / n;

    if ((unsigned)call->operation >= SMP_OPERATIONS ||
        (unsigned)call->dtype >= SMP_DTYPES || call->count > limit) {
        return false;
    }
    if (smp_operation_reduces(call->operation) &&
        ((unsigned)call->reduction >= SMP_REDUCTIONS ||
         !smp_reduction_defined(call->reduction, call->dtype))) {
        return false;
    }
    if (smp_operation_has_root(call->operation) &&
        (call->root < 0 || call->root >= size)) {
        return false;
    }
    if (call->counts != NULL &&
        (!may_be_uneven(call->operation) ||
         (call->operation == SMP_ALL_TO_ALL) != (call->out_counts != NULL))) {
        return false;
    }
    if (call->operation != SMP_ALL_GATHER &&
        (call->gather != NULL || call->offer != NULL || call->hints.sparse != 0 ||
         call->hints.assumed != 0)) {
        return false;
    }
    for (size_t m = 0; m < n && call->counts != NULL; m++) {
        if (call->counts[m] > limit ||
            (call->out_counts != NULL && call->out_counts[m] > limit)) {
            return false;
        }
    }
    return !smp_call_has_columns(call) || rows_fit(call, size);
}

bool
smp_call_copy(const smp_call *call, int n, smp_call *out)
{
    if (!is_valid(call, n)) {
        return false;
    }
    *out = *call;
    if (!may_be_uneven(call->operation)) {
        out->counts = NULL;
    }
    if (out->counts == NULL || call->operation != SMP_ALL_TO_ALL) {
        out->out_counts = NULL;
    }
    return true;
}

size_t
smp_call_lists(const smp_call *call)
{
    return (call->counts != NULL ? 1u : 0u) + (call->out_counts != NULL ? 1u : 0u);
}

smp_range
smp_call_range(const smp_call *call, int self, int source, int receiver)
{
    smp_range range = {0, 0, 0};

    switch (call->operation) {
    case SMP_ALL_REDUCE:
        range.count = call->count;
        break;
    case SMP_REDUCE:
        range.count = receiver == call->root ? call->count : 0;
        break;
    case SMP_REDUCE_SCATTER:
        for (int m = 0; m < receiver; m++) {
            range.from += count_of(call->counts, call->count, m);
        }
        range.count = count_of(call->counts, call->count, receiver);
        break;
    case SMP_ALL_GATHER:
        for (int m = 0; m < source; m++) {
            range.to += count_of(call->counts, call->count, m);
        }
        range.count = count_of(call->counts, call->count, source);
        break;
    case SMP_BROADCAST:
        range.count = source == call->root ? call->count : 0;
        break;
    case SMP_GATHER:
        range.to = (size_t)source * call->count;
        range.count = receiver == call->root ? call->count : 0;
        break;
    case SMP_SCATTER:
        range.from = (size_t)receiver * call->count;
        range.count = source == call->root ? call->count : 0;
        break;
    case SMP_ALL_TO_ALL:
        for (int m = 0; m < receiver && source == self; m++) {
            range.from += count_of(call->counts, call->count, m);
        }
        for (int m = 0; m < source && receiver == self; m++) {
            range.to += count_of(call->out_counts, call->count, m);
        }
        range.count = source == self ? count_of(call->counts, call->count, receiver)
                                     : count_of(call->out_counts, call->count, source);
        if (call->counts == NULL) {
            range.from = (size_t)receiver * call->count;
        }
        break;
    case SMP_BARRIER:
    case SMP_OPERATIONS:
        break;
    }
    return range;
}

size_t
smp_call_longest(const smp_call *call, int n)
{
    size_t most = call->count;

    if (call->counts != NULL) {
        most = 0;
        for (int m = 0; m < n; m++) {
            most = call->counts[m] > most ? call->counts[m] : most;
        }
    }
    return call->operation == SMP_BARRIER ? 0 : most;
}

void
smp_call_say(const smp_call *call, int n, uint64_t sequence, smp_notice *notice,
             uint64_t *counts)
{
    size_t lists = smp_call_lists(call);
    bool   is_barrier = call->operation == SMP_BARRIER;

    notice->sequence = sequence;
    notice->operation = (uint8_t)call->operation;
    notice->dtype = (uint8_t)(is_barrier ? 0 : call->dtype);
    notice->kind = is_barrier ? 0 : call->kind;
    notice->reduction =
        (uint8_t)(smp_operation_reduces(call->operation) ? call->reduction : 0);
    notice->uneven = (uint8_t)lists;
    notice->on_device = (uint8_t)(call->gather != NULL  ? SMP_NOTICE_GATHERS
                                  : call->offer != NULL ? SMP_NOTICE_MEETS
                                                        : 0);
    notice->sparse = call->hints.sparse;
    notice->columns = smp_call_has_columns(call);
    if (smp_operation_has_root(call->operation)) {
        notice->root = call->root;
    } else {
        notice->key = call->hints.key;
    }
    notice->count = lists != 0 || is_barrier ? 0 : call->count;
    if (call->operation == SMP_ALL_GATHER) {
        notice->assumed = call->hints.assumed;
    } else {
        notice->factor = call->factor;
    }
    notice->in = (uint64_t)(uintptr_t)call->in;
    notice->out = (uint64_t)(uintptr_t)call->out;
    for (int m = 0; m < n && lists != 0; m++) {
        counts[m] = call->counts[m];
        if (lists == 2) {
            counts[n + m] = call->out_counts[m];
        }
    }
}

void
smp_call_say_again(const smp_notice *said, smp_notice *notice)
{
    notice->sequence = said->sequence;
    notice->operation = said->operation;
    notice->dtype = said->dtype;
    notice->kind = said->kind;
    notice->reduction = said->reduction;
    notice->uneven = said->uneven;
    notice->root = said->root; /* and the key, in the same place */
    notice->count = said->count;
    notice->sparse = said->sparse;
    notice->columns = said->columns;
    notice->assumed = said->assumed; /* and the factor, likewise */
}
