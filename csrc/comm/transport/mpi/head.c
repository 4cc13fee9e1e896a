/* Numbers in front of a body. */
#include "comm/transport/mpi/head.h"

#include <stdint.h>
#include <string.h>

#include "comm/transport/body.h"

#define MAGIC 0x49504d53u

enum { KIND_MESSAGE = 0x4d, KIND_GOODBYE = 0x59 };

typedef struct {
    uint32_t magic; /* also shows the byte order */
    uint32_t kind;
    uint64_t nbytes;
    uint64_t nblocks;
} head;

_Static_assert(sizeof(head) == SMP_MPI_GOODBYE_BYTES, "a goodbye is a head alone");

size_t
smp_mpi_head_bytes(const smp_host *host, size_t nbytes, smp_block *const *blocks,
                   size_t nblocks)
{
    return sizeof(head) + smp_body_bytes(host, nbytes, blocks, nblocks);
}

void
smp_mpi_head_write(const smp_host *host, void *out, const void *bytes, size_t nbytes,
                   smp_block *const *blocks, size_t nblocks)
{
    head *h = out;

    *h = (head){MAGIC, KIND_MESSAGE, nbytes, nblocks};
    smp_body_write(host, h + 1, bytes, nbytes, blocks, nblocks);
}

void
smp_mpi_goodbye_write(void *out)
{
    *(head *)out = (head){.magic = MAGIC, .kind = KIND_GOODBYE};
}

bool
smp_mpi_follows(const smp_host *host, const smp_block *block)
{
    return host->block_bytes(block) > SMP_BODY_INLINE;
}

smp_status
smp_mpi_head_read(const smp_host *host, int rank, const void *bytes, size_t n,
                  smp_message **out)
{
    const uint8_t *body = (const uint8_t *)bytes + sizeof(head);
    head           h;
    smp_message   *message;
    smp_status     status;

    if (n < sizeof(h)) {
        return SMP_ERR_MALFORMED;
    }
    memcpy(&h, bytes, sizeof(h));
    if (h.magic == MAGIC && h.kind == KIND_GOODBYE && n == sizeof(h) && h.nbytes == 0 &&
        h.nblocks == 0) {
        *out = NULL;
        return SMP_OK;
    }
    if (h.magic != MAGIC || h.kind != KIND_MESSAGE) {
        return SMP_ERR_MALFORMED;
    }
    status =
        smp_body_read(host, rank, body, n - sizeof(h), h.nbytes, h.nblocks, &message);
    if (status != SMP_OK) {
        return status;
    }
    for (size_t i = 0; i < h.nblocks && status == SMP_OK; i++) {
        if (message->blocks[i] == NULL) {
            status = host->pinned_block(host->comm, smp_body_size(body, i),
                                        &message->blocks[i]);
        }
    }
    if (status != SMP_OK) {
        host->message_free(message);
        return status;
    }
    *out = message;
    return SMP_OK;
}
