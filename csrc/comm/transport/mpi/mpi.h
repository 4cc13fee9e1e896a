/* The MPI transport; see comm/transport/transport.h.  Lives in the extension smp._mpi.
 */
#ifndef SMP_COMM_TRANSPORT_MPI_MPI_H
#define SMP_COMM_TRANSPORT_MPI_MPI_H

#include "comm/transport/transport.h"
#include "common/status.h"

/* SMP_ERR_CLOSED: MPI is not initialized (import mpi4py.MPI first), or has ended;
 * SMP_ERR_INVALID: it was initialized without MPI_THREAD_SERIALIZED. */
smp_status smp_mpi_usable(void);

/* All ranks of the job are processes of one MPI_COMM_WORLD.  Its progress thread makes
 * all calls of MPI but those of connect: the connecting thread waits for these. */
extern const smp_transport smp_transport_mpi;

#endif
