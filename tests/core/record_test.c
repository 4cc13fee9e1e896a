/* Spec: csrc/comm/transport/shm/record.h. */
#define _GNU_SOURCE
#include "comm/transport/shm/record.h"

#include <stdlib.h>

#include "check.h"

#define ARENA ((size_t)1 << 20)

#define DEVICE_POOL ((uint64_t)3 << 20)
#define BLOCKS 5
#define LANDING 7

/* A segment with one block of each kind: inline, in the arena, too large for both, in
 * the device pool, in a landing of the reader. */
typedef struct {
    smp_segment *segment;
    smp_segment *own; /* the reader's */
    smp_block   *blocks[BLOCKS];
} fixture;

static fixture
make_blocks(void)
{
    static const size_t sizes[] = {100, 5000, 200000};
    fixture             f;

    if (smp_segment_create(2, ARENA, &f.segment) != SMP_OK ||
        smp_block_private(sizes[0], &f.blocks[0]) != SMP_OK ||
        smp_block_shared(f.segment, 3, 640, sizes[1], &f.blocks[1]) != SMP_OK ||
        smp_block_private(sizes[2], &f.blocks[2]) != SMP_OK ||
        smp_block_on_device(f.segment, 5, 4096, 1 << 20, &f.blocks[3]) != SMP_OK ||
        smp_segment_create(2, ARENA, &f.own) != SMP_OK ||
        smp_block_landing(f.own, LANDING, 1 << 19, &f.blocks[4]) != SMP_OK) {
        abort();
    }
    f.own->device->landings[LANDING].state = SMP_LANDING_SENT;
    f.own->device->landings[LANDING].source = 1;
    f.own->device->landings[LANDING].bytes = 1 << 19;
    f.segment->device->bytes = DEVICE_POOL;
    for (int i = 0; i < 3; i++) {
        memset(smp_block_data(f.blocks[i]), 'a' + i, sizes[i]);
    }
    return f;
}

static void
drop_blocks(fixture f)
{
    for (int i = 0; i < BLOCKS; i++) {
        smp_block_release(f.blocks[i]);
    }
    smp_segment_unref(f.segment);
    smp_segment_unref(f.own);
}

/* A record of nine bytes and the blocks; the caller frees it. */
static uint8_t *
write_record(fixture f, size_t *bytes)
{
    uint8_t *record;

    *bytes = smp_record_bytes(9, f.blocks, BLOCKS, f.segment);
    record = malloc(*bytes);
    memset(record, 0, *bytes);
    smp_record_write(record, SMP_RECORD_WHOLE, "nine byte", 9, f.blocks, BLOCKS,
                     f.segment);
    return record;
}

TEST(what_was_written_is_read)
{
    fixture         f = make_blocks();
    smp_message    *message;
    smp_record_kind kind;
    size_t          missing;
    size_t          bytes;
    uint8_t        *record = write_record(f, &bytes);

    CHECK_OK(
        smp_record_read(record, bytes, 1, f.segment, f.own, &message, &kind, &missing));

    CHECK(kind == SMP_RECORD_WHOLE && missing == 1 && message->source == 1);
    CHECK(message->nbytes == 9 && memcmp(message->bytes, "nine byte", 9) == 0);
    CHECK(message->nblocks == BLOCKS && message->blocks[2] == NULL);
    CHECK(smp_block_bytes(message->blocks[0]) == 100);
    CHECK(((uint8_t *)smp_block_data(message->blocks[0]))[99] == 'a');
    CHECK(smp_block_data(message->blocks[1]) == smp_block_data(f.blocks[1]));
    CHECK(smp_block_data(message->blocks[3]) == NULL);
    CHECK(message->blocks[3]->slot == 5 && message->blocks[3]->offset == 4096);
    CHECK(smp_block_bytes(message->blocks[3]) == 1 << 20);
    CHECK(message->blocks[4]->lands && message->blocks[4]->slot == LANDING);
    CHECK(message->blocks[4]->segment == f.own);
    smp_message_free(message);
    free(record);
    drop_blocks(f);
}

TEST(a_cut_record_is_malformed)
{
    fixture         f = make_blocks();
    smp_message    *message;
    smp_record_kind kind;
    size_t          missing;
    size_t          bytes;
    uint8_t        *record = write_record(f, &bytes);

    for (size_t n = 0; n < bytes; n++) {
        uint8_t *cut = malloc(n + 1); /* its own memory: a read beyond it is seen */

        memcpy(cut, record, n);
        CHECK_STATUS(
            smp_record_read(cut, n, 1, f.segment, f.own, &message, &kind, &missing),
            SMP_ERR_MALFORMED);
        free(cut);
    }
    free(record);
    drop_blocks(f);
}

/* Who reads the record that lies in that block does not reach a device's memory. */
TEST(a_spilled_record_does_not_lie_on_a_device)
{
    fixture         f = make_blocks();
    uint64_t        record[16];
    smp_message    *message;
    smp_record_kind kind;
    size_t          missing;
    size_t          bytes;

    for (int i = 1; i < BLOCKS; i += 1 + (i == 1)) { /* in the arena, on the device */
        bytes = smp_record_bytes(0, &f.blocks[i], 1, f.segment);
        CHECK(bytes <= sizeof(record));
        smp_record_write(record, SMP_RECORD_SPILLED, NULL, 0, &f.blocks[i], 1,
                         f.segment);
        CHECK_STATUS(smp_record_read(record, bytes, 1, f.segment, f.own, &message,
                                     &kind, &missing),
                     i == 1 ? SMP_OK : SMP_ERR_MALFORMED);
        if (i == 1) {
            smp_block_forget(smp_message_take_block(message, 0));
            smp_message_free(message);
        }
    }
    drop_blocks(f);
}

/* Any change gives a status, or a message whose blocks lie where blocks may lie. */
TEST(a_message_of_a_size_that_overflows_is_refused)
{
    smp_message *message;

    CHECK_STATUS(smp_message_create(0, SIZE_MAX - 8, 0, &message), SMP_ERR_NO_MEMORY);
    CHECK_STATUS(smp_message_create(0, 0, SIZE_MAX / 8, &message), SMP_ERR_NO_MEMORY);
}

TEST(a_changed_record_never_leads_outside)
{
    fixture  f = make_blocks();
    size_t   bytes;
    uint8_t *record = write_record(f, &bytes);
    uint8_t *changed = malloc(bytes);
    unsigned seed = 3;
    int      malformed = 0;
    int      read = 0;

    for (int i = 0; i < 200000; i++) {
        smp_message    *message;
        smp_record_kind kind;
        size_t          missing;
        smp_status      status;

        f.own->device->landings[LANDING].state =
            SMP_LANDING_SENT; /* a message gave it back */
        memcpy(changed, record, bytes);
        for (int j = 0; j <= i % 3; j++) { /* mostly in the head and the refs */
            changed[(size_t)rand_r(&seed) % (i % 5 ? 120 : bytes)] =
                (uint8_t)(rand_r(&seed) >> 3);
        }
        status = smp_record_read(changed, bytes, 1, f.segment, f.own, &message, &kind,
                                 &missing);
        if (status != SMP_OK) {
            CHECK(status == SMP_ERR_MALFORMED);
            malformed++;
            continue;
        }
        read++;
        for (size_t j = 0; j < message->nblocks; j++) {
            const smp_block *block = message->blocks[j];

            if (block != NULL && block->lands) {
                CHECK(block->segment == f.own && block->slot == LANDING);
                CHECK(block->bytes == 1 << 19);
            } else if (block != NULL && block->segment != NULL && block->data == NULL) {
                CHECK(block->offset <= DEVICE_POOL);
                CHECK(block->bytes <= DEVICE_POOL - block->offset);
                CHECK(block->slot < SMP_DEVICE_SPANS);
            } else if (block != NULL && block->segment != NULL) {
                CHECK((uint8_t *)block->data >= f.segment->arena);
                CHECK((uint8_t *)block->data + block->bytes <=
                      f.segment->arena + ARENA);
                CHECK(block->slot < f.segment->nslots);
            }
        }
        smp_message_free(message);
    }
    CHECK(malformed > 0 && read > 0);
    free(changed);
    free(record);
    drop_blocks(f);
}

RUN_TESTS
