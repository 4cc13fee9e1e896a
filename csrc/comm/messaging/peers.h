/* The states of the other ranks: present, ended in order, or lost.
 *
 * Threads  any; init, fini and open: one, without any other.
 */
#ifndef SMP_COMM_MESSAGING_PEERS_H
#define SMP_COMM_MESSAGING_PEERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

/* A peer's life goes from left to right; only OPEN has two ways on. */
typedef enum {
    SMP_PEER_UNKNOWN,
    SMP_PEER_OPEN,
    SMP_PEER_LEFT,
    SMP_PEER_LOST
} smp_peer_state;

typedef struct {
    int              size;
    _Atomic uint8_t *states; /* owned: [size] of smp_peer_state */
    _Atomic int      open;   /* the number of those SMP_PEER_OPEN */
    _Atomic uint64_t fault;  /* the first lost rank and why; 0: none is */
} smp_peers;

/* SMP_ERR_NO_MEMORY.  fini takes an all-zero one. */
smp_status smp_peers_init(smp_peers *peers, int size);
void       smp_peers_fini(smp_peers *peers);

void smp_peers_open(smp_peers *peers, int rank);

/* Nothing more comes from `rank`, if it was open: it has left (SMP_ERR_CLOSED) or is
 * lost.  `over`: the transport's name, for the log. */
void smp_peers_close(smp_peers *peers, int rank, smp_status why, const char *over);

static inline smp_peer_state
smp_peers_state(const smp_peers *peers, int rank)
{
    return (smp_peer_state)atomic_load(&peers->states[rank]);
}

/* Whether there are others and none is open any more; read before smp_peers_fault(). */
static inline bool
smp_peers_all_closed(const smp_peers *peers)
{
    return atomic_load(&peers->open) == 0 && peers->size > 1;
}

/* The reason of the first lost rank; SMP_OK: none is. */
smp_status smp_peers_fault(const smp_peers *peers);

/* The first lost one, or -1. */
int smp_peers_lost(const smp_peers *peers);

/* As smp_comm_someone_died(). */
bool smp_peers_someone_died(void);

#endif
