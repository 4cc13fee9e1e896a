/* Landings: a rank's memory for a tensor that another rank of the host sends.  The
 * sender's device writes the tensor there, and the receiver has it without a copy of
 * its own.
 *
 * A receiver offers memory of PyTorch's allocator for a size that a rank has sent
 * before: so it is a tensor's like any other of the script.  A sender takes a landing
 * only if the receiver's work on that memory is over: no stream waits for the other
 * rank's work.  A tensor without a landing goes through the pool (comm/device/pool.h).
 *
 *     rank 0 sends                                  rank 1 has received as much before
 *     own stream                                    stream of the script
 *                                                   memory of y: event "ready"; OPEN
 *     ready has come -> x -> y | event "written"
 *     message: TAKEN -> SENT ---------------------> waits for written, reads y
 *                                                   memory of y': event "ready"; OPEN
 *
 * The states are in comm/memory/device_card.h.  A landing that nobody took in a whole
 * step is taken back.
 *
 * Status     Run with the tests' stand-in for the driver (tests/core/stand_in.c), not
 *            yet on a GPU.
 * Ownership  Offered memory is the landings', until its tensor has come or it is let
 * go. Threads    one at a time, as of the port (comm/device/port.h).  The device's
 * context is current. Errors     `why` in the driver's words.
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
    bool        works;                 /* the way there has been tried */
    bool        refused;               /* it cannot write here */
    smp_imports imports;               /* its allocations */
    void       *ready[SMP_LANDINGS];   /* owned; its events; NULL: not opened yet */
    void       *came[SMP_LANDINGS];    /* the same: behind its writing */
    void       *written[SMP_LANDINGS]; /* owned; of this rank; NULL: not made yet */
    smp_driver_handle handles[SMP_LANDINGS]; /* of written */
} smp_landing_peer;

/* Closes or, with `forget`, leaves to the process's end. */
void smp_landing_peer_end(smp_landing_peer *peer, const smp_driver *driver,
                          bool forget);

/* -------------------------------------------------------------------- the sender's */

/* A landing for a tensor of `bytes` from `rank`, this one, on the owner's card: TAKEN,
 * with its address here.  *at is 0 if there is none.  False with `why`: a failure. */
bool smp_landing_take(smp_landing_peer *peer, const smp_driver *driver,
                      smp_device_card *card, int rank, size_t bytes, uint32_t *number,
                      uint64_t *at, char why[SMP_DRIVER_TEXT]);

/* Closes the allocations without a landing taken since the last call: their owner may
 * free them, and has the memory back when nobody has it open. */
void smp_landing_close_unused(smp_landing_peer *peer);

/* ------------------------------------------------------------------ the receiver's */

typedef struct smp_landings smp_landings;

/* Those on the card of `own`, for `limit` bytes at a time.  `own` is borrowed.  NULL:
 * no memory. */
smp_landings *smp_landings_create(const smp_driver *driver, smp_segment *own,
                                  size_t limit);

/* Nothing is offered any more. */
void smp_landings_stop(smp_landings *landings);

/* Whether a landing for `bytes` of `source` would be of use. */
bool smp_landings_want(smp_landings *landings, int source, const smp_landing_peer *peer,
                       size_t bytes);

/* Landings `bytes` at `at`, allocated for use on `stream`: part of `memory`, which is
 * taken.  let_go(memory) ends it.  False: it is not offered, and the caller's. */
bool smp_landings_offer(smp_landings *landings, int source, uint64_t at, size_t bytes,
                        void *stream, void *memory, void (*let_go)(void *memory));

/* A landing whose tensor has come: its memory (NULL: there is none), address and
 * stream.
 */
void *smp_landings_see(const smp_landings *landings, uint32_t number, uint64_t *at,
                       void **stream);

/* The event behind the writing of a landing by its source; NULL with `why`. */
void *smp_landings_came(const smp_landings *landings, uint32_t number,
                        smp_landing_peer *peer, char why[SMP_DRIVER_TEXT]);

/* The memory is the caller's from now on. */
void smp_landings_give(smp_landings *landings, uint32_t number);

/* No device uses the landing any more: lets its memory go, unless it was given. */
void smp_landings_done(smp_landings *landings, uint32_t number);

/* A step has ended.  Takes back what nobody wanted; peers[r]: rank r's, NULL if it is
 * unknown. */
void smp_landings_end_step(smp_landings *landings,
                           smp_landing_peer *(*peer_of)(void *of, int rank), void *of);

/* Lets go of the open landings; those that may be written are left to the process's
 * end. `forget`: so are the events.  Takes NULL. */
void smp_landings_destroy(smp_landings *landings, bool forget);

#endif
