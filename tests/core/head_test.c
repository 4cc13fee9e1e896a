/* Heads of messages over MPI, and what is none.  Spec: csrc/comm/transport/mpi/head.h.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "check.h"
#include "comm/memory/block.h"
#include "comm/memory/message.h"
#include "comm/transport/mpi/head.h"

enum { BIG = 5000, SMALL = 10, BLOCKS = 2, MOST = 1 << 20 };

static smp_status
make_block(smp_comm *comm, size_t bytes, smp_block **out)
{
    (void)comm;
    return bytes > MOST ? SMP_ERR_NO_MEMORY : smp_block_private(bytes, out);
}

static const smp_host host = {.block = make_block,
                              .pinned_block = make_block,
                              .block_data = smp_block_data,
                              .block_bytes = smp_block_bytes,
                              .block_release = smp_block_release,
                              .message = smp_message_create,
                              .message_free = smp_message_free};

/* The head of "eight by" with a small block and a large one: the caller's. */
static uint8_t *
written(size_t *n)
{
    static const size_t sizes[BLOCKS] = {SMALL, BIG};
    smp_block          *blocks[BLOCKS];
    uint8_t            *head;

    for (size_t i = 0; i < BLOCKS; i++) {
        if (smp_block_private(sizes[i], &blocks[i]) != SMP_OK) {
            abort();
        }
        memset(smp_block_data(blocks[i]), 7, sizes[i]);
    }
    *n = smp_mpi_head_bytes(&host, 8, blocks, BLOCKS);
    head = malloc(*n);
    smp_mpi_head_write(&host, head, "eight by", 8, blocks, BLOCKS);
    for (size_t i = 0; i < BLOCKS; i++) {
        smp_block_release(blocks[i]);
    }
    return head;
}

TEST(a_head_comes_back_with_room_for_what_follows)
{
    smp_message *message;
    size_t       n;
    uint8_t     *head = written(&n);

    CHECK_OK(smp_mpi_head_read(&host, 3, head, n, &message));
    CHECK(message->source == 3 && message->nbytes == 8 && message->nblocks == BLOCKS);
    CHECK(memcmp(message->bytes, "eight by", 8) == 0);
    CHECK(!smp_mpi_follows(&host, message->blocks[0]));
    CHECK(((uint8_t *)smp_block_data(message->blocks[0]))[SMALL - 1] == 7);
    CHECK(smp_mpi_follows(&host, message->blocks[1]));
    CHECK(smp_block_bytes(message->blocks[1]) == BIG);
    smp_message_free(message);
    free(head);
}

TEST(a_goodbye_is_no_message)
{
    _Alignas(8) uint8_t goodbye[SMP_MPI_GOODBYE_BYTES + 8] = {0};
    smp_message        *message = (smp_message *)(void *)goodbye;

    smp_mpi_goodbye_write(goodbye);
    CHECK_OK(smp_mpi_head_read(&host, 1, goodbye, SMP_MPI_GOODBYE_BYTES, &message));
    CHECK(message == NULL);
    CHECK_STATUS(smp_mpi_head_read(&host, 1, goodbye, sizeof(goodbye), &message),
                 SMP_ERR_MALFORMED);
    goodbye[8] = 1; /* of so many bytes */
    CHECK_STATUS(smp_mpi_head_read(&host, 1, goodbye, SMP_MPI_GOODBYE_BYTES, &message),
                 SMP_ERR_MALFORMED);
}

TEST(a_head_that_is_cut_or_too_long_is_malformed)
{
    smp_message *message;
    size_t       n;
    uint8_t     *head = written(&n);

    for (size_t cut = 0; cut < n; cut++) {
        uint8_t *part = malloc(cut + 1); /* so that a read past its end is noticed */

        memcpy(part, head, cut);
        CHECK_STATUS(smp_mpi_head_read(&host, 1, part, cut, &message),
                     SMP_ERR_MALFORMED);
        free(part);
    }
    head = realloc(head, n + 8);
    memset(head + n, 0, 8);
    CHECK_STATUS(smp_mpi_head_read(&host, 1, head, n + 8, &message), SMP_ERR_MALFORMED);
    free(head);
}

/* Whether the head with a word changed is refused so. */
static void
refused(size_t word, uint64_t value, smp_status want)
{
    smp_message *message;
    size_t       n;
    uint8_t     *head = written(&n);

    memcpy(head + 8 * word, &value, sizeof(value));
    CHECK_STATUS(smp_mpi_head_read(&host, 1, head, n, &message), want);
    free(head);
}

TEST(wrong_words_are_refused)
{
    refused(0, 0, SMP_ERR_MALFORMED);           /* neither magic nor kind */
    refused(0, 0x49504d53u, SMP_ERR_MALFORMED); /* no kind */
    refused(1, 9, SMP_ERR_MALFORMED);           /* bytes */
    refused(1, UINT64_MAX, SMP_ERR_MALFORMED);
    refused(2, 3, SMP_ERR_MALFORMED); /* blocks */
    refused(2, UINT64_MAX / 8, SMP_ERR_MALFORMED);
    refused(3, BIG, SMP_ERR_MALFORMED);        /* the small one's size */
    refused(4, UINT64_MAX, SMP_ERR_MALFORMED); /* the large one's */
    refused(4, MOST + 1, SMP_ERR_NO_MEMORY);
}

RUN_TESTS
