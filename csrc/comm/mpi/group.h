/* A communicator of the job's ranks alone, made from their cards. */
#ifndef SMP_COMM_MPI_GROUP_H
#define SMP_COMM_MPI_GROUP_H

#include <mpi.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

typedef struct {
    uint32_t magic;
    uint32_t version;
    int32_t  world_rank; /* in MPI_COMM_WORLD */
    int32_t  world_size;
} smp_mpi_card;

void smp_mpi_card_fill(smp_mpi_card *card);

/* The world ranks of the job's `size` ranks into ranks[]; cards[rank] is not read,
 * `own` is in its place.  False: one has no card, or is not of this world as far as its
 * card tells. */
bool smp_mpi_world_ranks(const smp_mpi_card *own, int rank, int size,
                         const void *const *cards, const size_t *card_bytes,
                         int *ranks);

/* A communicator in which ranks[r] has rank r and errors are returned; collective over
 * these ranks.  SMP_ERR_TIMED_OUT after wait_ns, SMP_ERR_NO_MEMORY, SMP_ERR_NO_THREAD,
 * SMP_ERR_SYSTEM. */
smp_status smp_mpi_make_comm(const int *ranks, int size, int64_t wait_ns,
                             MPI_Comm *out);

#endif
