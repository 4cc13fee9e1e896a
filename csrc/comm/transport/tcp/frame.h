/* Messages as frames on a connection, in both directions.
 *
 *   header | sizes of the blocks | the message's bytes | the blocks' bytes
 *
 * in the byte order of both sides (the handshake compares it), without padding.  A
 * writer sends from the memory of the blocks, a reader reads into theirs.  Neither ever
 * waits.
 *
 * Ownership  A frame owns its blocks; a writer owns its frames; a reader hands whole
 *            messages to the host.
 * Threads    writer: any, with the lock of its owner.  reader: one.
 */
#ifndef SMP_COMM_TRANSPORT_TCP_FRAME_H
#define SMP_COMM_TRANSPORT_TCP_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/transport/socket.h"
#include "comm/transport/transport.h"
#include "common/status.h"

enum { SMP_TCP_MESSAGE = 0x4d534721u, SMP_TCP_GOODBYE = 0x42594521u };

typedef struct {
    uint32_t kind; /* SMP_TCP_MESSAGE or _GOODBYE */
    uint32_t zero;
    uint64_t sequence; /* counts the frames of one direction from 0 */
    uint64_t nbytes;
    uint64_t nblocks;
    uint64_t total; /* the bytes behind the header */
} smp_tcp_header;

/* ---------------------------------------------------------------------- writing */

typedef struct smp_tcp_frame {
    struct smp_tcp_frame *next; /* owned: in the same list */
    size_t                head_bytes;
    uint8_t              *head; /* inside this allocation: header, sizes, bytes */
    size_t                nblocks;
    smp_block            *blocks[]; /* owned */
} smp_tcp_frame;

typedef struct {
    smp_tcp_frame *first; /* owned: linked by next */
    smp_tcp_frame *last;
} smp_tcp_frames;

typedef struct {
    int            fd; /* borrowed */
    uint64_t       sequence;
    smp_tcp_frames frames;
    size_t         part;  /* of the first frame: 0 its head, i its block i-1 */
    size_t         at;    /* sent bytes of that part */
    uint64_t       total; /* bytes sent */
    bool           ended; /* nothing more can be written */
} smp_tcp_writer;

/* A frame of a copy of `bytes`, and of the blocks: it takes these.  On failure
 * (SMP_ERR_NO_MEMORY) the blocks are still the caller's. */
smp_status smp_tcp_frame_create(const void *bytes, size_t nbytes,
                                smp_block *const *blocks, size_t nblocks,
                                smp_tcp_frame **out);

/* The goodbye.  SMP_ERR_NO_MEMORY. */
smp_status smp_tcp_frame_goodbye(smp_tcp_frame **out);

/* Frees them and their blocks. */
void smp_tcp_frames_free(smp_tcp_frames *frames);

/* Queues a frame: it gets its number now. */
void smp_tcp_writer_put(smp_tcp_writer *writer, smp_tcp_frame *frame);

/* Writes the queue, up to a limit, and moves sent frames to `done`, for the caller to
 * free without the lock.  IDLE, MORE, BLOCKED or HUNG_UP; after HUNG_UP all frames are
 * done. */
smp_socket_event smp_tcp_write(smp_tcp_writer *writer, smp_tcp_frames *done);

/* ---------------------------------------------------------------------- reading */

/* Bytes read ahead of their place: small messages then cost one call, and the next
 * header comes with the last bytes of a block. */
#define SMP_TCP_AHEAD ((size_t)32 << 10)

typedef enum { PART_HEADER, PART_SIZES, PART_BYTES, PART_BLOCKS } smp_tcp_part;

typedef struct {
    int             fd;   /* borrowed */
    const smp_host *host; /* borrowed: makes messages and blocks */
    int             rank; /* the rank at the other side */
    uint64_t        sequence;
    smp_tcp_header  header;
    smp_tcp_part    part;
    size_t          have;    /* bytes of the part, or of the block */
    size_t          block;   /* PART_BLOCKS: its number */
    uint64_t       *sizes;   /* owned: [nblocks] */
    smp_message    *message; /* owned */
    size_t          at;      /* ahead[at .. end) is read and not used */
    size_t          end;
    bool            drained; /* the last read got all there was */
    uint8_t        *ahead;   /* owned: [SMP_TCP_AHEAD] */
} smp_tcp_reader;

/* SMP_ERR_NO_MEMORY. */
smp_status smp_tcp_reader_init(smp_tcp_reader *reader, int fd, const smp_host *host,
                               int rank);
void       smp_tcp_reader_fini(smp_tcp_reader *reader);

/* Reads the arrived bytes, up to a limit, and delivers whole messages; *bytes is their
 * number.  Anything but BLOCKED; not to be called again after ENDED, HUNG_UP, BROKEN or
 * NO_MEMORY. */
smp_socket_event smp_tcp_read(smp_tcp_reader *reader, size_t *bytes);

#endif
