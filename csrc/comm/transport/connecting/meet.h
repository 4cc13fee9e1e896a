/* The meeting of two ranks over TCP: a card, a port, and a handshake.
 *
 * The card offers the rank's addresses, each with a reserved (bound) port without
 * connections until all cards are known.  Then the rank listens on the one address
 * chosen by comm/transport/connecting/address.h, until all have met.
 *
 *   higher rank (calls)                    lower rank (answers)
 *     hello: version, job's size, ranks, nonce  -->
 *                <--  hello, proof(secret, "answers", both hellos)
 *     proof(secret, "calls", both hellos)  -->
 *
 * The job's name is its secret; see comm/transport/connecting/proof.h.  It is never
 * sent.  A caller with other bytes, or none, is hung up on, without harm to others.
 * The later frames are neither signed nor encrypted.
 *
 * Threads  one, before the comm's own.
 */
#ifndef SMP_COMM_TRANSPORT_CONNECTING_MEET_H
#define SMP_COMM_TRANSPORT_CONNECTING_MEET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/transport/connecting/address.h"
#include "comm/transport/connecting/proof.h"
#include "common/deadline.h"
#include "common/status.h"

#define SMP_NONCE_BYTES 16

typedef struct {
    uint32_t      magic; /* also shows the byte order */
    uint32_t      version;
    int32_t       rank;
    uint32_t      zero;
    smp_tcp_offer offer;
} smp_tcp_card;

typedef struct {
    uint32_t magic;
    uint32_t version;
    int32_t  from; /* sending rank */
    int32_t  to;
    int32_t  size; /* of the job */
    uint32_t zero;
    uint8_t  nonce[SMP_NONCE_BYTES];
} smp_tcp_hello;

typedef struct {
    smp_tcp_hello hello;
    uint8_t       proof[SMP_PROOF_BYTES];
} smp_tcp_answer;

/* Reserved ports. */
typedef struct {
    int             fds[SMP_TCP_ADDRESSES]; /* owned: bound; -1: closed */
    smp_tcp_card    card;
    smp_tcp_address own; /* this rank's listening address; set when chosen */
} smp_tcp_door;

typedef struct {
    int         rank;
    int         size;
    const char *job; /* borrowed; the secret */
} smp_tcp_self;

/* Reserves a port on each address left by `interface` (NULL: on all).  Without an
 * address the card has none, and no rank is reached.  SMP_ERR_INVALID: `interface`
 * names no address. */
smp_status smp_tcp_door_open(int rank, const char *interface, smp_tcp_door *door);

/* Closes the open ports.  Twice is fine. */
void smp_tcp_door_close(smp_tcp_door *door);

/* Whether bytes are the card of `rank`. */
bool smp_tcp_card_ok(const void *bytes, size_t n, int rank);

/* Whether a hello comes from `rank` of this job to us. */
bool smp_tcp_hello_ok(const smp_tcp_hello *hello, const smp_tcp_self *self, int rank);

/* The proof of knowing the secret; `calls`: as the caller. */
void smp_tcp_prove(const smp_tcp_self *self, bool calls, const smp_tcp_hello *caller,
                   const smp_tcp_hello *answerer, uint8_t out[SMP_PROOF_BYTES]);

/* Meets each rank r with wanted[r] and a card: cards[r] is not NULL; the card of
 * self->rank is the door's.  Fills fds[r] with a connected nonblocking socket, the
 * caller's, and sets met[r].  A rank without an answer in time is not met.
 * SMP_ERR_NO_MEMORY, SMP_ERR_SYSTEM, SMP_ERR_INTERRUPTED; sockets from before a failure
 * are in fds all the same. */
smp_status smp_tcp_meet(smp_tcp_door *door, const smp_tcp_self *self,
                        const smp_tcp_card *const *cards, const bool *wanted,
                        const smp_deadline *deadline, int *fds, bool *met);

/* An idle connection ends after so long without a word of the other host. */
#define SMP_TCP_SILENT_S 3

/* Takes the socket of a met rank, also on an error. */
typedef smp_status smp_tcp_take(void *arg, int rank, int fd);

/* The same for a transport, in half of the time: cards[r] is the comm's, NULL for a
 * rank without one.  Each socket sends given bytes at once, probes the other host while
 * idle (SMP_TCP_SILENT_S), and goes to `take`, also after a failure.  With *failed:
 * SMP_ERR_MALFORMED: that rank's bytes are no card; errors of `take`. */
smp_status smp_tcp_connect(smp_tcp_door *door, const smp_tcp_self *self,
                           const void *const *cards, const size_t *card_bytes,
                           const bool *wanted, const smp_deadline *deadline,
                           smp_tcp_take *take, void *arg, bool *met, int *failed);

#endif
