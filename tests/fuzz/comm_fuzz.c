/* Any bytes at all from another process: a status, or something that lies inside what
 * we have mapped.
 *
 * The first byte of the input chooses who reads the rest: a ring, a record, a card, a
 * handshake, a stream.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/memory/ring.h"
#include "comm/transport/card.h"
#include "comm/transport/shm/meet.h"
#include "comm/transport/shm/record.h"
#include "comm/transport/shm/stream.h"

#define ARENA ((size_t)1 << 20)
#define LANDING 2 /* the one that the writer of records has sent to */

static void
require(int condition)
{
    if (!condition) {
        abort();
    }
}

static void
read_record(const uint8_t *data, size_t size)
{
    static smp_segment *segment;
    static smp_segment *own;
    smp_message        *message;
    smp_record_kind     kind;
    size_t              missing;
    size_t              absent = 0;
    uint8_t            *copy = malloc(size + 1); /* aligned, and no byte too many */

    if (segment == NULL) {
        require(smp_segment_create(2, ARENA, &segment) == SMP_OK);
        require(smp_segment_create(2, ARENA, &own) == SMP_OK);
        own->device->landings[LANDING].source = 1;
        own->device->landings[LANDING].bytes = 1024;
    }
    own->device->landings[LANDING].state = SMP_LANDING_SENT;
    memcpy(copy, data, size);
    if (smp_record_read(copy, size, 1, segment, own, &message, &kind, &missing) ==
        SMP_OK) {
        require(kind == SMP_RECORD_WHOLE || kind == SMP_RECORD_SPILLED);
        require(kind != SMP_RECORD_SPILLED || message->nblocks == 1);
        for (size_t i = 0; i < message->nblocks; i++) {
            const smp_block *block = message->blocks[i];

            if (block == NULL) {
                absent++;
            } else if (block->lands) {
                require(kind != SMP_RECORD_SPILLED && block->segment == own);
                require(block->slot == LANDING && block->bytes == 1024);
            } else if (block->data == NULL) { /* on a device */
                require(kind != SMP_RECORD_SPILLED);
                require(block->slot < SMP_DEVICE_SPANS);
                require(block->offset <= segment->device->bytes &&
                        block->bytes <= segment->device->bytes - block->offset);
            } else if (block->segment != NULL) {
                require((uint8_t *)block->data >= segment->arena);
                require((uint8_t *)block->data + block->bytes <=
                        segment->arena + ARENA);
                require(block->slot < segment->nslots);
            } else {
                require(block->bytes <= SMP_RECORD_INLINE);
            }
        }
        require(absent == missing);
        smp_message_free(message);
    }
    free(copy);
}

/* The input gives where the ends stand and fills the ring from the head on. */
static void
read_ring(const uint8_t *data, size_t size)
{
    static smp_ring  *ring;
    smp_ring_consumer consumer = {0};
    smp_ring_producer producer = {0};
    uint64_t          ends[3] = {0};
    const void       *from;
    void             *to;
    size_t            bytes;

    if (ring == NULL) {
        ring = aligned_alloc(64, sizeof(*ring));
        require(ring != NULL);
    }
    if (size < sizeof(ends)) {
        return;
    }
    memcpy(ends, data, sizeof(ends));
    data += sizeof(ends);
    size -= sizeof(ends);
    atomic_store(&ring->head, ends[0]);
    atomic_store(&ring->tail, ends[1]);
    atomic_store(&ring->hungry, (uint32_t)ends[2]);
    consumer.ring = ring;
    consumer.head = ends[0] / 64 * 64; /* ours, so it is what we write */
    for (size_t i = 0; i < size; i++) {
        ring->data[(consumer.head + i) % SMP_RING_BYTES] = data[i];
    }
    while (smp_ring_peek(&consumer, &from, &bytes) == SMP_OK && from != NULL) {
        require((const uint8_t *)from >= ring->data);
        require(bytes <= SMP_RING_ENTRY_BYTES);
        require((const uint8_t *)from + bytes <= ring->data + SMP_RING_BYTES);
        smp_ring_advance(&consumer);
    }
    producer.ring = ring;
    producer.tail = ends[1] / 64 * 64;
    producer.head = producer.tail;
    atomic_store(&ring->head, ends[0]);
    for (int i = 0; i < 20; i++) {
        bytes = (size_t)(ends[2] >> i) % (SMP_RING_ENTRY_BYTES + 1);
        if (smp_ring_reserve(&producer, bytes, &to) != SMP_OK || to == NULL) {
            break;
        }
        require((uint8_t *)to >= ring->data);
        require((uint8_t *)to + bytes <= ring->data + SMP_RING_BYTES);
        memset(to, 1, bytes);
        smp_ring_commit(&producer);
    }
}

static void
read_cards(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + 1);
    size_t   bytes;

    memcpy(copy, data, size);
    if (smp_card_ok(copy, size, 1, 2)) {
        const smp_card *card = (const smp_card *)(void *)copy;
        const uint8_t  *section = smp_card_find(card, "shm", &bytes);

        if (section != NULL) {
            require(section >= copy && section + bytes <= copy + size);
            (void)smp_shm_card_ok(section, bytes, 1);
        }
    }
    if (smp_shm_card_ok(copy, size, 1)) {
        require(strlen(((smp_shm_card *)(void *)copy)->path) < 64);
    }
    free(copy);
}

static void
read_hello(const uint8_t *data, size_t size)
{
    static const smp_shm_card own = {.token = "not guessed, own"};
    static const smp_shm_card theirs = {.token = "not guessed, its"};
    static const smp_shm_self self = {.rank = 0, .size = 2, .job = "job"};
    smp_shm_hello             hello;

    if (size >= sizeof(hello)) {
        memcpy(&hello, data, sizeof(hello));
        (void)smp_shm_hello_ok(&hello, &self, 1, &own, &theirs);
    }
}

/* Frames: their kind is any, their length 16 bits of the input (the reader would
 * allocate anything), what follows is what is left. */
static void
read_stream(const uint8_t *data, size_t size)
{
    int              pair[2];
    smp_stream       stream;
    smp_socket_event event = SMP_SOCKET_MORE;
    size_t           blocks = 0;
    smp_block       *block;

    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
    smp_stream_init(&stream, pair[0]);
    while (size > 4) {
        uint16_t  bytes = (uint16_t)(data[0] | data[1] << 8);
        smp_frame frame = {.kind = data[2] % 4 == 0   ? SMP_FRAME_GOODBYE
                                   : data[2] % 4 == 1 ? data[2]
                                                      : SMP_FRAME_BLOCK,
                           .zero = data[3] == 255,
                           .bytes = bytes};
        size_t    follows = bytes < size - 4 ? bytes : size - 4;

        if (follows + 4 == size && data[3] % 2 == 1) { /* the last one is cut */
            (void)!write(pair[1], &frame, data[3] % sizeof(frame));
            break;
        }
        (void)!write(pair[1], &frame, sizeof(frame));
        (void)!write(pair[1], data + 4, follows);
        data += 4 + follows;
        size -= 4 + follows;
    }
    close(pair[1]);
    while (event == SMP_SOCKET_MORE) {
        size_t more;

        event = smp_stream_read(&stream, &more);
        blocks += more;
    }
    require(event != SMP_SOCKET_IDLE && event != SMP_SOCKET_BLOCKED);
    require(smp_stream_arrived(&stream) == blocks);
    while ((block = smp_stream_get(&stream)) != NULL) {
        require(smp_block_bytes(block) <= UINT16_MAX);
        smp_block_release(block);
        blocks--;
    }
    require(blocks == 0);
    smp_stream_fini(&stream);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const readers[])(const uint8_t *, size_t) = {
        read_record, read_ring, read_cards, read_hello, read_stream};

    if (size > 0) {
        readers[data[0] % 5](data + 1, size - 1);
    }
    return 0;
}
