/* The members' writes to their slots, and reads of all. */
#include "comm/collective/intra_host/collective.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/intra_host/plan.h"
#include "comm/collective/kernels/columns.h"
#include "comm/collective/kernels/copy.h"

/* Bytes written to one member after the other while in the first cache. */
#define WRITE_BYTES ((size_t)16 << 10)

/* Bytes fetched at a time for a reduction (from all members together, so that they stay
 * in the second cache), or a copy. */
#define FETCH_BYTES ((size_t)256 << 10)
#define COPY_BYTES ((size_t)1 << 20)

/* The least of one member's piece of FETCH_BYTES. */
#define MIN_FETCH ((size_t)4 << 10)

/* Elements of a member's piece of a fetch. */
static size_t
fetch_elements(const smp_collective *op)
{
    size_t bytes = FETCH_BYTES / (size_t)op->barrier->size;

    return (bytes < MIN_FETCH ? MIN_FETCH : bytes) / 64 * 64 / op->element;
}

/* ----------------------------------------------------------------------- filling */

/* The window of a range through the slots in `round`. */
static smp_range
window(const smp_collective *op, smp_range range, size_t round)
{
    size_t elements = op->cell / op->element;

    return smp_range_window(range, round * elements, elements);
}

/* Bytes of a member's tensor before the present round, and in it. */
static size_t
round_skip(const smp_collective *op)
{
    return (op->step - op->data_step) * smp_exchange_half(op->devices.exchange);
}

static size_t
round_bytes(const smp_collective *op, int member)
{
    size_t half = smp_exchange_half(op->devices.exchange);
    size_t all = op->pulls[member].count * op->element;
    size_t skip = round_skip(op);
    size_t left = all > skip ? all - skip : 0;

    return left < half ? left : half;
}

static uint8_t *
cell_of(const smp_collective *op, smp_slot *slot, int member)
{
    return slot->data + op->header + (op->shared ? 0 : (size_t)member * op->cell);
}

/* Copies the window of a range of `in`. */
static void
take_in(const smp_collective *op, smp_range range, smp_range w, uint8_t *to)
{
    const uint8_t *in = op->call.in;
    size_t         rows = op->call.in_rows;

    if (rows == 0) {
        memcpy(to, in + w.from * op->element, w.count * op->element);
        return;
    }
    smp_columns_take(&(smp_columns){op->in_stride, range.from * op->element / rows,
                                    range.count * op->element / rows},
                     in, (w.from - range.from) * op->element, w.count * op->element,
                     to);
}

/* Copies to the window of a range of `out`; from there: nothing to do. */
static void
put_out(const smp_collective *op, smp_range range, smp_range w, const uint8_t *from)
{
    uint8_t *out = op->call.out;
    size_t   rows = op->call.out_rows;

    if (rows != 0) {
        smp_columns_put(&(smp_columns){op->out_stride, range.to * op->element / rows,
                                       range.count * op->element / rows},
                        out, (w.to - range.to) * op->element, w.count * op->element,
                        from);
    } else if (out + w.to * op->element != from) {
        memmove(out + w.to * op->element, from, w.count * op->element);
    }
}

/* Puts this step's data into `slot`; of columns, this member's own, too. */
static void
fill(smp_collective *op, smp_slot *slot)
{
    const uint8_t *in = op->call.in;
    size_t         round;

    if (op->way >= SMP_BY_MEMORY || op->step < op->data_step) {
        return;
    }
    if (op->way == SMP_BY_SPLIT) {
        if (op->step % 2 == 0) {
            smp_range w = window(op, (smp_range){0, 0, op->call.count}, op->step / 2);

            memcpy(slot->data, in + w.from * op->element, w.count * op->element);
        }
        return;
    }
    round = op->step - op->data_step;
    for (int m = 0; m < op->barrier->size; m++) {
        smp_range w = window(op, op->pushes[m], round);

        if ((m != op->barrier->self || op->call.in_rows != 0) && w.count != 0) {
            take_in(op, op->pushes[m], w, cell_of(op, slot, m));
            if (op->shared) {
                return;
            }
        }
    }
}

/* ------------------------------------------------------------------------ reading */

/* Reduces the found terms to the partials' places. */
static void
reduce_partials(smp_collective *op, size_t to, size_t count)
{
    size_t bytes = smp_dtype_bytes(smp_term_dtype(op->call.dtype));

    for (int i = 0; i < op->npartials; i++) {
        const smp_partial *p = &op->partials[i];

        if (p->n == 1) {
            memcpy(p->out + to * op->element, op->terms[p->first], count * op->element);
        } else {
            smp_reduce_term(op->kernels, op->call.reduction, op->call.dtype,
                            p->out + to * bytes, op->terms + p->first,
                            op->factors + p->first, p->n, count, op->scratch);
        }
    }
}

/* Reduces the found terms into out[to .. to + count). */
static void
reduce_terms(smp_collective *op, size_t to, size_t count)
{
    if (op->npartials != 0) {
        reduce_partials(op, to, count);
        return;
    }
    smp_reduce(op->kernels, op->call.reduction, op->call.dtype,
               (uint8_t *)op->call.out + to * op->element, op->terms, op->factors,
               op->barrier->size, count, op->scratch);
}

static void
collect_slots(smp_collective *op)
{
    const uint8_t *in = op->call.in;
    int            self = op->barrier->self;
    size_t         round = op->step - op->data_step;
    smp_range      w = {0, 0, 0};

    for (int m = 0; m < op->barrier->size; m++) {
        smp_slot *slot = smp_epoch_barrier_slot(op->barrier, m, op->barrier->step);

        w = window(op, op->pulls[m], round);
        op->terms[m] = m == self && op->call.in_rows == 0 ? in + w.from * op->element
                                                          : cell_of(op, slot, self);
        if (!smp_operation_reduces(op->call.operation) && w.count != 0 &&
            op->call.out != NULL) {
            put_out(op, op->pulls[m], w, op->terms[m]);
        }
    }
    if (smp_operation_reduces(op->call.operation) && w.count != 0) {
        reduce_terms(op, w.to, w.count);
    }
}

static void
collect_split(smp_collective *op)
{
    smp_epoch_barrier *barrier = op->barrier;
    uint8_t           *out = op->call.out;
    smp_range          w = window(op, (smp_range){0, 0, op->call.count}, op->step / 2);

    if (op->step % 2 == 0) {
        smp_range part = smp_plan_part(op, w.count, barrier->self);
        smp_slot *next =
            smp_epoch_barrier_slot(barrier, barrier->self, barrier->step + 1);
        size_t skip = part.from * op->element;

        for (int m = 0; m < barrier->size; m++) {
            op->terms[m] =
                smp_epoch_barrier_slot(barrier, m, barrier->step)->data + skip;
        }
        if (part.count != 0) {
            reduce_terms(op, w.to + part.to, part.count);
            memcpy(next->data + skip, out + (w.to + part.to) * op->element,
                   part.count * op->element);
        }
        return;
    }
    for (int m = 0; m < barrier->size; m++) {
        smp_range part = smp_plan_part(op, w.count, m);

        if (m != barrier->self && part.count != 0) {
            memcpy(out + (w.to + part.to) * op->element,
                   smp_epoch_barrier_slot(barrier, m, barrier->step)->data +
                       part.from * op->element,
                   part.count * op->element);
        }
    }
}

/* Reduces the next piece of this member's pull. */
static smp_status
reduce_memory(smp_collective *op, smp_range range, bool *whole, int *member)
{
    size_t   piece = fetch_elements(op);
    size_t   count = range.count - op->turn_offset;
    uint8_t *to = op->fetched;

    count = count < piece ? count : piece;
    for (int m = 0; m < op->barrier->size && count != 0; m++) {
        size_t     skip = (range.from + op->turn_offset) * op->element;
        uint64_t   at = op->ins[m] + skip;
        size_t     bytes = count * op->element;
        smp_status status;

        op->terms[m] = smp_epoch_barrier_mapped(op->barrier, m, at, bytes);
        if (op->terms[m] != NULL) {
            continue;
        }
        status = smp_epoch_barrier_copy(op->barrier, m, to, at, bytes);
        if (status != SMP_OK) {
            *member = m;
            return status;
        }
        op->terms[m] = to;
        to += piece * op->element;
    }
    if (count != 0) {
        reduce_terms(op, range.to + op->turn_offset, count);
    }
    op->turn_offset += count;
    *whole = op->turn_offset == range.count;
    return SMP_OK;
}

static void
copy_bytes(const smp_collective *op, uint8_t *to, const uint8_t *from, size_t bytes)
{
    uintptr_t a = (uintptr_t)to;
    uintptr_t b = (uintptr_t)from;

    if (a == b) {
        return; /* in place */
    }
    if (op->is_large && (a + bytes <= b || b + bytes <= a)) {
        smp_copy_uncached(to, from, bytes);
    } else {
        memmove(to, from, bytes);
    }
}

/* Copies the next piece of member `m`'s range at `from`; true: the last one. */
static smp_status
copy_memory(smp_collective *op, int m, uint64_t from, smp_range range, bool *last)
{
    size_t     piece = COPY_BYTES / op->element;
    size_t     count = range.count - op->turn_offset;
    uint8_t   *to = op->call.out;
    smp_status status = SMP_OK;

    count = count < piece ? count : piece;
    if (count != 0 && to != NULL) {
        uint64_t       at = from + (range.from + op->turn_offset) * op->element;
        size_t         bytes = count * op->element;
        const uint8_t *here = smp_epoch_barrier_mapped(op->barrier, m, at, bytes);

        to += (range.to + op->turn_offset) * op->element;
        if (here != NULL) {
            copy_bytes(op, to, here, bytes);
        } else {
            status = smp_epoch_barrier_copy(op->barrier, m, to, at, bytes);
        }
    }
    op->turn_offset += count;
    *last = op->turn_offset == range.count;
    return status;
}

/* One piece of the member in turn; members begin with different ones. */
static smp_status
copy_turn(smp_collective *op, bool *whole, int *member)
{
    int        n = op->barrier->size;
    int        m = (op->barrier->self + op->turn) % n;
    bool       gathers = op->call.operation == SMP_ALL_REDUCE; /* the others' parts */
    smp_range  range = gathers ? smp_plan_part(op, op->call.count, m) : op->pulls[m];
    bool       last = true;
    smp_status status = SMP_OK;

    if (range.count != 0 && !(gathers && m == op->barrier->self)) {
        status = copy_memory(op, m, gathers ? op->outs[m] : op->ins[m], range, &last);
    }
    if (status != SMP_OK) {
        *member = m;
        return status;
    }
    if (last) {
        op->turn++;
        op->turn_offset = 0;
    }
    *whole = op->turn == n;
    return SMP_OK;
}

/* Writes the next piece of this member's `in` into all outputs. */
static void
write_turn(smp_collective *op, bool *whole)
{
    smp_range      range = op->pushes[op->barrier->self];
    size_t         piece = COPY_BYTES / op->element;
    size_t         left = range.count - op->turn_offset;
    const uint8_t *in = op->call.in;
    size_t         to = (range.to + op->turn_offset) * op->element;
    size_t         bytes = (left < piece ? left : piece) * op->element;

    in += (range.from + op->turn_offset) * op->element;
    for (size_t at = 0; at < bytes; at += WRITE_BYTES) {
        size_t now = bytes - at < WRITE_BYTES ? bytes - at : WRITE_BYTES;

        for (int m = 0; m < op->barrier->size; m++) {
            copy_bytes(op, op->targets[m] + to + at, in + at, now);
        }
    }
    op->turn_offset += bytes / op->element;
    *whole = op->turn_offset == range.count;
}

static smp_status
collect_memory(smp_collective *op, bool *whole, int *member)
{
    smp_status status;
    smp_range  range;

    *whole = true;
    if (op->step + 1 == op->steps) { /* the last is only waiting */
        return SMP_OK;
    }
    /* A member uses its tensors again after giving up, perhaps before this one came. */
    status = smp_epoch_barrier_given_up(op->barrier, member);
    if (status != SMP_OK) {
        return status;
    }
    if (op->writes) {
        write_turn(op, whole);
        return SMP_OK;
    }
    if (!smp_operation_reduces(op->call.operation) || op->step == 1) {
        return copy_turn(op, whole, member);
    }
    range = op->call.operation == SMP_ALL_REDUCE
                ? smp_plan_part(op, op->call.count, op->barrier->self)
                : op->pulls[op->barrier->self];
    return reduce_memory(op, range, whole, member);
}

static smp_status
collect_device(smp_collective *op, int *member)
{
    for (int m = 0; m < op->barrier->size; m++) {
        op->lengths[m] = round_bytes(op, m);
    }
    if (!smp_exchange_drain(op->devices.exchange, op->call.gather, round_skip(op),
                            op->lengths, op->why) ||
        (op->step + 1 == op->steps &&
         !smp_exchange_finish(op->devices.exchange, op->call.gather, op->why))) {
        *member = op->barrier->self;
        return SMP_ERR_SYSTEM;
    }
    return SMP_OK;
}

/* The first steps of a gather where tensors lie. */
static smp_devices_next
go_on_reading(smp_collective *op)
{
    return op->step == 0 ? smp_devices_see(&op->devices, op->why)
                         : smp_devices_count(&op->devices);
}

static smp_status
collect_reading(smp_collective *op, int *member)
{
    smp_exchange *exchange = op->devices.exchange;
    smp_status    status;
    bool          done = false;

    if (op->step == op->data_step + 1) {
        done = smp_exchange_take_back(exchange, op->call.gather, op->why);
        *member = op->barrier->self;
        return done ? SMP_OK : SMP_ERR_SYSTEM;
    }
    switch (go_on_reading(op)) {
    case SMP_DEVICES_ROUNDS:
        smp_plan_rounds(op, op->step + 1);
        return SMP_OK;
    case SMP_DEVICES_VOTES:
        op->data_step = 1;
        op->steps = 3;
        return SMP_OK;
    case SMP_DEVICES_READ:
        /* A member uses its tensor again after giving up. */
        status = smp_epoch_barrier_given_up(op->barrier, member);
        if (status != SMP_OK) {
            return status;
        }
        for (int m = 0; m < op->barrier->size; m++) {
            op->lengths[m] = op->pulls[m].count * op->element;
        }
        atomic_fetch_add(&op->devices.reads, 1);
        done = smp_exchange_read(exchange, op->call.gather, op->lengths, op->why);
        break;
    case SMP_DEVICES_FAILED:
        break;
    }
    *member = op->barrier->self;
    return done ? SMP_OK : SMP_ERR_SYSTEM;
}

/* ---------------------------------------------------------------------- agreement */

static const smp_notice *
notice_of(const smp_collective *op, int member)
{
    return &smp_epoch_barrier_slot(op->barrier, member, op->barrier->step)->notice;
}

/* ------------------------------------------------------------------------- public */

smp_status
smp_collective_init(smp_collective *op, smp_epoch_barrier *barrier)
{
    size_t n = (size_t)barrier->size;
    size_t pieces = FETCH_BYTES / n < MIN_FETCH ? MIN_FETCH * n : FETCH_BYTES;

    *op = (smp_collective){
        .barrier = barrier,
        .kernels = smp_kernels_best(),
        .pulls = calloc(n, sizeof(smp_range)),
        .pushes = calloc(n, sizeof(smp_range)),
        .ins = calloc(n, sizeof(uint64_t)),
        .outs = calloc(n, sizeof(uint64_t)),
        .targets = calloc(n, sizeof(uint8_t *)),
        .factors = calloc(n, sizeof(double)),
        .terms = calloc(n, sizeof(void *)),
        .said = calloc(n, sizeof(smp_said)),
        .lengths = calloc(n, sizeof(size_t)),
        .devices = {.barrier = barrier},
        .scratch = aligned_alloc(64, SMP_REDUCE_SCRATCH),
        .fetched = aligned_alloc(64, pieces),
    };
    if (op->pulls == NULL || op->pushes == NULL || op->ins == NULL ||
        op->outs == NULL || op->targets == NULL || op->factors == NULL ||
        op->terms == NULL || op->said == NULL || op->lengths == NULL ||
        op->scratch == NULL || op->fetched == NULL) {
        smp_collective_fini(op);
        return SMP_ERR_NO_MEMORY;
    }
    return SMP_OK;
}

void
smp_collective_fini(smp_collective *op)
{
    free(op->pulls);
    free(op->pushes);
    free(op->ins);
    free(op->outs);
    free((void *)op->targets);
    free(op->factors);
    free((void *)op->terms);
    free(op->said);
    free(op->lengths);
    free(op->scratch);
    free(op->fetched);
}

/* The common part of every way to begin. */
static void
reset(smp_collective *op)
{
    op->element = smp_dtype_bytes(op->call.dtype);
    op->first = op->barrier->step + 1;
    op->step = 0;
    op->turn = 0;
    op->turn_offset = 0;
    op->writes = false;
}

smp_status
smp_collective_begin(smp_collective *op, const smp_call *call, uint64_t sequence)
{
    smp_epoch_barrier *barrier = op->barrier;
    smp_slot *slot = smp_epoch_barrier_slot(barrier, barrier->self, barrier->step + 1);
    size_t    lists;

    if (!smp_call_copy(call, barrier->size, &op->call) ||
        (op->call.gather != NULL && !op->devices.met)) {
        return SMP_ERR_INVALID;
    }
    lists = smp_call_lists(&op->call);
    reset(op);
    op->npartials = 0;
    op->header = (lists * (size_t)barrier->size * sizeof(uint64_t) + 63) / 64 * 64;
    op->shared = call->operation != SMP_REDUCE_SCATTER &&
                 call->operation != SMP_SCATTER && call->operation != SMP_ALL_TO_ALL;
    /* The number of steps is unknown until the other members' split sizes are there. */
    op->data_step = op->call.out_counts != NULL;
    smp_plan_ranges(op);
    if (op->call.gather != NULL || op->call.offer != NULL) {
        smp_plan_on_devices(op);
    } else {
        smp_plan_way(op, op->call.out_counts != NULL
                             ? 0
                             : smp_call_longest(&op->call, barrier->size));
    }
    smp_call_say(&op->call, barrier->size, sequence, &slot->notice,
                 (uint64_t *)(void *)slot->data);
    fill(op, slot);
    return SMP_OK;
}

smp_status
smp_collective_prepare(smp_collective *op)
{
    smp_devices *devices = &op->devices;
    int          self = op->barrier->self;
    bool         done = true;

    devices->skip = op->header;
    switch (op->way) {
    case SMP_BY_MEETING:
        smp_devices_prepare(devices, op->step, op->call.offer);
        break;
    case SMP_BY_READING:
        if (op->step == 0) {
            done = smp_devices_show(devices, op->call.gather,
                                    op->pulls[self].count * op->element, op->why);
        } else if (op->step == op->data_step) {
            smp_devices_vote(devices);
        }
        break;
    case SMP_BY_DEVICE:
        done = smp_exchange_fill(devices->exchange, op->call.gather, round_skip(op),
                                 round_bytes(op, self), op->why);
        break;
    default:
        break;
    }
    return done ? SMP_OK : SMP_ERR_SYSTEM;
}

void
smp_collective_finish(smp_collective *op)
{
    smp_exchange *exchange = op->devices.exchange;
    char          why[SMP_DRIVER_TEXT];

    /* A failure here leaves the mark never over. */
    if (op->way == SMP_BY_DEVICE && exchange != NULL) {
        (void)smp_exchange_finish(exchange, op->call.gather, why);
    } else if (op->way == SMP_BY_READING && exchange != NULL) {
        (void)smp_exchange_take_back(exchange, op->call.gather, why);
    }
}

void
smp_collective_begin_part(smp_collective *op, const smp_call *call,
                          const smp_local_part *part, const smp_notice *notice)
{
    smp_epoch_barrier *barrier = op->barrier;
    smp_slot *slot = smp_epoch_barrier_slot(barrier, barrier->self, barrier->step + 1);

    op->call = (smp_call){.operation = part->operation,
                          .dtype = call->dtype,
                          .reduction = call->reduction,
                          .in = part->in,
                          .out = part->out};
    reset(op);
    op->partials = part->partials;
    op->npartials = part->npartials;
    op->header = 0;
    op->shared = part->operation == SMP_ALL_GATHER;
    op->data_step = 0;
    smp_plan_way(op, part->most);
    smp_call_say_again(notice, &slot->notice);
    slot->notice.in = (uint64_t)(uintptr_t)part->in;
    slot->notice.out = (uint64_t)(uintptr_t)part->out;
    fill(op, slot);
}

void
smp_collective_see(smp_collective *op)
{
    for (int m = 0; m < op->barrier->size; m++) {
        const smp_notice *its = notice_of(op, m);

        op->ins[m] = its->in;
        op->outs[m] = its->out;
        op->factors[m] = its->factor;
    }
}

bool
smp_collective_agreed(smp_collective *op, smp_refusal *refusal)
{
    size_t most = 0;

    for (int m = 0; m < op->barrier->size; m++) {
        op->said[m] = (smp_said){
            .name = smp_comm_name(op->barrier->comm, op->barrier->members[m].rank),
            .notice = notice_of(op, m),
            .counts = smp_plan_counts(op, m)};
    }
    if (!smp_agreement(op->said, op->barrier->size, &most, refusal)) {
        return false;
    }
    smp_collective_see(op);
    smp_plan_mapped(op);
    if (op->call.out_counts != NULL) {
        smp_plan_all_to_all(op, most);
    }
    return true;
}

smp_status
smp_collective_collect(smp_collective *op, bool *whole, int *member)
{
    *whole = true;
    switch (op->way) {
    case SMP_BY_SLOTS:
        if (op->step >= op->data_step) {
            collect_slots(op);
        }
        return SMP_OK;
    case SMP_BY_SPLIT:
        collect_split(op);
        return SMP_OK;
    case SMP_BY_DEVICE:
        return collect_device(op, member);
    case SMP_BY_READING:
        return collect_reading(op, member);
    case SMP_BY_MEETING:
        smp_devices_collect(&op->devices, op->step);
        return SMP_OK;
    case SMP_BY_MEMORY:
        break;
    }
    return collect_memory(op, whole, member);
}

size_t
smp_collective_written(const smp_collective *op)
{
    size_t all = 0;

    for (int m = 0; m < op->barrier->size; m++) {
        all += op->pulls[m].count * op->element;
    }
    return all;
}

bool
smp_collective_next(smp_collective *op)
{
    smp_epoch_barrier *barrier = op->barrier;

    if (op->step + 1 >= op->steps) {
        return false;
    }
    op->step++;
    op->turn = 0;
    op->turn_offset = 0;
    fill(op, smp_epoch_barrier_slot(barrier, barrier->self, barrier->step + 1));
    return true;
}
