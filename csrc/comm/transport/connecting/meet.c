/* Reserved ports, calls and answers. */
#define _GNU_SOURCE
#include "comm/transport/connecting/meet.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"

#define MAGIC 0x54504d53u
#define VERSION 1u

/* Connections without a proof yet, beyond one per rank. */
#define STRANGERS 64

/* The pause before a refusing rank is called again, at first and at most: it may not
 * listen yet, or have taken us for one stranger too many. */
#define PAUSE_NS (2 * SMP_NS_PER_MS)
#define PAUSE_MAX_NS (200 * SMP_NS_PER_MS)

/* SMP_TCP_SILENT_S: the other host is asked after so many seconds, this often, so many
 * times. */
#define ASK_AFTER_S 1
#define ASK_EVERY_S 1
#define ASKS 2
_Static_assert(ASK_AFTER_S + ASK_EVERY_S * ASKS == SMP_TCP_SILENT_S, "as promised");

/* The next expected event of a connection. */
typedef enum {
    TALK_CALLING,  /* the end of our connect() */
    TALK_CALLED,   /* the answer */
    TALK_ACCEPTED, /* the hello */
    TALK_ANSWERED  /* the proof */
} talk_step;

/* A connection without the other side's proof yet. */
typedef struct {
    int            fd;   /* owned */
    int            rank; /* the other side; -1: not known */
    talk_step      step;
    int64_t        since_ns;
    smp_tcp_hello  ours;
    smp_tcp_answer theirs;
    size_t         have; /* bytes arrived of the expected ones */
} talk;

/* A rank to be met. */
typedef struct {
    bool            expected;
    bool            called;  /* we are calling it */
    smp_tcp_address address; /* where it listens */
    int64_t         next_ns; /* when to call it (again) */
    int64_t         pause_ns;
} appointment;

typedef struct {
    const smp_tcp_self *self;
    const smp_deadline *deadline;
    int                 listening; /* -1: no rank calls us */
    int                *fds;
    bool               *met;
    appointment        *appointments; /* owned: [size] */
    int                 nexpected;
    smp_status          refused; /* no rank can be met: no descriptors are left */
    talk               *talks;   /* owned: talks[0 .. ntalks), room for `room` */
    int                 ntalks;
    int                 room;
    struct pollfd      *polled; /* owned: the talks' and ours */
} meeting;

/* --------------------------------------------------------------------- the door */

/* A socket with a port of its own at the address; -1. */
static int
reserve(smp_tcp_address *address)
{
    struct sockaddr_storage at;
    socklen_t               bytes = smp_tcp_socket_address(address, &at);
    int fd = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) {
        return -1;
    }
    if (bind(fd, (struct sockaddr *)&at, bytes) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &bytes) != 0) {
        close(fd);
        return -1;
    }
    address->port =
        ntohs(at.ss_family == AF_INET ? ((struct sockaddr_in *)&at)->sin_port
                                      : ((struct sockaddr_in6 *)&at)->sin6_port);
    return fd;
}

smp_status
smp_tcp_door_open(int rank, const char *interface, smp_tcp_door *door)
{
    smp_tcp_offer *offer = &door->card.offer;
    uint32_t       kept = 0;

    door->card = (smp_tcp_card){.magic = MAGIC, .version = VERSION, .rank = rank};
    for (int i = 0; i < SMP_TCP_ADDRESSES; i++) {
        door->fds[i] = -1;
    }
    smp_tcp_offer_fill(offer, interface);
    for (uint32_t i = 0; i < offer->naddresses; i++) {
        door->fds[kept] = reserve(&offer->addresses[i]);
        if (door->fds[kept] >= 0) {
            offer->addresses[kept++] = offer->addresses[i];
        }
    }
    memset(&offer->addresses[kept], 0,
           (SMP_TCP_ADDRESSES - kept) * sizeof(offer->addresses[0]));
    offer->naddresses = kept;
    return interface != NULL && kept == 0 ? SMP_ERR_INVALID : SMP_OK;
}

/* Closes all but the one at `kept`; -1: all. */
static void
close_ports(smp_tcp_door *door, int kept)
{
    for (int i = 0; i < SMP_TCP_ADDRESSES; i++) {
        if (i != kept && door->fds[i] >= 0) {
            close(door->fds[i]);
            door->fds[i] = -1;
        }
    }
}

void
smp_tcp_door_close(smp_tcp_door *door)
{
    close_ports(door, -1);
}

/* -------------------------------------------------------------- admission */

bool
smp_tcp_card_ok(const void *bytes, size_t n, int rank)
{
    smp_tcp_card card;

    if (n != sizeof(card)) {
        return false;
    }
    memcpy(&card, bytes, sizeof(card));
    return card.magic == MAGIC && card.version == VERSION && card.rank == rank &&
           smp_tcp_offer_ok(&card.offer);
}

bool
smp_tcp_hello_ok(const smp_tcp_hello *hello, const smp_tcp_self *self, int rank)
{
    return hello->magic == MAGIC && hello->version == VERSION && hello->from == rank &&
           hello->to == self->rank && hello->size == self->size && hello->zero == 0;
}

void
smp_tcp_prove(const smp_tcp_self *self, bool calls, const smp_tcp_hello *caller,
              const smp_tcp_hello *answerer, uint8_t out[SMP_PROOF_BYTES])
{
    struct {
        char          role[8]; /* a proof cannot be sent back to its maker */
        smp_tcp_hello caller;
        smp_tcp_hello answerer;
    } text = {.caller = *caller, .answerer = *answerer};

    memcpy(text.role, calls ? "calls\0\0" : "answers", sizeof(text.role));
    smp_proof(self->job, &text, sizeof(text), out);
}

static bool
say_hello(const meeting *m, talk *t)
{
    t->ours = (smp_tcp_hello){.magic = MAGIC,
                              .version = VERSION,
                              .from = m->self->rank,
                              .to = t->rank,
                              .size = m->self->size};
    return getrandom(t->ours.nonce, SMP_NONCE_BYTES, 0) == SMP_NONCE_BYTES;
}

/* Sends a few bytes; the socket is new, so it takes all at once. */
static bool
say(const talk *t, const void *bytes, size_t n)
{
    return send(t->fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n;
}

/* Reads more of the `want` expected bytes.  1: all are there; 0: not yet; -1: the other
 * side has hung up. */
static int
hear_bytes(talk *t, void *to, size_t want)
{
    ssize_t n = recv(t->fd, (uint8_t *)to + t->have, want - t->have, 0);

    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
    }
    if (n <= 0) {
        return -1;
    }
    t->have += (size_t)n;
    return t->have == want;
}

/* ------------------------------------------------------------------ the meeting */

static void
add_talk(meeting *m, int fd, int rank, talk_step step)
{
    m->talks[m->ntalks++] =
        (talk){.fd = fd, .rank = rank, .step = step, .since_ns = smp_clock_ns()};
}

/* A called rank is to be called again later. */
static void
call_later(appointment *a)
{
    a->called = false;
    a->next_ns = smp_clock_ns() + a->pause_ns;
    a->pause_ns = a->pause_ns < PAUSE_MAX_NS / 2 ? 2 * a->pause_ns : PAUSE_MAX_NS;
}

static void
drop_talk(meeting *m, int i)
{
    const talk *t = &m->talks[i];

    close(t->fd);
    if (t->step == TALK_CALLING || t->step == TALK_CALLED) {
        call_later(&m->appointments[t->rank]);
    }
    m->talks[i] = m->talks[--m->ntalks];
}

/* Makes room for one more, at the cost of the first caller; a rank of the job calls
 * again. */
static void
make_room(meeting *m)
{
    int oldest = -1;

    for (int i = 0; m->ntalks == m->room && i < m->ntalks; i++) {
        if ((m->talks[i].step == TALK_ACCEPTED || m->talks[i].step == TALK_ANSWERED) &&
            (oldest < 0 || m->talks[i].since_ns < m->talks[oldest].since_ns)) {
            oldest = i;
        }
    }
    if (oldest >= 0) {
        drop_talk(m, oldest);
    }
}

/* A socket was not to be had: if no descriptors are left, waiting brings none. */
static void
note_refusal(meeting *m)
{
    if (errno == EMFILE || errno == ENFILE) {
        m->refused = smp_status_refused();
    }
}

static void
call(meeting *m, int rank)
{
    appointment            *a = &m->appointments[rank];
    struct sockaddr_storage to;
    socklen_t               bytes = smp_tcp_socket_address(&a->address, &to);
    int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) {
        note_refusal(m);
    }
    make_room(m);
    if (fd >= 0 && m->ntalks < m->room &&
        (connect(fd, (struct sockaddr *)&to, bytes) == 0 || errno == EINPROGRESS)) {
        add_talk(m, fd, rank, TALK_CALLING);
        a->called = true;
        return;
    }
    if (fd >= 0) {
        close(fd);
    }
    call_later(a);
}

static void
accept_one(meeting *m)
{
    int fd = accept4(m->listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0) {
        note_refusal(m);
        return;
    }
    make_room(m);
    if (m->ntalks < m->room) {
        add_talk(m, fd, -1, TALK_ACCEPTED);
    } else {
        close(fd);
    }
}

/* The other side has given its proof: the talk is over, the socket stays. */
static void
has_met(meeting *m, int i)
{
    const talk  *t = &m->talks[i];
    appointment *a = &m->appointments[t->rank];

    m->fds[t->rank] = t->fd;
    m->met[t->rank] = true;
    a->expected = false;
    m->nexpected--;
    m->talks[i] = m->talks[--m->ntalks];
}

static bool
proof_is(const meeting *m, const talk *t, bool calls)
{
    const smp_tcp_hello *caller = calls ? &t->theirs.hello : &t->ours;
    const smp_tcp_hello *answerer = calls ? &t->ours : &t->theirs.hello;
    uint8_t              proof[SMP_PROOF_BYTES];

    smp_tcp_prove(m->self, calls, caller, answerer, proof);
    return smp_proof_equal(proof, t->theirs.proof);
}

/* Our connect() has ended. */
static bool
begin_call(const meeting *m, talk *t)
{
    int       error = 0;
    socklen_t bytes = sizeof(error);

    t->step = TALK_CALLED;
    return getsockopt(t->fd, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 && error == 0 &&
           say_hello(m, t) && say(t, &t->ours, sizeof(t->ours));
}

/* A whole answer has come to our hello. */
static bool
accept_answer(const meeting *m, const talk *t)
{
    uint8_t proof[SMP_PROOF_BYTES];

    if (!smp_tcp_hello_ok(&t->theirs.hello, m->self, t->rank) ||
        !proof_is(m, t, false)) {
        return false;
    }
    smp_tcp_prove(m->self, true, &t->ours, &t->theirs.hello, proof);
    return say(t, proof, sizeof(proof));
}

/* A whole hello has come. */
static bool
answer(const meeting *m, talk *t)
{
    smp_tcp_answer ours;
    int            rank = t->theirs.hello.from;

    if (rank <= m->self->rank || rank >= m->self->size ||
        !m->appointments[rank].expected ||
        !smp_tcp_hello_ok(&t->theirs.hello, m->self, rank)) {
        return false;
    }
    t->rank = rank;
    t->step = TALK_ANSWERED;
    t->have = 0;
    if (!say_hello(m, t)) {
        return false;
    }
    ours.hello = t->ours;
    smp_tcp_prove(m->self, false, &t->theirs.hello, &t->ours, ours.proof);
    return say(t, &ours, sizeof(ours));
}

/* Something has happened on a connection. */
static void
attend_talk(meeting *m, int i)
{
    talk *t = &m->talks[i];
    int   heard = -1;

    switch (t->step) {
    case TALK_CALLING:
        heard = begin_call(m, t) ? 0 : -1;
        break;
    case TALK_CALLED:
        heard = hear_bytes(t, &t->theirs, sizeof(t->theirs));
        if (heard > 0 && m->appointments[t->rank].expected && accept_answer(m, t)) {
            has_met(m, i);
            return;
        }
        break;
    case TALK_ACCEPTED:
        heard = hear_bytes(t, &t->theirs.hello, sizeof(t->theirs.hello));
        if (heard > 0 && answer(m, t)) {
            return;
        }
        break;
    case TALK_ANSWERED:
        heard = hear_bytes(t, t->theirs.proof, sizeof(t->theirs.proof));
        if (heard > 0 && m->appointments[t->rank].expected && proof_is(m, t, true)) {
            has_met(m, i);
            return;
        }
        break;
    }
    if (heard != 0) {
        drop_talk(m, i);
    }
}

/* Waits for something to happen, at most until `until_ns`, and sees to it. */
static void
attend(meeting *m, int64_t until_ns)
{
    int n = m->ntalks;

    for (int i = 0; i < n; i++) {
        short events = m->talks[i].step == TALK_CALLING ? POLLOUT : POLLIN;

        m->polled[i] = (struct pollfd){.fd = m->talks[i].fd, .events = events};
    }
    m->polled[n] = (struct pollfd){.fd = m->listening, .events = POLLIN};
    if (poll(m->polled, (nfds_t)n + 1, smp_deadline_ms(m->deadline, until_ns)) <= 0) {
        return;
    }
    for (int i = n; i-- > 0;) { /* backwards: a removed one is replaced by the last */
        if (m->polled[i].revents != 0) {
            attend_talk(m, i);
        }
    }
    if (m->polled[n].revents != 0) {
        accept_one(m);
    }
}

/* Calls the due ranks; returns the time of the next call. */
static int64_t
call_all(meeting *m)
{
    int64_t next = m->deadline->at_ns;
    int64_t now = smp_clock_ns();

    for (int r = 0; r < m->self->rank; r++) {
        appointment *a = &m->appointments[r];

        if (!a->expected || a->called) {
            continue;
        }
        if (a->next_ns <= now) {
            call(m, r);
        }
        if (!a->called && a->next_ns < next) {
            next = a->next_ns;
        }
    }
    return next;
}

/* Sets the expected ranks, their listening addresses, and ours (-1: none). */
static smp_status
appoint(meeting *m, smp_tcp_door *door, const smp_tcp_card *const *cards,
        const bool *wanted, int *own)
{
    int                   size = m->self->size;
    const smp_tcp_offer **offers = calloc((size_t)size, sizeof(smp_tcp_offer *));
    bool                  called = false;

    if (offers == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    for (int r = 0; r < size; r++) {
        offers[r] = cards[r] == NULL ? NULL : &cards[r]->offer;
    }
    offers[m->self->rank] = &door->card.offer;
    *own = smp_tcp_choose(offers, size, m->self->rank);
    if (*own >= 0) {
        door->own = door->card.offer.addresses[*own];
    }
    for (int r = 0; r < size && *own >= 0; r++) {
        appointment *a = &m->appointments[r];
        int          theirs;

        if (r == m->self->rank || !wanted[r] || offers[r] == NULL) {
            continue;
        }
        theirs = smp_tcp_choose(offers, size, r);
        if (theirs >= 0) {
            a->expected = true;
            a->address = offers[r]->addresses[theirs];
            a->pause_ns = PAUSE_NS;
            m->nexpected++;
            called = called || r > m->self->rank;
        }
    }
    free(offers);
    if (!called) {
        *own = -1;
    }
    return SMP_OK;
}

smp_status
smp_tcp_meet(smp_tcp_door *door, const smp_tcp_self *self,
             const smp_tcp_card *const *cards, const bool *wanted,
             const smp_deadline *deadline, int *fds, bool *met)
{
    size_t     room = (size_t)self->size + STRANGERS;
    smp_status status = SMP_ERR_NO_MEMORY;
    int        own = -1;
    meeting    m = {
           .self = self,
           .deadline = deadline,
           .listening = -1,
           .fds = fds,
           .met = met,
           .appointments = calloc((size_t)self->size, sizeof(appointment)),
           .talks = calloc(room, sizeof(talk)),
           .polled = calloc(room + 1, sizeof(struct pollfd)),
           .room = (int)room,
    };

    if (m.appointments == NULL || m.talks == NULL || m.polled == NULL) {
        goto out;
    }
    status = appoint(&m, door, cards, wanted, &own);
    if (status != SMP_OK) {
        goto out;
    }
    close_ports(door, own);
    if (own >= 0) {
        m.listening = door->fds[own];
        if (listen(m.listening, SOMAXCONN) != 0) {
            status = smp_status_refused();
            goto out;
        }
    }
    while (m.nexpected != 0 && status == SMP_OK) {
        status = smp_deadline_left(deadline, smp_clock_ns());
        if (status == SMP_OK) {
            attend(&m, call_all(&m));
            status = m.refused;
        }
    }
    if (status == SMP_ERR_TIMED_OUT) { /* a missing rank is not met */
        status = SMP_OK;
    }
    while (m.ntalks != 0) {
        drop_talk(&m, m.ntalks - 1);
    }

out:
    smp_tcp_door_close(door);
    free(m.appointments);
    free(m.talks);
    free(m.polled);
    return status;
}

/* The cards in readable form, NULL for a missing one. */
static smp_status
read_cards(int size, const void *const *cards, const size_t *card_bytes,
           smp_tcp_card *copies, const smp_tcp_card **out, int *failed)
{
    for (int r = 0; r < size; r++) {
        if (cards[r] == NULL) {
            continue;
        }
        if (!smp_tcp_card_ok(cards[r], card_bytes[r], r)) {
            *failed = r;
            return SMP_ERR_MALFORMED;
        }
        memcpy(&copies[r], cards[r], sizeof(copies[r]));
        out[r] = &copies[r];
    }
    return SMP_OK;
}

static bool
set_option(int fd, int level, int name, int value)
{
    return setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

/* Buffers are the kernel's business: they grow with the connection, but not once they
 * are set. */
static bool
set_options(int fd)
{
    return set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1) &&
           set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, ASK_AFTER_S) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, ASK_EVERY_S) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, ASKS);
}

smp_status
smp_tcp_connect(smp_tcp_door *door, const smp_tcp_self *self, const void *const *cards,
                const size_t *card_bytes, const bool *wanted,
                const smp_deadline *deadline, smp_tcp_take *take, void *arg, bool *met,
                int *failed)
{
    size_t               size = (size_t)self->size;
    smp_deadline         half = smp_deadline_half(deadline);
    smp_tcp_card        *copies = calloc(size, sizeof(*copies));
    const smp_tcp_card **readable = calloc(size, sizeof(smp_tcp_card *));
    int                 *fds = calloc(size, sizeof(*fds));
    smp_status           status = SMP_ERR_NO_MEMORY;

    if (copies == NULL || readable == NULL || fds == NULL) {
        goto out;
    }
    status = read_cards(self->size, cards, card_bytes, copies, readable, failed);
    if (status != SMP_OK) {
        goto out;
    }
    status = smp_tcp_meet(door, self, readable, wanted, &half, fds, met);
    for (int r = 0; r < self->size; r++) {
        if (met[r]) {
            smp_status set = set_options(fds[r]) ? SMP_OK : smp_status_refused();
            smp_status taken = take(arg, r, fds[r]);

            if (status == SMP_OK && (set != SMP_OK || taken != SMP_OK)) {
                status = set != SMP_OK ? set : taken;
                *failed = r;
            }
        }
    }

out:
    free(copies);
    free(readable);
    free(fds);
    return status;
}
