/* The order of microbatches at modules with changing buffers. */
#include "server/turns.h"

#include <stdlib.h>
#include <string.h>

struct smp_turns {
    int32_t  ngates;
    int32_t *expected; /* owned, by gate */
    int32_t  microbatches;
    int32_t *calls;        /* owned: calls[gate * microbatches + microbatch] */
    bool    *forward_done; /* owned, by microbatch */
};

smp_status
smp_turns_create(int32_t ngates, const int32_t *expected, smp_turns **out)
{
    smp_turns *turns = calloc(1, sizeof(*turns));

    if (turns == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    turns->expected = calloc((size_t)ngates + 1, sizeof(*turns->expected));
    if (turns->expected == NULL) {
        free(turns);
        return SMP_ERR_NO_MEMORY;
    }
    if (ngates > 0) {
        memcpy(turns->expected, expected, (size_t)ngates * sizeof(*expected));
    }
    turns->ngates = ngates;
    *out = turns;
    return SMP_OK;
}

void
smp_turns_destroy(smp_turns *turns)
{
    if (turns == NULL) {
        return;
    }
    free(turns->expected);
    free(turns->calls);
    free(turns->forward_done);
    free(turns);
}

smp_status
smp_turns_begin(smp_turns *turns, int32_t microbatches)
{
    free(turns->calls);
    free(turns->forward_done);
    turns->microbatches = 0;
    turns->calls =
        calloc((size_t)turns->ngates * (size_t)microbatches + 1, sizeof(*turns->calls));
    turns->forward_done =
        calloc((size_t)microbatches + 1, sizeof(*turns->forward_done));
    if (turns->calls == NULL || turns->forward_done == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    turns->microbatches = microbatches;
    return SMP_OK;
}

bool
smp_turns_may_enter(const smp_turns *turns, int32_t gate, int32_t microbatch)
{
    const int32_t *calls;

    if (gate < 0 || gate >= turns->ngates || microbatch >= turns->microbatches) {
        return true;
    }
    calls = turns->calls + (size_t)gate * (size_t)turns->microbatches;
    for (int32_t mb = 0; mb < microbatch; mb++) {
        bool all = turns->expected[gate] > 0 && calls[mb] >= turns->expected[gate];

        if (!all && !turns->forward_done[mb]) {
            return false;
        }
    }
    return true;
}

void
smp_turns_left(smp_turns *turns, int32_t gate, int32_t microbatch)
{
    int32_t *calls;

    if (gate < 0 || gate >= turns->ngates || microbatch < 0 ||
        microbatch >= turns->microbatches) {
        return;
    }
    calls = turns->calls + (size_t)gate * (size_t)turns->microbatches + microbatch;
    *calls += 1;
    if (*calls > turns->expected[gate]) {
        turns->expected[gate] = 0;
    }
}

void
smp_turns_forward_done(smp_turns *turns, int32_t microbatch)
{
    if (microbatch >= 0 && microbatch < turns->microbatches) {
        turns->forward_done[microbatch] = true;
    }
}
