/* The MPI transport: point-to-point messages, all of them by the progress thread.
 *
 * A message travels as one MPI message with the head (sizes of all blocks, the bytes,
 * the bytes of small blocks), then one per larger block, in order.  MPI keeps the order
 * of messages with one tag between two ranks, so the receiver, which posts the receives
 * for the blocks of one head after the other, gets each into its place.
 *
 * MPI has no descriptor to sleep on.  The progress thread polls hard for a moment after
 * something has moved, and longer while the receiving thread sleeps (this rank's core
 * is free then); otherwise it looks once in a while.
 *
 * This file is part of another shared object than the rest of csrc/comm, and uses it
 * only through the host's table.
 */
#define _GNU_SOURCE
#include "comm/mpi/mpi.h"

#include <mpi.h>

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/mpi/group.h"
#include "comm/transport.h"
#include "common/jitter.h"
#include "common/lock.h"

#define MAGIC 0x49504d53u

/* A longer block travels in several pieces: MPI counts in int, and says nothing of a
 * message until it has arrived whole. */
#ifndef SMP_MPI_PIECE
#    define SMP_MPI_PIECE ((size_t)32 << 20)
#endif

/* Blocks up to this size travel in the head. */
#define INLINE_BYTES ((size_t)2048)

/* Requests looked at in one go, and new messages in one round. */
#define TESTED 256
#define PROBED 64

/* Rounds of progress(), while it polls hard, before it returns to the loop. */
#define ROUNDS 16

/* How long to poll hard after something moved; the same while the receiver sleeps; the
 * longest pauses afterwards. */
#define HARD_NS 100000
#define HARD_WAITING_NS 5000000
#define PAUSE_NS 1000000
#define PAUSE_WAITING_NS 100000

enum { TAG_HEAD = 1, TAG_BLOCK = 2 };

typedef enum { HEAD_MESSAGE = 0x4d, HEAD_GOODBYE = 0x59 } head_kind;

/* Followed by one size per block, the bytes, the inline blocks; each padded to 8. */
typedef struct {
    uint32_t magic;
    uint32_t kind; /* head_kind */
    uint64_t nbytes;
    uint64_t nblocks;
} head;

/* A message on its way out or in. */
typedef struct transfer {
    struct transfer *next; /* owned: in the list that holds this one */
    int              rank; /* the other side */
    bool             incoming;
    bool         parsed;  /* incoming: message is there and its receives are posted */
    size_t       pending; /* requests under way */
    uint8_t     *head;    /* owned */
    size_t       head_bytes;
    smp_block  **blocks; /* owned, outgoing: those not in the head */
    size_t       nblocks;
    smp_message *message; /* owned, incoming */
} transfer;

typedef struct {
    transfer *first; /* owned */
    transfer *last;
} transfers;

typedef struct {
    const smp_host *host; /* borrowed */
    smp_mpi_card    card;
    MPI_Comm        comm;   /* MPI_COMM_NULL until connected */
    int             keyval; /* its deletion tells that MPI ends */
    int             npeers; /* set by connect, like peers */
    bool           *peers;  /* owned: [size]: reached by us */

    transfers   *incoming; /* owned: [size]; progress thread only, up to `lost` */
    MPI_Request *requests; /* owned: [nrequests] under way, room for `room` */
    transfer   **owners;   /* owned: [nrequests] of borrowed: whose they are */
    size_t       nrequests;
    size_t       room;
    size_t       tested;   /* where the next test begins */
    size_t       nsending; /* outgoing transfers under way */
    int64_t      moved_ns;
    bool         goodbye; /* ours is under way or sent */
    bool        *left;    /* owned: [size]: its goodbye has come */
    bool        *lost;    /* owned: [size]: given up */

    _Atomic bool busy;  /* the progress thread is inside MPI */
    _Atomic bool ended; /* MPI_Finalize has begun: no more calls */
    _Atomic bool awake; /* the progress thread polls: no kick needed */

    _Atomic size_t queued; /* messages in queue */
    smp_lock       lock;   /* guards queue */
    transfers      queue;  /* owned: not yet given to MPI */
} mpi;

static size_t
padded(size_t bytes)
{
    return (bytes + 7) / 8 * 8;
}

static int64_t
now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void
put_last(transfers *list, transfer *t)
{
    t->next = NULL;
    if (list->first == NULL) {
        list->first = t;
    } else {
        list->last->next = t;
    }
    list->last = t;
}

static transfer *
take_first(transfers *list)
{
    transfer *t = list->first;

    if (t != NULL) {
        list->first = t->next;
        t->next = NULL;
    }
    return t;
}

static void
transfer_free(const smp_host *host, transfer *t)
{
    for (size_t i = 0; i < t->nblocks; i++) {
        host->block_release(t->blocks[i]);
    }
    host->message_free(t->message);
    free(t->blocks);
    free(t->head);
    free(t);
}

static void
free_all(const smp_host *host, transfers *list)
{
    transfer *t;

    while ((t = take_first(list)) != NULL) {
        transfer_free(host, t);
    }
}

/* ------------------------------------------------------------------- inside MPI */

/* False: MPI has ended.  Else leave() must follow. */
static bool
enter(mpi *self)
{
    atomic_store(&self->busy, true);
    if (atomic_load(&self->ended)) {
        atomic_store(&self->busy, false);
        return false;
    }
    return true;
}

static void
leave(mpi *self)
{
    atomic_store(&self->busy, false);
}

/* Nothing more comes from that rank, or goes there. */
static void
give_up(mpi *self, int rank, smp_status why)
{
    if (!self->lost[rank]) {
        self->lost[rank] = true;
        self->host->lost(self->host->comm, rank, why);
    }
}

/* Room for `more` requests. */
static bool
make_room(mpi *self, size_t more)
{
    size_t       room = 2 * (self->nrequests + more);
    MPI_Request *requests;
    transfer   **owners;

    if (self->nrequests + more <= self->room) {
        return true;
    }
    requests = realloc(self->requests, room * sizeof(MPI_Request));
    if (requests == NULL) {
        return false;
    }
    self->requests = requests;
    owners = realloc(self->owners, room * sizeof(transfer *));
    if (owners == NULL) {
        return false;
    }
    self->owners = owners;
    self->room = room;
    return true;
}

/* Starts one request of t; there is room. */
static bool
start(mpi *self, transfer *t, void *data, size_t bytes, int tag)
{
    MPI_Request *request = &self->requests[self->nrequests];
    int          result;

    if (t->incoming) {
        result =
            MPI_Irecv(data, (int)bytes, MPI_BYTE, t->rank, tag, self->comm, request);
    } else {
        result =
            MPI_Isend(data, (int)bytes, MPI_BYTE, t->rank, tag, self->comm, request);
    }
    if (result != MPI_SUCCESS) {
        give_up(self, t->rank, SMP_ERR_PEER_LOST);
        return false;
    }
    self->owners[self->nrequests++] = t;
    t->pending++;
    return true;
}

/* Starts the requests for one block. */
static bool
start_block(mpi *self, transfer *t, const smp_block *block)
{
    uint8_t *data = self->host->block_data(block);
    size_t   bytes = self->host->block_bytes(block);

    if (!make_room(self, bytes / SMP_MPI_PIECE + 1)) {
        give_up(self, t->rank, SMP_ERR_NO_MEMORY);
        return false;
    }
    for (size_t at = 0; at < bytes; at += SMP_MPI_PIECE) {
        size_t left = bytes - at;

        if (!start(self, t, data + at, left < SMP_MPI_PIECE ? left : SMP_MPI_PIECE,
                   TAG_BLOCK)) {
            return false;
        }
    }
    return true;
}

/* --------------------------------------------------------------------- receiving */

/* What the head of t says: its message, and receives for the blocks that follow. */
static smp_status
parse(mpi *self, transfer *t)
{
    const smp_host *host = self->host;
    size_t          left = t->head_bytes;
    const uint8_t  *at;
    const uint64_t *sizes;
    head            h;
    smp_status      status;

    if (left < sizeof(h)) {
        return SMP_ERR_MALFORMED;
    }
    memcpy(&h, t->head, sizeof(h));
    left -= sizeof(h);
    sizes = (const uint64_t *)(const void *)(t->head + sizeof(h));
    if (h.magic != MAGIC || (h.kind != HEAD_MESSAGE && h.kind != HEAD_GOODBYE) ||
        h.nblocks > left / sizeof(uint64_t) ||
        h.nbytes > left - h.nblocks * sizeof(uint64_t) ||
        padded(h.nbytes) > left - h.nblocks * sizeof(uint64_t)) {
        return SMP_ERR_MALFORMED;
    }
    if (h.kind == HEAD_GOODBYE) {
        return SMP_OK;
    }
    status = host->message(t->rank, h.nbytes, h.nblocks, &t->message);
    if (status != SMP_OK) {
        return status;
    }
    at = (const uint8_t *)(sizes + h.nblocks);
    memcpy(t->message->bytes, at, h.nbytes);
    at += padded(h.nbytes);
    left -= h.nblocks * sizeof(uint64_t) + padded(h.nbytes);
    for (size_t i = 0; i < h.nblocks; i++) {
        smp_block **block = &t->message->blocks[i];

        if (sizes[i] > SIZE_MAX / 2 ||
            (sizes[i] <= INLINE_BYTES && padded(sizes[i]) > left)) {
            return SMP_ERR_MALFORMED;
        }
        status = host->block(host->comm, sizes[i], block);
        if (status != SMP_OK) {
            return status;
        }
        if (sizes[i] <= INLINE_BYTES) {
            memcpy(host->block_data(*block), at, sizes[i]);
            at += padded(sizes[i]);
            left -= padded(sizes[i]);
        } else if (!start_block(self, t, *block)) {
            return SMP_ERR_PEER_LOST; /* it has been given up already */
        }
    }
    return left == 0 ? SMP_OK : SMP_ERR_MALFORMED;
}

/* Parses heads and delivers messages of one rank, both in order. */
static void
advance(mpi *self, int rank)
{
    transfers *list = &self->incoming[rank];

    for (transfer *t = list->first; t != NULL && !self->lost[rank]; t = t->next) {
        if (!t->parsed) {
            smp_status status;

            if (t->pending != 0) {
                break;
            }
            status = parse(self, t);
            if (status != SMP_OK) {
                give_up(self, rank, status);
                return;
            }
            t->parsed = true;
        }
    }
    while (list->first != NULL && list->first->parsed && list->first->pending == 0 &&
           !self->lost[rank]) {
        transfer *t = take_first(list);

        if (t->message != NULL) {
            self->host->deliver(self->host->comm, t->message);
            t->message = NULL;
        } else {
            self->left[rank] = true;
            self->host->left(self->host->comm, rank);
        }
        transfer_free(self->host, t);
    }
}

/* Begins to receive the next head, if there is one. */
static bool
probe(mpi *self)
{
    MPI_Message message;
    MPI_Status  found;
    transfer   *t;
    int         there = 0;
    int         bytes = 0;

    if (MPI_Improbe(MPI_ANY_SOURCE, TAG_HEAD, self->comm, &there, &message, &found) !=
            MPI_SUCCESS ||
        !there) {
        return false;
    }
    MPI_Get_count(&found, MPI_BYTE, &bytes);
    t = calloc(1, sizeof(*t));
    if (t == NULL || bytes < 0 || !make_room(self, 1) ||
        (t->head = malloc((size_t)bytes + 1)) == NULL) {
        free(t);
        give_up(self, found.MPI_SOURCE, SMP_ERR_NO_MEMORY);
        return false;
    }
    t->rank = found.MPI_SOURCE;
    t->incoming = true;
    t->head_bytes = (size_t)bytes;
    if (MPI_Imrecv(t->head, bytes, MPI_BYTE, &message,
                   &self->requests[self->nrequests]) != MPI_SUCCESS) {
        transfer_free(self->host, t);
        give_up(self, found.MPI_SOURCE, SMP_ERR_PEER_LOST);
        return false;
    }
    self->owners[self->nrequests++] = t;
    t->pending = 1;
    put_last(&self->incoming[t->rank], t);
    return true;
}

/* ----------------------------------------------------------------------- sending */

/* A transfer with a head of `bytes`; the head is not filled. */
static transfer *
new_outgoing(int dest, size_t bytes, size_t nblocks)
{
    transfer *t = calloc(1, sizeof(*t));

    if (t == NULL) {
        return NULL;
    }
    t->rank = dest;
    t->head_bytes = bytes;
    t->head = malloc(bytes);
    t->blocks = calloc(nblocks + 1, sizeof(smp_block *));
    if (t->head == NULL || t->blocks == NULL) {
        free(t->head);
        free(t->blocks);
        free(t);
        return NULL;
    }
    return t;
}

static void
enqueue(mpi *self, transfer *t)
{
    smp_jitter();
    smp_lock_acquire(&self->lock);
    put_last(&self->queue, t);
    atomic_fetch_add(&self->queued, 1);
    smp_lock_release(&self->lock);
    smp_jitter();
    if (!atomic_load(&self->awake)) {
        self->host->kick(self->host->comm);
    }
}

static smp_status
mpi_send(void *arg, int dest, const void *bytes, size_t nbytes,
         smp_block *const *blocks, size_t nblocks)
{
    mpi            *self = arg;
    const smp_host *host = self->host;
    size_t          total = sizeof(head) + nblocks * sizeof(uint64_t) + padded(nbytes);
    transfer       *t = NULL;
    uint64_t       *sizes;
    uint8_t        *at;

    for (size_t i = 0; i < nblocks; i++) {
        size_t size = host->block_bytes(blocks[i]);

        total += size <= INLINE_BYTES ? padded(size) : 0;
    }
    if (total <= INT32_MAX) { /* more cannot be one MPI message */
        t = new_outgoing(dest, total, nblocks);
    }
    if (t == NULL) {
        for (size_t i = 0; i < nblocks; i++) {
            host->block_release(blocks[i]);
        }
        return SMP_ERR_NO_MEMORY;
    }
    *(head *)(void *)t->head = (head){MAGIC, HEAD_MESSAGE, nbytes, nblocks};
    sizes = (uint64_t *)(void *)(t->head + sizeof(head));
    at = (uint8_t *)(sizes + nblocks);
    if (nbytes != 0) {
        memcpy(at, bytes, nbytes);
    }
    at += padded(nbytes);
    for (size_t i = 0; i < nblocks; i++) {
        sizes[i] = host->block_bytes(blocks[i]);
        if (sizes[i] <= INLINE_BYTES) {
            memcpy(at, host->block_data(blocks[i]), sizes[i]);
            at += padded(sizes[i]);
            host->block_release(blocks[i]);
        } else {
            t->blocks[t->nblocks++] = blocks[i];
        }
    }
    enqueue(self, t);
    return SMP_OK;
}

static smp_status
mpi_block(void *arg, int dest, size_t bytes, smp_block **out)
{
    const mpi *self = arg;

    (void)dest;
    return self->host->block(self->host->comm, bytes, out);
}

/* Gives the oldest queued message to MPI. */
static bool
start_next(mpi *self)
{
    transfer *t;

    if (atomic_load(&self->queued) == 0) {
        return false;
    }
    smp_jitter();
    smp_lock_acquire(&self->lock);
    t = take_first(&self->queue);
    atomic_fetch_sub(&self->queued, 1);
    smp_lock_release(&self->lock);
    if (self->lost[t->rank]) {
        transfer_free(self->host, t);
        return true;
    }
    self->nsending++;
    if (!make_room(self, 1)) {
        give_up(self, t->rank, SMP_ERR_NO_MEMORY);
    } else if (start(self, t, t->head, t->head_bytes, TAG_HEAD)) {
        for (size_t i = 0; i < t->nblocks && start_block(self, t, t->blocks[i]); i++) {
        }
    }
    if (t->pending == 0) {
        self->nsending--;
        transfer_free(self->host, t);
    }
    return true;
}

/* ---------------------------------------------------------------------- progress */

/* One request of t has ended. */
static void
ended(mpi *self, transfer *t, bool failed)
{
    smp_jitter();
    t->pending--;
    if (failed) {
        give_up(self, t->rank, SMP_ERR_PEER_LOST);
    }
    if (t->incoming) {
        advance(self, t->rank);
    } else if (t->pending == 0) {
        self->nsending--;
        transfer_free(self->host, t);
    }
}

/* Tests some requests, in turn; true: some have ended. */
static bool
test_some(mpi *self)
{
    int        indices[TESTED];
    MPI_Status statuses[TESTED];
    transfer  *owners[TESTED];
    size_t     first = self->tested < self->nrequests ? self->tested : 0;
    size_t     n = self->nrequests - first;
    int        count = 0;
    int        result;
    size_t     kept;

    if (n == 0) {
        return false;
    }
    n = n < TESTED ? n : TESTED;
    self->tested = first + n;
    for (size_t i = 0; i < n; i++) {
        statuses[i].MPI_ERROR = MPI_SUCCESS;
    }
    result = MPI_Testsome((int)n, self->requests + first, &count, indices, statuses);
    if (count == MPI_UNDEFINED || count == 0) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        owners[i] = self->owners[first + (size_t)indices[i]];
        self->owners[first + (size_t)indices[i]] = NULL;
    }
    kept = first; /* close the gaps before the owners start new requests */
    for (size_t i = first; i < self->nrequests; i++) {
        if (self->owners[i] != NULL) {
            self->owners[kept] = self->owners[i];
            self->requests[kept++] = self->requests[i];
        }
    }
    self->nrequests = kept;
    for (int i = 0; i < count; i++) {
        ended(self, owners[i],
              result == MPI_ERR_IN_STATUS && statuses[i].MPI_ERROR != MPI_SUCCESS);
    }
    return true;
}

/* How long to wait until the next look. */
static int64_t
pause_for(mpi *self)
{
    bool    waiting = self->host->waiting(self->host->comm);
    int64_t idle = now_ns() - self->moved_ns;
    int64_t longest = waiting ? PAUSE_WAITING_NS : PAUSE_NS;

    if (idle < (waiting ? HARD_WAITING_NS : HARD_NS)) {
        atomic_store(&self->awake, true);
        return 0;
    }
    atomic_store(&self->awake, false); /* from here on senders kick ... */
    smp_jitter();
    if (atomic_load(&self->queued) != 0) {
        return 0; /* ... but one before may have relied on us */
    }
    return idle / 8 < longest ? idle / 8 : longest;
}

static int64_t
mpi_progress(void *arg)
{
    mpi    *self = arg;
    int64_t pause;
    bool    moved = false;
    int     rounds;

    if (self->npeers == 0 || !enter(self)) {
        return -1;
    }
    rounds = atomic_load(&self->awake) ? ROUNDS : 1;
    for (int round = 0; round < rounds; round++) {
        bool now = false;

        for (int i = 0; i < PROBED && start_next(self); i++) {
            now = true;
        }
        for (int i = 0; i < PROBED && probe(self); i++) {
            now = true;
        }
        now = test_some(self) || now;
        moved = moved || now;
        if (!now) {
            sched_yield(); /* the core may be this rank's only one */
        }
    }
    if (moved) {
        self->moved_ns = now_ns();
        self->host->moved(self->host->comm);
    }
    pause = pause_for(self);
    leave(self);
    return pause;
}

static bool
say_goodbye(mpi *self, int rank)
{
    transfer *t = new_outgoing(rank, sizeof(head), 0);

    if (t == NULL) {
        return false;
    }
    *(head *)(void *)t->head = (head){.magic = MAGIC, .kind = HEAD_GOODBYE};
    enqueue(self, t);
    return true;
}

/* Done when all is sent and the others have said goodbye too: only then nothing can
 * arrive for a communicator that does not exist any more. */
static bool
mpi_finish(void *arg)
{
    mpi *self = arg;
    bool done = self->goodbye;

    if (self->npeers == 0 || atomic_load(&self->ended)) {
        return true;
    }
    for (int r = 0; r < self->host->size && !self->goodbye; r++) {
        if (self->peers[r] && !self->lost[r]) {
            say_goodbye(self, r);
        }
    }
    self->goodbye = true;
    for (int r = 0; r < self->host->size; r++) {
        done = done && (!self->peers[r] || self->left[r] || self->lost[r]);
    }
    return done && self->nsending == 0 && atomic_load(&self->queued) == 0;
}

/* ------------------------------------------------------------ setup and teardown */

/* MPI_Finalize deletes the attributes of MPI_COMM_SELF first. */
static int
mpi_ends(MPI_Comm comm, int keyval, void *value, void *extra)
{
    mpi *self = value;

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
mpi_create(const smp_host *host, void **out)
{
    size_t     size = (size_t)host->size;
    smp_status status = smp_mpi_usable();
    mpi       *self;

    if (status != SMP_OK) {
        return status;
    }
    smp_jitter_init(); /* this object has its own */
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    self->host = host;
    self->comm = MPI_COMM_NULL;
    self->peers = calloc(size, sizeof(bool));
    self->left = calloc(size, sizeof(bool));
    self->lost = calloc(size, sizeof(bool));
    self->incoming = calloc(size, sizeof(transfers));
    status = SMP_ERR_NO_MEMORY;
    if (self->peers == NULL || self->left == NULL || self->lost == NULL ||
        self->incoming == NULL) {
        goto err_free;
    }
    status = SMP_ERR_SYSTEM;
    if (MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, mpi_ends, &self->keyval, NULL) !=
        MPI_SUCCESS) {
        goto err_free;
    }
    if (MPI_Comm_set_attr(MPI_COMM_SELF, self->keyval, self) != MPI_SUCCESS) {
        goto err_free_keyval;
    }
    smp_lock_init(&self->lock, SMP_LOCK_OUTBOX);
    smp_mpi_card_fill(&self->card);
    *out = self;
    return SMP_OK;

err_free_keyval:
    MPI_Comm_free_keyval(&self->keyval);
err_free:
    free(self->peers);
    free(self->left);
    free(self->lost);
    free(self->incoming);
    free(self);
    return status;
}

static const void *
mpi_get_card(void *arg, size_t *bytes)
{
    const mpi *self = arg;

    *bytes = sizeof(self->card);
    return &self->card;
}

/* Ranks on one host reach one another by shared memory or not at all, so either every
 * rank of the job wants somebody, or nobody does: all come to the same answer. */
static smp_status
mpi_connect(void *arg, const void *const *cards, const size_t *card_bytes,
            const bool *wanted, int64_t deadline_ns, bool *reached, int *failed)
{
    mpi       *self = arg;
    int        size = self->host->size;
    int        wants = -1;
    int       *ranks;
    smp_status status;

    for (int r = 0; r < size && wants < 0; r++) {
        wants = wanted[r] ? r : -1;
    }
    if (wants < 0) {
        return SMP_OK;
    }
    ranks = calloc((size_t)size, sizeof(*ranks));
    if (ranks == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    if (!smp_mpi_world_ranks(&self->card, self->host->rank, size, cards, card_bytes,
                             ranks)) {
        free(ranks);
        return SMP_OK; /* reaches nobody */
    }
    status = smp_mpi_make_comm(ranks, size, deadline_ns - now_ns(), &self->comm);
    free(ranks);
    if (status != SMP_OK) {
        *failed = wants;
        return status;
    }
    for (int r = 0; r < size; r++) {
        reached[r] = wanted[r];
        self->peers[r] = wanted[r];
        self->npeers += wanted[r];
    }
    self->moved_ns = now_ns();
    return SMP_OK;
}

/* Frees those that MPI does not know any more; it may still write into the others. */
static void
free_idle(const smp_host *host, transfers *list)
{
    transfer *t;

    while ((t = take_first(list)) != NULL) {
        if (t->pending == 0) {
            transfer_free(host, t);
        }
    }
}

static void
mpi_destroy(void *arg)
{
    mpi *self = arg;
    bool all_left = true;

    for (int r = 0; r < self->host->size; r++) {
        free_idle(self->host, &self->incoming[r]);
        all_left = all_left && (!self->peers[r] || self->left[r]);
    }
    free_all(self->host, &self->queue);
    if (enter(self)) {
        if (self->comm != MPI_COMM_NULL && all_left && self->nrequests == 0) {
            MPI_Comm_free(&self->comm);
        }
        leave(self);
        MPI_Comm_delete_attr(MPI_COMM_SELF, self->keyval); /* runs mpi_ends */
        MPI_Comm_free_keyval(&self->keyval);
    }
    smp_lock_fini(&self->lock);
    free(self->requests);
    free(self->owners);
    free(self->incoming);
    free(self->peers);
    free(self->left);
    free(self->lost);
    free(self);
}

const smp_transport smp_transport_mpi = {
    .abi = SMP_TRANSPORT_ABI,
    .name = "mpi",
    .same_host = false,
    .polls = true,
    .create = mpi_create,
    .card = mpi_get_card,
    .connect = mpi_connect,
    .block = mpi_block,
    .send = mpi_send,
    .poll = NULL,
    .progress = mpi_progress,
    .finish = mpi_finish,
    .destroy = mpi_destroy,
};
