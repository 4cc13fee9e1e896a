/* A message's body, for a transport with larger blocks sent by themselves.
 *
 *   u64 sizes[nblocks]     of all blocks
 *   the message's bytes    padded to 8
 *   the blocks of at most SMP_BODY_INLINE bytes, each padded to 8
 *
 * in the byte order of both sides.  Its head, the transport's, has the numbers of bytes
 * and blocks.
 *
 * Threads  any.  Everything goes by the host's table: this file is a part of the MPI
 * extension, too.
 */
#ifndef SMP_COMM_TRANSPORT_BODY_H
#define SMP_COMM_TRANSPORT_BODY_H

#include <stddef.h>
#include <stdint.h>

#include "comm/transport/transport.h"
#include "common/status.h"

#define SMP_BODY_INLINE ((size_t)2048)

/* The length of a message's body. */
size_t smp_body_bytes(const smp_host *host, size_t nbytes, smp_block *const *blocks,
                      size_t nblocks);

/* Writes it to `body`, aligned to 8; `bytes` and `blocks` stay the caller's. */
void smp_body_write(const smp_host *host, void *body, const void *bytes, size_t nbytes,
                    smp_block *const *blocks, size_t nblocks);

/* The message from `rank`, by its arrived body of n bytes; blocks sent by themselves
 * are NULL in it.  SMP_ERR_MALFORMED: the numbers do not fit the body.
 * SMP_ERR_NO_MEMORY. */
smp_status smp_body_read(const smp_host *host, int rank, const void *body, size_t n,
                         uint64_t nbytes, uint64_t nblocks, smp_message **out);

/* The size of a block, by a body read before. */
uint64_t smp_body_size(const void *body, size_t index);

#endif
