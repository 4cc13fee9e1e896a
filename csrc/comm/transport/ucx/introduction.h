/* The introduction of two ranks before their first message over UCX.
 *
 * On their lifeline (comm/transport/connecting/lifeline.h), each side tells the address
 * of its UCX worker and a random number, the pass.  All messages to it over UCX must
 * bear the pass; UCX itself lets any process in.
 *
 * Threads  one at a time.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_INTRODUCTION_H
#define SMP_COMM_TRANSPORT_UCX_INTRODUCTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/deadline.h"
#include "common/status.h"

/* The longest address of a worker. */
#define SMP_UCX_ADDRESS_BYTES 65536u

/* The lifeline's later bytes: all is well; everything up to the goodbye has arrived. */
#define SMP_UCX_AGREED 'Y'
#define SMP_UCX_ARRIVED 'A'

/* Tells the other side pass and address.  False: it has hung up. */
bool smp_ucx_introduce(int fd, uint64_t pass, const void *address, size_t n);

/* Waits for the other side's.  *address is the caller's, to be freed.
 * SMP_ERR_TIMED_OUT, SMP_ERR_INTERRUPTED, SMP_ERR_NO_MEMORY; SMP_ERR_PEER_LOST: it has
 * hung up; SMP_ERR_MALFORMED. */
smp_status smp_ucx_be_introduced(int fd, const smp_deadline *deadline, uint64_t *pass,
                                 void **address);

#endif
