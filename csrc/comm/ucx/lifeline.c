/* Introductions and single bytes over a socket that does not block. */
#define _GNU_SOURCE
#include "comm/ucx/lifeline.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "comm/clock.h"

#define MAGIC 0x55504d53u
#define VERSION 1u

/* The other host is asked after so many seconds, this often, so many times. */
#define ASK_AFTER_S 1
#define ASK_EVERY_S 1
#define ASKS 2

typedef struct {
    uint32_t magic; /* also shows the byte order */
    uint32_t version;
    uint64_t pass;
    uint64_t bytes; /* of the address, which follows */
} introduction;

static bool
set_option(int fd, int level, int name, int value)
{
    return setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

bool
smp_ucx_lifeline_watch_over(int fd)
{
    return set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1) &&
           set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, ASK_AFTER_S) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, ASK_EVERY_S) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, ASKS);
}

static bool
say(int fd, const void *bytes, size_t n)
{
    return send(fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n;
}

static smp_status
hear(int fd, void *to, size_t n, int64_t deadline_ns)
{
    size_t have = 0;

    while (have < n) {
        struct pollfd any = {.fd = fd, .events = POLLIN};
        int64_t       left_ms = (deadline_ns - smp_clock_ns()) / SMP_NS_PER_MS;
        ssize_t       got = recv(fd, (uint8_t *)to + have, n - have, 0);

        if (got > 0) {
            have += (size_t)got;
            continue;
        }
        if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
            return SMP_ERR_PEER_LOST;
        }
        if (left_ms <= 0) {
            return SMP_ERR_TIMED_OUT;
        }
        poll(&any, 1, left_ms < 1000 ? (int)left_ms : 1000);
    }
    return SMP_OK;
}

bool
smp_ucx_lifeline_introduce(int fd, uint64_t pass, const void *address, size_t n)
{
    introduction i = {.magic = MAGIC, .version = VERSION, .pass = pass, .bytes = n};

    return say(fd, &i, sizeof(i)) && say(fd, address, n);
}

smp_status
smp_ucx_lifeline_meet(int fd, int64_t deadline_ns, uint64_t *pass, void **address)
{
    introduction i;
    smp_status   status = hear(fd, &i, sizeof(i), deadline_ns);
    void        *theirs;

    if (status != SMP_OK) {
        return status;
    }
    if (i.magic != MAGIC || i.version != VERSION || i.bytes == 0 ||
        i.bytes > SMP_UCX_ADDRESS_BYTES) {
        return SMP_ERR_MALFORMED;
    }
    theirs = malloc(i.bytes);
    if (theirs == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    status = hear(fd, theirs, i.bytes, deadline_ns);
    if (status != SMP_OK) {
        free(theirs);
        return status;
    }
    *pass = i.pass;
    *address = theirs;
    return SMP_OK;
}

bool
smp_ucx_lifeline_say(int fd, char what)
{
    return say(fd, &what, 1);
}

smp_ucx_heard
smp_ucx_lifeline_hear(int fd, char *what)
{
    ssize_t got = recv(fd, what, 1, 0);

    if (got == 1) {
        return SMP_UCX_SAID;
    }
    return got < 0 && (errno == EAGAIN || errno == EINTR) ? SMP_UCX_QUIET
                                                          : SMP_UCX_HUNG_UP;
}
