/* A transport is a table of functions; a comm is its host.
 *
 * The transports of a comm are tried in a list's order, per pair of ranks, when the
 * job connects.  A transport never sees another, and knows the comm only through the
 * host's table, so it may live in another shared object (the MPI one does).
 */
#ifndef SMP_COMM_TRANSPORT_TRANSPORT_H
#define SMP_COMM_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/message.h"
#include "comm/memory/segment.h"
#include "common/deadline.h"
#include "common/status.h"

/* Changes with every change of the two tables. */
#define SMP_TRANSPORT_ABI 11

typedef struct smp_comm smp_comm;

/* There are never more. */
#define SMP_TRANSPORTS 8

/* Called by the progress thread when a descriptor is ready; `events` are epoll's. */
typedef struct {
    void (*ready)(void *arg, uint32_t events);
    void *arg; /* borrowed */
} smp_watch;

/* A comm's functions for its transports. */
typedef struct {
    smp_comm    *comm;
    int          rank;
    int          size;
    const char  *job;     /* borrowed: lives as long as the comm */
    smp_segment *segment; /* borrowed: the own one */

    /* The configuration's, NULL for any; borrowed, during create() only. */
    const char *interface;

    /* The configuration names this transport, so it is to be used wherever it reaches;
     * else only where it is worth while. */
    bool named;

    /* Memory for a block, in the own arena or (counted) in private memory.  Any
     * thread.  SMP_ERR_NO_MEMORY. */
    smp_status (*block)(smp_comm *comm, size_t bytes, smp_block **out);

    /* The same, pinned where this rank has a device (comm/device/pinned.h): for tensors
     * of devices, and for blocks of other hosts' ranks. */
    smp_status (*pinned_block)(smp_comm *comm, size_t bytes, smp_block **out);
    void *(*block_data)(const smp_block *block);
    size_t (*block_bytes)(const smp_block *block);
    void (*block_release)(smp_block *block);

    /* See comm/memory/message.h. */
    smp_status (*message)(int source, size_t nbytes, size_t nblocks, smp_message **out);
    void (*message_free)(smp_message *message);

    /* Hands an arrived message to the receiver; takes it.  Any thread. */
    void (*deliver)(smp_comm *comm, smp_message *message);

    /* There is something new for poll().  Any thread. */
    void (*arrived)(smp_comm *comm);

    /* A transfer has moved on.  destroy waits for as long as it hears this.  The
     * progress thread. */
    void (*moved)(smp_comm *comm);

    /* Nothing more comes from `rank`: it died or broke the protocol, or ended in order
     * (SMP_ERR_CLOSED).  Only the first call for a rank counts.  Any thread. */
    void (*ended)(smp_comm *comm, int rank, smp_status why);

    /* Whether ended() was called for `rank`.  Any thread. */
    bool (*gone)(const smp_comm *comm, int rank);

    /* The name of `rank` in messages.  Any thread. */
    int (*name)(const smp_comm *comm, int rank);

    /* Whether a thread sleeps in smp_comm_receive(): nothing else runs on this rank. */
    bool (*waiting)(const smp_comm *comm);

    /* Makes the progress thread call progress() soon.  Any thread, no lock needed. */
    void (*kick)(smp_comm *comm);

    /* A descriptor for another process's writes in place of `kick` (an eventfd). */
    int kick_fd;

    /* Watches a descriptor; `watch` is borrowed until unwatch or the end of the
     * progress thread.  Again for the same descriptor: changes the events.
     * SMP_ERR_SYSTEM. */
    smp_status (*watch)(smp_comm *comm, int fd, uint32_t events, smp_watch *watch);
    void (*unwatch)(smp_comm *comm, int fd);

    /* See common/fork.h. */
    smp_status (*close_in_child)(int fd);
    void (*forget_fd)(int fd);
} smp_host;

/* A transport's functions. */
typedef struct {
    int         abi;       /* SMP_TRANSPORT_ABI */
    const char *name;      /* "shm", "ucx", "tcp", "mpi" */
    bool        same_host; /* whom it reaches is on this machine */
    bool        polls;     /* its progress() keeps a core busy */

    /* `host` is borrowed until destroy.  *card: this rank's addresses for the others;
     * at most 1 KiB, owned by self. */
    smp_status (*create)(const smp_host *host, void **self, const void **card,
                         size_t *card_bytes);

    /* Connects to each rank r with wanted[r] within its reach and sets reached[r].
     * cards[r] is NULL for a rank without this transport.  Every rank of the job calls
     * it, and both ends of a pair come to the same answer.  With *failed:
     * SMP_ERR_TIMED_OUT, SMP_ERR_UNREACHABLE, SMP_ERR_MALFORMED; SMP_ERR_PEER_LOST:
     * *failed has died or given up, the others were met all the same.
     * SMP_ERR_INTERRUPTED. */
    smp_status (*connect)(void *self, const void *const *cards,
                          const size_t *card_bytes, const bool *wanted,
                          const smp_deadline *deadline, bool *reached, int *failed);

    /* As smp_comm_block and smp_comm_send, for a reached rank.  Any thread.  No
     * `block`: it is the host's.  When send fails the blocks are still the caller's. */
    smp_status (*block)(void *self, size_t bytes, smp_block **out);
    smp_status (*send)(void *self, int dest, const void *bytes, size_t nbytes,
                       smp_block *const *blocks, size_t nblocks);

    /* The next message, NULL in *out for none.  The receiving thread.  NULL for a
     * transport with deliver() alone. */
    smp_status (*poll)(void *self, smp_message **out);

    /* Moves transfers on; never waits.  The progress thread, after every kick, every
     * ready descriptor, and after the returned time: nanoseconds, or -1. */
    int64_t (*progress)(void *self);

    /* The memory of a reached rank.  Any thread.  NULL for a transport without mapped
     * memory. */
    void (*neighbour)(void *self, int rank, smp_neighbour *out);

    /* Called until true, with progress() in between: sends the queue, then says goodbye
     * to every rank.  The progress thread. */
    bool (*finish)(void *self);

    /* After the progress thread has ended. */
    void (*destroy)(void *self);
} smp_transport;

/* Adds a transport for later comms; the first registered is preferred.  `transport` is
 * borrowed for ever.  A second registration of a name does nothing.  SMP_ERR_INVALID:
 * too many, or built for another SMP_TRANSPORT_ABI. */
smp_status smp_transport_register(const smp_transport *transport);

/* The registered transport with the name name[0 .. length), or NULL. */
const smp_transport *smp_transport_find(const char *name, size_t length);

/* All of them, in order; returns their number. */
int smp_transport_all(const smp_transport *out[SMP_TRANSPORTS]);

/* Always registered, in this order: shared memory, UCX, TCP. */
extern const smp_transport smp_transport_shm;
extern const smp_transport smp_transport_ucx;
extern const smp_transport smp_transport_tcp;

#endif
