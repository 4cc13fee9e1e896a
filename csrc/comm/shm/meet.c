/* The socket file and the handshake.
 *
 * Of a pair the higher rank connects and speaks first.  The lower one answers only
 * from inside smp_shm_meet(), after it has looked which files there are: so no rank
 * removes its file before every rank that could see it has looked.
 */
#define _GNU_SOURCE
#include "comm/shm/meet.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "comm/clock.h"

#define FOLDER "/dev/shm"
#define PREFIX "smp-"
#define SUFFIX ".sock"
#define MAGIC 0x53504d53u
#define VERSION 3u

/* Connections that have not said who they are, beyond one per rank. */
#define STRANGERS 16

/* How long to wait before trying a peer's full backlog again. */
#define RETRY_MS 5

/* One connection whose other side has not yet proved who it is. */
typedef struct {
    int           fd;   /* owned */
    int           rank; /* whom we called; -1: it called us */
    smp_shm_guest guest;
} caller;

typedef struct {
    smp_shm_door              *door;
    const smp_shm_self        *self;
    const smp_shm_card *const *cards;
    smp_shm_guest             *guests;
    bool                      *met;
    bool                      *expected; /* owned: ranks still to be met */
    int                        nexpected;
    caller                    *callers; /* owned: callers[0 .. ncallers) */
    struct pollfd             *polled;  /* owned: the callers' and the door's */
    int                        ncallers;
    int                        room;
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

/* Removes the socket files of this user at which nobody listens: a rank that was
 * killed before all had met left it. */
static void
remove_stale(void)
{
    DIR           *folder = opendir(FOLDER);
    struct dirent *entry;

    if (folder == NULL) {
        return;
    }
    while ((entry = readdir(folder)) != NULL) {
        size_t      length = strlen(entry->d_name);
        char        path[sizeof(FOLDER) + sizeof(entry->d_name)];
        struct stat found;
        int         fd;

        if (strncmp(entry->d_name, PREFIX, strlen(PREFIX)) != 0 ||
            length < strlen(SUFFIX) ||
            strcmp(entry->d_name + length - strlen(SUFFIX), SUFFIX) != 0) {
            continue;
        }
        snprintf(path, sizeof(path), FOLDER "/%s", entry->d_name);
        if (lstat(path, &found) != 0 || !S_ISSOCK(found.st_mode) ||
            found.st_uid != geteuid()) {
            continue;
        }
        fd = call_file(path);
        if (fd >= 0) {
            close(fd);
        } else if (errno == ECONNREFUSED) {
            unlink(path);
        }
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
 * side has hung up or said something else.  Descriptors are the caller's after 1. */
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
    ssize_t       n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    size_t        nfds = 0;

    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
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
        close(fds[i]);
    }
    return -1;
}

/* The process at the other end; false unless it is this user's. */
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

static void
add_caller(meeting *m, int fd, int rank)
{
    caller new = {.fd = fd, .rank = rank};

    if (m->ncallers == m->room || !same_user(fd, &new.guest.pid)) {
        close(fd);
        return;
    }
    m->callers[m->ncallers++] = new;
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

/* The rank that a hello comes from, if it is one that we wait for; -1. */
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
    rank = heard < 0 ? -1 : recognize(m, &hello, c->rank);
    if (rank >= 0 && c->rank < 0 &&
        !send_hello(c->fd, m->self, &m->door->card, m->cards[rank])) {
        rank = -1;
    }
    if (rank < 0) {
        if (heard > 0) {
            close(fds[0]);
            close(fds[1]);
        }
        if (c->rank >= 0) { /* it does not want us: not reached this way */
            no_longer_expected(m, c->rank);
        }
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

/* Calls a lower rank.  False: its backlog is full, try again. */
static bool
call(meeting *m, int rank)
{
    int fd = call_file(m->cards[rank]->path);

    if (fd < 0 && errno == EAGAIN) {
        return false;
    }
    if (fd >= 0) {
        int before = m->ncallers;

        add_caller(m, fd, rank);
        if (m->ncallers > before) {
            if (send_hello(fd, m->self, &m->door->card, m->cards[rank])) {
                return true;
            }
            drop_caller(m, before);
        }
    }
    no_longer_expected(m, rank);
    return true;
}

/* Waits for something to happen at the door or a caller, and sees to it. */
static void
attend(meeting *m, int64_t wait_ns)
{
    int n = m->ncallers;
    int wait_ms =
        wait_ns / SMP_NS_PER_MS > 1000 ? 1000 : (int)(wait_ns / SMP_NS_PER_MS);

    for (int i = 0; i < n; i++) {
        m->polled[i] = (struct pollfd){.fd = m->callers[i].fd, .events = POLLIN};
    }
    m->polled[n] = (struct pollfd){.fd = m->door->fd, .events = POLLIN};
    if (poll(m->polled, (nfds_t)n + 1, wait_ms + 1) <= 0) {
        return;
    }
    for (int i = n; i-- > 0;) { /* backwards: a removed one is replaced by the last */
        if (m->polled[i].revents != 0) {
            hear(m, i);
        }
    }
    if (m->polled[n].revents != 0) {
        int fd = accept4(m->door->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            add_caller(m, fd, -1);
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
        return SMP_ERR_SYSTEM;
    }
    for (int i = 0; i < 16; i++) {
        snprintf(name + 2 * (size_t)i, 3, "%02x", random[i]);
    }
    *door = (smp_shm_door){
        .fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0),
        .card = {.magic = MAGIC, .version = VERSION, .rank = rank},
    };
    if (door->fd < 0) {
        return SMP_ERR_SYSTEM;
    }
    memcpy(door->card.token, random + 16, SMP_TOKEN_BYTES);
    snprintf(door->card.path, sizeof(door->card.path), FOLDER "/" PREFIX "%s" SUFFIX,
             name);
    snprintf(early, sizeof(early), FOLDER "/" PREFIX "%s.new", name);
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
    unlink(early);
err_close:
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

smp_status
smp_shm_meet(smp_shm_door *door, const smp_shm_self *self,
             const smp_shm_card *const *cards, int64_t deadline_ns,
             smp_shm_guest *guests, bool *met, int *failed)
{
    smp_status status = SMP_ERR_NO_MEMORY;
    int        to_call = 0;
    meeting    m = {
           .door = door,
           .self = self,
           .cards = cards,
           .guests = guests,
           .met = met,
           .expected = calloc((size_t)self->size, sizeof(bool)),
           .callers = calloc((size_t)self->size + STRANGERS, sizeof(caller)),
           .polled = calloc((size_t)self->size + STRANGERS + 1, sizeof(struct pollfd)),
           .room = self->size + STRANGERS,
    };

    if (m.expected == NULL || m.callers == NULL || m.polled == NULL) {
        goto out;
    }
    for (int r = 0; r < self->size; r++) {
        m.expected[r] = cards[r] != NULL && access(cards[r]->path, F_OK) == 0;
        m.nexpected += m.expected[r];
    }
    status = SMP_OK;
    while (m.nexpected != 0) {
        int64_t left = deadline_ns - smp_clock_ns();

        while (to_call < self->rank && (!m.expected[to_call] || call(&m, to_call))) {
            to_call++;
        }
        if (left <= 0) {
            status = SMP_ERR_TIMED_OUT;
            for (int r = 0; r < self->size; r++) {
                if (m.expected[r]) {
                    *failed = r;
                    break;
                }
            }
            break;
        }
        if (m.nexpected != 0) {
            attend(&m, to_call < self->rank ? RETRY_MS * SMP_NS_PER_MS : left);
        }
    }
    while (m.ncallers != 0) {
        drop_caller(&m, 0);
    }
    smp_shm_door_close(door);

out:
    free(m.expected);
    free(m.callers);
    free(m.polled);
    return status;
}
