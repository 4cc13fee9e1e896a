/* One rank's end of the job: messages to and from the other ranks.
 *
 * A message is a run of bytes (the header, written by the codec) and any number of
 * blocks (tensor bytes).  The receiver reads a block's memory in place where a
 * transport allows it: the sender writes a tensor once and the receiver uses that
 * memory as its tensor.
 *
 * Ownership  smp_comm_block() gives a block to the caller; smp_comm_send() takes it,
 *            also on an error.  smp_comm_receive() gives a message, with its blocks, to
 *            the caller; smp_message_take_block() moves a block out of it.  A block
 *            goes back by smp_block_release().
 * Threads    send, block, release, wake: any.  receive: one at a time (the
 *            server's baton guarantees it).  None of them needs the GIL, and no
 *            callback runs under a lock.
 * Order      Messages of one sender to one receiver arrive in the order of the
 *            calls to smp_comm_send().
 */
#ifndef SMP_COMM_MESSAGING_COMM_H
#define SMP_COMM_MESSAGING_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/memory/message.h"
#include "common/deadline.h"
#include "common/status.h"

typedef struct smp_comm smp_comm;

typedef struct {
    int        rank;   /* of this process */
    int        size;   /* ranks in the job */
    const int *names;  /* [size]: the ranks' numbers for people, in errors; borrowed
                          during create; NULL: rank r is called r */
    size_t pool_bytes; /* this rank's arena of shared memory, at most; 0: a part of the
                          machine's memory, and of a limited address space. Only used
                          pages take memory. */
    size_t device_pool_bytes; /* of the device pool, made when a tensor of a device is
                                 sent first (comm/device/port.h); 0: none */
    int spin_us; /* the time of a waiter's poll before its sleep; -1: decide by the
                    number of cores and local ranks */
    const char
        *transports; /* comma-separated names in order of preference; or, each with a
                        leading '^', those not to be used; NULL: all registered ones */
    const char *interface; /* for transports over a network: the name of an interface,
                              an address of it or its subnet ("10.0.0.0/24"), or NULL:
                              one with a way to the other hosts */
    char job[64]; /* same on all ranks of the job, unlike any other job's, and secret:
                     their proof to each other */
} smp_comm_config;

/* The values of smp_comm_counters(); counts since create. */
typedef struct {
    uint64_t messages;       /* sent */
    uint64_t bytes;          /* sent, headers and blocks */
    uint64_t pool_blocks;    /* blocks from the pool (small ones need none) */
    uint64_t pool_fallbacks; /* blocks without room in the pool */
    uint64_t pool_in_use;    /* bytes of the own arena handed out now */
    uint64_t pool_high;      /* the most of pool_in_use */
    uint64_t pool_made;      /* bytes of the own arena with pages */
    uint64_t pool_size;      /* bytes of the own arena, at most */
} smp_comm_stats;

/* The pool of a comm of this configuration, at most.  Any thread. */
size_t smp_comm_pool_bytes(const smp_comm_config *config);

/* Makes this rank's end and its address card (how others reach it; opaque bytes,
 * owned by the comm, at most 4 KiB).  SMP_ERR_NO_MEMORY, SMP_ERR_SYSTEM,
 * SMP_ERR_INVALID: no such transport, interface, rank or size. */
smp_status  smp_comm_create(const smp_comm_config *config, smp_comm **out);
const void *smp_comm_card(const smp_comm *comm, size_t *bytes);

/* Connects to every other rank; cards[r] is the card of rank r.  Collective: all ranks
 * must call it.  With *failed: SMP_ERR_UNREACHABLE: the first rank out of reach of all
 * transports; SMP_ERR_TIMED_OUT: it did not answer in time; SMP_ERR_PEER_LOST: it died
 * or gave up meanwhile; SMP_ERR_MALFORMED.  SMP_ERR_INTERRUPTED: the caller gives up.
 * After any error only smp_comm_destroy() may follow. */
smp_status smp_comm_connect(smp_comm *comm, const void *const *cards,
                            const size_t *card_bytes, const smp_deadline *deadline,
                            int *failed);

/* Sends the queue (gives up when nothing moves for a second), says goodbye to the
 * peers, stops the progress thread, unmaps, frees.  The caller's messages and blocks
 * stay valid until they are released.  No other call may be running.  Takes NULL; does
 * nothing in a forked child. */
void smp_comm_destroy(smp_comm *comm);

/* So many bytes of the own arena will be in use at a time: the progress thread makes
 * their pages, so that no thread waits for fresh memory.  Any thread. */
void smp_comm_expect(smp_comm *comm, uint64_t bytes);

/* 64-byte aligned memory for `bytes` on the way to `dest`.  A full pool is not an
 * error: the block then travels by a slower way, and is counted. */
smp_status smp_comm_block(smp_comm *comm, int dest, size_t bytes, smp_block **out);

/* The same for the bytes of a tensor on device number `device`: pinned where it can be
 * (comm/device/pinned.h).  One thread at a time. */
smp_status smp_comm_block_for_device(smp_comm *comm, int dest, int device, size_t bytes,
                                     smp_block **out);

/* Queues a message.  Copies `bytes`; takes the blocks.  Never waits for the receiver:
 * when its queue is full, the message waits in this process.
 * SMP_ERR_PEER_LOST; SMP_ERR_CLOSED: it ended in order, or this is a forked child;
 * SMP_ERR_NO_MEMORY; SMP_ERR_INVALID: no such rank, or not connected. */
smp_status smp_comm_send(smp_comm *comm, int dest, const void *bytes, size_t nbytes,
                         smp_block *const *blocks, size_t nblocks);

/* The next message.  timeout_ns < 0: no limit; 0: only an arrived one.
 * SMP_ERR_TIMED_OUT; SMP_ERR_INTERRUPTED after smp_comm_wake() (once a call).  After
 * the last message, and from then on: SMP_ERR_PEER_LOST when a peer died,
 * SMP_ERR_MALFORMED or SMP_ERR_NO_MEMORY when its messages cannot be read
 * (smp_comm_lost names the peer).  SMP_ERR_CLOSED when every peer has ended in order,
 * or in a forked child. */
smp_status smp_comm_receive(smp_comm *comm, int64_t timeout_ns, smp_message **out);

/* Makes the present or next smp_comm_receive() return SMP_ERR_INTERRUPTED.
 * Async-signal-safe. */
void smp_comm_wake(smp_comm *comm);

/* The first rank dead, or with an unreadable message, or -1.  Any thread. */
int smp_comm_lost(const smp_comm *comm);

/* Whether a rank connected to any comm of this process, also a destroyed one, has died.
 * Any thread. */
bool smp_comm_someone_died(void);

/* Whether `rank` has ended in order (smp_comm_destroy): it answers nothing any more. */
bool smp_comm_left(const smp_comm *comm, int rank);

/* Ranks in the job. */
int smp_comm_size(const smp_comm *comm);

/* The name of `rank` in errors; for a number of no rank the number itself.  Any
 * thread. */
int smp_comm_name(const smp_comm *comm, int rank);

void smp_comm_counters(smp_comm *comm, smp_comm_stats *out);

/* Messages sent so far; smp_comm_counters() without the rest. */
uint64_t smp_comm_sent(const smp_comm *comm);

/* The counts of messages and bytes sent to one rank so far. */
void smp_comm_sent_to(const smp_comm *comm, int rank, uint64_t *messages,
                      uint64_t *bytes);

/* The name of the transport used to `rank` ("shm", "ucx", "tcp", "mpi"). */
const char *smp_comm_transport(const smp_comm *comm, int rank);

#endif
