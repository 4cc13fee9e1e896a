/* The state of a comm, for comm.c and messages.c alone. */
#ifndef SMP_COMM_MESSAGING_COMM_STATE_H
#define SMP_COMM_MESSAGING_COMM_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "comm/device/pinned.h"
#include "comm/device/port.h"
#include "comm/memory/arena.h"
#include "comm/memory/segment.h"
#include "comm/messaging/endpoints.h"
#include "comm/messaging/inbox.h"
#include "comm/messaging/loop.h"
#include "comm/messaging/peers.h"
#include "comm/messaging/post.h"
#include "comm/transport/card.h"
#include "comm/transport/transport.h"
#include "common/fork.h"

/* The counts of one rank's messages. */
typedef struct {
    _Atomic uint64_t messages;
    _Atomic uint64_t bytes;
} smp_traffic;

struct smp_comm {
    int              rank; /* set at create, like all up to endpoints */
    int              size;
    int             *names; /* owned: [size] */
    int              spin_us;
    char             job[64];
    uint32_t         generation; /* smp_fork_generation() of its own process */
    smp_segment     *segment;    /* owned: one reference */
    smp_arena       *arena;      /* owned */
    smp_device_port *device;     /* owned */
    smp_pinned      *pinned;     /* owned */
    smp_loop         loop;
    smp_host         host;
    smp_card        *card; /* owned */
    smp_endpoints    endpoints;

    smp_endpoint **routes; /* owned: [size] of borrowed; set by connect, like all up to
                              thread */
    bool      spins;       /* a waiter may keep its core between two looks */
    int64_t   look_ns;     /* the time of its look before its sleep */
    bool      polls;       /* a route's transport does */
    bool      started;     /* the thread runs */
    pthread_t thread;

    smp_peers    peers;
    _Atomic bool woken;    /* smp_comm_wake() */
    _Atomic bool stopping; /* the progress thread is to finish */
    _Atomic bool
        pages_asked; /* the progress thread has been asked for the arena's pages */

    int64_t moved_ns; /* progress thread: when a transport moved something */

    smp_traffic     *traffic; /* owned: [size] */
    _Atomic uint64_t pool_blocks;
    _Atomic uint64_t pool_fallbacks;

    smp_inbox inbox;
    smp_post  post;
};

/* A forked child has the struct, but neither the thread nor the descriptors. */
static inline bool
smp_comm_is_child(const smp_comm *comm)
{
    return comm->generation != smp_fork_generation();
}

#endif
