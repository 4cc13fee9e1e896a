/* This rank's ends of the transports that a comm uses, in the order of preference.
 *
 * Threads  create, connect, destroy: one, while no other is there.  The rest: the
 *          progress thread.
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

/* Makes those that `names` stands for (smp_comm_config), and their sections of the
 * card; sets host->named.  `host` is borrowed until destroy.  SMP_ERR_INVALID: no such
 * transport; and what a transport's create() returns.  Also after an error destroy
 * follows. */
smp_status smp_endpoints_create(smp_endpoints *endpoints, smp_host *host,
                                const char *names, smp_card *card);

/* Connects by one transport after the other to those ranks that have no route yet:
 * routes[r], which is NULL before; cards[r] is the card of rank r.  As
 * smp_comm_connect(). */
smp_status smp_endpoints_connect(smp_endpoints *endpoints, const smp_host *host,
                                 const void *const *cards, const smp_deadline *deadline,
                                 smp_peers *peers, smp_endpoint **routes, int *failed);

/* progress() of all; how long to wait then, at most wait_ns. */
int64_t smp_endpoints_progress(const smp_endpoints *endpoints, int64_t wait_ns);

/* finish() of all; whether they have. */
bool smp_endpoints_finish(const smp_endpoints *endpoints);

void smp_endpoints_destroy(smp_endpoints *endpoints);

#endif
