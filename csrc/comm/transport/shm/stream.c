/* Reading and writing frames without ever waiting. */
#define _GNU_SOURCE
#include "comm/transport/shm/stream.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* Bytes moved in one call, so one peer does not keep the others waiting. */
#define TURN_BYTES ((size_t)8 << 20)

void
smp_stream_init(smp_stream *stream, int fd)
{
    *stream = (smp_stream){.fd = fd};
    atomic_init(&stream->arrived, 0);
    smp_lock_init(&stream->in_lock, SMP_LOCK_INBOX);
    smp_lock_init(&stream->out_lock, SMP_LOCK_OUTBOX);
}

void
smp_stream_fini(smp_stream *stream)
{
    smp_block_release(stream->in_block);
    smp_block_list_clear(&stream->in);
    smp_block_list_clear(&stream->out);
    smp_lock_fini(&stream->in_lock);
    smp_lock_fini(&stream->out_lock);
    close(stream->fd);
}

void
smp_stream_put(smp_stream *stream, smp_block *block)
{
    smp_lock_acquire(&stream->out_lock);
    smp_block_list_put(&stream->out, block);
    smp_lock_release(&stream->out_lock);
}

void
smp_stream_say_goodbye(smp_stream *stream)
{
    smp_lock_acquire(&stream->out_lock);
    stream->goodbye = true;
    smp_lock_release(&stream->out_lock);
}

size_t
smp_stream_arrived(const smp_stream *stream)
{
    return atomic_load(&stream->arrived);
}

smp_block *
smp_stream_get(smp_stream *stream)
{
    smp_block *block;

    smp_lock_acquire(&stream->in_lock);
    block = smp_block_list_get(&stream->in);
    if (block != NULL) {
        atomic_fetch_sub(&stream->arrived, 1);
    }
    smp_lock_release(&stream->in_lock);
    return block;
}

/* Reads into [to, to + want); false with *event when there is no more now. */
static bool
read_some(smp_stream *stream, void *to, size_t want, smp_socket_event *event)
{
    ssize_t n = recv(stream->fd, to, want, 0);

    if (n > 0) {
        stream->in_have += (size_t)n;
        return true;
    }
    if (n < 0 && errno == EINTR) {
        return true;
    }
    *event = n < 0 && errno == EAGAIN ? SMP_SOCKET_IDLE : SMP_SOCKET_HUNG_UP;
    return false;
}

/* Acts on a whole frame. */
static bool
begin_block(smp_stream *stream, smp_socket_event *event)
{
    const smp_frame *frame = &stream->in_frame;

    if (frame->kind == SMP_FRAME_GOODBYE && frame->bytes == 0) {
        *event = SMP_SOCKET_ENDED;
        return false;
    }
    if (frame->kind != SMP_FRAME_BLOCK || frame->zero != 0) {
        *event = SMP_SOCKET_BROKEN;
        return false;
    }
    if (smp_block_private(frame->bytes, &stream->in_block) != SMP_OK) {
        *event = SMP_SOCKET_NO_MEMORY;
        return false;
    }
    stream->in_have = 0;
    return true;
}

smp_socket_event
smp_stream_read(smp_stream *stream, size_t *blocks)
{
    smp_socket_event event = SMP_SOCKET_IDLE;
    size_t           moved = 0;

    *blocks = 0;
    while (moved < TURN_BYTES) {
        smp_block *block = stream->in_block;
        size_t     had = stream->in_have;

        if (block == NULL) {
            if (!read_some(stream, (uint8_t *)&stream->in_frame + had,
                           sizeof(smp_frame) - had, &event) ||
                (stream->in_have == sizeof(smp_frame) &&
                 !begin_block(stream, &event))) {
                return event;
            }
            continue;
        }
        if (had < block->bytes) {
            if (!read_some(stream, (uint8_t *)block->data + had, block->bytes - had,
                           &event)) {
                return event;
            }
        }
        if (stream->in_have == block->bytes) {
            moved += sizeof(smp_frame) + block->bytes;
            stream->in_block = NULL;
            stream->in_have = 0;
            smp_lock_acquire(&stream->in_lock);
            smp_block_list_put(&stream->in, block);
            atomic_fetch_add(&stream->arrived, 1);
            smp_lock_release(&stream->in_lock);
            (*blocks)++;
        }
    }
    return SMP_SOCKET_MORE;
}

/* The block to be written now, NULL for none; *goodbye: the goodbye is due. */
static smp_block *
first_out(smp_stream *stream, bool *goodbye)
{
    smp_block *block;

    smp_lock_acquire(&stream->out_lock);
    block = stream->out.head; /* only this thread removes it */
    *goodbye = block == NULL && stream->goodbye;
    smp_lock_release(&stream->out_lock);
    return block;
}

/* Writes more of the current frame and `bytes` of data. */
static ssize_t
write_some(smp_stream *stream, uint8_t *data, size_t bytes)
{
    struct iovec  parts[2];
    struct msghdr message = {.msg_iov = parts};
    size_t        sent = stream->out_sent;

    if (sent < sizeof(smp_frame)) {
        parts[0] = (struct iovec){(uint8_t *)&stream->out_frame + sent,
                                  sizeof(smp_frame) - sent};
        parts[1] = (struct iovec){data, bytes};
        message.msg_iovlen = bytes != 0 ? 2 : 1;
    } else {
        sent -= sizeof(smp_frame);
        parts[0] = (struct iovec){data + sent, bytes - sent};
        message.msg_iovlen = 1;
    }
    return sendmsg(stream->fd, &message, MSG_NOSIGNAL);
}

smp_socket_event
smp_stream_write(smp_stream *stream)
{
    size_t moved = 0;

    while (!stream->out_ended) {
        bool       goodbye;
        smp_block *block = first_out(stream, &goodbye);
        size_t     bytes = block == NULL ? 0 : block->bytes;
        ssize_t    n;

        if (block == NULL && !goodbye) {
            return SMP_SOCKET_IDLE;
        }
        if (moved >= TURN_BYTES) {
            return SMP_SOCKET_MORE;
        }
        stream->out_frame = (smp_frame){
            .kind = goodbye ? SMP_FRAME_GOODBYE : SMP_FRAME_BLOCK, .bytes = bytes};
        n = write_some(stream, block == NULL ? NULL : block->data, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            return SMP_SOCKET_BLOCKED;
        }
        if (n < 0) {
            stream->out_ended = true;
            return SMP_SOCKET_HUNG_UP;
        }
        stream->out_sent += (size_t)n;
        stream->out_total += (uint64_t)n;
        moved += (size_t)n;
        if (stream->out_sent == sizeof(smp_frame) + bytes) {
            stream->out_sent = 0;
            stream->out_ended = goodbye;
            if (block != NULL) {
                smp_lock_acquire(&stream->out_lock);
                smp_block_list_get(&stream->out);
                smp_lock_release(&stream->out_lock);
                smp_block_release(block);
            }
        }
    }
    return SMP_SOCKET_IDLE;
}
