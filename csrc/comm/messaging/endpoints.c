/* The choice of transports, the ranks reached by each, and their work on the progress
 * thread. */
#include "comm/messaging/endpoints.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"

/* Makes this rank's end of one transport and its section of the card. */
static smp_status
add(smp_endpoints *endpoints, const smp_host *host, const smp_transport *ops,
    smp_card *card)
{
    smp_endpoint *e = &endpoints->list[endpoints->n];
    const void   *section;
    size_t        bytes;
    smp_status    status;

    assert(endpoints->n < SMP_TRANSPORTS);
    e->ops = ops;
    status = ops->create(host, &e->self, &section, &bytes);
    if (status != SMP_OK) {
        return status;
    }
    endpoints->n++; /* destroy sees to it from here on */
    return smp_card_add(card, ops->name, section, bytes) ? SMP_OK : SMP_ERR_INVALID;
}

/* The transports named by the user, in that order: each must exist. */
static smp_status
add_named(smp_endpoints *endpoints, const smp_host *host, const char *names,
          smp_card *card)
{
    while (*names != '\0') {
        size_t               length = strcspn(names, ",");
        const smp_transport *ops = smp_transport_find(names, length);
        smp_status           status;

        if (ops == NULL || endpoints->n == SMP_TRANSPORTS) {
            return SMP_ERR_INVALID;
        }
        status = add(endpoints, host, ops, card);
        if (status != SMP_OK) {
            return status;
        }
        names += length + (names[length] == ',');
    }
    return SMP_OK;
}

/* Whether the list "^shm,^tcp" has the name. */
static bool
is_left_out(const char *names, const char *name)
{
    size_t length = strlen(name);

    while (*names != '\0') {
        size_t n = strcspn(names, ",");

        if (n == length + 1 && names[0] == '^' &&
            memcmp(names + 1, name, length) == 0) {
            return true;
        }
        names += n + (names[n] == ',');
    }
    return false;
}

/* All registered ones but those left out; one unable to work here is passed over. */
static smp_status
add_registered(smp_endpoints *endpoints, const smp_host *host, const char *left_out,
               smp_card *card)
{
    const smp_transport *all[SMP_TRANSPORTS];
    int                  n = smp_transport_all(all);
    smp_status           status = SMP_ERR_INVALID;

    for (int i = 0; i < n; i++) {
        smp_status its;

        if (is_left_out(left_out, all[i]->name)) {
            continue;
        }
        its = add(endpoints, host, all[i], card);
        if (its != SMP_OK) {
            smp_log(SMP_LOG_INFO, "transport %s is passed over: %s", all[i]->name,
                    smp_status_text(its));
        }
        if (endpoints->n == 0) {
            status = its;
        }
    }
    return endpoints->n != 0 ? SMP_OK : status;
}

smp_status
smp_endpoints_create(smp_endpoints *endpoints, smp_host *host, const char *names,
                     smp_card *card)
{
    host->named = names != NULL && names[0] != '^';
    return host->named
               ? add_named(endpoints, host, names, card)
               : add_registered(endpoints, host, names != NULL ? names : "", card);
}

/* Connects by one transport to the ranks without a route; lost: but this one.
 */
static smp_status
connect_by(smp_endpoint *e, const smp_host *host, const void *const *cards,
           const smp_deadline *deadline, int lost, smp_peers *peers,
           smp_endpoint **routes, int *failed)
{
    size_t       size = (size_t)host->size;
    const void **sections = calloc(size, sizeof(*sections));
    size_t      *bytes = calloc(size, sizeof(*bytes));
    bool        *wanted = calloc(size, sizeof(*wanted));
    bool        *reached = calloc(size, sizeof(*reached));
    smp_status   status = SMP_ERR_NO_MEMORY;

    if (sections == NULL || bytes == NULL || wanted == NULL || reached == NULL) {
        goto out;
    }
    for (int r = 0; r < host->size; r++) {
        wanted[r] = r != host->rank && r != lost && routes[r] == NULL;
        if (r != host->rank) {
            sections[r] = smp_card_find(cards[r], e->ops->name, &bytes[r]);
        }
    }
    status =
        e->ops->connect(e->self, sections, bytes, wanted, deadline, reached, failed);
    e->connected = status == SMP_OK || status == SMP_ERR_PEER_LOST;
    for (int r = 0; r < host->size; r++) {
        if (e->connected && reached[r]) {
            routes[r] = e;
            smp_peers_open(peers, r);
        }
    }

out:
    free(sections);
    free(bytes);
    free(wanted);
    free(reached);
    return status;
}

/* Logs the ranks' transports. */
static void
log_routes(const smp_endpoints *endpoints, int size, smp_endpoint *const *routes)
{
    for (int i = 0; i < endpoints->n && smp_log_has(SMP_LOG_INFO); i++) {
        int n = 0;

        for (int r = 0; r < size; r++) {
            n += routes[r] == &endpoints->list[i];
        }
        smp_log(SMP_LOG_INFO, "%d of %d other ranks are reached by %s", n, size - 1,
                endpoints->list[i].ops->name);
    }
}

smp_status
smp_endpoints_connect(smp_endpoints *endpoints, const smp_host *host,
                      const void *const *cards, const smp_deadline *deadline,
                      smp_peers *peers, smp_endpoint **routes, int *failed)
{
    int lost = -1;

    for (int i = 0; i < endpoints->n; i++) {
        smp_status status = connect_by(&endpoints->list[i], host, cards, deadline, lost,
                                       peers, routes, failed);

        if (status == SMP_ERR_PEER_LOST && lost < 0) {
            lost = *failed; /* the others are met all the same; see smp_comm_destroy */
        } else if (status != SMP_OK && status != SMP_ERR_PEER_LOST) {
            return status;
        }
    }
    if (lost >= 0) {
        *failed = lost;
        return SMP_ERR_PEER_LOST;
    }
    for (int r = 0; r < host->size; r++) {
        if (r != host->rank && routes[r] == NULL) {
            *failed = r;
            return SMP_ERR_UNREACHABLE;
        }
    }
    log_routes(endpoints, host->size, routes);
    return SMP_OK;
}

int64_t
smp_endpoints_progress(const smp_endpoints *endpoints, int64_t wait_ns)
{
    for (int i = 0; i < endpoints->n; i++) {
        const smp_endpoint *e = &endpoints->list[i];
        int64_t             its = e->connected ? e->ops->progress(e->self) : -1;

        if (its >= 0 && its < wait_ns) {
            wait_ns = its;
        }
    }
    return wait_ns;
}

bool
smp_endpoints_finish(const smp_endpoints *endpoints)
{
    bool done = true;

    for (int i = 0; i < endpoints->n; i++) {
        const smp_endpoint *e = &endpoints->list[i];

        done = (!e->connected || e->ops->finish(e->self)) && done;
    }
    return done;
}

void
smp_endpoints_destroy(smp_endpoints *endpoints)
{
    for (int i = endpoints->n; i-- > 0;) {
        endpoints->list[i].ops->destroy(endpoints->list[i].self);
    }
}
