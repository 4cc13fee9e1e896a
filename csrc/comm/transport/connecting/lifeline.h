/* A lifeline: a TCP connection beside another transport that cannot tell whether the
 * other side lives.
 *
 * It comes from smp_tcp_connect(), so its other end has proved its knowledge of the
 * secret. The kernel closes it when the process dies, whatever the transport uses, and
 * probes the other host once a second.  Beside that it carries a few bytes.
 *
 * Threads  one at a time.  No function but smp_lifeline_listen() waits.
 */
#ifndef SMP_COMM_TRANSPORT_CONNECTING_LIFELINE_H
#define SMP_COMM_TRANSPORT_CONNECTING_LIFELINE_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/transport/connecting/proof.h"
#include "common/deadline.h"
#include "common/status.h"

#define SMP_LIFELINE_SECRET (2 * SMP_PROOF_BYTES + 1)

typedef enum {
    SMP_LIFELINE_QUIET,
    SMP_LIFELINE_SAID,
    SMP_LIFELINE_HUNG_UP
} smp_lifeline_heard;

/* The secret of a transport's lifelines.  It follows from the job's, so that no message
 * at a port of the TCP transport, or of another one, proves anything here. */
void smp_lifeline_secret(const char *job, const char *transport,
                         char out[SMP_LIFELINE_SECRET]);

/* Makes the kernel ask for the other side while a byte is unacknowledged, too.  False:
 * it refuses. */
bool smp_lifeline_watch_over(int fd);

/* One byte.  False: the other side has hung up. */
bool               smp_lifeline_say(int fd, char what);
smp_lifeline_heard smp_lifeline_hear(int fd, char *what);

/* Some bytes on a new lifeline: it takes them at once.  False: the other side has hung
 * up. */
bool smp_lifeline_tell(int fd, const void *bytes, size_t n);

/* Waits for n bytes.  SMP_ERR_TIMED_OUT, SMP_ERR_INTERRUPTED; SMP_ERR_PEER_LOST: the
 * other side has hung up. */
smp_status smp_lifeline_listen(int fd, void *to, size_t n,
                               const smp_deadline *deadline);

#endif
