/* The socket between two ranks of one host: blocks without room in the pool, and the
 * goodbye.
 *
 *   frame = kind, bytes; then `bytes` of a block
 *
 * Ownership  put() takes a block; get() gives one.
 * Threads    put, say_goodbye: any.  get, arrived: the receiving thread.  The rest: the
 *            progress thread; init runs before and fini after its life.
 */
#ifndef SMP_COMM_TRANSPORT_SHM_STREAM_H
#define SMP_COMM_TRANSPORT_SHM_STREAM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/block.h"
#include "comm/transport/socket.h"
#include "common/lock.h"
#include "common/status.h"

typedef struct {
    uint32_t kind; /* SMP_FRAME_* */
    uint32_t zero;
    uint64_t bytes;
} smp_frame;

enum { SMP_FRAME_BLOCK = 0x424cu, SMP_FRAME_GOODBYE = 0x4259u };

typedef struct {
    int fd; /* owned */

    smp_frame  in_frame; /* progress thread only, like all in_ */
    size_t     in_have;  /* bytes read, of the frame or else of the block */
    smp_block *in_block; /* owned: being filled */

    smp_frame out_frame; /* progress thread only, like all out_ */
    size_t    out_sent;  /* of frame and block together */
    uint64_t  out_total; /* bytes written since init */
    bool      out_ended; /* the goodbye is sent, or cannot be */

    _Atomic size_t arrived; /* blocks in `in` */
    smp_lock       in_lock; /* guards in */
    smp_block_list in;

    smp_lock       out_lock; /* guards out, goodbye */
    smp_block_list out;
    bool           goodbye; /* to be said once out is empty */
} smp_stream;

/* Takes fd, a nonblocking one. */
void smp_stream_init(smp_stream *stream, int fd);
void smp_stream_fini(smp_stream *stream);

/* Queues a block; the caller wakes the progress thread. */
void smp_stream_put(smp_stream *stream, smp_block *block);
void smp_stream_say_goodbye(smp_stream *stream);

/* The number of arrived blocks, and the oldest (NULL: none). */
size_t     smp_stream_arrived(const smp_stream *stream);
smp_block *smp_stream_get(smp_stream *stream);

/* Reads the arrived bytes, up to a limit.  *blocks: the number of newly arrived
 * ones. */
smp_socket_event smp_stream_read(smp_stream *stream, size_t *blocks);

/* Writes the queue, up to a limit: IDLE, MORE, BLOCKED or HUNG_UP. */
smp_socket_event smp_stream_write(smp_stream *stream);

#endif
