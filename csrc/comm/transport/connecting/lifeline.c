/* Options of the kernel, and bytes over a socket that does not block. */
#define _GNU_SOURCE
#include "comm/transport/connecting/lifeline.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "common/clock.h"

/* The other host is asked after so many seconds, this often, so many times.  The kernel
 * does not ask while a byte that we said is unacknowledged: that may take as long. */
#define ASK_AFTER_S 1
#define ASK_EVERY_S 1
#define ASKS 2
#define UNACKED_MS (1000 * (ASK_AFTER_S + ASK_EVERY_S * ASKS))

void
smp_lifeline_secret(const char *job, const char *transport,
                    char out[SMP_LIFELINE_SECRET])
{
    uint8_t proof[SMP_PROOF_BYTES];

    smp_proof(job, transport, strlen(transport) + 1, proof);
    for (size_t i = 0; i < SMP_PROOF_BYTES; i++) {
        snprintf(out + 2 * i, 3, "%02x", proof[i]);
    }
}

static bool
set_option(int fd, int level, int name, int value)
{
    return setsockopt(fd, level, name, &value, sizeof(value)) == 0;
}

bool
smp_lifeline_watch_over(int fd)
{
    return set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1) &&
           set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, ASK_AFTER_S) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, ASK_EVERY_S) &&
           set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, ASKS) &&
           set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, UNACKED_MS);
}

bool
smp_lifeline_tell(int fd, const void *bytes, size_t n)
{
    return send(fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n;
}

smp_status
smp_lifeline_listen(int fd, void *to, size_t n, const smp_deadline *deadline)
{
    size_t     have = 0;
    smp_status status;

    while (have < n) {
        struct pollfd any = {.fd = fd, .events = POLLIN};
        ssize_t       got = recv(fd, (uint8_t *)to + have, n - have, 0);

        if (got > 0) {
            have += (size_t)got;
            continue;
        }
        if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
            return SMP_ERR_PEER_LOST;
        }
        status = smp_deadline_left(deadline, smp_clock_ns());
        if (status != SMP_OK) {
            return status;
        }
        poll(&any, 1, smp_deadline_ms(deadline, SMP_NEVER));
    }
    return SMP_OK;
}

bool
smp_lifeline_say(int fd, char what)
{
    return smp_lifeline_tell(fd, &what, 1);
}

smp_lifeline_heard
smp_lifeline_hear(int fd, char *what)
{
    ssize_t got = recv(fd, what, 1, 0);

    if (got == 1) {
        return SMP_LIFELINE_SAID;
    }
    return got < 0 && (errno == EAGAIN || errno == EINTR) ? SMP_LIFELINE_QUIET
                                                          : SMP_LIFELINE_HUNG_UP;
}
