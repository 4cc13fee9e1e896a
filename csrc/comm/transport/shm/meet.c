/* The socket file and the handshake.
 *
 * The higher rank of a pair connects and speaks first.  The lower one answers only from
 * inside smp_shm_meet(), after its look at the files: so no rank removes its file
 * before the look of every rank on the host.
 *
 * The lower one connects too, and says nothing: its kernel closes that connection when
 * the higher rank dies before it speaks.  A rank with an ended connection is called
 * again, and is lost if its file has no listener any more.  A met rank with a
 * connection ended without a word is lost too: in order, it says goodbye first.
 */
#define _GNU_SOURCE
#include "comm/transport/shm/meet.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"

#define FOLDER "/dev/shm"
#define PREFIX "smp-"
#define SUFFIX ".sock"
#define EARLY_SUFFIX ".new"
#define MAGIC 0x53504d53u
#define VERSION 3u

/* Connections without a hello yet, beyond two per rank. */
#define STRANGERS 16

/* From this age on a file without its final name belongs to no rank: a rank renames it
 * at once. */
#define EARLY_S 60

/* The number of looks, a millisecond apart, for the death of a rank after its
 * hang-up. */
#define DYING_LOOKS 100

/* The pause before another try of a peer's full backlog. */
#define RETRY_MS 5

/* When one is lost, the others are still met, if they come within this time: a rank
 * leaving before would be taken for lost itself. */
#define GRACE_NS (5 * SMP_NS_PER_S)

/* One connection without the other side's proof yet. */
typedef struct {
    int           fd;   /* owned */
    int           rank; /* whom we called; -1: it called us */
    bool          mute; /* ... only to hear of its end */
    smp_shm_guest guest;
} caller;

typedef struct {
    smp_shm_door              *door;
    const smp_shm_self        *self;
    const smp_shm_card *const *cards;
    smp_shm_guest             *guests;
    bool                      *met;
    bool                      *expected; /* owned: ranks still to be met */
    bool                      *called;   /* owned: ... with a connection from us */
    bool                      *left;     /* owned: met, and gone since */
    int                        nexpected;
    int                        lost; /* a rank dead or given up; -1: none */
    smp_status     refused;          /* no rank can be met: no descriptors are left */
    caller        *callers;          /* owned: callers[0 .. ncallers) */
    struct pollfd *polled;           /* owned: callers', the door's, by rank guests' */
    int            ncallers;
    int            room;
} meeting;

static bool
address_of(const char *path, struct sockaddr_un *address)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    return snprintf(address->sun_path, sizeof(address->sun_path), "%s", path) <
           (int)sizeof(address->sun_path);
}

/* A socket connected to the file; -1 with errno. */
static int
call_file(const char *path)
{
    struct sockaddr_un address;
    int                fd;

    if (!address_of(path, &address)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        int why = errno;

        close(fd);
        errno = why;
        return -1;
    }
    return fd;
}

void
smp_shm_remove_dead(const char *path)
{
    int fd = call_file(path);

    if (fd >= 0) {
        close(fd);
    } else if (errno == ECONNREFUSED) {
        unlink(path);
    }
}

static bool
ends_with(const char *name, const char *end)
{
    size_t n = strlen(name);

    return n >= strlen(end) && strcmp(name + n - strlen(end), end) == 0;
}

/* Whether a file of this name is one of ours, old enough for its owner to listen. */
static bool
is_settled(const char *name, const struct stat *found)
{
    return strncmp(name, PREFIX, strlen(PREFIX)) == 0 && S_ISSOCK(found->st_mode) &&
           found->st_uid == geteuid() &&
           (ends_with(name, SUFFIX) || (ends_with(name, EARLY_SUFFIX) &&
                                        time(NULL) - found->st_mtim.tv_sec > EARLY_S));
}

/* Removes this user's socket files without a listener: left by ranks killed before all
 * had met. */
static void
remove_stale(void)
{
    DIR           *folder = opendir(FOLDER);
    struct dirent *entry;

    if (folder == NULL) {
        return;
    }
    while ((entry = readdir(folder)) != NULL) {
        char        path[sizeof(FOLDER) + sizeof(entry->d_name)];
        struct stat found;

        snprintf(path, sizeof(path), FOLDER "/%s", entry->d_name);
        if (lstat(path, &found) != 0 || !is_settled(entry->d_name, &found)) {
            continue;
        }
        smp_shm_remove_dead(path);
    }
    closedir(folder);
}

/* Sends a hello and our descriptors.  The socket is new, so it takes all at once. */
static bool
send_hello(int fd, const smp_shm_self *self, const smp_shm_card *own,
           const smp_shm_card *theirs)
{
    smp_shm_hello hello = {
        .magic = MAGIC,
        .version = VERSION,
        .rank = self->rank,
        .size = self->size,
        .arena_bytes = self->arena_bytes,
    };
    union {
        struct cmsghdr header;
        char           room[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    int             fds[2] = {self->segment_fd, self->kick_fd};
    struct iovec    text = {&hello, sizeof(hello)};
    struct msghdr   message = {.msg_iov = &text,
                               .msg_iovlen = 1,
                               .msg_control = control.room,
                               .msg_controllen = sizeof(control.room)};
    struct cmsghdr *attached = CMSG_FIRSTHDR(&message);

    memcpy(hello.to, theirs->token, SMP_TOKEN_BYTES);
    memcpy(hello.from, own->token, SMP_TOKEN_BYTES);
    snprintf(hello.job, sizeof(hello.job), "%s", self->job);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof(fds));
    memcpy(CMSG_DATA(attached), fds, sizeof(fds));
    return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof(hello);
}

/* Reads a hello with its two descriptors.  1: read; 0: nothing there yet; -1: the other
 * side has hung up or said something else, or no descriptors are left (errno).
 * Descriptors are the caller's after 1. */
static int
receive_hello(int fd, smp_shm_hello *hello, int fds[2])
{
    union {
        struct cmsghdr header;
        char           room[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    struct iovec  text = {hello, sizeof(*hello)};
    struct msghdr message = {.msg_iov = &text,
                             .msg_iovlen = 1,
                             .msg_control = control.room,
                             .msg_controllen = sizeof(control.room)};
    ssize_t       n;
    size_t        nfds = 0;

    errno = 0;
    n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
    }
    if ((message.msg_flags & MSG_CTRUNC) !=
        0) { /* the kernel had nowhere to put them */
        errno = EMFILE;
    }
    for (struct cmsghdr *c = n < 0 ? NULL : CMSG_FIRSTHDR(&message); c != NULL;
         c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            nfds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(c), nfds * sizeof(int)); /* room for two, no more */
        }
    }
    if (n == (ssize_t)sizeof(*hello) && nfds == 2) {
        return 1;
    }
    for (size_t i = 0; i < nfds; i++) {
        int why = errno;

        close(fds[i]);
        errno = why;
    }
    return -1;
}

/* This process or the machine has no descriptors left, and waiting brings none. */
static bool
none_left(int why)
{
    return why == EMFILE || why == ENFILE;
}

/* The process at the other end, 0 where this pid namespace does not see it; false
 * unless it is this user's. */
static bool
same_user(int fd, pid_t *pid)
{
    struct ucred who;
    socklen_t    bytes = sizeof(who);

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) != 0 ||
        who.uid != geteuid()) {
        return false;
    }
    *pid = who.pid;
    return true;
}

/* Takes the descriptor.  False: there is no room, or it is another's. */
static bool
add_caller(meeting *m, int fd, int rank, bool mute)
{
    caller new = {.fd = fd, .rank = rank, .mute = mute};

    if (m->ncallers == m->room || !same_user(fd, &new.guest.pid)) {
        close(fd);
        return false;
    }
    m->callers[m->ncallers++] = new;
    return true;
}

static void
drop_caller(meeting *m, int i)
{
    close(m->callers[i].fd);
    m->callers[i] = m->callers[--m->ncallers];
}

static void
no_longer_expected(meeting *m, int rank)
{
    if (m->expected[rank]) {
        m->expected[rank] = false;
        m->nexpected--;
    }
}

/* The rank of a hello, if expected; -1: not. */
static int
recognize(const meeting *m, const smp_shm_hello *hello, int called)
{
    int rank = called >= 0 ? called : hello->rank;

    if (rank < 0 || rank >= m->self->size || !m->expected[rank] ||
        (called < 0 && rank < m->self->rank) ||
        !smp_shm_hello_ok(hello, m->self, rank, &m->door->card, m->cards[rank])) {
        return -1;
    }
    return rank;
}

/* A rank's file without a listener: the rank has died, or given up. */
static void
is_lost(meeting *m, int rank)
{
    no_longer_expected(m, rank);
    if (m->lost < 0) {
        m->lost = rank;
    }
}

/* Its connection has ended; its earlier bytes are read later. */
static void
guest_left(meeting *m, int rank)
{
    int said = 0;

    m->left[rank] = true;
    if (ioctl(m->guests[rank].socket, FIONREAD, &said) == 0 && said == 0) {
        is_lost(m, rank);
    }
}

/* A connection has ended without a meeting; rank < 0: not one of ours. */
static void
ended(meeting *m, int rank, bool mute)
{
    int fd;

    if (rank < 0 || !m->expected[rank]) {
        return;
    }
    if (mute) {
        m->called[rank] = false; /* another call shows the reason */
        return;
    }
    /* A process at its end may close this connection before its listening socket. */
    for (int i = 0; i < DYING_LOOKS; i++) {
        fd = call_file(m->cards[rank]->path);
        if (fd >= 0) {
            close(fd);
            poll(NULL, 0, 1);
        } else if (errno == ECONNREFUSED || errno == ENOENT) {
            is_lost(m, rank);
            return;
        }
    }
    no_longer_expected(m, rank); /* it does not want us: not reached this way */
}

/* A caller has said something, or hung up.  True: it is gone from the list. */
static bool
hear(meeting *m, int i)
{
    caller       *c = &m->callers[i];
    smp_shm_hello hello;
    int           fds[2];
    int           rank;
    int           heard = receive_hello(c->fd, &hello, fds);

    if (heard == 0) {
        return false;
    }
    if (heard < 0 && none_left(errno)) {
        m->refused = smp_status_refused();
    }
    rank = heard < 0 || c->mute ? -1 : recognize(m, &hello, c->rank);
    if (rank >= 0 && c->rank < 0 &&
        !send_hello(c->fd, m->self, &m->door->card, m->cards[rank])) {
        rank = -1;
    }
    if (rank < 0) {
        if (heard > 0) {
            close(fds[0]);
            close(fds[1]);
        }
        ended(m, c->rank, c->mute);
        drop_caller(m, i);
        return true;
    }
    m->guests[rank] = (smp_shm_guest){.socket = c->fd,
                                      .segment_fd = fds[0],
                                      .kick_fd = fds[1],
                                      .pid = c->guest.pid,
                                      .arena_bytes = hello.arena_bytes};
    m->met[rank] = true;
    no_longer_expected(m, rank);
    m->callers[i] = m->callers[--m->ncallers];
    return true;
}

/* Calls an expected rank: to greet a lower one, or to hear of a higher one's end.
 * False: its backlog is full, try again. */
static bool
call(meeting *m, int rank)
{
    bool mute = rank > m->self->rank;
    int  fd = call_file(m->cards[rank]->path);

    if (fd < 0 && errno == EAGAIN) {
        return false;
    }
    m->called[rank] = true;
    if (fd < 0 && none_left(errno)) {
        m->refused = smp_status_refused();
        return true;
    }
    if (fd < 0 && (errno == ECONNREFUSED || errno == ENOENT)) {
        is_lost(m, rank);
        return true;
    }
    if (fd >= 0 && add_caller(m, fd, rank, mute)) {
        if (mute || send_hello(fd, m->self, &m->door->card, m->cards[rank])) {
            return true;
        }
        drop_caller(m, m->ncallers - 1);
    }
    if (!mute) {
        no_longer_expected(m, rank);
    }
    return true;
}

/* Calls the ranks to be called; false: some must be called again soon. */
static bool
call_all(meeting *m)
{
    bool all = true;

    for (int r = 0; r < m->self->size; r++) {
        if (m->expected[r] && !m->called[r]) {
            all = call(m, r) && all;
        }
    }
    return all;
}

/* Waits for something to happen at the door or a caller, and sees to it. */
static void
attend(meeting *m, int wait_ms)
{
    int            n = m->ncallers;
    struct pollfd *guests = m->polled + n + 1;

    for (int i = 0; i < n; i++) {
        m->polled[i] = (struct pollfd){.fd = m->callers[i].fd, .events = POLLIN};
    }
    m->polled[n] = (struct pollfd){.fd = m->door->fd, .events = POLLIN};
    for (int r = 0; r < m->self->size; r++) {
        bool here = m->met[r] && !m->left[r];

        guests[r] =
            (struct pollfd){.fd = here ? m->guests[r].socket : -1, .events = POLLRDHUP};
    }
    if (poll(m->polled, (nfds_t)n + 1 + (nfds_t)m->self->size, wait_ms) <= 0) {
        return;
    }
    for (int i = n; i-- > 0;) { /* backwards: a removed one is replaced by the last */
        if (m->polled[i].revents != 0) {
            hear(m, i);
        }
    }
    for (int r = 0; r < m->self->size; r++) {
        if (guests[r].revents != 0) {
            guest_left(m, r);
        }
    }
    if (m->polled[n].revents != 0) {
        int fd = accept4(m->door->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            (void)add_caller(m, fd, -1, false);
        } else if (none_left(errno)) {
            m->refused = smp_status_refused();
        }
    }
}

smp_status
smp_shm_door_open(int rank, smp_shm_door *door)
{
    uint8_t            random[16 + SMP_TOKEN_BYTES];
    char               name[33];
    char               early[sizeof(door->card.path)];
    struct sockaddr_un address;

    remove_stale();
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random)) {
        return smp_status_refused();
    }
    for (int i = 0; i < 16; i++) {
        snprintf(name + 2 * (size_t)i, 3, "%02x", random[i]);
    }
    *door = (smp_shm_door){
        .fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0),
        .card = {.magic = MAGIC, .version = VERSION, .rank = rank},
    };
    if (door->fd < 0) {
        return smp_status_refused();
    }
    memcpy(door->card.token, random + 16, SMP_TOKEN_BYTES);
    snprintf(door->card.path, sizeof(door->card.path), FOLDER "/" PREFIX "%s" SUFFIX,
             name);
    snprintf(early, sizeof(early), FOLDER "/" PREFIX "%s" EARLY_SUFFIX, name);
    address_of(early, &address);
    /* The mode of the descriptor becomes the file's.  The file gets its name only when
     * it can be called, or remove_stale() of another rank would take it for dead. */
    if (fchmod(door->fd, 0600) != 0 ||
        bind(door->fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        goto err_close;
    }
    if (listen(door->fd, SOMAXCONN) != 0 || rename(early, door->card.path) != 0) {
        goto err_unlink;
    }
    return SMP_OK;

err_unlink:
    (void)smp_status_refused();
    unlink(early);
    goto err_forget;
err_close:
    (void)smp_status_refused();
err_forget:
    close(door->fd);
    door->fd = -1;
    return SMP_ERR_SYSTEM;
}

void
smp_shm_door_close(smp_shm_door *door)
{
    if (door->fd >= 0) {
        unlink(door->card.path);
        close(door->fd);
        door->fd = -1;
    }
}

bool
smp_shm_card_ok(const void *bytes, size_t n, int rank)
{
    smp_shm_card card;

    if (n != sizeof(card)) {
        return false;
    }
    memcpy(&card, bytes, sizeof(card));
    return card.magic == MAGIC && card.version == VERSION && card.rank == rank &&
           memchr(card.path, '\0', sizeof(card.path)) != NULL &&
           strncmp(card.path, FOLDER "/" PREFIX, strlen(FOLDER "/" PREFIX)) == 0 &&
           strchr(card.path + strlen(FOLDER "/"), '/') == NULL;
}

bool
smp_shm_hello_ok(const smp_shm_hello *hello, const smp_shm_self *self, int rank,
                 const smp_shm_card *own, const smp_shm_card *theirs)
{
    return hello->magic == MAGIC && hello->version == VERSION && hello->rank == rank &&
           hello->size == self->size &&
           memcmp(hello->to, own->token, SMP_TOKEN_BYTES) == 0 &&
           memcmp(hello->from, theirs->token, SMP_TOKEN_BYTES) == 0 &&
           strncmp(hello->job, self->job, sizeof(hello->job)) == 0;
}

/* The first rank still expected. */
static int
first_expected(const meeting *m)
{
    int r = 0;

    while (r < m->self->size && !m->expected[r]) {
        r++;
    }
    return r;
}

/* Until no rank is expected any more. */
static smp_status
meet_all(meeting *m, const smp_deadline *given, int *failed)
{
    smp_deadline deadline = *given;
    smp_status   status = SMP_OK;

    while (m->nexpected != 0 && status == SMP_OK) {
        bool none_lost = m->lost < 0;
        bool all_called = call_all(m);

        if (m->nexpected != 0 && m->refused == SMP_OK) {
            attend(m, all_called ? smp_deadline_ms(&deadline, SMP_NEVER) : RETRY_MS);
            status = smp_deadline_left(&deadline, smp_clock_ns());
        }
        if (m->refused != SMP_OK) {
            *failed = m->self->rank;
            return m->refused;
        }
        if (none_lost && m->lost >= 0) {
            int64_t until = smp_clock_ns() + GRACE_NS;

            if (until < deadline.at_ns) {
                deadline.at_ns = until;
            }
        }
    }
    if (m->nexpected == 0) {
        status = SMP_OK;
    } else if (status == SMP_ERR_TIMED_OUT) {
        *failed = first_expected(m);
    }
    if (m->lost >= 0 && status != SMP_ERR_INTERRUPTED) {
        *failed = m->lost;
        status = SMP_ERR_PEER_LOST;
    }
    return status;
}

/* Removes the files of dead ranks. */
static void
remove_files_of_dead(const meeting *m)
{
    for (int r = 0; r < m->self->size; r++) {
        if (m->cards[r] != NULL && !m->met[r]) {
            smp_shm_remove_dead(m->cards[r]->path);
        }
    }
}

smp_status
smp_shm_meet(smp_shm_door *door, const smp_shm_self *self,
             const smp_shm_card *const *cards, const smp_deadline *deadline,
             smp_shm_guest *guests, bool *met, int *failed)
{
    size_t     size = (size_t)self->size;
    size_t     room = 2 * size + STRANGERS;
    smp_status status = SMP_ERR_NO_MEMORY;
    meeting    m = {
           .door = door,
           .self = self,
           .cards = cards,
           .guests = guests,
           .met = met,
           .expected = calloc(size, sizeof(bool)),
           .called = calloc(size, sizeof(bool)),
           .left = calloc(size, sizeof(bool)),
           .lost = -1,
           .callers = calloc(room, sizeof(caller)),
           .polled = calloc(room + 1 + size, sizeof(struct pollfd)),
           .room = (int)room,
    };

    if (m.expected == NULL || m.called == NULL || m.left == NULL || m.callers == NULL ||
        m.polled == NULL) {
        goto out;
    }
    for (int r = 0; r < self->size; r++) {
        m.expected[r] = cards[r] != NULL && access(cards[r]->path, F_OK) == 0;
        m.nexpected += m.expected[r];
    }
    status = meet_all(&m, deadline, failed);
    while (m.ncallers != 0) {
        drop_caller(&m, 0);
    }
    smp_shm_door_close(door);
    remove_files_of_dead(&m);

out:
    free(m.expected);
    free(m.called);
    free(m.left);
    free(m.callers);
    free(m.polled);
    return status;
}
