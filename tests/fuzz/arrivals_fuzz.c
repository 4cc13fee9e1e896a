/* Any parts in any order over UCX: a status, a goodbye, or messages of exactly what
 * came, by their numbers.
 *
 * The first byte of the input chooses: any bytes as the body of a message (which MPI
 * reads too), parts that are right but for what the input changes, or a message that is
 * written and read back.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "comm/transport/body.h"
#include "comm/transport/ucx/arrivals.h"
#include "modest_host.h"

static const smp_host host = {MODEST_HOST};

static void
read_body(const uint8_t *data, size_t size)
{
    smp_message *message;
    uint8_t     *copy;

    if (size < 2) {
        return;
    }
    copy = malloc(size); /* of its own, so that a read past its end is noticed */
    memcpy(copy, data, size);
    if (smp_body_read(&host, 1, copy + 2, size - 2, data[0], data[1], &message) ==
        SMP_OK) {
        require(message->source == 1 && message->nblocks == data[1]);
        require(weigh(message) <= size);
        smp_message_free(message);
    }
    free(copy);
}

/* ------------------------------------------------------------------------- messages */

enum { MESSAGES = 3, BLOCKS = 3 };

static const size_t sizes_of_blocks[] = {0, 1, 7, 8, 2047, 2048, 2049, 5000};

typedef struct {
    uint64_t number;
    size_t   nbytes;
    size_t   sizes[BLOCKS];
    size_t   nblocks;
} plan;

static uint8_t
byte_at(const plan *p, size_t part, size_t i)
{
    return (uint8_t)(31 * p->number + 7 * part + i);
}

static smp_block *
filled_block(const plan *p, size_t index)
{
    smp_block *block;
    uint8_t   *at;

    require(smp_block_private(p->sizes[index], &block) == SMP_OK);
    at = smp_block_data(block);
    for (size_t i = 0; i < p->sizes[index]; i++) {
        at[i] = byte_at(p, index + 1, i);
    }
    return block;
}

/* Its body, written as senders do. */
static uint8_t *
written(const plan *p, size_t *n)
{
    smp_block *blocks[BLOCKS];
    uint8_t    bytes[256];
    uint8_t   *body;

    for (size_t i = 0; i < p->nbytes; i++) {
        bytes[i] = byte_at(p, 0, i);
    }
    for (size_t b = 0; b < p->nblocks; b++) {
        blocks[b] = filled_block(p, b);
    }
    *n = smp_body_bytes(&host, p->nbytes, blocks, p->nblocks);
    body = malloc(*n + 1);
    smp_body_write(&host, body, bytes, p->nbytes, blocks, p->nblocks);
    for (size_t b = 0; b < p->nblocks; b++) {
        smp_block_release(blocks[b]);
    }
    return body;
}

static void
check_message(const smp_message *message, const plan *p)
{
    require(message->nbytes == p->nbytes && message->nblocks == p->nblocks);
    for (size_t i = 0; i < p->nbytes; i++) {
        require(message->bytes[i] == byte_at(p, 0, i));
    }
    for (size_t b = 0; b < p->nblocks; b++) {
        const uint8_t *at = smp_block_data(message->blocks[b]);

        require(smp_block_bytes(message->blocks[b]) == p->sizes[b]);
        for (size_t i = 0; i < p->sizes[b]; i++) {
            require(at[i] == byte_at(p, b + 1, i));
        }
    }
}

/* Parts in the order that the input says; each once, it must come to all messages and
 * the goodbye.  After 15 bits of luck one is changed: then anything but a wrong read.
 */
static void
arrive(const uint8_t *data, size_t size, bool spoil)
{
    plan             plans[MESSAGES];
    smp_ucx_arrivals arrivals;
    smp_message     *message;
    smp_ucx_next     next = SMP_UCX_NOTHING;
    uint64_t         parts[(BLOCKS + 1) * MESSAGES + 1]; /* message * 8 + part */
    size_t           nparts = 0;
    size_t           came = 0;
    smp_status       status = SMP_OK;

    if (size < 2 * MESSAGES + sizeof(parts) / sizeof(parts[0])) {
        return;
    }
    for (uint64_t m = 0; m < MESSAGES; m++, data += 2) {
        plans[m] = (plan){.number = m, .nbytes = data[0], .nblocks = data[1] % 4};
        parts[nparts++] = m * 8;
        for (size_t b = 0; b < plans[m].nblocks; b++) {
            plans[m].sizes[b] = sizes_of_blocks[(data[0] + data[1] / 4u + b * 3u) % 8];
            if (plans[m].sizes[b] > SMP_BODY_INLINE) {
                parts[nparts++] = m * 8 + 1 + b;
            }
        }
    }
    parts[nparts++] = MESSAGES * 8; /* the goodbye */
    for (size_t i = nparts; i-- > 1;) {
        size_t   j = data[i] % (i + 1);
        uint64_t moved = parts[i];

        parts[i] = parts[j];
        parts[j] = moved;
    }
    smp_ucx_arrivals_init(&arrivals, &host, 1);
    for (size_t i = 0; i < nparts && status == SMP_OK; i++) {
        uint64_t m = parts[i] / 8;
        uint64_t part = parts[i] % 8;
        uint64_t wrong = spoil && i == data[0] % nparts ? data[1] % 8 : 0;

        if (m == MESSAGES) {
            status = smp_ucx_arrivals_goodbye(&arrivals, m - (wrong > 4));
        } else if (part == 0) {
            size_t   n;
            uint8_t *body = written(&plans[m], &n);

            if (wrong == 1 && n != 0) {
                body[data[2] % n] ^= data[3];
            }
            status = smp_ucx_arrivals_head(
                &arrivals, m + (wrong == 2), body, n - (wrong == 3 && n != 0),
                plans[m].nbytes + (wrong == 4), plans[m].nblocks + (wrong == 5));
            free(body);
        } else {
            status = smp_ucx_arrivals_block(&arrivals, m + (wrong == 2),
                                            part - 1 + (wrong == 3),
                                            filled_block(&plans[m], part - 1));
        }
        while (status == SMP_OK &&
               (next = smp_ucx_arrivals_next(&arrivals, &message)) == SMP_UCX_MESSAGE) {
            if (spoil) {
                (void)weigh(message);
            } else {
                check_message(message, &plans[came]);
            }
            came++;
            smp_message_free(message);
        }
    }
    require(spoil || (status == SMP_OK && came == MESSAGES && next == SMP_UCX_GOODBYE));
    smp_ucx_arrivals_fini(&arrivals);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    if (data[0] % 3 == 0) {
        read_body(data + 1, size - 1);
    } else {
        arrive(data + 1, size - 1, data[0] % 3 == 1);
    }
    return 0;
}
