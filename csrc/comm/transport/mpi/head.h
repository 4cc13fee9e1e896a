/* The first part of a message over MPI: a head with its body (comm/transport/body.h),
 * or a goodbye.  The larger blocks follow, each by itself.
 *
 * Threads  any.  This header and its file know nothing of MPI.
 */
#ifndef SMP_COMM_TRANSPORT_MPI_HEAD_H
#define SMP_COMM_TRANSPORT_MPI_HEAD_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/transport/transport.h"
#include "common/status.h"

/* The length of a goodbye. */
#define SMP_MPI_GOODBYE_BYTES 24

/* The length of a message's head. */
size_t smp_mpi_head_bytes(const smp_host *host, size_t nbytes, smp_block *const *blocks,
                          size_t nblocks);

/* Writes it to `out`, aligned to 8; `bytes` and `blocks` stay the caller's. */
void smp_mpi_head_write(const smp_host *host, void *out, const void *bytes,
                        size_t nbytes, smp_block *const *blocks, size_t nblocks);
void smp_mpi_goodbye_write(void *out);

/* Whether a block is not in the head, but follows it. */
bool smp_mpi_follows(const smp_host *host, const smp_block *block);

/* Reads the n bytes from `rank`.  *out is the message, the caller's, with memory for
 * the next blocks; NULL: a goodbye.  SMP_ERR_MALFORMED, SMP_ERR_NO_MEMORY: *out is not
 * set. */
smp_status smp_mpi_head_read(const smp_host *host, int rank, const void *bytes,
                             size_t n, smp_message **out);

#endif
