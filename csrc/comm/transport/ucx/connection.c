/* Workers, lifelines and hellos. */
#define _GNU_SOURCE
#include "comm/transport/ucx/connection.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/transport/connecting/lifeline.h"
#include "comm/transport/ucx/am.h"
#include "comm/transport/ucx/devices.h"
#include "comm/transport/ucx/introduction.h"
#include "comm/transport/ucx/transfer.h"
#include "common/clock.h"
#include "common/fork.h"
#include "common/log.h"

/* UCX's time at the end to close its connections. */
#define CLOSE_NS (1 * SMP_NS_PER_S)

/* The most transports looked at between two ranks. */
#define ENTRIES 16

/* --------------------------------------------------------------------------- peers */

static void
on_closed(void *request, ucs_code code, void *arg)
{
    smp_ucx_peer *p = arg;

    (void)code;
    p->self->ucp->ucp_request_free(request);
    p->closing = false;
}

static void
lifeline_ready(void *arg, uint32_t events)
{
    smp_ucx_peer *p = arg;
    char          what;

    (void)events;
    switch (smp_lifeline_hear(p->fd, &what)) {
    case SMP_LIFELINE_QUIET:
        break;
    case SMP_LIFELINE_SAID:
        p->arrived = p->arrived || what == SMP_UCX_ARRIVED;
        break;
    case SMP_LIFELINE_HUNG_UP:
        p->ended = true;
        p->self->news = true;
        break;
    }
}

static void
on_fault(void *arg, ucp_ep *ep, ucs_code code)
{
    (void)ep;
    (void)code;
    smp_ucx_blame(arg, SMP_ERR_PEER_LOST);
}

/* Takes the descriptor, whatever it returns. */
static smp_status
take_lifeline(void *arg, int rank, int fd)
{
    smp_ucx      *self = arg;
    smp_status    status = SMP_ERR_NO_MEMORY;
    smp_ucx_peer *p = calloc(1, sizeof(*p));

    if (p == NULL) {
        close(fd);
        return SMP_ERR_NO_MEMORY;
    }
    *p = (smp_ucx_peer){
        .self = self, .rank = rank, .fd = fd, .watch = {lifeline_ready, p}};
    smp_ucx_arrivals_init(&p->arrivals, self->host, rank);
    if (smp_fork_close_in_child(fd) != SMP_OK) {
        goto err_destroy;
    }
    status = SMP_ERR_SYSTEM;
    if (!smp_lifeline_watch_over(fd) ||
        getrandom(&p->our_pass, sizeof(p->our_pass), 0) != sizeof(p->our_pass)) {
        goto err_destroy;
    }
    self->peers[rank] = p;
    return SMP_OK;

err_destroy:
    smp_ucx_peer_destroy(p);
    return status;
}

/* Warns of the first of this rank's peers with a failed trial. */
static void
warn(smp_ucx *self, const smp_ucx_peer *p, const char *how)
{
    if (!self->has_warned) {
        self->has_warned = true;
        smp_warn(
            "rank %d does not talk to rank %d over UCX, which was tried and cannot "
            "be relied on between them: %s; the next of comm_transports serves",
            self->host->name(self->host->comm, self->host->rank),
            self->host->name(self->host->comm, p->rank), how);
    }
}

/* Gives a peer up before it was reached. */
static void
drop_peer(smp_ucx_peer *p)
{
    p->gone = true;
    smp_ucx_close_connection(p);
    shutdown(p->fd, SHUT_RDWR);
}

/* ----------------------------------------------------------------------- the worker */

/* UCX's threads are no place for the process's signals. */
static ucs_code
init_library(smp_ucx *self, const ucp_config *config)
{
    const ucp_params        params = {.field_mask = SMP_UCP_PARAM_FIELD_FEATURES |
                                                    SMP_UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
                                      .features = SMP_UCP_FEATURE_AM | SMP_UCP_FEATURE_WAKEUP,
                                      .estimated_num_eps = (size_t)self->host->size};
    const ucp_worker_params worker = {.field_mask =
                                          SMP_UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                      .thread_mode = SMP_UCS_THREAD_MODE_SERIALIZED};
    sigset_t                all;
    sigset_t                before;
    ucs_code                code;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = self->ucp->ucp_init_version(SMP_UCP_MAJOR, SMP_UCP_MINOR, &params, config,
                                       &self->context);
    if (code != SMP_UCS_OK) {
        self->context = NULL;
    } else {
        code = self->ucp->ucp_worker_create(self->context, &worker, &self->worker);
        if (code != SMP_UCS_OK) {
            self->worker = NULL;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code;
}

/* The settings without a UCX_... variable of the user's.  Shared memory is not UCX's
 * business here, and it would take its buffers out of System V's few segments. */
static ucs_code
configure(const smp_ucx *self, ucp_config *config, const char *devices)
{
    ucs_code code = SMP_UCS_OK;

    if (self->only || getenv("UCX_NET_DEVICES") == NULL) {
        code = self->ucp->ucp_config_modify(config, "NET_DEVICES", devices);
    }
    if (code == SMP_UCS_OK && getenv("UCX_TLS") == NULL) {
        code = self->ucp->ucp_config_modify(config, "TLS", "^shm");
    }
    return code;
}

/* A worker on the devices of this rank's listening address. */
static smp_status
open_worker(smp_ucx *self)
{
    const ucp_am_handler_param handler = {
        .field_mask =
            SMP_UCP_AM_HANDLER_PARAM_FIELD_ID | SMP_UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
            SMP_UCP_AM_HANDLER_PARAM_FIELD_CB | SMP_UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = SMP_UCX_AM_ID,
        .flags = SMP_UCP_AM_FLAG_WHOLE_MSG,
        .cb = smp_ucx_on_message,
        .arg = self};
    char        devices[SMP_UCX_DEVICES_BYTES];
    ucp_config *config;
    smp_status  status = smp_ucx_devices(&self->door.own, self->only, devices);
    ucs_code    code;

    if (status != SMP_OK) {
        return status;
    }
    if (self->ucp->ucp_config_read(NULL, NULL, &config) != SMP_UCS_OK) {
        return SMP_ERR_SYSTEM;
    }
    code = configure(self, config, devices);
    if (code == SMP_UCS_OK) {
        code = init_library(self, config);
    }
    self->ucp->ucp_config_release(config);
    if (code != SMP_UCS_OK ||
        self->ucp->ucp_worker_set_am_recv_handler(self->worker, &handler) !=
            SMP_UCS_OK ||
        self->ucp->ucp_worker_get_efd(self->worker, &self->efd) != SMP_UCS_OK) {
        return SMP_ERR_SYSTEM;
    }
    return SMP_OK;
}

/* ---------------------------------------------------------------------- the meeting */

/* Tells each peer our worker's address and the pass. */
static smp_status
introduce(smp_ucx *self)
{
    ucp_worker_attr attr = {.field_mask = SMP_UCP_WORKER_ATTR_FIELD_ADDRESS |
                                          SMP_UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS,
                            .address_flags = SMP_UCP_WORKER_ADDRESS_FLAG_NET_ONLY};

    if (self->ucp->ucp_worker_query(self->worker, &attr) != SMP_UCS_OK) {
        return SMP_ERR_SYSTEM;
    }
    for (int r = 0; r < self->host->size; r++) {
        smp_ucx_peer *p = self->peers[r];

        if (p != NULL && (attr.address_length > SMP_UCX_ADDRESS_BYTES ||
                          !smp_ucx_introduce(p->fd, p->our_pass, attr.address,
                                             attr.address_length))) {
            drop_peer(p);
        }
    }
    self->ucp->ucp_worker_release_address(self->worker, attr.address);
    return SMP_OK;
}

/* Hears where a peer's worker is and says hello to it.  SMP_ERR_INTERRUPTED; after any
 * other error it is not to be reached. */
static smp_status
call_peer(smp_ucx *self, smp_ucx_peer *p, const smp_deadline *deadline)
{
    ucp_ep_params params = {.field_mask = SMP_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                          SMP_UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                          SMP_UCP_EP_PARAM_FIELD_ERR_HANDLER,
                            .err_mode = SMP_UCP_ERR_HANDLING_MODE_PEER,
                            .err_handler = {on_fault, p}};
    void         *address;
    ucs_code      code;
    smp_status    status =
        smp_ucx_be_introduced(p->fd, deadline, &p->their_pass, &address);

    if (status != SMP_OK) {
        return status;
    }
    params.address = address;
    code = self->ucp->ucp_ep_create(self->worker, &params, &p->ep);
    free(address);
    if (code != SMP_UCS_OK) {
        p->ep = NULL;
        return SMP_ERR_SYSTEM;
    }
    return smp_ucx_say_hello(p) ? SMP_OK : SMP_ERR_SYSTEM;
}

/* Whether UCX reaches it by something else than the kernel's TCP. */
static bool
is_fast(const smp_ucx_peer *p)
{
    ucp_transport_entry entries[ENTRIES] = {{0}};
    ucp_ep_attr         attr = {.field_mask = SMP_UCP_EP_ATTR_FIELD_TRANSPORTS,
                                .transports = {.entries = entries,
                                               .num_entries = ENTRIES,
                                               .entry_size = sizeof(entries[0])}};

    if (p->self->ucp->ucp_ep_query(p->ep, &attr) != SMP_UCS_OK) {
        return false;
    }
    for (unsigned i = 0; i < attr.transports.num_entries && i < ENTRIES; i++) {
        const char *name = entries[i].transport_name;

        if (name != NULL && strcmp(name, "tcp") != 0) {
            return true;
        }
    }
    return false;
}

/* Sees how far the meeting with a peer is. */
static void
attend(smp_ucx *self, smp_ucx_peer *p)
{
    char what;

    if (p->fault != SMP_OK) {
        if (p->distrust != NULL) {
            warn(self, p, p->distrust);
        }
        drop_peer(p);
        return;
    }
    if (p->heard && !p->told && !self->named && !is_fast(p)) {
        drop_peer(p);
        return;
    }
    if (p->heard && p->tried_head && p->tried_block && !p->told) {
        p->told = true;
        if (!smp_lifeline_say(p->fd, SMP_UCX_AGREED)) {
            drop_peer(p);
            return;
        }
    }
    if (!p->agreed) {
        switch (smp_lifeline_hear(p->fd, &what)) {
        case SMP_LIFELINE_QUIET:
            break;
        case SMP_LIFELINE_SAID:
            p->agreed = what == SMP_UCX_AGREED;
            break;
        case SMP_LIFELINE_HUNG_UP:
            drop_peer(p);
            return;
        }
    }
    p->met = p->told && p->agreed;
}

/* Sleeps until something happens at UCX or at a lifeline of those not yet met. */
static void
sleep_until_news(const smp_ucx *self, struct pollfd *polled,
                 const smp_deadline *deadline)
{
    nfds_t n = 0;

    polled[n++] = (struct pollfd){.fd = self->efd, .events = POLLIN};
    for (int r = 0; r < self->host->size; r++) {
        const smp_ucx_peer *p = self->peers[r];

        if (p != NULL && !p->gone && !p->agreed) {
            polled[n++] = (struct pollfd){.fd = p->fd, .events = POLLIN};
        }
    }
    poll(polled, n, smp_deadline_ms(deadline, SMP_NEVER));
}

/* Until each peer is met or dropped, or the time is over.  SMP_ERR_INTERRUPTED,
 * SMP_ERR_NO_MEMORY. */
static smp_status
attend_all(smp_ucx *self, const smp_deadline *deadline)
{
    struct pollfd *polled = calloc((size_t)self->host->size + 1, sizeof(*polled));
    bool           pending = true;
    smp_status     status = SMP_OK;

    if (polled == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    while (pending && status == SMP_OK) {
        while (self->ucp->ucp_worker_progress(self->worker) != 0) {
        }
        pending = false;
        for (int r = 0; r < self->host->size; r++) {
            smp_ucx_peer *p = self->peers[r];

            if (p != NULL && !p->gone && !p->met) {
                attend(self, p);
                pending = pending || (!p->gone && !p->met);
            }
        }
        if (pending && self->ucp->ucp_worker_arm(self->worker) == SMP_UCS_OK) {
            sleep_until_news(self, polled, deadline);
        }
        if (pending) {
            status = smp_deadline_left(deadline, smp_clock_ns());
        }
    }
    free(polled);
    return status == SMP_ERR_TIMED_OUT ? SMP_OK : status;
}

/* Watches the met ranks, drops the others. */
static smp_status
settle(smp_ucx *self, bool *reached, int *failed)
{
    const smp_host *host = self->host;

    for (int r = 0; r < host->size; r++) {
        smp_ucx_peer *p = self->peers[r];

        reached[r] = false;
        if (p != NULL && !p->gone && !p->met) {
            if (p->heard && !p->told) {
                warn(self, p, "a pattern did not arrive in time");
            }
            drop_peer(p);
        }
        if (p == NULL || p->gone) {
            continue;
        }
        if (host->watch(host->comm, p->fd, EPOLLIN, &p->watch) != SMP_OK) {
            *failed = r;
            return SMP_ERR_SYSTEM;
        }
        reached[r] = true;
        self->npeers++;
    }
    self->news = true; /* there may be news of ranks met early */
    return self->npeers == 0
               ? SMP_OK
               : host->watch(host->comm, self->efd, EPOLLIN, &self->watch);
}

/* UCX between us and the ranks at the other ends of the lifelines.  Without a working
 * UCX no rank is reached, and the others hear our hang-up at once. */
static smp_status
meet_over_ucx(smp_ucx *self, const smp_deadline *deadline)
{
    if (open_worker(self) != SMP_OK || introduce(self) != SMP_OK) {
        return SMP_OK;
    }
    for (int r = 0; r < self->host->size; r++) {
        smp_ucx_peer *p = self->peers[r];

        if (p != NULL && !p->gone) {
            smp_status status = call_peer(self, p, deadline);

            if (status == SMP_ERR_INTERRUPTED) {
                return status;
            }
            if (status != SMP_OK) {
                drop_peer(p);
            }
        }
    }
    return attend_all(self, deadline);
}

/* --------------------------------------------------------------------------- public */

smp_status
smp_ucx_connect(void *arg, const void *const *cards, const size_t *card_bytes,
                const bool *wanted, const smp_deadline *deadline, bool *reached,
                int *failed)
{
    smp_ucx        *self = arg;
    const smp_host *host = self->host;
    smp_tcp_self    me = {.rank = host->rank, .size = host->size, .job = self->secret};
    smp_status status = smp_tcp_connect(&self->door, &me, cards, card_bytes, wanted,
                                        deadline, take_lifeline, self, reached, failed);

    for (int r = 0; r < host->size && status == SMP_OK; r++) {
        if (self->peers[r] != NULL) { /* half of the time left, for the ranks present */
            smp_deadline half = smp_deadline_half(deadline);

            status = meet_over_ucx(self, &half);
            break;
        }
    }
    return status == SMP_OK ? settle(self, reached, failed) : status;
}

void
smp_ucx_close_connection(smp_ucx_peer *p)
{
    ucp_request_param how = {.op_attr_mask = SMP_UCP_OP_ATTR_FIELD_FLAGS |
                                             SMP_UCP_OP_ATTR_FIELD_CALLBACK |
                                             SMP_UCP_OP_ATTR_FIELD_USER_DATA,
                             .flags = SMP_UCP_EP_CLOSE_FLAG_FORCE,
                             .cb.send = on_closed,
                             .user_data = p};
    ucs_code_ptr      closing;

    if (p->ep == NULL) {
        return;
    }
    closing = p->self->ucp->ucp_ep_close_nbx(p->ep, &how);
    p->ep = NULL;
    p->closing = closing != NULL && !smp_ucs_is_error(closing);
}

void
smp_ucx_peer_destroy(smp_ucx_peer *p)
{
    if (p == NULL) {
        return;
    }
    smp_ucx_arrivals_fini(&p->arrivals);
    smp_fork_forget_fd(p->fd);
    close(p->fd);
    free(p);
}

void
smp_ucx_close_worker(smp_ucx *self)
{
    int64_t until = smp_clock_ns() + CLOSE_NS;
    bool    closing = true;

    /* After a loss UCX 1.22 may run into a freed connection of TCP, when it moves while
     * others are being closed too: its unfinished transfers end with it.
     */
    for (int r = 0; r < self->host->size; r++) {
        const smp_ucx_peer *p = self->peers[r];

        closing = closing && (p == NULL || !p->met || !p->gone || p->goodbye_came);
    }
    for (int r = 0; r < self->host->size && closing; r++) {
        if (self->peers[r] != NULL) {
            self->peers[r]->gone = true;
            smp_ucx_close_connection(self->peers[r]);
        }
    }
    while (closing && smp_clock_ns() < until) {
        self->ucp->ucp_worker_progress(self->worker);
        closing = self->sending != NULL || self->fetching != NULL;
        for (int r = 0; r < self->host->size; r++) {
            closing = closing || (self->peers[r] != NULL && self->peers[r]->closing);
        }
    }
    self->ucp->ucp_worker_destroy(self->worker);
}
