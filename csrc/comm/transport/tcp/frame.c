/* Frames out of memory and into memory. */
#define _GNU_SOURCE
#include "comm/transport/tcp/frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* Bytes moved in one call, so one peer does not keep the others waiting. */
#define TURN_BYTES ((size_t)8 << 20)

/* Pieces of memory in one system call. */
#define PIECES 64

/* ---------------------------------------------------------------------- writing */

static smp_status
make_frame(uint32_t kind, const void *bytes, size_t nbytes, smp_block *const *blocks,
           size_t nblocks, smp_tcp_frame **out)
{
    smp_tcp_header header = {
        .kind = kind,
        .nbytes = nbytes,
        .nblocks = nblocks,
        .total = nblocks * sizeof(uint64_t) + nbytes,
    };
    size_t         head_bytes = sizeof(header) + (size_t)header.total;
    smp_tcp_frame *frame =
        malloc(sizeof(*frame) + nblocks * sizeof(smp_block *) + head_bytes);
    uint64_t *sizes;

    if (frame == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    frame->next = NULL;
    frame->nblocks = nblocks;
    frame->head_bytes = head_bytes;
    frame->head = (uint8_t *)(frame->blocks + nblocks);
    sizes = (uint64_t *)(void *)(frame->head + sizeof(header));
    for (size_t i = 0; i < nblocks; i++) {
        frame->blocks[i] = blocks[i];
        sizes[i] = smp_block_bytes(blocks[i]);
        header.total += sizes[i];
    }
    if (nbytes != 0) {
        memcpy(sizes + nblocks, bytes, nbytes);
    }
    memcpy(frame->head, &header, sizeof(header));
    *out = frame;
    return SMP_OK;
}

smp_status
smp_tcp_frame_create(const void *bytes, size_t nbytes, smp_block *const *blocks,
                     size_t nblocks, smp_tcp_frame **out)
{
    if (nbytes > SIZE_MAX / 4 || nblocks > SIZE_MAX / 64) {
        return SMP_ERR_NO_MEMORY;
    }
    return make_frame(SMP_TCP_MESSAGE, bytes, nbytes, blocks, nblocks, out);
}

smp_status
smp_tcp_frame_goodbye(smp_tcp_frame **out)
{
    return make_frame(SMP_TCP_GOODBYE, NULL, 0, NULL, 0, out);
}

static void
put_last(smp_tcp_frames *frames, smp_tcp_frame *frame)
{
    frame->next = NULL;
    if (frames->first == NULL) {
        frames->first = frame;
    } else {
        frames->last->next = frame;
    }
    frames->last = frame;
}

void
smp_tcp_frames_free(smp_tcp_frames *frames)
{
    while (frames->first != NULL) {
        smp_tcp_frame *frame = frames->first;

        frames->first = frame->next;
        for (size_t i = 0; i < frame->nblocks; i++) {
            smp_block_release(frame->blocks[i]);
        }
        free(frame);
    }
}

void
smp_tcp_writer_put(smp_tcp_writer *writer, smp_tcp_frame *frame)
{
    memcpy(frame->head + offsetof(smp_tcp_header, sequence), &writer->sequence,
           sizeof(writer->sequence));
    writer->sequence++;
    put_last(&writer->frames, frame);
}

/* The memory of one part of a frame. */
static struct iovec
piece_of(const smp_tcp_frame *frame, size_t part)
{
    if (part == 0) {
        return (struct iovec){frame->head, frame->head_bytes};
    }
    return (struct iovec){smp_block_data(frame->blocks[part - 1]),
                          smp_block_bytes(frame->blocks[part - 1])};
}

/* The next pieces to be sent, of as many frames as fit; returns their number. */
static size_t
collect(const smp_tcp_writer *writer, struct iovec *pieces, size_t limit)
{
    size_t part = writer->part;
    size_t at = writer->at;
    size_t n = 0;

    for (const smp_tcp_frame *f = writer->frames.first; f != NULL; f = f->next) {
        for (; part <= f->nblocks; part++) {
            struct iovec piece = piece_of(f, part);

            piece.iov_base = (uint8_t *)piece.iov_base + at;
            piece.iov_len -= at;
            at = 0;
            if (piece.iov_len > limit) {
                piece.iov_len = limit;
            }
            pieces[n++] = piece;
            limit -= piece.iov_len;
            if (n == PIECES || limit == 0) {
                return n;
            }
        }
        part = 0;
    }
    return n;
}

/* `sent` more bytes are on their way. */
static void
consume(smp_tcp_writer *writer, size_t sent, smp_tcp_frames *done)
{
    smp_tcp_frame *frame;

    writer->total += sent;
    while ((frame = writer->frames.first) != NULL) {
        size_t left = piece_of(frame, writer->part).iov_len - writer->at;

        if (sent < left) {
            writer->at += sent;
            return;
        }
        sent -= left;
        writer->at = 0;
        if (writer->part++ == frame->nblocks) {
            writer->part = 0;
            writer->frames.first = frame->next;
            put_last(done, frame);
        }
    }
}

smp_socket_event
smp_tcp_write(smp_tcp_writer *writer, smp_tcp_frames *done)
{
    struct iovec pieces[PIECES];
    size_t       moved = 0;

    while (writer->frames.first != NULL && !writer->ended) {
        struct msghdr message = {.msg_iov = pieces};
        ssize_t       n;

        if (moved >= TURN_BYTES) {
            return SMP_SOCKET_MORE;
        }
        message.msg_iovlen = collect(writer, pieces, TURN_BYTES);
        n = sendmsg(writer->fd, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            return SMP_SOCKET_BLOCKED;
        }
        if (n < 0) {
            writer->ended = true;
            break;
        }
        moved += (size_t)n;
        consume(writer, (size_t)n, done);
    }
    if (!writer->ended) {
        return SMP_SOCKET_IDLE;
    }
    while (writer->frames.first != NULL) { /* they go nowhere any more */
        smp_tcp_frame *frame = writer->frames.first;

        writer->frames.first = frame->next;
        put_last(done, frame);
    }
    return SMP_SOCKET_HUNG_UP;
}

/* ---------------------------------------------------------------------- reading */

smp_status
smp_tcp_reader_init(smp_tcp_reader *reader, int fd, const smp_host *host, int rank)
{
    *reader = (smp_tcp_reader){.fd = fd, .host = host, .rank = rank};
    reader->ahead = malloc(SMP_TCP_AHEAD);
    return reader->ahead != NULL ? SMP_OK : SMP_ERR_NO_MEMORY;
}

void
smp_tcp_reader_fini(smp_tcp_reader *reader)
{
    if (reader->message != NULL) {
        reader->host->message_free(reader->message);
    }
    free(reader->sizes);
    free(reader->ahead);
}

/* The place for the bytes of the present part. */
static struct iovec
place_of(smp_tcp_reader *reader)
{
    const smp_block *block;

    switch (reader->part) {
    case PART_HEADER:
        break;
    case PART_SIZES:
        return (struct iovec){reader->sizes,
                              (size_t)reader->header.nblocks * sizeof(uint64_t)};
    case PART_BYTES:
        return (struct iovec){reader->message->bytes, reader->message->nbytes};
    case PART_BLOCKS:
        block = reader->message->blocks[reader->block];
        return (struct iovec){reader->host->block_data(block),
                              reader->host->block_bytes(block)};
    }
    return (struct iovec){&reader->header, sizeof(reader->header)};
}

/* A whole header has come. */
static smp_socket_event
begin_message(smp_tcp_reader *reader)
{
    const smp_tcp_header *header = &reader->header;

    if (header->zero != 0 || header->sequence != reader->sequence++) {
        return SMP_SOCKET_BROKEN;
    }
    if (header->kind == SMP_TCP_GOODBYE && header->nbytes == 0 &&
        header->nblocks == 0 && header->total == 0) {
        return SMP_SOCKET_ENDED;
    }
    if (header->kind != SMP_TCP_MESSAGE || header->nblocks > INT32_MAX ||
        header->nbytes > header->total ||
        header->nblocks * sizeof(uint64_t) > header->total - header->nbytes) {
        return SMP_SOCKET_BROKEN;
    }
    if (reader->host->message(reader->rank, (size_t)header->nbytes,
                              (size_t)header->nblocks, &reader->message) != SMP_OK) {
        return SMP_SOCKET_NO_MEMORY;
    }
    if (header->nblocks != 0) {
        reader->sizes = malloc((size_t)header->nblocks * sizeof(uint64_t));
        if (reader->sizes == NULL) {
            return SMP_SOCKET_NO_MEMORY;
        }
    }
    return SMP_SOCKET_MORE;
}

/* All sizes have come: whether they add up. */
static bool
sizes_ok(const smp_tcp_reader *reader)
{
    const smp_tcp_header *header = &reader->header;
    uint64_t left = header->total - header->nbytes - header->nblocks * sizeof(uint64_t);

    for (size_t i = 0; i < header->nblocks; i++) {
        if (reader->sizes[i] > left) {
            return false;
        }
        left -= reader->sizes[i];
    }
    return left == 0;
}

/* Memory for the next block. */
static smp_socket_event
begin_block(smp_tcp_reader *reader)
{
    size_t i = reader->block;

    if (reader->host->pinned_block(reader->host->comm, (size_t)reader->sizes[i],
                                   &reader->message->blocks[i]) != SMP_OK) {
        return SMP_SOCKET_NO_MEMORY;
    }
    return SMP_SOCKET_MORE;
}

/* The message is whole. */
static void
end_message(smp_tcp_reader *reader)
{
    smp_message *message = reader->message;

    reader->message = NULL;
    free(reader->sizes);
    reader->sizes = NULL;
    reader->part = PART_HEADER;
    reader->host->deliver(reader->host->comm, message);
}

/* A part is whole: goes on to the next.  MORE: there is one. */
static smp_socket_event
next_part(smp_tcp_reader *reader)
{
    size_t           nblocks = (size_t)reader->header.nblocks;
    smp_socket_event event = SMP_SOCKET_MORE;

    reader->have = 0;
    switch (reader->part) {
    case PART_HEADER:
        event = begin_message(reader);
        reader->part = nblocks != 0 ? PART_SIZES : PART_BYTES;
        break;
    case PART_SIZES:
        event = sizes_ok(reader) ? SMP_SOCKET_MORE : SMP_SOCKET_BROKEN;
        reader->part = PART_BYTES;
        break;
    case PART_BYTES:
    case PART_BLOCKS:
        reader->block = reader->part == PART_BYTES ? 0 : reader->block + 1;
        if (reader->block == nblocks) {
            end_message(reader);
        } else {
            event = begin_block(reader);
            reader->part = PART_BLOCKS;
        }
        break;
    }
    return event;
}

/* Reads more of `place`, and ahead of it.  MORE: something has come. */
static smp_socket_event
read_some(smp_tcp_reader *reader, struct iovec place, size_t *bytes)
{
    struct iovec pieces[2] = {
        {(uint8_t *)place.iov_base + reader->have, place.iov_len - reader->have},
        {reader->ahead, SMP_TCP_AHEAD}};
    ssize_t n;

    if (reader->drained) {
        reader->drained = false;
        return SMP_SOCKET_IDLE;
    }
    n = readv(reader->fd, pieces, 2);
    if (n < 0 && errno == EINTR) {
        return SMP_SOCKET_MORE;
    }
    if (n <= 0) {
        return n < 0 && errno == EAGAIN ? SMP_SOCKET_IDLE : SMP_SOCKET_HUNG_UP;
    }
    *bytes += (size_t)n;
    reader->drained = (size_t)n < pieces[0].iov_len + pieces[1].iov_len;
    if ((size_t)n <= pieces[0].iov_len) {
        reader->have += (size_t)n;
    } else {
        reader->have = place.iov_len;
        reader->at = 0;
        reader->end = (size_t)n - pieces[0].iov_len;
    }
    return SMP_SOCKET_MORE;
}

smp_socket_event
smp_tcp_read(smp_tcp_reader *reader, size_t *bytes)
{
    smp_socket_event event = SMP_SOCKET_MORE;

    *bytes = 0;
    reader->drained = false;
    while (event == SMP_SOCKET_MORE) {
        struct iovec place = place_of(reader);
        size_t       ahead = reader->end - reader->at;
        size_t       want = place.iov_len - reader->have;

        if (want != 0 && ahead != 0) {
            size_t n = want < ahead ? want : ahead;

            memcpy((uint8_t *)place.iov_base + reader->have, reader->ahead + reader->at,
                   n);
            reader->have += n;
            reader->at += n;
        } else if (want == 0) {
            event = next_part(reader);
        } else if (*bytes >= TURN_BYTES) {
            return SMP_SOCKET_MORE;
        } else {
            event = read_some(reader, place, bytes);
        }
    }
    return event;
}
