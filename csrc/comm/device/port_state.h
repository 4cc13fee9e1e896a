/* A port's state, shared by its two files: port_meet.c opens the device and the other
 * ranks' pools, port_move.c moves the tensors.
 */
#ifndef SMP_COMM_DEVICE_PORT_STATE_H
#define SMP_COMM_DEVICE_PORT_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "comm/device/landings.h"
#include "comm/device/pool.h"
#include "comm/device/port.h"
#include "comm/memory/block.h"
#include "comm/memory/device_card.h"
#include "device/driver.h"

/* IDLE -> OPEN -> SHUT, or IDLE -> SHUT. */
typedef enum { SMP_PORT_IDLE, SMP_PORT_OPEN, SMP_PORT_SHUT } smp_port_state;

/* Another rank of this host. */
typedef struct {
    smp_segment *segment; /* owned: one reference; NULL: not met */
    pid_t        pid;
    uint64_t     base; /* its pool, as this process sees it; 0: not open */
    void        *events[SMP_DEVICE_SPANS]; /* owned; its spans'; NULL: not opened yet */
    smp_landing_peer landings;
} smp_port_peer;

/* A tensor under way: a copy out of another's pool, or a wait for a landing. */
typedef struct reading {
    struct reading *next;  /* owned; in the order of their begin */
    void           *event; /* owned */
    smp_block      *block; /* owned; NULL: this one is free to use */
} reading;

struct smp_device_port {
    smp_device_peers ask; /* set at create, like all up to peers */
    smp_segment     *own; /* borrowed */
    int              rank;
    int              size;
    size_t           bytes;
    uint32_t         generation; /* smp_fork_generation() of its own process */
    smp_port_peer  **peers;      /* owned: [size]; NULL: not on this host, or not met */

    const smp_driver *driver; /* set when the port opens, like all up to fence */
    int               number; /* of the device */
    int               device; /* as the driver calls it */
    void             *context;
    void             *stream;  /* owned */
    void             *fence;   /* owned: an event, for the work of the user's stream */
    uint64_t          arrived; /* owned: where a pattern arrives */
    void *trial; /* owned: the stream of a failed trial, perhaps still with the device's
                    work, and its event */
    void *written;

    reading *first; /* owned */
    reading *last;
    reading *spare; /* owned */

    smp_landings *landings; /* owned; NULL: not open yet, or no memory */
    bool step_ended; /* and the next one has not begun, with the device at rest */

    _Atomic(smp_device_pool *) pool;  /* owned */
    _Atomic int                state; /* smp_port_state; `why` is written before SHUT */
    char                       why[SMP_DRIVER_TEXT];
    _Atomic bool               distrusted; /* by groups */
    _Atomic bool     useless; /* no rank can open the pool: it has no memory */
    _Atomic uint64_t tensors;
    _Atomic uint64_t sent;
    _Atomic uint64_t landed;
    _Atomic uint64_t fallbacks;
};

static inline smp_port_state
smp_port_state_of(const smp_device_port *port)
{
    return (smp_port_state)atomic_load(&port->state);
}

/* Nothing is sent by it any more, and no rank sends to it; `why` is written. */
void smp_port_shut(smp_device_port *port);

/* Whether the port is open on device `number`; opens it, the first time. */
bool smp_port_is_open(smp_device_port *port, int number);

/* `rank` as a reader of this rank's pool and the other way round; NULL: it is on
 * another host, or there is no memory. */
smp_port_peer *smp_port_find_peer(smp_device_port *port, int rank);

#endif
