/* A stand-in for UCX, for what UCX does when it fails: the functions that
 * csrc/comm/transport/ucx/ucp_abi.h names, between workers of one process.
 *
 *   - an active message without SMP_UCP_AM_SEND_FLAG_RNDV comes with its bytes, and has
 *     left when the call returns; with it, it is announced, and has left when it was
 *     fetched;
 *   - what was begun ends in ucp_worker_progress(), with its callback;
 *   - a worker's descriptor is readable while there is something to do, once it is
 * armed.
 */
#define _GNU_SOURCE
#include "stand_in_ucp.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "comm/transport/ucx/ucp_abi.h"

/* UCS_ERR_IO_ERROR, UCS_ERR_CANCELED. */
enum { IO_ERROR = -3, CANCELED = -16 };

stand_in_ucp_table stand_in_ucp = {
    .major = SMP_UCP_MAJOR, .minor = SMP_UCP_MINOR, .transport = "rc_mlx5"};

struct ucp_context {
    int any;
};

struct ucp_config {
    int any;
};

/* What was begun, until it was freed. */
typedef struct request {
    struct request   *next; /* among those of a worker that have ended */
    ucp_worker       *worker;
    ucp_request_param how;
    bool              fetches;
    size_t            bytes;
    ucs_code          code;
} request;

/* An active message on its way. */
typedef struct parcel {
    struct parcel *next;
    ucp_ep        *by;
    uint8_t        header[64];
    size_t         header_bytes;
    void          *data; /* owned, unless it is announced */
    size_t         bytes;
    request *announced; /* ends when it was fetched; NULL: it comes with its bytes */
} parcel;

struct ucp_worker {
    ucp_worker          *next; /* of all that there ever were */
    int                  fd;   /* -1: destroyed */
    ucp_am_handler_param handler;
    parcel              *parcels;
    request             *ended;
    ucp_ep              *connections;
};

struct ucp_ep {
    ucp_ep       *next;
    ucp_worker   *from;
    ucp_worker   *to;
    ucp_ep_params params;
};

/* Guards all below, and what ucp_config_modify() was told. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ucp_worker     *workers;

static bool
is_broken(const char *name)
{
    return stand_in_ucp.broken != NULL && strcmp(stand_in_ucp.broken, name) == 0;
}

#define OR_BROKEN                                                                      \
    do {                                                                               \
        if (is_broken(__func__)) {                                                     \
            return IO_ERROR;                                                           \
        }                                                                              \
    } while (0)

/* Whether the one whose turn it is fails. */
static bool
is_the_one(_Atomic int *number)
{
    return atomic_load(number) > 0 && atomic_fetch_sub(number, 1) == 1;
}

/* ------------------------------------------------------------------------ requests */

static request *
new_request(ucp_worker *worker, const ucp_request_param *how, bool fetches)
{
    request *r = calloc(1, sizeof(*r));

    *r = (request){.worker = worker, .how = *how, .fetches = fetches};
    r->code = SMP_UCS_INPROGRESS;
    atomic_fetch_add(&stand_in_ucp.alive, 1);
    return r;
}

/* It is over; its worker, if there is one, hears of it.  The lock is held. */
static void
end_request(request *r, ucs_code code)
{
    const uint64_t one = 1;

    if (r->worker->fd < 0) {
        free(r);
        atomic_fetch_sub(&stand_in_ucp.alive, 1);
        return;
    }
    r->code = code;
    r->next = r->worker->ended;
    r->worker->ended = r;
    (void)!write(r->worker->fd, &one, sizeof(one));
}

static void
free_parcel(parcel *p, ucs_code code)
{
    if (p->announced != NULL) {
        end_request(p->announced, code);
    } else {
        free(p->data);
    }
    free(p);
}

/* ------------------------------------------------------------ versions and contexts */

void
ucp_get_version(unsigned *major, unsigned *minor, unsigned *release)
{
    *major = stand_in_ucp.major;
    *minor = stand_in_ucp.minor;
    *release = 0;
}

const char *
ucp_get_version_string(void)
{
    return "stand-in";
}

ucs_code
ucp_config_read(const char *prefix, const char *file, ucp_config **out)
{
    (void)prefix;
    (void)file;
    OR_BROKEN;
    pthread_mutex_lock(&lock);
    stand_in_ucp.net_devices[0] = stand_in_ucp.tls[0] = '\0';
    pthread_mutex_unlock(&lock);
    *out = calloc(1, sizeof(**out));
    atomic_fetch_add(&stand_in_ucp.alive, 1);
    return SMP_UCS_OK;
}

ucs_code
ucp_config_modify(ucp_config *config, const char *name, const char *value)
{
    char *to = strcmp(name, "TLS") == 0 ? stand_in_ucp.tls : stand_in_ucp.net_devices;

    (void)config;
    OR_BROKEN;
    pthread_mutex_lock(&lock);
    strncpy(to, value, sizeof(stand_in_ucp.tls) - 1);
    pthread_mutex_unlock(&lock);
    return SMP_UCS_OK;
}

void
ucp_config_release(ucp_config *config)
{
    free(config);
    atomic_fetch_sub(&stand_in_ucp.alive, 1);
}

ucs_code
ucp_init_version(unsigned major, unsigned minor, const ucp_params *params,
                 const ucp_config *config, ucp_context **out)
{
    (void)config;
    if (is_broken("ucp_init_version") || major != SMP_UCP_MAJOR ||
        minor != SMP_UCP_MINOR ||
        params->features != (SMP_UCP_FEATURE_AM | SMP_UCP_FEATURE_WAKEUP)) {
        return IO_ERROR;
    }
    *out = calloc(1, sizeof(**out));
    atomic_fetch_add(&stand_in_ucp.alive, 1);
    return SMP_UCS_OK;
}

void
ucp_cleanup(ucp_context *context)
{
    free(context);
    atomic_fetch_sub(&stand_in_ucp.alive, 1);
}

/* ------------------------------------------------------------------------- workers */

ucs_code
ucp_worker_create(ucp_context *context, const ucp_worker_params *params,
                  ucp_worker **out)
{
    (void)context;
    (void)params;
    OR_BROKEN;
    *out = calloc(1, sizeof(**out));
    (*out)->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_lock(&lock);
    (*out)->next = workers;
    workers = *out;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&stand_in_ucp.alive, 1);
    return SMP_UCS_OK;
}

ucs_code_ptr ucp_ep_close_nbx(ucp_ep *ep, const ucp_request_param *param);

/* Its memory stays: others may still have its address. */
void
ucp_worker_destroy(ucp_worker *worker)
{
    while (worker->connections != NULL) {
        ucp_ep_close_nbx(worker->connections, NULL);
    }
    pthread_mutex_lock(&lock);
    while (worker->parcels != NULL) {
        parcel *p = worker->parcels;

        worker->parcels = p->next;
        free_parcel(p, CANCELED);
    }
    while (worker->ended != NULL) {
        request *r = worker->ended;

        worker->ended = r->next;
        free(r);
        atomic_fetch_sub(&stand_in_ucp.alive, 1);
    }
    close(worker->fd);
    worker->fd = -1;
    pthread_mutex_unlock(&lock);
    atomic_fetch_sub(&stand_in_ucp.alive, 1);
}

ucs_code
ucp_worker_query(ucp_worker *worker, ucp_worker_attr *attr)
{
    OR_BROKEN;
    attr->address = malloc(sizeof(worker));
    attr->address_length = sizeof(worker);
    memcpy(attr->address, &worker, sizeof(worker));
    atomic_fetch_add(&stand_in_ucp.alive, 1);
    return SMP_UCS_OK;
}

void
ucp_worker_release_address(ucp_worker *worker, ucp_address *address)
{
    (void)worker;
    free(address);
    atomic_fetch_sub(&stand_in_ucp.alive, 1);
}

ucs_code
ucp_worker_get_efd(ucp_worker *worker, int *fd)
{
    *fd = worker->fd;
    return is_broken("ucp_worker_get_efd") ? IO_ERROR : SMP_UCS_OK;
}

ucs_code
ucp_worker_arm(ucp_worker *worker)
{
    uint64_t count;
    bool     is_idle;

    pthread_mutex_lock(&lock);
    (void)!read(worker->fd, &count, sizeof(count));
    is_idle = worker->parcels == NULL && worker->ended == NULL;
    pthread_mutex_unlock(&lock);
    return is_idle ? SMP_UCS_OK : SMP_UCS_ERR_BUSY;
}

ucs_code
ucp_worker_set_am_recv_handler(ucp_worker *worker, const ucp_am_handler_param *param)
{
    worker->handler = *param;
    return is_broken("ucp_worker_set_am_recv_handler") ? IO_ERROR : SMP_UCS_OK;
}

/* Gives an active message to who handles them. */
static void
hand_over(ucp_worker *worker, parcel *p)
{
    ucp_am_recv_param param = {
        .recv_attr = p->announced != NULL ? SMP_UCP_AM_RECV_ATTR_FLAG_RNDV : 0};
    bool announced = p->announced != NULL;

    (void)worker->handler.cb(worker->handler.arg, p->header, p->header_bytes,
                             announced ? (void *)p : p->data, p->bytes, &param);
    if (!announced || p->announced != NULL) {
        pthread_mutex_lock(&lock);
        free_parcel(p, SMP_UCS_OK); /* one that nobody fetched is dropped */
        pthread_mutex_unlock(&lock);
    } else {
        free(p);
    }
}

unsigned
ucp_worker_progress(ucp_worker *worker)
{
    request *r;
    parcel  *p = NULL;
    ucp_ep  *ep;

    pthread_mutex_lock(&lock);
    ep = worker->connections;
    if ((r = worker->ended) != NULL) {
        worker->ended = r->next;
    } else if ((p = worker->parcels) != NULL) {
        worker->parcels = p->next;
    }
    pthread_mutex_unlock(&lock);
    if (ep != NULL && is_the_one(&stand_in_ucp.faults)) {
        ep->params.err_handler.cb(ep->params.err_handler.arg, ep, IO_ERROR);
    }
    if (r != NULL && r->fetches) {
        r->how.cb.recv_am(r, r->code, r->bytes, r->how.user_data);
    } else if (r != NULL) {
        r->how.cb.send(r, r->code, r->how.user_data);
    } else if (p != NULL) {
        hand_over(worker, p);
    }
    return r != NULL || p != NULL;
}

/* --------------------------------------------------------------------- connections */

ucs_code
ucp_ep_create(ucp_worker *worker, const ucp_ep_params *params, ucp_ep **out)
{
    OR_BROKEN;
    *out = calloc(1, sizeof(**out));
    pthread_mutex_lock(&lock);
    **out = (ucp_ep){.next = worker->connections, .from = worker, .params = *params};
    memcpy(&(*out)->to, params->address, sizeof((*out)->to));
    worker->connections = *out;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&stand_in_ucp.alive, 1);
    return SMP_UCS_OK;
}

ucs_code
ucp_ep_query(ucp_ep *ep, ucp_ep_attr *attr)
{
    (void)ep;
    OR_BROKEN;
    attr->transports.entries[0] =
        (ucp_transport_entry){.transport_name = stand_in_ucp.transport};
    attr->transports.num_entries = 1;
    return SMP_UCS_OK;
}

/* What was announced by it and not fetched is over, too. */
ucs_code_ptr
ucp_ep_close_nbx(ucp_ep *ep, const ucp_request_param *param)
{
    ucp_ep **at;
    parcel **link;

    (void)param;
    pthread_mutex_lock(&lock);
    for (at = &ep->from->connections; *at != ep; at = &(*at)->next) {
    }
    *at = ep->next;
    for (link = &ep->to->parcels; *link != NULL;) {
        parcel *p = *link;

        if (p->by == ep && p->announced != NULL) {
            *link = p->next;
            free_parcel(p, CANCELED);
        } else {
            link = &p->next;
        }
    }
    pthread_mutex_unlock(&lock);
    free(ep);
    atomic_fetch_sub(&stand_in_ucp.alive, 1);
    return NULL;
}

/* Where UCX says that it did not begin. */
static ucs_code_ptr
refused(void)
{
    return (
        void *)(intptr_t)IO_ERROR; /* NOLINT(performance-no-int-to-ptr): as UCX does */
}

ucs_code_ptr
ucp_am_send_nbx(ucp_ep *ep, unsigned id, const void *header, size_t header_length,
                const void *buffer, size_t count, const ucp_request_param *param)
{
    const uint64_t one = 1;
    bool           fails = is_the_one(&stand_in_ucp.sent);
    bool           announces = (param->flags & SMP_UCP_AM_SEND_FLAG_RNDV) != 0;
    parcel        *p;
    parcel       **last;
    request       *r = NULL;

    if (fails && !stand_in_ucp.late) {
        return refused();
    }
    pthread_mutex_lock(&lock);
    if (fails || announces || ep->to->fd < 0) {
        r = new_request(ep->from, param, false);
    }
    if (fails || ep->to->fd < 0 || id != ep->to->handler.id) {
        if (r != NULL) {
            end_request(r, IO_ERROR);
        }
        pthread_mutex_unlock(&lock);
        return r;
    }
    p = calloc(1, sizeof(*p));
    *p = (parcel){
        .by = ep, .header_bytes = header_length, .bytes = count, .announced = r};
    memcpy(p->header, header, header_length);
    p->data = (void *)(uintptr_t)buffer;
    if (!announces) {
        p->data = malloc(count + 1);
        if (count != 0) {
            memcpy(p->data, buffer, count);
        }
    }
    for (last = &ep->to->parcels; *last != NULL; last = &(*last)->next) {
    }
    *last = p;
    (void)!write(ep->to->fd, &one, sizeof(one));
    pthread_mutex_unlock(&lock);
    return r;
}

ucs_code_ptr
ucp_am_recv_data_nbx(ucp_worker *worker, void *data, void *buffer, size_t count,
                     const ucp_request_param *param)
{
    bool     fails = is_the_one(&stand_in_ucp.fetch);
    parcel  *p = data;
    request *r = NULL;

    pthread_mutex_lock(&lock);
    if (!fails && count != 0) {
        memcpy(buffer, p->data, count);
    }
    end_request(p->announced, SMP_UCS_OK);
    p->announced = NULL;
    if (stand_in_ucp.late) {
        r = new_request(worker, param, true);
        r->bytes = count;
        end_request(r, fails ? IO_ERROR : SMP_UCS_OK);
    }
    pthread_mutex_unlock(&lock);
    return fails && r == NULL ? refused() : r;
}

ucs_code
ucp_request_check_status(void *r)
{
    return ((request *)r)->code;
}

void
ucp_request_free(void *r)
{
    free(r);
    atomic_fetch_sub(&stand_in_ucp.alive, 1);
}
