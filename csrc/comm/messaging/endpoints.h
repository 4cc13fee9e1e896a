/* This rank's ends of a comm's transports, in the order of preference.
 *
 * Threads  create, connect, destroy: one, without any other.  The rest: the progress
 *          thread.
 */
#ifndef SMP_COMM_MESSAGING_ENDPOINTS_H
#define SMP_COMM_MESSAGING_ENDPOINTS_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/messaging/peers.h"
#include "comm/transport/card.h"
#include "comm/transport/transport.h"
#include "common/deadline.h"
#include "common/status.h"

typedef struct {
    const smp_transport *ops;
    void                *self;      /* owned */
    bool                 connected; /* connect() has returned with whom it reaches */
} smp_endpoint;

typedef struct {
    smp_endpoint list[SMP_TRANSPORTS];
    int          n;
} smp_endpoints;

/* Makes the ends of `names` (smp_comm_config), and their sections of the card; sets
 * host->named.  `host` is borrowed until destroy.  SMP_ERR_INVALID: no such transport;
 * and the errors of a transport's create().  Also after an error destroy follows. */
smp_status smp_endpoints_create(smp_endpoints *endpoints, smp_host *host,
                                const char *names, smp_card *card);

/* Connects by one transport after the other to the ranks without a route: routes[r],
 * NULL before; cards[r] is the card of rank r.  As smp_comm_connect(). */
smp_status smp_endpoints_connect(smp_endpoints *endpoints, const smp_host *host,
                                 const void *const *cards, const smp_deadline *deadline,
                                 smp_peers *peers, smp_endpoint **routes, int *failed);

/* progress() of all; returns the time to wait then, at most wait_ns. */
int64_t smp_endpoints_progress(const smp_endpoints *endpoints, int64_t wait_ns);

/* finish() of all; whether they have. */
bool smp_endpoints_finish(const smp_endpoints *endpoints);

void smp_endpoints_destroy(smp_endpoints *endpoints);

#endif
