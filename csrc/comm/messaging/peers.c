/* Their states, and the first fault as one value. */
#include "comm/messaging/peers.h"

#include <stdlib.h>

#include "common/jitter.h"
#include "common/log.h"

static _Atomic bool someone_died; /* a peer of any comm of this process; for good */

smp_status
smp_peers_init(smp_peers *peers, int size)
{
    *peers = (smp_peers){.size = size,
                         .states = calloc((size_t)size, sizeof(*peers->states))};
    return peers->states != NULL ? SMP_OK : SMP_ERR_NO_MEMORY;
}

void
smp_peers_fini(smp_peers *peers)
{
    free(peers->states);
}

void
smp_peers_open(smp_peers *peers, int rank)
{
    atomic_store(&peers->states[rank], SMP_PEER_OPEN);
    atomic_fetch_add(&peers->open, 1);
}

void
smp_peers_close(smp_peers *peers, int rank, smp_status why, const char *over)
{
    uint8_t  from = SMP_PEER_OPEN;
    uint8_t  to = why == SMP_ERR_CLOSED ? SMP_PEER_LEFT : SMP_PEER_LOST;
    uint64_t none = 0;

    if (!atomic_compare_exchange_strong(&peers->states[rank], &from, to)) {
        return;
    }
    if (why == SMP_ERR_PEER_LOST) {
        atomic_store(&someone_died, true); /* before any thread can be told */
    }
    if (to == SMP_PEER_LOST) {
        atomic_compare_exchange_strong(&peers->fault, &none,
                                       (uint64_t)why << 32 | ((uint64_t)rank + 1));
        smp_log(SMP_LOG_INFO, "rank %d is lost, over %s: %s", rank, over,
                smp_status_text(why));
    }
    smp_jitter();
    /* Last: a thread that sees no rank left also sees the reason. */
    atomic_fetch_sub(&peers->open, 1);
}

smp_status
smp_peers_fault(const smp_peers *peers)
{
    return (smp_status)(atomic_load(&peers->fault) >> 32);
}

int
smp_peers_lost(const smp_peers *peers)
{
    int rank = (int)(atomic_load(&peers->fault) & UINT32_MAX) - 1;

    /* A sender may learn of the loss from the state, a moment earlier. */
    for (int r = 0; rank < 0 && r < peers->size; r++) {
        if (smp_peers_state(peers, r) == SMP_PEER_LOST) {
            rank = r;
        }
    }
    return rank;
}

bool
smp_peers_someone_died(void)
{
    return atomic_load(&someone_died);
}
