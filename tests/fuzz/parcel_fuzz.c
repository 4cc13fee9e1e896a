/* Any bytes at all from a member of a group on another host, and from a sender of
 * tensors: a status, and nothing outside the caller's tensors is touched.
 *
 * The first byte of the input chooses who reads the rest: a group, which meets and does
 * one operation, or a mailbox.  Rank 1, whose messages these are, is in this process.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "comm/collective/inter_host/hierarchical.h"
#include "comm/collective/mailbox.h"
#include "comm/memory/block.h"
#include "comm/memory/message.h"
#include "comm/messaging/neighbour.h"
#include "common/clock.h"
#include "common/deadline.h"

enum { GROUP = 7, MEMBERS = 2, MOST_COUNT = 64, MOST_BLOCK = 300, MOST_STEPS = 1000 };

/* Room for the largest operation, and what must stay as it is behind it. */
#define ROOM (MOST_COUNT * 16 * MEMBERS)
#define GUARD 64

static smp_comm *comms[2];

static void
require(int condition)
{
    if (!condition) {
        abort();
    }
}

/* ------------------------------------------------------------------- two ranks */

typedef struct {
    int         rank;
    const void *cards[2];
    size_t      bytes[2];
} end;

static void *
connect_end(void *arg)
{
    const end *e = arg;
    int        failed;

    require(smp_comm_connect(
                comms[e->rank], e->cards, e->bytes,
                &(smp_deadline){.at_ns = smp_clock_deadline(10000 * SMP_NS_PER_MS)},
                &failed) == SMP_OK);
    return NULL;
}

static void
connect_ranks(void)
{
    end       ends[2];
    pthread_t threads[2];

    for (int r = 0; r < 2; r++) {
        smp_comm_config config = {.rank = r,
                                  .size = 2,
                                  .pool_bytes = 1 << 20,
                                  .spin_us = -1,
                                  .transports = "tcp",
                                  .job = "fuzz"};

        require(smp_comm_create(&config, &comms[r]) == SMP_OK);
        ends[0].cards[r] = ends[1].cards[r] =
            smp_comm_card(comms[r], &ends[0].bytes[r]);
        ends[1].bytes[r] = ends[0].bytes[r];
        ends[r].rank = r;
    }
    for (int r = 0; r < 2; r++) {
        require(pthread_create(&threads[r], NULL, connect_end, &ends[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
    }
}

/* What came for a group and was not taken. */
static void
drop_rest(smp_comm *comm)
{
    smp_channel channel = {.address = GROUP, .nonce = 1};

    smp_channel_open(smp_comm_post(comm), &channel);
    smp_channel_close(smp_comm_post(comm), &channel);
}

/* ------------------------------------------------------------------- the input */

typedef struct {
    const uint8_t *at;
    size_t         left;
} input;

/* The next bytes; zeros at the end. */
static uint64_t
take(input *in, size_t bytes)
{
    uint64_t value = 0;

    bytes = bytes < in->left ? bytes : in->left;
    memcpy(&value, in->at, bytes);
    in->at += bytes;
    in->left -= bytes;
    return value;
}

/* ------------------------------------------------------------------- a group */

/* Choices of a parcel. */
enum { RIGHT_REST = 1, RIGHT_TAG = 2, HAS_BLOCK = 4, RIGHT_BLOCK = 8, ANY_HEAD = 16 };

typedef struct {
    smp_epoch_barrier barrier;
    smp_collective    op;
    smp_wire          wire;
    smp_hierarchical  hier;
    bool              has_met;
} group;

/* A message of rank 1, made of the input: much of it is as it should be, so that the
 * rest of it is looked at. */
static void
put_parcel(group *g, input *in)
{
    unsigned         choice = (unsigned)take(in, 1);
    smp_parcel       head = {.post = {SMP_POST_MARK, GROUP, g->wire.channel.nonce},
                             .kind = (uint32_t)take(in, 1) % (SMP_PARCELS + 1),
                             .member = 1,
                             .sequence = 1,
                             .tag = take(in, 1),
                             .nonce = 99,
                             .known = g->wire.channel.nonce,
                             .digest = g->wire.digest,
                             .host = 1};
    size_t           rest = (size_t)take(in, 1);
    size_t           block = (size_t)take(in, 2) % MOST_BLOCK;
    const smp_stage *stage = g->has_met && g->hier.phase == SMP_HIERARCHICAL_ON_ROUTE &&
                                     g->hier.stage < g->hier.route.nstages
                                 ? &g->hier.route.stages[g->hier.stage]
                                 : NULL;
    smp_message     *message;

    if (head.kind == SMP_PARCEL_HELLO) {
        head.post.nonce = 0;
    }
    if ((choice & RIGHT_TAG) != 0 && stage != NULL) {
        head.tag = stage->tag;
    }
    if ((choice & RIGHT_BLOCK) != 0 && stage != NULL) {
        block = stage->range.count * smp_dtype_bytes(g->hier.call.dtype);
    }
    if ((choice & ANY_HEAD) != 0) {
        size_t at = (size_t)take(in, 1) % sizeof(head);

        ((uint8_t *)&head)[at] = (uint8_t)take(in, 1);
    }
    if ((choice & RIGHT_REST) != 0 && g->has_met) { /* the call that this rank makes */
        rest = sizeof(smp_notice) +
               smp_call_lists(&g->hier.call) * MEMBERS * sizeof(uint64_t);
    }
    if (smp_message_create(1, sizeof(head) + rest, (choice & HAS_BLOCK) != 0,
                           &message) != SMP_OK) {
        return;
    }
    memcpy(message->bytes, &head, sizeof(head));
    for (size_t i = 0; i < rest; i++) {
        message->bytes[sizeof(head) + i] = 0;
    }
    if ((choice & RIGHT_REST) != 0 && g->has_met) {
        memcpy(message->bytes + sizeof(head), &g->hier.notice, sizeof(smp_notice));
        memcpy(message->bytes + sizeof(head) + sizeof(smp_notice), g->hier.counts,
               rest - sizeof(smp_notice));
        rest = (choice & ANY_HEAD) != 0 ? 1 : 0; /* so many bytes of it are changed */
        if (rest != 0) {
            message->bytes[sizeof(head) + take(in, 1) % sizeof(smp_notice)] =
                (uint8_t)take(in, 1);
        }
    } else {
        for (size_t i = 0; i < rest && in->left != 0; i++) {
            message->bytes[sizeof(head) + i] = (uint8_t)take(in, 1);
        }
    }
    if (message->nblocks == 1) {
        require(smp_block_private(block, &message->blocks[0]) == SMP_OK);
        memset(smp_block_data(message->blocks[0]), 1, block);
    }
    if (smp_post_is(message)) {
        smp_post_put(smp_comm_post(comms[0]), message);
    } else {
        smp_message_free(message);
    }
}

/* A call of the input.  in and out: ROOM bytes. */
static smp_call
make_call(input *in, void *from, void *to, size_t *counts)
{
    smp_call call = {.operation = (smp_operation)(take(in, 1) % SMP_OPERATIONS),
                     .dtype = (smp_dtype)(take(in, 1) % SMP_DTYPES),
                     .reduction = (smp_reduction)(take(in, 1) % SMP_REDUCTIONS),
                     .root = (int)(take(in, 1) % MEMBERS),
                     .count = (size_t)take(in, 1) % MOST_COUNT,
                     .in = from,
                     .out = to,
                     .factor = 2};
    bool     uneven = take(in, 1) % 2 != 0;

    for (int i = 0; i < 2 * MEMBERS; i++) {
        counts[i] = uneven ? (size_t)take(in, 1) % MOST_COUNT : 0;
    }
    if (uneven &&
        (call.operation == SMP_REDUCE_SCATTER || call.operation == SMP_ALL_GATHER ||
         call.operation == SMP_ALL_TO_ALL)) {
        call.counts = counts;
        call.out_counts = call.operation == SMP_ALL_TO_ALL ? counts + MEMBERS : NULL;
    }
    return call;
}

/* Begins the operation and goes on while parcels come. */
static void
do_operation(group *g, input *in)
{
    _Alignas(16) static uint8_t from[ROOM];
    _Alignas(16) static uint8_t to[ROOM + GUARD];
    size_t                      counts[2 * MEMBERS];
    smp_call                    call = make_call(in, from, to, counts);
    smp_status                  status = smp_hierarchical_begin(&g->hier, &call, 1);
    int                         member = -1;
    char                        why[64];

    memset(to + ROOM, 0x5a, GUARD);
    for (int step = 0; status == SMP_OK && step < MOST_STEPS; step++) {
        bool waits = false;

        status = smp_hierarchical_go_on(&g->hier, &waits, &member);
        if (g->hier.phase == SMP_HIERARCHICAL_OVER ||
            g->hier.phase == SMP_HIERARCHICAL_REFUSED) {
            break;
        }
        if (status == SMP_OK && waits && in->left == 0) {
            break;
        }
        if (status == SMP_OK && waits) {
            put_parcel(g, in);
            status = smp_hierarchical_trouble(&g->hier, &member);
        }
    }
    (void)smp_hierarchical_why(&g->hier, 1, why, sizeof(why));
    for (int m = 0; m < MEMBERS; m++) {
        (void)smp_hierarchical_awaits(&g->hier, m);
    }
    for (size_t i = 0; i < GUARD; i++) {
        require(to[ROOM + i] == 0x5a);
    }
}

static void
be_member(input *in)
{
    static const int    ranks[MEMBERS] = {0, 1};
    static const bool   local[MEMBERS] = {true, false};
    static const int    lowest[MEMBERS] = {0, 1};
    static const size_t round_bytes = 64;
    static group        g;
    smp_deadline        deadline = {.at_ns = smp_clock_ns() + SMP_NS_PER_S};
    int                 parcels = (int)take(in, 1) % 4;
    int                 failed;
    smp_doorbell       *doorbell;

    memset(&g, 0, sizeof(g));
    require(smp_epoch_barrier_init(&g.barrier, comms[0], ranks, 1, GROUP,
                                   SMP_READ_NEVER, &deadline, &failed, NULL) == SMP_OK);
    require(smp_collective_init(&g.op, &g.barrier) == SMP_OK);
    require(smp_wire_init(&g.wire, comms[0], ranks, local, MEMBERS, 0, GROUP, "fuzz",
                          &failed) == SMP_OK);
    for (int i = 0; i < parcels; i++) {
        put_parcel(&g, in);
    }
    if (parcels == 0) { /* a hello as it should be */
        static const uint8_t hello[6] = {0, SMP_PARCEL_HELLO};
        input                right = {hello, sizeof(hello)};

        put_parcel(&g, &right);
    }
    deadline.at_ns = smp_clock_ns(); /* what is there */
    doorbell = &g.barrier.members[0].control->doorbell;
    if (smp_wire_meet(&g.wire, doorbell, &deadline, &failed) == SMP_OK) {
        require(smp_hierarchical_init(&g.hier, &g.barrier, &g.op, &g.wire, lowest,
                                      round_bytes) == SMP_OK);
        g.has_met = true;
        do_operation(&g, in);
    }
    smp_wire_fini(&g.wire);
    smp_hierarchical_fini(&g.hier);
    smp_collective_fini(&g.op);
    smp_epoch_barrier_fini(&g.barrier);
    drop_rest(comms[0]);
    drop_rest(comms[1]);
}

/* ----------------------------------------------------------------- a mailbox */

/* Sends bytes of the input, then a message as it should be. */
static void
send_messages(input *in, const smp_address *last)
{
    int messages = (int)take(in, 1) % 4;

    for (int i = 0; i < messages; i++) {
        smp_address address = {.group = take(in, 1),
                               .tag = (int64_t)take(in, 1),
                               .dtype = (smp_dtype)take(in, 1),
                               .count = (size_t)take(in, 2)};
        size_t      bytes = take(in, 1) % 8 == 0 ? (size_t)take(in, 1) % sizeof(address)
                                                 : sizeof(address);
        size_t      nblocks = (size_t)take(in, 1) % 3;
        smp_block  *blocks[2];

        for (size_t b = 0; b < nblocks; b++) {
            require(smp_comm_block(comms[1], 0, (size_t)take(in, 2), &blocks[b]) ==
                    SMP_OK);
        }
        require(smp_comm_send(comms[1], 0, &address, bytes, blocks, nblocks) == SMP_OK);
    }
    require(smp_comm_send(comms[1], 0, last, sizeof(*last), NULL, 0) == SMP_OK);
}

static void
be_mailbox(input *in)
{
    static int64_t     last_tag = 1000;
    uint8_t            out[64] = {0};
    smp_posted_receive receive = {
        .want = {.group = 1, .tag = 1, .dtype = SMP_U8, .count = 16},
        .source = SMP_ANY_SOURCE,
        .out = out,
    };
    smp_posted_receive last = {
        .want = {.group = 1, .tag = ++last_tag, .dtype = SMP_U8, .count = 0},
        .source = 1,
        .out = out,
    };
    smp_mailbox *mailbox;

    require(smp_mailbox_create(comms[0], &mailbox) == SMP_OK);
    smp_receive_post(mailbox, &receive);
    smp_receive_post(mailbox, &last);
    send_messages(in, &last.want);
    require(smp_receive_wait(mailbox, &last, smp_clock_ns() + 10 * SMP_NS_PER_S));
    for (size_t i = 16; i < sizeof(out); i++) {
        require(out[i] == 0);
    }
    smp_receive_cancel(mailbox, &receive);
    smp_mailbox_destroy(mailbox);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};

    if (comms[0] == NULL) {
        connect_ranks();
    }
    if (take(&in, 1) % 8 == 0) {
        be_mailbox(&in);
    } else {
        be_member(&in);
    }
    return 0;
}
