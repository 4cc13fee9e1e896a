/* Where tensors enter and leave a rank's device, without passing through host memory.
 *
 * put() copies a tensor from the user's memory into the own pool; the block that it
 * gives travels in a message like any other, and get(), on the receiving rank, copies
 * from the sender's pool into fresh memory of the receiver.  So nothing aliases, and
 * the span goes back as soon as the second copy is done.  Both copies run on a stream
 * of the port's own, in order with the user's stream by events; the thread waits for
 * neither:
 *
 *     user's stream   ...writes x | fence ............ (x may be changed again)...
 *     own stream                    \-> x -> pool | event of the span ->/
 *     -------------------------------------------------\--- other rank ---
 *     own stream                         fence ->/      \-> pool -> y | done -> release
 *     user's stream                   ...memory of y |                \-> ...reads y
 *
 * The user's stream waits for the first copy too: what comes after the send may write
 * x.
 *
 * A rank has one port and a port one device, the first that is used.
 *
 * The pool of a rank is tried before tensors come from it: its owner has put a pattern
 * there, which the reader copies as it will copy tensors, and compares.  The reader
 * waits for that, 10 s at most; tensors go through host memory until it is open.  Other
 * bytes, an error and no end are the same: both ranks' ports are shut, with one warning
 * (smp_warn), and so is that of every rank that sends to one of them, or hears from one
 * of them, later.
 *
 * Status     Run by ranks that share one H100, not yet between two GPUs; the tests have
 *            a stand-in for the driver (tests/core/stand_in.c).  Between devices of
 * other hosts there is no path of this kind: tensors go through host memory. Ownership
 * put gives a block to the caller, get takes one, whatever it returns. Threads    put,
 * get, meet, sweep: one at a time (the server's baton guarantees it). measure, device:
 * any. Errors     put has none: NULL means that the tensor goes through host memory.
 * After a failure of the driver the port is shut, on this rank; `why` of measure says
 * it in the driver's words.
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

/* Whom a port asks for another rank's memory (comm/messaging/neighbour.h), whether it
 * is gone, in order (left) or not, and what messages call it. */
typedef struct {
    const smp_comm *comm; /* borrowed, until the port is destroyed */
    bool (*neighbour)(const smp_comm *comm, int rank, smp_neighbour *out);
    bool (*gone)(const smp_comm *comm, int rank);
    bool (*left)(const smp_comm *comm, int rank);
    int (*name)(const smp_comm *comm, int rank);
} smp_device_peers;

/* What smp_device_measure() reports; counts since create. */
typedef struct {
    uint64_t    tensors;   /* that left in the pool */
    uint64_t    bytes;     /* of them */
    uint64_t    fallbacks; /* that went through host memory to a rank of this host */
    uint64_t    in_use;    /* bytes of the pool, now */
    uint64_t    high;      /* the most that in_use has been */
    uint64_t    size;      /* of the pool; 0: there is none (yet) */
    const char *why; /* why there is none, "" if it may still come; until destroy */
} smp_device_use;

/* The port of `rank`, idle: nothing is loaded or allocated on a device yet.  `bytes` is
 * the pool's size; 0: everything goes through host memory.  `own` is borrowed until
 * destroy.  NULL: no memory. */
smp_device_port *smp_device_port_create(const smp_device_peers *peers, smp_segment *own,
                                        int rank, int size, size_t bytes);

/* Waits (for a second at most) for the copies under way, closes what it has open, gives
 * back what it has received.  Takes NULL. */
void smp_device_port_destroy(smp_device_port *port);

/* A path between devices of this host was tried elsewhere and cannot be relied on: the
 * groups of this comm are not to try it.  Any thread. */
void smp_device_distrust(smp_device_port *port);
bool smp_device_is_distrusted(const smp_device_port *port);

/* The number of the device that this rank reads and writes on, or -1. */
int smp_device_number(const smp_device_port *port);

/* Device number `device` is this rank's, and `rank` is one that tensors of it come from
 * or go to: makes the own pool, opens and tries that of `rank` once it is shown.  From
 * then on put() there and get() from there work.  Cheap when it is done already. */
void smp_device_meet(smp_device_port *port, int rank, int device);

/* A block for `dest` with the `bytes` at `data`, on device number `device`, as they are
 * when what `stream` has been told is done.  What `stream` is told from now on comes
 * after the copy.  NULL: no; so for a stream that is captured, whose copies are made
 * when the graph runs, not when the message leaves. */
smp_block *smp_device_put(smp_device_port *port, int dest, int device, uint64_t data,
                          size_t bytes, void *stream);

/* Copies the bytes of a block that is on a device and came from `source` to `to`,
 * memory of smp_device_number(), which was free for `stream` to use.  What `stream` is
 * told from now on finds them there.  SMP_ERR_SYSTEM with `why`. */
smp_status smp_device_get(smp_device_port *port, int source, smp_block *block,
                          uint64_t to, void *stream, char why[SMP_DRIVER_TEXT]);

/* Gives back the blocks whose copies are done; put() and get() do it too. */
void smp_device_sweep(smp_device_port *port);

void smp_device_measure(smp_device_port *port, smp_device_use *use);

#endif
