/* Messages over MPI, in their parts, and the progress thread's rounds.
 *
 * Threads  send: any.  The rest: the progress thread, or a thread with none beside it.
 */
#ifndef SMP_COMM_TRANSPORT_MPI_TRANSFER_H
#define SMP_COMM_TRANSPORT_MPI_TRANSFER_H

#include "comm/transport/mpi/state.h"

/* As smp_transport's. */
smp_status smp_mpi_send(void *self, int dest, const void *bytes, size_t nbytes,
                        smp_block *const *blocks, size_t nblocks);
int64_t    smp_mpi_progress(void *self);

/* Queues it, after all others.  False: no memory. */
bool smp_mpi_say_goodbye(smp_mpi *self, int rank);

/* False: MPI has ended, or is not to be called.  Else leave must follow. */
bool smp_mpi_enter(smp_mpi *self);
void smp_mpi_leave(smp_mpi *self);

#endif
