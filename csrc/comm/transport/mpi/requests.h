/* Messages on their way over MPI, and MPI's requests for them.
 *
 * Threads  one at a time; those of one list or set.
 */
#ifndef SMP_COMM_TRANSPORT_MPI_REQUESTS_H
#define SMP_COMM_TRANSPORT_MPI_REQUESTS_H

#include <mpi.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/transport/transport.h"

/* Requests looked at in one go. */
#define SMP_MPI_TESTED 256

/* A message on its way out or in. */
typedef struct smp_mpi_transfer {
    struct smp_mpi_transfer *next; /* owned: in the same list */

    int          rank; /* the other side */
    bool         incoming;
    bool         parsed;  /* incoming: message is there and its receives are posted */
    size_t       pending; /* requests under way */
    uint8_t     *head;    /* owned */
    size_t       head_bytes;
    smp_block  **blocks; /* owned, outgoing: those not in the head */
    size_t       nblocks;
    smp_message *message; /* owned, incoming */
} smp_mpi_transfer;

/* In their order; all zero: none. */
typedef struct {
    smp_mpi_transfer *first; /* owned */
    smp_mpi_transfer *last;
} smp_mpi_transfers;

/* The requests under way; all zero: none. */
typedef struct {
    MPI_Request       *under_way; /* owned: [n], room for `room` */
    smp_mpi_transfer **owners;    /* owned: [n] of borrowed: their transfers */
    size_t             n;
    size_t             room;
    size_t             tested; /* where the next test begins */
} smp_mpi_requests;

/* The caller's, with an unfilled head of `bytes`, and room for nblocks; NULL: no
 * memory. */
smp_mpi_transfer *smp_mpi_new_outgoing(int dest, size_t bytes, size_t nblocks);

/* Frees a finished transfer, with all its own parts. */
void smp_mpi_transfer_free(const smp_host *host, smp_mpi_transfer *t);

/* Takes t over. */
void smp_mpi_put_last(smp_mpi_transfers *list, smp_mpi_transfer *t);

/* The caller's; NULL: there is none. */
smp_mpi_transfer *smp_mpi_take_first(smp_mpi_transfers *list);

/* Empties the list: frees all; frees those unknown to MPI by now, since it may still
 * write into the others. */
void smp_mpi_transfers_free(const smp_host *host, smp_mpi_transfers *list);
void smp_mpi_free_idle(const smp_host *host, smp_mpi_transfers *list);

/* Room for `more` requests.  False: no memory. */
bool smp_mpi_make_room(smp_mpi_requests *all, size_t more);

/* Starts one request of t, for `bytes` (at most INT_MAX) at `data`, borrowed until its
 * end; there is room.  False: MPI refuses. */
bool smp_mpi_start(smp_mpi_requests *all, MPI_Comm comm, smp_mpi_transfer *t,
                   void *data, size_t bytes, int tag);

/* The same for the head of t, already matched by MPI. */
bool smp_mpi_start_matched(smp_mpi_requests *all, MPI_Message *message,
                           smp_mpi_transfer *t);

/* Tests some of them, each time the next ones.  Returns the number of ended ones, with
 * their transfers and failures. */
size_t smp_mpi_test(smp_mpi_requests *all, smp_mpi_transfer *owners[SMP_MPI_TESTED],
                    bool failed[SMP_MPI_TESTED]);

/* None is under way, or MPI is not called any more. */
void smp_mpi_requests_fini(smp_mpi_requests *all);

#endif
