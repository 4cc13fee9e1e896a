/* Any bytes at all over TCP: a status, a goodbye, or messages of exactly the bytes that
 * came.
 *
 * The first byte of the input chooses who reads the rest: a connection, a card, a
 * hello, the choice of an address.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/transport/connecting/address.h"
#include "comm/transport/connecting/meet.h"
#include "comm/transport/tcp/frame.h"
#include "modest_host.h"

static size_t delivered; /* bytes and blocks' bytes */

static void
deliver(smp_comm *comm, smp_message *message)
{
    (void)comm;
    require(message->source == 1);
    for (size_t i = 0; i < message->nblocks; i++) {
        require(message->blocks[i] != NULL);
    }
    delivered += weigh(message);
    smp_message_free(message);
}

static const smp_host host = {MODEST_HOST, .deliver = deliver};

/* `cuts` says after how many bytes the reader looks. */
static void
read_connection(const uint8_t *data, size_t size)
{
    int              pair[2];
    smp_tcp_reader   reader;
    smp_socket_event event = SMP_SOCKET_IDLE;
    size_t           came = 0;
    size_t           cut = size != 0 ? 1 + data[0] : 1;

    delivered = 0;
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0);
    require(smp_tcp_reader_init(&reader, pair[0], &host, 1) == SMP_OK);
    for (size_t at = 1; at < size && event <= SMP_SOCKET_MORE; at += cut) {
        size_t n = size - at < cut ? size - at : cut;
        size_t bytes;

        if (write(pair[1], data + at, n) != (ssize_t)n) {
            break;
        }
        event = smp_tcp_read(&reader, &bytes);
        came += bytes;
    }
    close(pair[1]);
    while (event <= SMP_SOCKET_MORE) {
        size_t bytes;

        event = smp_tcp_read(&reader, &bytes);
        came += bytes;
    }
    require(event != SMP_SOCKET_BLOCKED);
    require(came <= size);
    require(delivered <= came);
    smp_tcp_reader_fini(&reader);
    close(pair[0]);
}

/* Frames that are right but for what the input changes. */
static void
read_frames(const uint8_t *data, size_t size)
{
    uint8_t  bytes[4096];
    size_t   n = 1;
    uint64_t sequence = 0;

    bytes[0] = size > 0 ? data[0] : 0;
    while (size >= 8 && n + sizeof(smp_tcp_header) + 3 * 8 + 1024 < sizeof(bytes)) {
        uint64_t       sizes[3] = {data[1], data[2], data[3]};
        size_t         nblocks = data[4] % 4;
        smp_tcp_header header = {.kind =
                                     data[5] == 255 ? SMP_TCP_GOODBYE : SMP_TCP_MESSAGE,
                                 .sequence = sequence++,
                                 .nbytes = data[6],
                                 .nblocks = nblocks,
                                 .total = data[6] + 8 * nblocks};

        for (size_t i = 0; i < nblocks; i++) {
            header.total += sizes[i];
        }
        memcpy(bytes + n, &header, sizeof(header));
        memcpy(bytes + n + sizeof(header), sizes, 8 * nblocks);
        memset(bytes + n + sizeof(header) + 8 * nblocks, 1, 1024);
        if (data[7] < sizeof(header) + 8 * nblocks) { /* one byte is another */
            bytes[n + data[7]] ^= data[0];
        }
        n += sizeof(header) + header.total;
        data += 8;
        size -= 8;
    }
    read_connection(bytes, n);
}

static void
read_card(const uint8_t *data, size_t size)
{
    smp_tcp_card *copy = malloc(size + 1);

    memcpy(copy, data, size);
    if (smp_tcp_card_ok(copy, size, 1)) {
        require(size == sizeof(*copy));
        require(copy->offer.naddresses <= SMP_TCP_ADDRESSES);
    }
    free(copy);
}

static void
read_hello(const uint8_t *data, size_t size)
{
    static const smp_tcp_self self = {.rank = 0, .size = 2, .job = "job"};
    smp_tcp_hello             hello = {0};
    uint8_t                   proof[SMP_PROOF_BYTES];

    memcpy(&hello, data, size < sizeof(hello) ? size : sizeof(hello));
    if (smp_tcp_hello_ok(&hello, &self, 1)) {
        smp_tcp_prove(&self, true, &hello, &hello, proof);
    }
}

static void
choose(const uint8_t *data, size_t size)
{
    smp_tcp_offer        offers[3];
    const smp_tcp_offer *all[3] = {NULL, NULL, NULL};

    memset(offers, 0, sizeof(offers));
    memcpy(offers, data, size < sizeof(offers) ? size : sizeof(offers));
    for (int r = 0; r < 3; r++) {
        offers[r].naddresses %= SMP_TCP_ADDRESSES + 1;
        if (smp_tcp_offer_ok(&offers[r])) {
            all[r] = &offers[r];
        }
    }
    for (int r = 0; r < 3; r++) {
        if (all[r] != NULL) {
            int                     choice = smp_tcp_choose(all, 3, r);
            struct sockaddr_storage address;

            require(choice >= -1 && choice < (int)all[r]->naddresses);
            if (choice >= 0) {
                require(smp_tcp_socket_address(&all[r]->addresses[choice], &address) <=
                        sizeof(address));
            }
        }
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const readers[])(const uint8_t *, size_t) = {
        read_connection, read_frames, read_card, read_hello, choose};

    if (size > 0) {
        readers[data[0] % 5](data + 1, size - 1);
    }
    return 0;
}
