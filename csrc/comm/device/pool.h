/* A rank's device pool: memory on its device, readable by the other ranks of the host.
 *
 * One allocation, made for the first tensor, exported once, shown on the segment's
 * card.  It is not memory of PyTorch's allocator, because expandable segments cannot be
 * exported.  A pattern lies behind its end, for its readers, and then room for a
 * pattern of each rank: so a way is tried in both directions.
 *
 * Status     Run by ranks on one shared H100, not yet between two GPUs; the tests have
 *            a stand-in for the driver (tests/core/stand_in.c).
 * Ownership  A taken span is the caller's until it is sent, then the receiver's: one
 *            store gives it back (a block's release).
 * Threads    create, take, give_back, withdraw, retire: one at a time.
 *            measure: any.
 * Errors     `why` in the driver's words.
 */
#ifndef SMP_COMM_DEVICE_POOL_H
#define SMP_COMM_DEVICE_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "comm/memory/arena.h"
#include "comm/memory/segment.h"
#include "device/driver.h"

typedef struct smp_device_pool smp_device_pool;

typedef struct {
    uint32_t slot; /* of the card */
    uint64_t offset;
    uint64_t at;    /* its address on the device */
    void    *event; /* borrowed: to be recorded when the bytes are there */
} smp_device_span;

/* A rank that may have the pool open. */
typedef struct {
    smp_segment *segment; /* owned: one reference; NULL: none */
    pid_t        pid;
} smp_device_reader;

/* The bytes of a pool with all its patterns. */
size_t smp_device_pool_end(size_t bytes, int ranks);

/* Makes and shows it; `bytes` are rounded up to a multiple of 64.  `stream` writes the
 * pattern.  Holds references to the device's primary context and to `own`, the segment
 * of this rank.  NULL: no. */
smp_device_pool *smp_device_pool_create(const smp_driver *driver, int device,
                                        void *stream, size_t bytes, int rank,
                                        smp_segment *own, char why[SMP_DRIVER_TEXT]);

/* Room for `bytes` to `dest`.  False: full, or (*fault) its event cannot be made.  The
 * context is current. */
bool smp_device_pool_take(smp_device_pool *pool, size_t bytes, int dest,
                          smp_device_span *out, bool *fault, char why[SMP_DRIVER_TEXT]);

/* Gives back an unsent span. */
void smp_device_pool_give_back(smp_device_pool *pool, uint32_t slot);

/* `dest` is dead: its spans come back. */
void smp_device_pool_reclaim(smp_device_pool *pool, int dest);

/* No rank can read it: gives its memory back.  Nothing was sent, and nothing is from
 * now on. */
void smp_device_pool_withdraw(smp_device_pool *pool);

void smp_device_pool_measure(smp_device_pool *pool, smp_arena_use *use);

/* Takes an event of this rank, opened by readers of the pool: it ends with the memory.
 */
void smp_device_pool_keep(smp_device_pool *pool, void *event);

/* Takes the pool, and readers[0 .. n) with their references.  Its memory is freed when
 * no reader has it open any more: now, or when the next pool of this process is made or
 * retired; the end of the process frees it in any case.  With `leave` it is left to the
 * process's end: the device may still be working on it. */
void smp_device_pool_retire(smp_device_pool *pool, smp_device_reader *readers, int n,
                            bool leave);

#endif
