/* Sizes, bytes, small blocks. */
#include "comm/transport/body.h"

#include <string.h>

static size_t
padded(size_t bytes)
{
    return (bytes + 7) / 8 * 8;
}

/* Writes n bytes and, up to a multiple of 8, zeros. */
static uint8_t *
write_padded(uint8_t *at, const void *bytes, size_t n)
{
    if (n != 0) {
        memcpy(at, bytes, n);
    }
    memset(at + n, 0, padded(n) - n);
    return at + padded(n);
}

/* Reads n bytes; false: the body is too short. */
static bool
read_padded(const uint8_t **at, size_t *left, void *out, size_t n)
{
    if (n > *left || padded(n) > *left) {
        return false;
    }
    if (n != 0) {
        memcpy(out, *at, n);
    }
    *at += padded(n);
    *left -= padded(n);
    return true;
}

size_t
smp_body_bytes(const smp_host *host, size_t nbytes, smp_block *const *blocks,
               size_t nblocks)
{
    size_t total = nblocks * sizeof(uint64_t) + padded(nbytes);

    for (size_t i = 0; i < nblocks; i++) {
        size_t size = host->block_bytes(blocks[i]);

        total += size <= SMP_BODY_INLINE ? padded(size) : 0;
    }
    return total;
}

void
smp_body_write(const smp_host *host, void *body, const void *bytes, size_t nbytes,
               smp_block *const *blocks, size_t nblocks)
{
    uint64_t *sizes = body;
    uint8_t  *at = write_padded((uint8_t *)(sizes + nblocks), bytes, nbytes);

    for (size_t i = 0; i < nblocks; i++) {
        sizes[i] = host->block_bytes(blocks[i]);
        if (sizes[i] <= SMP_BODY_INLINE) {
            at = write_padded(at, host->block_data(blocks[i]), sizes[i]);
        }
    }
}

uint64_t
smp_body_size(const void *body, size_t index)
{
    uint64_t size;

    memcpy(&size, (const uint8_t *)body + index * sizeof(size), sizeof(size));
    return size;
}

/* Fills in the parts behind the sizes, `left` bytes. */
static smp_status
fill(const smp_host *host, smp_message *message, const void *body, size_t left)
{
    const uint8_t *at = (const uint8_t *)body + message->nblocks * sizeof(uint64_t);

    if (!read_padded(&at, &left, message->bytes, message->nbytes)) {
        return SMP_ERR_MALFORMED;
    }
    for (size_t i = 0; i < message->nblocks; i++) {
        uint64_t   size = smp_body_size(body, i);
        smp_status status;

        if (size > SMP_BODY_INLINE) {
            continue;
        }
        status = host->pinned_block(host->comm, size, &message->blocks[i]);
        if (status != SMP_OK) {
            return status;
        }
        if (!read_padded(&at, &left, host->block_data(message->blocks[i]), size)) {
            return SMP_ERR_MALFORMED;
        }
    }
    return left == 0 ? SMP_OK : SMP_ERR_MALFORMED;
}

smp_status
smp_body_read(const smp_host *host, int rank, const void *body, size_t n,
              uint64_t nbytes, uint64_t nblocks, smp_message **out)
{
    smp_message *message;
    smp_status   status;

    if (nblocks > n / sizeof(uint64_t) || nbytes > n) {
        return SMP_ERR_MALFORMED;
    }
    for (uint64_t i = 0; i < nblocks; i++) {
        if (smp_body_size(body, i) > SIZE_MAX / 2) {
            return SMP_ERR_MALFORMED;
        }
    }
    status = host->message(rank, nbytes, nblocks, &message);
    if (status != SMP_OK) {
        return status;
    }
    status = fill(host, message, body, n - nblocks * sizeof(uint64_t));
    if (status != SMP_OK) {
        host->message_free(message);
        return status;
    }
    *out = message;
    return SMP_OK;
}
