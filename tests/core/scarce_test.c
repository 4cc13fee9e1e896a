/* Comm without memory: each allocation in turn fails, and the call says so, leaves
 * nothing behind and works the next time.  The linker sends the core's allocations
 * here (see the Makefile). */
#define _GNU_SOURCE
#include <errno.h>

#include "comm/transport/shm/meet.h"
#include "pair.h"
#include "traffic.h"

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);

/* How many more of this thread's allocations succeed; negative: all. */
static _Thread_local int left = -1;

static bool
refused(void)
{
    if (left < 0) {
        return false;
    }
    if (left == 0) {
        errno = ENOMEM;
        return true;
    }
    left--;
    return false;
}

void *
__wrap_malloc(size_t bytes)
{
    return refused() ? NULL : __real_malloc(bytes);
}

void *
__wrap_calloc(size_t count, size_t bytes)
{
    return refused() ? NULL : __real_calloc(count, bytes);
}

void *
__wrap_realloc(void *old, size_t bytes)
{
    return refused() ? NULL : __real_realloc(old, bytes);
}

/* The transport under test. */
static const char *transport = "shm";

static smp_status
create_comm(int rank, smp_comm **comm)
{
    smp_comm_config config = {.rank = rank,
                              .size = 2,
                              .pool_bytes = 1 << 20,
                              .spin_us = 0,
                              .transports = transport,
                              .job = "scarce"};

    return smp_comm_create(&config, comm);
}

TEST(create_without_memory)
{
    smp_comm  *comm;
    smp_status status = SMP_ERR_NO_MEMORY;
    int        failures = 0;

    for (int n = 0; status != SMP_OK; n++) {
        CHECK(n < 100);
        left = n;
        status = create_comm(0, &comm);
        left = -1;
        if (status != SMP_OK) {
            /* Registering a descriptor with the fork handlers counts as the system's.
             */
            CHECK(status == SMP_ERR_NO_MEMORY || status == SMP_ERR_SYSTEM);
            failures++;
        }
    }
    CHECK(failures >= 6);
    smp_comm_destroy(comm);
}

typedef struct {
    meeter   m;
    uint64_t copies[2][SMP_CARD_BYTES / 8]; /* of the cards: who fails is gone */
    int      scarce;                        /* for `left` of the connecting thread */
    bool     plenty;                        /* not all of `scarce` was needed */
} end;

static void *
connect_main(void *arg)
{
    end *e = arg;

    left = e->scarce;
    meet_main(&e->m);
    e->plenty = left != 0;
    left = -1;
    if (e->m.status != SMP_OK) { /* so that the other one does not wait for us */
        smp_comm_destroy(e->m.comm);
        e->m.comm = NULL;
    }
    return NULL;
}

/* Both ranks as threads; rank 0 may make `scarce` allocations while it connects. */
static void
connect_both(end ends[2], int scarce)
{
    bool slow = scarce < 0 || strcmp(transport, "tcp") != 0;

    for (int r = 0; r < 2; r++) {
        ends[r].m = (meeter){.timeout_ms = slow ? 20000 : 1000};
        CHECK_OK(create_comm(r, &ends[r].m.comm));
        ends[r].scarce = r == 0 ? scarce : -1;
    }
    for (int i = 0; i < 4; i++) {
        end        *e = &ends[i / 2];
        const void *card = smp_comm_card(ends[i % 2].m.comm, &e->m.bytes[i % 2]);

        e->m.cards[i % 2] = memcpy(e->copies[i % 2], card, e->m.bytes[i % 2]);
    }
    for (int r = 0; r < 2; r++) {
        CHECK(pthread_create(&ends[r].m.thread, NULL, connect_main, &ends[r]) == 0);
    }
    pthread_join(ends[0].m.thread, NULL);
    pthread_join(ends[1].m.thread, NULL);
}

static void
drop_both(end ends[2])
{
    smp_comm_destroy(ends[0].m.comm);
    smp_comm_destroy(ends[1].m.comm);
}

TEST(connect_without_memory)
{
    end  ends[2] = {{.scarce = 0}};
    int  failures = 0;
    bool plenty = false;

    for (int n = 0; !plenty; n++) {
        CHECK(n < 100);
        connect_both(ends, n);
        plenty = ends[0].plenty;
        if (ends[0].m.status != SMP_OK) {
            CHECK_STATUS(ends[0].m.status, SMP_ERR_NO_MEMORY);
            failures++;
        }
        drop_both(ends);
    }
    CHECK(failures >= 8);
    CHECK_OK(ends[0].m.status);
}

/* A send of three blocks, one of each kind; then the same for the receive. */
TEST(messages_without_memory)
{
    static const size_t sizes[] = {100, 5000, 2 << 20};
    end                 ends[2] = {{.scarce = 0}};
    world               w = {.rank = 0, .size = 2};
    smp_message        *message;
    smp_status          status = SMP_ERR_NO_MEMORY;
    int                 failures = 0;

    connect_both(ends, -1);
    CHECK(ends[0].m.status == SMP_OK && ends[1].m.status == SMP_OK);
    w.comm = ends[0].m.comm;
    for (int n = 0; status != SMP_OK; n++) {
        smp_block *blocks[3];
        uint8_t    bytes[20000];

        CHECK(n < 20);
        fill(bytes, sizeof(bytes), 9);
        for (size_t i = 0; i < 3; i++) {
            CHECK_OK(smp_comm_block(w.comm, 1, sizes[i], &blocks[i]));
            fill(smp_block_data(blocks[i]), sizes[i], 9 + i + 1);
        }
        left = n;
        status = smp_comm_send(w.comm, 1, bytes, sizeof(bytes), blocks, 3);
        left = -1;
        failures += status != SMP_OK;
        CHECK(status == SMP_OK || status == SMP_ERR_NO_MEMORY);
    }
    CHECK(failures >= 1);
    for (int n = 0;; n++) { /* nothing of the failed sends, and nothing is lost */
        CHECK(n < 100000000);
        left = n % 8;
        status = smp_comm_receive(ends[1].m.comm, 0, &message);
        left = -1;
        if (status == SMP_OK) {
            break;
        }
        CHECK(status == SMP_ERR_NO_MEMORY || status == SMP_ERR_TIMED_OUT);
    }
    CHECK(message_filled(message, 9, 20000, sizes, 3));
    smp_message_free(message);
    CHECK_STATUS(smp_comm_receive(ends[1].m.comm, 0, &message), SMP_ERR_TIMED_OUT);

    for (int n = 0; n < 3; n++) { /* a block for each place */
        smp_block *block;

        left = 0;
        CHECK_STATUS(smp_comm_block(w.comm, 1, sizes[n], &block), SMP_ERR_NO_MEMORY);
        left = -1;
    }
    drop_both(ends);
}

/* Over TCP the other rank calls one that has failed until its time is over. */
#define OVER_TCP(name)                                                                 \
    TEST(name##_over_tcp)                                                              \
    {                                                                                  \
        transport = "tcp";                                                             \
        name();                                                                        \
        transport = "shm";                                                             \
    }

OVER_TCP(create_without_memory)
OVER_TCP(connect_without_memory)
OVER_TCP(messages_without_memory)

RUN_TESTS
