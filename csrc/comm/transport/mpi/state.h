/* The common state of this folder's files: the transport, and its reached ranks. */
#ifndef SMP_COMM_TRANSPORT_MPI_STATE_H
#define SMP_COMM_TRANSPORT_MPI_STATE_H

#include <mpi.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/transport/connecting/meet.h"
#include "comm/transport/mpi/group.h"
#include "comm/transport/mpi/requests.h"
#include "comm/transport/transport.h"
#include "common/lock.h"

typedef struct smp_mpi smp_mpi;

/* Another rank.  The progress thread's, once connected. */
typedef struct {
    smp_mpi          *self; /* borrowed */
    int               rank;
    int               fd; /* owned: the lifeline; -1: not reached by us */
    smp_mpi_transfers incoming;
    size_t            sending;      /* outgoing transfers under way */
    bool              said_goodbye; /* it is queued */
    bool              left;         /* its goodbye has come */
    bool              arrived;      /* it has all up to ours */
    bool              gone;         /* the lifeline has ended */
} smp_mpi_peer;

struct smp_mpi {
    const smp_host *host; /* borrowed */
    smp_mpi_card    card;
    smp_tcp_door    door;
    MPI_Comm        comm;   /* MPI_COMM_NULL until connected */
    int             keyval; /* its deletion is MPI's end */
    int             npeers; /* set by connect: the number of reached ranks */
    int             epoll;  /* owned: all lifelines; -1 */
    smp_watch       watch;  /* of epoll */

    /* The progress thread's, up to `over`. */
    smp_mpi_requests sends;
    smp_mpi_requests receives; /* apart: they must not wait behind sends */
    int64_t          moved_ns;
    bool             over; /* a rank is lost: no more calls */

    _Atomic bool busy;  /* the progress thread is inside MPI */
    _Atomic bool ended; /* MPI_Finalize has begun: no more calls */
    _Atomic bool awake; /* the progress thread polls: no kick needed */

    _Atomic size_t    queued; /* messages in queue */
    smp_lock          lock;   /* guards queue */
    smp_mpi_transfers queue;  /* owned: not yet given to MPI */

    smp_mpi_peer peers[]; /* [size] */
};

#endif
