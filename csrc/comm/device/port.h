/* The port: tensors enter and leave a rank's device there, past host memory.
 *
 * put() copies a tensor from the user's memory into the own pool.  Its block travels in
 * a message like any other; get(), on the receiving rank, copies from the sender's pool
 * into fresh memory of the receiver.  So nothing aliases, and the span goes back as
 * soon as the second copy is done.  Both copies run on a stream of the port's own, in
 * order with the user's stream by events; the thread waits for neither:
 *
 *     user's stream   ...writes x | fence ............ (x may be changed again)...
 *     own stream                    \-> x -> pool | event of the span ->/
 *     -------------------------------------------------\--- other rank ---
 *     own stream                         fence ->/      \-> pool -> y | done -> release
 *     user's stream                   ...memory of y |                \-> ...reads y
 *
 * The user's stream waits for the first copy too: work after the send may write x.
 * A tensor of a size that came before is copied once, into memory that the receiver has
 * offered for it, a landing (comm/device/landings.h).
 *
 * A rank has one port and a port one device, the first one used.
 *
 * The pool of a rank is tried before tensors come from it: its owner has put a pattern
 * there; the reader copies it in a tensor's way, and compares.  The reader waits for
 * the copy, 10 s at most; tensors go through host memory until it is open.  Other
 * bytes, an error and no end are the same: both ranks' ports are shut, with one warning
 * (smp_warn).  So is the port of every rank at its next message to or from one of them.
 *
 * Status     Run by ranks on one shared H100, not yet between two GPUs; the tests have
 *            a stand-in for the driver (tests/core/stand_in.c).  Between devices of
 *            other hosts there is no path of this kind: tensors go through host memory.
 * Ownership  put gives a block to the caller, get takes one, also on an error.
 * Threads    measure, number, distrust: any.  The rest, up to destroy: one at a time
 *            (the server's baton guarantees it); let_go is called by this thread.
 * Errors     put has none: for NULL the tensor goes through host memory.  After a
 *            failure of the driver the port is shut, on this rank; `why` of measure
 *            has the driver's words.
 */
#ifndef SMP_COMM_DEVICE_PORT_H
#define SMP_COMM_DEVICE_PORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/block.h"
#include "comm/memory/segment.h"
#include "common/status.h"
#include "device/driver.h"

typedef struct smp_comm        smp_comm;
typedef struct smp_device_port smp_device_port;

/* A port's questions about another rank: its memory (comm/messaging/neighbour.h),
 * whether it is gone, in order (left) or not, and its name in messages. */
typedef struct {
    const smp_comm *comm; /* borrowed, until the port is destroyed */
    bool (*neighbour)(const smp_comm *comm, int rank, smp_neighbour *out);
    bool (*gone)(const smp_comm *comm, int rank);
    bool (*left)(const smp_comm *comm, int rank);
    int (*name)(const smp_comm *comm, int rank);
} smp_device_peers;

/* The values of smp_device_measure(); counts since create. */
typedef struct {
    uint64_t    tensors;   /* sent in the pool, or into landings */
    uint64_t    bytes;     /* of them */
    uint64_t    landed;    /* of the tensors: copied once, into landings */
    uint64_t    fallbacks; /* sent through host memory to a rank of this host */
    uint64_t    in_use;    /* bytes of the pool, now */
    uint64_t    high;      /* the most of in_use */
    uint64_t    size;      /* of the pool; 0: there is none (yet) */
    const char *why; /* why there is none, "" if it may still come; until destroy */
} smp_device_use;

/* The port of `rank`, idle: nothing is loaded or allocated on a device yet.  `bytes` is
 * the pool's size; 0: everything goes through host memory.  `own` is borrowed until
 * destroy.  NULL: no memory. */
smp_device_port *smp_device_port_create(const smp_device_peers *peers, smp_segment *own,
                                        int rank, int size, size_t bytes);

/* Waits (for a second at most) for the copies under way, closes the open pools, gives
 * back the received blocks.  Takes NULL. */
void smp_device_port_destroy(smp_device_port *port);

/* A path between devices of this host was tried elsewhere and cannot be relied on: the
 * groups of this comm are not to try it.  Any thread. */
void smp_device_distrust(smp_device_port *port);
bool smp_device_is_distrusted(const smp_device_port *port);

/* The number of this rank's device, or -1. */
int smp_device_number(const smp_device_port *port);

/* Device number `device` is this rank's, and tensors travel between it and `rank`:
 * makes the own pool, opens and tries the pool of `rank` once it is shown.  From then
 * on put() there and get() from there work.  Cheap when it is done already. */
void smp_device_meet(smp_device_port *port, int rank, int device);

/* A block for `dest` with the `bytes` at `data`, on device number `device`, as they are
 * behind the work given to `stream`.  Later work of `stream` comes after the copy.
 * NULL: no block; so for a captured stream: its copies are made when the graph runs,
 * not when the message leaves. */
smp_block *smp_device_put(smp_device_port *port, int dest, int device, uint64_t data,
                          size_t bytes, void *stream);

/* Copies the bytes of a block on a device, from `source`, to `to`, memory of
 * smp_device_number(), free for `stream` to use.  Later work of `stream` finds them
 * there.  SMP_ERR_SYSTEM with `why`. */
smp_status smp_device_get(smp_device_port *port, int source, smp_block *block,
                          uint64_t to, void *stream, char why[SMP_DRIVER_TEXT]);

/* The memory of a received block in a landing, with its address and the stream it was
 * allocated on; NULL: it is in a pool.  After get() to that address the memory is the
 * caller's. */
void *smp_device_landing(const smp_device_port *port, const smp_block *block,
                         uint64_t *at, void **stream);

/* A tensor of `bytes` has come from `source`: whether memory for the next one is to be
 * offered.  Then `bytes` at `at`, just allocated for use on `stream`, are: part of
 * `memory`, which is taken, until let_go(memory) or its return by smp_device_landing().
 * False: it is still the caller's. */
bool smp_device_wants_landing(smp_device_port *port, int source, size_t bytes);
bool smp_device_offer_landing(smp_device_port *port, int source, uint64_t at,
                              size_t bytes, void *stream, void *memory,
                              void (*let_go)(void *memory));

/* There is no memory to offer: for many steps nothing is. */
void smp_device_pause_landings(smp_device_port *port);

/* A step begins: sweeps, and closes the landings' memory that the last one did not use.
 */
void smp_device_begin_step(smp_device_port *port);

/* A step is over: sweeps, and takes back what was offered in vain. */
void smp_device_end_step(smp_device_port *port);

/* Gives back the blocks with finished copies; put() and get() do it too. */
void smp_device_sweep(smp_device_port *port);

void smp_device_measure(smp_device_port *port, smp_device_use *use);

#endif
