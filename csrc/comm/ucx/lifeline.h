/* A TCP connection beside UCX between two ranks: what they must know before they can
 * talk over UCX, and what must be known although UCX cannot say it.
 *
 * It comes from smp_tcp_meet(), so its other end has proved that it knows the job's
 * secret.  Each side then says where its UCX worker is and a random number, the pass,
 * which whatever is sent to it over UCX must bear; UCX itself lets anybody in.
 *
 * Later it carries a single byte, and its end: the kernel closes it when the process
 * dies, whatever UCX uses, and asks the other host once a second whether it is there.
 *
 * Threads  one at a time.
 */
#ifndef SMP_COMM_UCX_LIFELINE_H
#define SMP_COMM_UCX_LIFELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

/* The longest address of a worker. */
#define SMP_UCX_ADDRESS_BYTES 65536u

/* Says that all is well; that everything up to the goodbye has arrived. */
#define SMP_UCX_AGREED 'Y'
#define SMP_UCX_ARRIVED 'A'

typedef enum { SMP_UCX_QUIET, SMP_UCX_SAID, SMP_UCX_HUNG_UP } smp_ucx_heard;

/* Makes the kernel ask for the other side.  False: it refuses. */
bool smp_ucx_lifeline_watch_over(int fd);

/* Tells the other side pass and address.  The socket is new: it takes them at once.
 * False: it has hung up. */
bool smp_ucx_lifeline_introduce(int fd, uint64_t pass, const void *address, size_t n);

/* Waits for the other side's.  *address is the caller's, to be freed.
 * SMP_ERR_TIMED_OUT, SMP_ERR_NO_MEMORY; SMP_ERR_PEER_LOST: it has hung up;
 * SMP_ERR_MALFORMED. */
smp_status smp_ucx_lifeline_meet(int fd, int64_t deadline_ns, uint64_t *pass,
                                 void **address);

/* One byte.  False: the other side has hung up. */
bool          smp_ucx_lifeline_say(int fd, char what);
smp_ucx_heard smp_ucx_lifeline_hear(int fd, char *what);

#endif
