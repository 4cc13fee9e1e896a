/* The MPI transport: point-to-point messages, all of them by the progress thread.
 *
 * A message travels as one MPI message with the head (head.h: sizes of all blocks, the
 * bytes, the bytes of small blocks), then one per larger block, in order.  MPI keeps
 * the order of messages with one tag between two ranks.  So the receiver posts the
 * receives for the blocks of one head after the other, and gets each into its place.
 *
 * MPI does not name a dead rank, so beside it each rank has a lifeline
 * (comm/transport/connecting/lifeline.h).  A rank at its end says goodbye over MPI, and
 * the other confirms all earlier messages over the lifeline.  After a loss this rank
 * calls MPI no more: Open MPI, when it sees a connection of its own end, ends its
 * process.  So the lifelines are looked at before every round of calls.  The other
 * ranks hear of the loss by themselves.  A rank at its end before then tells them over
 * the lifeline that it is not the one to name.
 *
 * MPI has no descriptor to sleep on.  The progress thread polls hard for a moment after
 * a transfer's progress, and longer while the receiving thread sleeps (this rank's core
 * is free then).  Otherwise it looks once in a while.
 *
 * This file is part of another shared object than the rest of csrc/comm, and uses it
 * only through the host's table.
 */
#define _GNU_SOURCE
#include "comm/transport/mpi/mpi.h"

#include <mpi.h>

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "comm/transport/connecting/lifeline.h"
#include "comm/transport/mpi/group.h"
#include "comm/transport/mpi/requests.h"
#include "comm/transport/mpi/state.h"
#include "comm/transport/mpi/transfer.h"
#include "common/clock.h"
#include "common/jitter.h"
#include "common/lock.h"

/* progress() follows, and looks. */
static void
lifelines_ready(void *arg, uint32_t events)
{
    (void)arg;
    (void)events;
}

/* No message is on its way between us any more, so none can arrive for a freed
 * communicator. */
static bool
is_parted(const smp_mpi_peer *p)
{
    return p->fd < 0 || (p->left && p->arrived && p->sending == 0);
}

static bool
mpi_finish(void *arg)
{
    smp_mpi *self = arg;
    bool     done = true;

    if (self->npeers == 0 || self->over || atomic_load(&self->ended)) {
        return true;
    }
    for (int r = 0; r < self->host->size; r++) {
        smp_mpi_peer *p = &self->peers[r];

        if (p->fd >= 0 && !p->gone) {
            p->said_goodbye = p->said_goodbye || smp_mpi_say_goodbye(self, r);
            done = done && is_parted(p);
        }
    }
    return done;
}

/* MPI_Finalize deletes the attributes of MPI_COMM_SELF first. */
static int
mpi_ends(MPI_Comm comm, int keyval, void *value, void *extra)
{
    smp_mpi *self = value;

    (void)comm;
    (void)keyval;
    (void)extra;
    atomic_store(&self->ended, true);
    while (atomic_load(&self->busy)) {
        sched_yield();
    }
    return MPI_SUCCESS;
}

smp_status
smp_mpi_usable(void)
{
    int initialized = 0;
    int finalized = 0;
    int level = MPI_THREAD_SINGLE;

    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized || finalized) {
        return SMP_ERR_CLOSED;
    }
    MPI_Query_thread(&level);
    return level >= MPI_THREAD_SERIALIZED ? SMP_OK : SMP_ERR_INVALID;
}

static smp_status
mpi_create(const smp_host *host, void **out, const void **card, size_t *card_bytes)
{
    smp_status status = smp_mpi_usable();
    smp_mpi   *self;

    if (status != SMP_OK) {
        return status;
    }
    smp_jitter_init(); /* this object has its own */
    self = calloc(1, sizeof(*self) + (size_t)host->size * sizeof(smp_mpi_peer));
    if (self == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    self->host = host;
    self->comm = MPI_COMM_NULL;
    self->epoll = -1;
    self->watch = (smp_watch){lifelines_ready, self};
    for (int r = 0; r < host->size; r++) {
        smp_mpi_peer *p = &self->peers[r];

        *p = (smp_mpi_peer){.self = self, .rank = r, .fd = -1};
    }
    status = smp_tcp_door_open(host->rank, host->interface, &self->door);
    if (status != SMP_OK) {
        goto err_free;
    }
    status = SMP_ERR_SYSTEM;
    if (MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, mpi_ends, &self->keyval, NULL) !=
        MPI_SUCCESS) {
        goto err_close_door;
    }
    if (MPI_Comm_set_attr(MPI_COMM_SELF, self->keyval, self) != MPI_SUCCESS) {
        goto err_free_keyval;
    }
    smp_lock_init(&self->lock, SMP_LOCK_OUTBOX);
    smp_mpi_card_fill(&self->card);
    self->card.door = self->door.card;
    *out = self;
    *card = &self->card;
    *card_bytes = sizeof(self->card);
    return SMP_OK;

err_free_keyval:
    MPI_Comm_free_keyval(&self->keyval);
err_close_door:
    smp_tcp_door_close(&self->door);
err_free:
    free(self);
    return status;
}

/* Takes the descriptor, whatever it returns. */
static smp_status
take_lifeline(void *arg, int rank, int fd)
{
    smp_mpi *self = arg;

    self->peers[rank].fd = fd;
    return smp_lifeline_watch_over(fd) ? self->host->close_in_child(fd)
                                       : SMP_ERR_SYSTEM;
}

/* Lifelines to the wanted ranks, and a communicator of all. */
static smp_status
meet(smp_mpi *self, const void *const *cards, const int *ranks, const bool *wanted,
     const smp_deadline *deadline, bool *reached, int *failed)
{
    const smp_host *host = self->host;
    int            *fds = calloc((size_t)host->size, sizeof(*fds));
    smp_status      status;

    if (fds == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    status = smp_mpi_meet(&self->door, host->job, host->rank, host->size, cards, wanted,
                          deadline, take_lifeline, self, reached, failed);
    for (int r = 0; r < host->size; r++) {
        fds[r] = self->peers[r].fd;
    }
    if (status == SMP_OK) {
        status = smp_mpi_make_comm(host->job, ranks, host->size, fds, deadline,
                                   &self->comm, failed);
    }
    free(fds);
    return status;
}

static smp_status
watch_lifelines(smp_mpi *self)
{
    const smp_host *host = self->host;
    smp_status      status;

    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (self->epoll < 0) {
        return smp_status_refused();
    }
    status = host->close_in_child(self->epoll);
    for (int r = 0; r < host->size && status == SMP_OK; r++) {
        smp_mpi_peer      *p = &self->peers[r];
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = p};

        if (p->fd >= 0 && epoll_ctl(self->epoll, EPOLL_CTL_ADD, p->fd, &event) != 0) {
            status = smp_status_refused();
        }
    }
    return status == SMP_OK
               ? host->watch(host->comm, self->epoll, EPOLLIN, &self->watch)
               : status;
}

/* Ranks on one host reach one another by shared memory or not at all.  So either every
 * rank of the job wants a connection, or none does: all come to the same answer. */
static smp_status
mpi_connect(void *arg, const void *const *cards, const size_t *card_bytes,
            const bool *wanted, const smp_deadline *deadline, bool *reached,
            int *failed)
{
    smp_mpi        *self = arg;
    const smp_host *host = self->host;
    int             size = host->size;
    int             wants = -1;
    int            *ranks;
    smp_status      status;

    for (int r = 0; r < size && wants < 0; r++) {
        wants = wanted[r] ? r : -1;
    }
    if (wants < 0) {
        smp_tcp_door_close(&self->door);
        return SMP_OK;
    }
    ranks = calloc((size_t)size, sizeof(*ranks));
    if (ranks == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    if (!smp_mpi_world_ranks(&self->card, host->rank, size, cards, card_bytes, ranks)) {
        free(ranks);
        smp_tcp_door_close(&self->door);
        return SMP_OK; /* reaches no rank */
    }
    *failed = wants;
    status = meet(self, cards, ranks, wanted, deadline, reached, failed);
    free(ranks);
    if (status == SMP_OK) {
        status = watch_lifelines(self);
    }
    for (int r = 0; r < size; r++) {
        reached[r] = reached[r] && status == SMP_OK;
        self->npeers += reached[r];
    }
    self->moved_ns = smp_clock_ns();
    return status;
}

static void
end_lifeline(smp_mpi_peer *p)
{
    const smp_mpi *self = p->self;

    if (p->fd < 0) {
        return;
    }
    if (!p->gone) {
        smp_lifeline_say(p->fd, SMP_MPI_LEFT);
    }
    self->host->forget_fd(p->fd);
    close(p->fd);
}

static void
mpi_destroy(void *arg)
{
    smp_mpi *self = arg;
    bool     parted =
        self->comm != MPI_COMM_NULL && self->sends.n == 0 && self->receives.n == 0;

    for (int r = 0; r < self->host->size; r++) {
        smp_mpi_free_idle(self->host, &self->peers[r].incoming);
        parted = parted && is_parted(&self->peers[r]);
    }
    smp_mpi_transfers_free(self->host, &self->queue);
    if (parted && smp_mpi_enter(self)) {
        MPI_Comm_free(&self->comm);
        smp_mpi_leave(self);
    }
    if (!atomic_load(&self->ended)) {                      /* these speak to no rank */
        MPI_Comm_delete_attr(MPI_COMM_SELF, self->keyval); /* runs mpi_ends */
        MPI_Comm_free_keyval(&self->keyval);
    }
    for (int r = 0; r < self->host->size; r++) {
        end_lifeline(&self->peers[r]);
    }
    if (self->epoll >= 0) {
        self->host->forget_fd(self->epoll);
        close(self->epoll);
    }
    smp_tcp_door_close(&self->door);
    smp_lock_fini(&self->lock);
    smp_mpi_requests_fini(&self->sends);
    smp_mpi_requests_fini(&self->receives);
    free(self);
}

const smp_transport smp_transport_mpi = {
    .abi = SMP_TRANSPORT_ABI,
    .name = "mpi",
    .same_host = false,
    .polls = true,
    .create = mpi_create,
    .connect = mpi_connect,
    .send = smp_mpi_send,
    .poll = NULL,
    .progress = smp_mpi_progress,
    .finish = mpi_finish,
    .destroy = mpi_destroy,
};
