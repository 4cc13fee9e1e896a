/* Messages put together from parts in any order.  Spec:
 * csrc/comm/transport/ucx/arrivals.h. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "check.h"
#include "comm/memory/block.h"
#include "comm/memory/message.h"
#include "comm/transport/ucx/arrivals.h"

enum { BIG = 5000, SMALL = 10 };

static smp_status
make_block(smp_comm *comm, size_t bytes, smp_block **out)
{
    (void)comm;
    return smp_block_private(bytes, out);
}

static const smp_host host = {.block = make_block,
                              .pinned_block = make_block,
                              .block_data = smp_block_data,
                              .block_bytes = smp_block_bytes,
                              .block_release = smp_block_release,
                              .message = smp_message_create,
                              .message_free = smp_message_free};

/* A message with eight bytes, a small block and two big ones. */
typedef struct {
    uint64_t sizes[3];
    uint8_t  bytes[8];
    uint8_t  small[16];
} body;

static body
body_of(uint8_t fill)
{
    body b = {.sizes = {BIG, SMALL, BIG}};

    memset(b.bytes, fill, sizeof(b.bytes));
    memset(b.small, fill, SMALL);
    return b;
}

static smp_status
put_head(smp_ucx_arrivals *a, uint64_t number)
{
    body b = body_of((uint8_t)number);

    return smp_ucx_arrivals_head(a, number, &b, sizeof(b), sizeof(b.bytes), 3);
}

static smp_status
put_block(smp_ucx_arrivals *a, uint64_t number, uint64_t index, size_t bytes)
{
    smp_block *block;

    if (smp_block_private(bytes, &block) != SMP_OK) {
        return SMP_ERR_NO_MEMORY;
    }
    memset(smp_block_data(block), (int)(number + index), bytes);
    return smp_ucx_arrivals_block(a, number, index, block);
}

/* Whether the next thing is the message `number`, whole. */
static void
comes_out(smp_ucx_arrivals *a, uint64_t number)
{
    smp_message *message;
    uint8_t      last;

    CHECK(smp_ucx_arrivals_next(a, &message) == SMP_UCX_MESSAGE);
    CHECK(message->source == 3 && message->nbytes == 8 && message->nblocks == 3);
    CHECK(message->bytes[7] == (uint8_t)number);
    for (uint64_t i = 0; i < 3; i++) {
        size_t bytes = smp_block_bytes(message->blocks[i]);

        CHECK(bytes == (i == 1 ? SMALL : BIG));
        last = ((uint8_t *)smp_block_data(message->blocks[i]))[bytes - 1];
        CHECK(last == (uint8_t)(i == 1 ? number : number + i));
    }
    smp_message_free(message);
}

static void
nothing_comes(smp_ucx_arrivals *a)
{
    smp_message *message;

    CHECK(smp_ucx_arrivals_next(a, &message) == SMP_UCX_NOTHING);
}

/* Three messages and a goodbye have ten parts: in orders that a fixed generator draws.
 */
enum { MESSAGES = 3, PARTS = 3 * MESSAGES + 1, ORDERS = 2000 };

static smp_status
put_part(smp_ucx_arrivals *a, int part)
{
    uint64_t number = (uint64_t)part / 3;

    if (number == MESSAGES) {
        return smp_ucx_arrivals_goodbye(a, number);
    }
    return part % 3 == 0 ? put_head(a, number)
                         : put_block(a, number, part % 3 == 1 ? 0 : 2, BIG);
}

TEST(parts_in_any_order_make_messages_in_order)
{
    uint64_t random = 1;

    for (int order = 0; order < ORDERS; order++) {
        int              parts[PARTS];
        bool             there[PARTS] = {false};
        smp_ucx_arrivals a;
        smp_message     *message;
        int              out = 0;

        for (int i = 0; i < PARTS; i++) {
            parts[i] = i;
        }
        for (int i = PARTS - 1; i > 0; i--) {
            int j =
                (int)((random = random * 6364136223846793005u + 1442695040888963407u) >>
                      33) %
                (i + 1);
            int kept = parts[i];

            parts[i] = parts[j];
            parts[j] = kept;
        }
        smp_ucx_arrivals_init(&a, &host, 3);
        for (int i = 0; i < PARTS; i++) {
            CHECK_OK(put_part(&a, parts[i]));
            there[parts[i]] = true;
            while (out < MESSAGES && there[3 * out] && there[3 * out + 1] &&
                   there[3 * out + 2]) {
                comes_out(&a, (uint64_t)out);
                out++;
            }
            if (out < MESSAGES || !there[PARTS - 1]) {
                nothing_comes(&a);
            }
        }
        CHECK(smp_ucx_arrivals_next(&a, &message) == SMP_UCX_GOODBYE);
        nothing_comes(&a);
        smp_ucx_arrivals_fini(&a);
    }
}

TEST(unfinished_messages_are_freed)
{
    smp_ucx_arrivals a;

    smp_ucx_arrivals_init(&a, &host, 3);
    CHECK_OK(put_block(&a, 5, 0, BIG));
    CHECK_OK(put_head(&a, 2));
    CHECK_OK(put_block(&a, 2, 2, BIG));
    CHECK_OK(smp_ucx_arrivals_goodbye(&a, 9));
    nothing_comes(&a);
    smp_ucx_arrivals_fini(&a);
}

/* Whether a head of n bytes that claims these sizes is refused. */
static void
head_is_malformed(size_t n, uint64_t nbytes, uint64_t nblocks, uint64_t first_size)
{
    body             b = body_of(0);
    smp_ucx_arrivals a;

    b.sizes[0] = first_size;
    smp_ucx_arrivals_init(&a, &host, 3);
    CHECK_STATUS(smp_ucx_arrivals_head(&a, 0, &b, n, nbytes, nblocks),
                 SMP_ERR_MALFORMED);
    smp_ucx_arrivals_fini(&a);
}

TEST(heads_that_disagree_with_themselves_are_malformed)
{
    head_is_malformed(sizeof(body) - 8, 8, 3, BIG);
    head_is_malformed(sizeof(body), 0, 3, BIG);
    head_is_malformed(sizeof(body), 24, 3, BIG);
    head_is_malformed(sizeof(body), 8, 2, BIG);
    head_is_malformed(sizeof(body), 8, 3, 100); /* would be in the body */
    head_is_malformed(sizeof(body), UINT64_MAX, 3, BIG);
    head_is_malformed(sizeof(body), UINT64_MAX - 7, 3, BIG);
    head_is_malformed(sizeof(body), 8, UINT64_MAX, BIG);
    head_is_malformed(sizeof(body), 8, UINT64_MAX / 8 + 2, BIG);
    head_is_malformed(0, 0, 1, BIG);
}

TEST(parts_that_do_not_fit_are_malformed)
{
    smp_ucx_arrivals a;

    smp_ucx_arrivals_init(&a, &host, 3);
    CHECK_OK(put_head(&a, 0));
    CHECK_STATUS(put_head(&a, 0), SMP_ERR_MALFORMED);            /* twice */
    CHECK_STATUS(put_block(&a, 0, 3, BIG), SMP_ERR_MALFORMED);   /* no such block */
    CHECK_STATUS(put_block(&a, 0, 1, SMALL), SMP_ERR_MALFORMED); /* is in the body */
    CHECK_STATUS(put_block(&a, 0, 0, BIG - 1), SMP_ERR_MALFORMED);
    CHECK_OK(put_block(&a, 0, 0, BIG));
    CHECK_STATUS(put_block(&a, 0, 0, BIG), SMP_ERR_MALFORMED); /* twice */
    CHECK_STATUS(smp_ucx_arrivals_goodbye(&a, 0), SMP_ERR_MALFORMED);
    CHECK_OK(put_block(&a, 0, 2, BIG));
    comes_out(&a, 0);
    CHECK_STATUS(put_head(&a, 0), SMP_ERR_MALFORMED); /* is out already */
    CHECK_OK(put_block(&a, 1, 7, BIG));               /* early, and wrong */
    CHECK_STATUS(put_head(&a, 1), SMP_ERR_MALFORMED);
    CHECK_OK(put_block(&a, 4, 0, BIG));
    CHECK_STATUS(smp_ucx_arrivals_goodbye(&a, 4), SMP_ERR_MALFORMED); /* of a message */
    CHECK_OK(smp_ucx_arrivals_goodbye(&a, 5));
    CHECK_STATUS(smp_ucx_arrivals_goodbye(&a, 5), SMP_ERR_MALFORMED);
    CHECK_STATUS(put_head(&a, 5), SMP_ERR_MALFORMED);
    smp_ucx_arrivals_fini(&a);
}

RUN_TESTS
