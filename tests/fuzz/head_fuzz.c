/* Any bytes as the head of a message over MPI: a status, a goodbye, or a message of
 * exactly what came, with memory for the blocks that follow.
 *
 * The first byte of the input chooses: any bytes, or a head that is right but for what
 * the input changes.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "comm/transport/mpi/head.h"
#include "modest_host.h"

static const smp_host host = {MODEST_HOST};

enum { BLOCKS = 3 };

static const size_t sizes_of_blocks[] = {0, 1, 7, 8, 2047, 2048, 2049, 5000};

/* What is read of n bytes; they are copied, so that a read past their end is noticed.
 */
static smp_message *
read_copy(const uint8_t *bytes, size_t n)
{
    uint8_t     *copy = malloc(n != 0 ? n : 1);
    smp_message *message = NULL;
    smp_status   status;

    memcpy(copy, bytes, n);
    status = smp_mpi_head_read(&host, 1, copy, n, &message);
    free(copy);
    require(status == SMP_OK || message == NULL);
    require(status != SMP_OK || message != NULL || n == SMP_MPI_GOODBYE_BYTES);
    return message;
}

/* What is in the head itself has come; what follows has its memory. */
static void
check(smp_message *message, size_t n)
{
    size_t here = message->nbytes;

    require(message->source == 1);
    for (size_t b = 0; b < message->nblocks; b++) {
        require(message->blocks[b] != NULL);
        if (smp_mpi_follows(&host, message->blocks[b])) {
            memset(smp_block_data(message->blocks[b]), 1,
                   smp_block_bytes(message->blocks[b]));
        } else {
            here += smp_block_bytes(message->blocks[b]);
        }
    }
    require(here + 8 * message->nblocks + SMP_MPI_GOODBYE_BYTES <= n);
    (void)weigh(message);
}

static void
read_any(const uint8_t *data, size_t size)
{
    smp_message *message = read_copy(data, size);

    if (message != NULL) {
        check(message, size);
        smp_message_free(message);
    }
}

/* Written as senders do; with `spoil` one byte is another, or some are missing. */
static void
read_written(const uint8_t *data, size_t size, bool spoil)
{
    smp_block   *blocks[BLOCKS];
    smp_message *message;
    uint8_t     *head;
    size_t       nblocks;
    size_t       n;

    if (size < 6) {
        return;
    }
    nblocks = data[0] % (BLOCKS + 1u);
    for (size_t b = 0; b < nblocks; b++) {
        require(smp_block_private(sizes_of_blocks[data[1 + b] % 8u], &blocks[b]) ==
                SMP_OK);
        memset(smp_block_data(blocks[b]), data[1 + b], smp_block_bytes(blocks[b]));
    }
    n = smp_mpi_head_bytes(&host, size, blocks, nblocks);
    head = malloc(n);
    smp_mpi_head_write(&host, head, data, size, blocks, nblocks);
    if (spoil) {
        head[(data[4] + 256u * (data[5] / 128u)) % n] ^= (uint8_t)(data[5] | 1u);
        n -= data[5] % 4u == 0 ? data[4] % n : 0;
    }
    message = read_copy(head, n);
    require(spoil || message != NULL);
    if (message != NULL) {
        check(message, n);
    }
    if (!spoil) {
        require(message->nbytes == size && message->nblocks == nblocks);
        require(memcmp(message->bytes, data, size) == 0);
    }
    for (size_t b = 0; b < nblocks; b++) {
        const smp_block *got = spoil ? NULL : message->blocks[b];

        require(spoil || smp_block_bytes(got) == smp_block_bytes(blocks[b]));
        require(spoil || smp_mpi_follows(&host, got) ||
                memcmp(smp_block_data(got), smp_block_data(blocks[b]),
                       smp_block_bytes(got)) == 0);
        smp_block_release(blocks[b]);
    }
    if (message != NULL) {
        smp_message_free(message);
    }
    free(head);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    if (data[0] % 3 == 0) {
        read_any(data + 1, size - 1);
    } else {
        read_written(data + 1, size - 1, data[0] % 3 == 1);
    }
    return 0;
}
