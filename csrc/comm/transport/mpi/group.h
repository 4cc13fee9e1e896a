/* The connection of ranks over MPI: lifelines (comm/transport/connecting/lifeline.h) to
 * the wanted ranks, since MPI does not report a dead process, and a communicator of the
 * job's ranks alone.  Both are made from the ranks' cards.
 *
 * Threads  one, before the comm's own.
 */
#ifndef SMP_COMM_TRANSPORT_MPI_GROUP_H
#define SMP_COMM_TRANSPORT_MPI_GROUP_H

#include <mpi.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/transport/connecting/meet.h"
#include "common/deadline.h"
#include "common/status.h"

typedef struct {
    uint32_t magic;
    uint32_t version;
    int32_t  world_rank; /* in MPI_COMM_WORLD */
    int32_t  world_size;

    smp_tcp_card door; /* where the lifelines begin */
} smp_mpi_card;

/* A lifeline's bytes: everything up to the goodbye has arrived; last, its sender ends
 * by itself: as news, the sender has lost another rank or was never connected, and is
 * not the one to name. */
#define SMP_MPI_ARRIVED 'A'
#define SMP_MPI_LEFT 'L'

/* All but the door. */
void smp_mpi_card_fill(smp_mpi_card *card);

/* The world ranks of the job's `size` ranks into ranks[]; cards[rank] is not read,
 * `own` is in its place.  False: one has no card, or is not of this world as far as its
 * card tells. */
bool smp_mpi_world_ranks(const smp_mpi_card *own, int rank, int size,
                         const void *const *cards, const size_t *card_bytes,
                         int *ranks);

/* Gives a lifeline to each wanted rank to `take` (smp_tcp_connect); the cards have
 * passed smp_mpi_world_ranks().  Closes the door.  SMP_ERR_UNREACHABLE: *failed has not
 * come in time.  Other errors as smp_tcp_connect()'s. */
smp_status smp_mpi_meet(smp_tcp_door *door, const char *job, int rank, int size,
                        const void *const *cards, const bool *wanted,
                        const smp_deadline *deadline, smp_tcp_take *take, void *arg,
                        bool *met, int *failed);

/* A communicator with ranks[r] as rank r and errors returned; collective over these
 * ranks, with the same job; fds[] are the lifelines, borrowed.  SMP_ERR_PEER_LOST:
 * *failed has died or given up.  SMP_ERR_TIMED_OUT, SMP_ERR_INTERRUPTED,
 * SMP_ERR_NO_MEMORY, SMP_ERR_NO_THREAD, SMP_ERR_SYSTEM. */
smp_status smp_mpi_make_comm(const char *job, const int *ranks, int size,
                             const int *fds, const smp_deadline *deadline,
                             MPI_Comm *out, int *failed);

#endif
