/* The choice of this host's network devices for UCX.
 *
 * Status   No host with InfiniBand or RoCE has run it yet.
 * Threads  any.
 */
#ifndef SMP_COMM_TRANSPORT_UCX_DEVICES_H
#define SMP_COMM_TRANSPORT_UCX_DEVICES_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/transport/connecting/address.h"
#include "common/status.h"

/* Room for the text of smp_ucx_devices(). */
#define SMP_UCX_DEVICES_BYTES 8192u

/* Whether this host has devices (InfiniBand, RoCE) that UCX drives better than the
 * kernel's TCP. */
bool smp_ucx_fast_devices(void);

/* UCX's NET_DEVICES for a rank with the address `address`: its interface.  The devices
 * of InfiniBand and RoCE go with their interface if `only`, else all of them are there
 * too.  Loopback stands for any if not `only`: all ranks are on one host then, and UCX
 * 1.20 does not reach itself through loopback.  SMP_ERR_SYSTEM: no interface has the
 * address any more, or the list is too long. */
smp_status smp_ucx_devices(const smp_tcp_address *address, bool only,
                           char out[SMP_UCX_DEVICES_BYTES]);

#endif
