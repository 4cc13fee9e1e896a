/* Options of the kernel, and bytes over a nonblocking socket. */
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

#include "comm/transport/connecting/meet.h"
#include "common/clock.h"

/* The kernel does not ask for the other host during an unacknowledged byte of ours: the
 * byte may take as long. */
#define UNACKED_MS (1000 * SMP_TCP_SILENT_S)

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

bool
smp_lifeline_watch_over(int fd)
{
    int ms = UNACKED_MS;

    return setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof(ms)) == 0;
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
