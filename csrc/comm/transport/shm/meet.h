/* The meeting of one host's ranks: a socket file in /dev/shm, and a handshake.
 *
 * "One host" means a reachable file: host names, boot ids and pids are shared by
 * network namespaces with different /dev/shm.  Memory can be read across namespaces
 * that should be kept apart.
 *
 * The card names the file (mode 0600, 128 random bits in its name) and holds a secret
 * token.  Both sides of a connection prove their knowledge of the other's token and
 * send their version, job and rank.  Then they exchange the descriptors of their
 * segment and of their progress thread's eventfd.  A caller with other bytes is turned
 * away.  The file is removed as soon as all have met.
 *
 * Threads  one, before the comm's own.
 */
#ifndef SMP_COMM_TRANSPORT_SHM_MEET_H
#define SMP_COMM_TRANSPORT_SHM_MEET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/deadline.h"
#include "common/status.h"

#define SMP_TOKEN_BYTES 16

typedef struct {
    uint32_t magic;
    uint32_t version;
    int32_t  rank;
    uint8_t  token[SMP_TOKEN_BYTES];
    char     path[64];
} smp_shm_card;

typedef struct {
    uint32_t magic;
    uint32_t version;
    int32_t  rank; /* of the sender of this hello */
    int32_t  size;
    uint64_t arena_bytes;           /* of its segment */
    uint8_t  to[SMP_TOKEN_BYTES];   /* the receiver's token */
    uint8_t  from[SMP_TOKEN_BYTES]; /* the sender's token */
    char     job[64];
} smp_shm_hello;

/* An open door: others can connect. */
typedef struct {
    int          fd; /* owned: listens; -1 when closed */
    smp_shm_card card;
} smp_shm_door;

/* The door's owner, and its descriptors for admitted ranks. */
typedef struct {
    int         rank;
    int         size;
    const char *job; /* borrowed; at most 63 bytes */
    uint64_t    arena_bytes;
    int         segment_fd;
    int         kick_fd;
} smp_shm_self;

/* The other side's part of a meeting. */
typedef struct {
    int      socket; /* owned by the receiver of this struct, as all descriptors */
    int      segment_fd;
    int      kick_fd;
    pid_t    pid; /* 0: this pid namespace does not see the process */
    uint64_t arena_bytes;
} smp_shm_guest;

/* Makes the socket file, and removes those left by dead processes of this user.
 * SMP_ERR_SYSTEM. */
smp_status smp_shm_door_open(int rank, smp_shm_door *door);

/* Removes the file.  Twice is fine. */
void smp_shm_door_close(smp_shm_door *door);

/* Removes a rank's file if it has no listener any more: the rank has died. */
void smp_shm_remove_dead(const char *path);

/* Whether bytes are the card of `rank`. */
bool smp_shm_card_ok(const void *bytes, size_t n, int rank);

/* Whether a hello comes from `rank` of this job to us. */
bool smp_shm_hello_ok(const smp_shm_hello *hello, const smp_shm_self *self, int rank,
                      const smp_shm_card *own, const smp_shm_card *theirs);

/* Meets each rank r with a card (cards[r] is not NULL) and a reachable file; fills
 * guests[r] and sets met[r].  With *failed: SMP_ERR_TIMED_OUT; SMP_ERR_PEER_LOST: it
 * has died or given up, and its file is gone.  SMP_ERR_INTERRUPTED, SMP_ERR_NO_MEMORY.
 * Ranks met before a failure are in guests all the same. */
smp_status smp_shm_meet(smp_shm_door *door, const smp_shm_self *self,
                        const smp_shm_card *const *cards, const smp_deadline *deadline,
                        smp_shm_guest *guests, bool *met, int *failed);

#endif
