/* A chain of mixed numbers, and a table of counts. */
#include "server/calls.h"

#include <stdlib.h>

#include "common/mix.h"

#define FIRST_ROOM 16

struct smp_call_count {
    uint64_t module;
    uint32_t times; /* 0: nothing here */
};

uint64_t
smp_call_of_root(int32_t microbatch)
{
    return smp_mix(0, (uint64_t)microbatch);
}

uint64_t
smp_call_of(uint64_t caller, uint64_t module, uint32_t time, smp_phase phase)
{
    return smp_mix(smp_mix(caller, module), (uint64_t)time * SMP_PHASES + phase);
}

uint64_t
smp_call_of_backward(uint64_t forward)
{
    return smp_mix(forward, UINT64_MAX);
}

/* The module's place, present or free: there is room. */
static struct smp_call_count *
find(const smp_calls *calls, uint64_t module)
{
    size_t at = (size_t)smp_mix(0, module);

    for (;; at++) {
        struct smp_call_count *count = &calls->counts[at & (calls->room - 1)];

        if (count->times == 0 || count->module == module) {
            return count;
        }
    }
}

static smp_status
grow(smp_calls *calls)
{
    smp_calls more = {.room = calls->room == 0 ? FIRST_ROOM : 2 * calls->room,
                      .used = calls->used};

    more.counts = calloc(more.room, sizeof(*more.counts));
    if (more.counts == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < calls->room; i++) {
        if (calls->counts[i].times > 0) {
            *find(&more, calls->counts[i].module) = calls->counts[i];
        }
    }
    free(calls->counts);
    *calls = more;
    return SMP_OK;
}

smp_status
smp_calls_count(smp_calls *calls, uint64_t module, uint32_t *before)
{
    struct smp_call_count *count;

    if (2 * calls->used >= calls->room) {
        smp_status status = grow(calls);

        if (status != SMP_OK) {
            return status;
        }
    }
    count = find(calls, module);
    calls->used += count->times == 0;
    count->module = module;
    *before = count->times++;
    return SMP_OK;
}

void
smp_calls_fini(smp_calls *calls)
{
    free(calls->counts);
    *calls = (smp_calls){0};
}
