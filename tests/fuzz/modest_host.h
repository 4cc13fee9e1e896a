/* A host that gives the decoders of the network's bytes only as much memory as a test
 * has, and what reads the messages that they make. */
#ifndef SMP_TESTS_MODEST_HOST_H
#define SMP_TESTS_MODEST_HOST_H

#include <stdint.h>
#include <stdlib.h>

#include "comm/memory/block.h"
#include "comm/memory/message.h"
#include "comm/transport/transport.h"

/* The decoders would allocate anything that a header asks for. */
#define MOST ((size_t)1 << 20)

static void
require(int condition)
{
    if (!condition) {
        abort();
    }
}

static smp_status
make_message(int source, size_t nbytes, size_t nblocks, smp_message **out)
{
    return nbytes > MOST || nblocks > MOST
               ? SMP_ERR_NO_MEMORY
               : smp_message_create(source, nbytes, nblocks, out);
}

static smp_status
make_block(smp_comm *comm, size_t bytes, smp_block **out)
{
    (void)comm;
    return bytes > MOST ? SMP_ERR_NO_MEMORY : smp_block_private(bytes, out);
}

/* Designated initializers of an smp_host. */
#define MODEST_HOST                                                                    \
    .size = 2, .block = make_block, .pinned_block = make_block,                        \
    .block_data = smp_block_data, .block_bytes = smp_block_bytes,                      \
    .block_release = smp_block_release, .message = make_message,                       \
    .message_free = smp_message_free

static volatile uint8_t sink;

/* Reads every byte, so that one past an end is noticed. */
static size_t
weigh(const smp_message *message)
{
    size_t  bytes = message->nbytes;
    uint8_t sum = 0;

    for (size_t i = 0; i < message->nbytes; i++) {
        sum ^= message->bytes[i];
    }
    for (size_t b = 0; b < message->nblocks; b++) {
        const smp_block *block = message->blocks[b];
        const uint8_t   *at = block != NULL ? smp_block_data(block) : NULL;

        for (size_t i = 0; block != NULL && i < smp_block_bytes(block); i++) {
            sum ^= at[i];
        }
        bytes += block != NULL ? smp_block_bytes(block) : 0;
    }
    sink = sum;
    return bytes;
}

#endif
