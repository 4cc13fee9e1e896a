/* The order of preference is a table: a place for each kind in each phase. */
#include "server/choice.h"

/* Lower goes first. */
static const uint8_t places[SMP_READY_KINDS][SMP_PHASES] = {
    [SMP_READY_ISSUE] = {[SMP_FORWARD] = 0, [SMP_BACKWARD] = 0},
    [SMP_READY_OVER] = {[SMP_FORWARD] = 1, [SMP_BACKWARD] = 2},
    [SMP_READY_BALLOT] = {[SMP_FORWARD] = 1, [SMP_BACKWARD] = 2},
    [SMP_READY_RESPONSE] = {[SMP_FORWARD] = 1, [SMP_BACKWARD] = 2},
    [SMP_READY_REQUEST] = {[SMP_FORWARD] = 5, [SMP_BACKWARD] = 2},
    [SMP_READY_GATE] = {[SMP_FORWARD] = 4, [SMP_BACKWARD] = 4},
    [SMP_READY_TURN] = {[SMP_FORWARD] = 6, [SMP_BACKWARD] = 3},
};

bool
smp_ready_is_same(const smp_ready *a, const smp_ready *b)
{
    return a->kind == b->kind && a->phase == b->phase &&
           a->microbatch == b->microbatch && a->call == b->call;
}

ptrdiff_t
smp_ready_find(const smp_ready *run, const smp_ready *ready, size_t n)
{
    ptrdiff_t first = -1;

    for (size_t i = 0; i < n; i++) {
        if (smp_ready_is_same(run, &ready[i]) &&
            (first < 0 || ready[i].arrival < ready[first].arrival)) {
            first = (ptrdiff_t)i;
        }
    }
    return first;
}

static bool
goes_before(const smp_ready *a, const smp_ready *b)
{
    const uint8_t left = places[a->kind][a->phase];
    const uint8_t right = places[b->kind][b->phase];

    if (left != right) {
        return left < right;
    }
    if (a->microbatch != b->microbatch) {
        return a->microbatch < b->microbatch;
    }
    return a->arrival < b->arrival;
}

static bool
is_message(const smp_ready *ready)
{
    return ready->kind == SMP_READY_RESPONSE || ready->kind == SMP_READY_REQUEST;
}

static bool
is_forward_request(const smp_ready *ready)
{
    return ready->kind == SMP_READY_REQUEST && ready->phase == SMP_FORWARD;
}

ptrdiff_t
smp_choose(const smp_ready *ready, size_t n, bool *overtaken)
{
    ptrdiff_t best = -1;
    ptrdiff_t forward = -1; /* the first request of one */
    size_t    backwards = 0;

    for (size_t i = 0; i < n; i++) {
        if (best < 0 || goes_before(&ready[i], &ready[best])) {
            best = (ptrdiff_t)i;
        }
        if (is_forward_request(&ready[i]) &&
            (forward < 0 || goes_before(&ready[i], &ready[forward]))) {
            forward = (ptrdiff_t)i;
        }
        backwards += is_message(&ready[i]) && ready[i].phase == SMP_BACKWARD;
    }
    if (best < 0 || !is_message(&ready[best]) || ready[best].phase != SMP_BACKWARD) {
        return best;
    }
    *overtaken = !*overtaken && backwards == 1 &&
                 ready[best].kind == SMP_READY_REQUEST && forward >= 0;
    return *overtaken ? forward : best;
}
