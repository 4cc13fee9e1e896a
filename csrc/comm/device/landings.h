/* Landings: a rank's memory for a tensor that another rank sends.  The sender's device
 * writes the tensor there, and the receiver has it without a copy of its own.
 *
 * A receiver offers memory of PyTorch's allocator for a size that a rank has sent
 * before: so it is a tensor's like any other of the script.  It shows this memory when
 * it has seen its stream's earlier work on it to be over: no sender's stream waits for
 * the receiver's work.  A tensor without a landing goes through the pool
 * (comm/device/pool.h).
 *
 *     rank 0 sends                               rank 1 has received as much before
 *     own stream                                 stream of the script
 *                                                memory of y: event "ready" ... OPEN
 *     x -> y | event "written"
 *     message: TAKEN -> SENT ------------------> waits for written, reads y
 *                                                memory of y': event "ready" ... OPEN
 *
 * The states are in comm/memory/device_card.h.  A landing that nobody took in a whole
 * step is taken back.
 *
 * Only ranks that share a device land tensors: the sender's stream waits for its copy,
 * which between two devices takes as long as their link does.
 *
 * Status     Run with the tests' stand-in for the driver (tests/core/stand_in.c), not
 *            yet on a GPU.
 * Ownership  Offered memory is the landings', until its tensor has come or it is let
 *            go.  Memory of a tensor nobody read stays for good if the sender's
 *            process has ended meanwhile.
 * Threads    One at a time, as of the port (comm/device/port.h).  The device's context
 *            is current.
 * Errors     None but that of came(): a tensor then goes through the pool.
 */
#ifndef SMP_COMM_DEVICE_LANDINGS_H
#define SMP_COMM_DEVICE_LANDINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/device/allocations.h"
#include "comm/memory/device_card.h"
#include "comm/memory/segment.h"
#include "device/driver.h"

/* Smaller tensors go through the pool: a second copy costs less than a landing. */
#define SMP_LANDINGS_LEAST ((size_t)256 << 10)

/* Another rank, as the writer of this rank's landings and as the owner of its own. */
typedef struct {
    bool        works;              /* this rank can write there */
    bool        refused;            /* the other one cannot write here */
    smp_imports imports;            /* its allocations */
    void       *came[SMP_LANDINGS]; /* owned; its events behind its writing; NULL:
                                       not opened yet */
    void *written[SMP_LANDINGS];    /* owned; of this rank; NULL: not made yet */
    smp_driver_handle handles[SMP_LANDINGS]; /* of written */
} smp_landing_peer;

/* Closes or, with `forget`, leaves to the process's end; but for `written`. */
void smp_landing_peer_end(smp_landing_peer *peer, const smp_driver *driver,
                          bool forget);

/* -------------------------------------------------------------------- the sender's */

/* Takes a landing for a tensor of `bytes` from `rank`, this one, on the owner's card:
 * its address here; 0: there is none. */
uint64_t smp_landing_take(smp_landing_peer *peer, const smp_driver *driver,
                          smp_device_card *card, int rank, size_t bytes,
                          uint32_t *number);

/* ------------------------------------------------------------------ the receiver's */

typedef struct smp_landings smp_landings;

/* A rank as a peer of the port; NULL: unknown, or dead. */
typedef smp_landing_peer *smp_landing_peer_of(void *port, int rank);

/* Those on the card of `own`, for `limit` bytes at a time.  `own` is borrowed.  NULL:
 * no memory. */
smp_landings *smp_landings_create(const smp_driver *driver, smp_segment *own,
                                  size_t limit);

/* There is no memory to offer: for many steps nothing is. */
void smp_landings_pause(smp_landings *landings);

/* Whether a landing for `bytes` of `source` would be of use. */
bool smp_landings_want(smp_landings *landings, int source, const smp_landing_peer *peer,
                       size_t bytes);

/* Offers `bytes` at `at`, allocated for use on `stream`: part of `memory`, which is
 * taken.  let_go(memory) ends it.  False: it is not offered, and the caller's. */
bool smp_landings_offer(smp_landings *landings, int source, uint64_t at, size_t bytes,
                        void *stream, void *memory, void (*let_go)(void *memory));

/* Whether the events of some are yet to come.  Then: shows what is ready, and lets go
 * of what was left. */
bool smp_landings_pending(const smp_landings *landings);
void smp_landings_show(smp_landings *landings);

/* A landing whose tensor has come: its memory (NULL: there is none), address and
 * stream. */
void *smp_landings_see(const smp_landings *landings, uint32_t number, uint64_t *at,
                       void **stream);

/* The event behind the writing of a landing by its source; NULL with `why`. */
void *smp_landings_came(const smp_landings *landings, uint32_t number,
                        smp_landing_peer *peer, char why[SMP_DRIVER_TEXT]);

/* The memory is the caller's from now on. */
void smp_landings_give(smp_landings *landings, uint32_t number);

/* No device uses the landing any more: lets its memory go, unless it was given. */
void smp_landings_done(smp_landings *landings, uint32_t number);

/* A step has ended: takes back what nobody wanted, or will read.  The rest of `stream`
 * comes after the writing of what was left. */
void smp_landings_end_step(smp_landings *landings, smp_landing_peer_of *peer_of,
                           void *port, void *stream);

/* The same for all landings, before the end. */
void smp_landings_leave(smp_landings *landings, smp_landing_peer_of *peer_of,
                        void *port, void *stream);

/* `quiet`: `stream` has come to rest.  Else what may be written, and the events, are
 * left to the process's end.  Takes NULL. */
void smp_landings_destroy(smp_landings *landings, bool quiet);

#endif
