/* One poll over both. */
#define _GNU_SOURCE
#include "server/rest.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/jitter.h"

smp_status
smp_rest_init(smp_rest *rest)
{
    rest->given = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (rest->given < 0) {
        return smp_status_refused();
    }
    if (pipe2(rest->pipe, O_CLOEXEC | O_NONBLOCK) < 0) {
        close(rest->given);
        return smp_status_refused();
    }
    return SMP_OK;
}

void
smp_rest_fini(smp_rest *rest)
{
    close(rest->given);
    close(rest->pipe[0]);
    close(rest->pipe[1]);
}

void
smp_rest_give(smp_rest *rest)
{
    uint64_t one = 1;

    smp_jitter();
    (void)!write(rest->given, &one, sizeof(one)); /* fails only past 2^64 - 2 */
}

/* Whether there were any. */
static bool
take_signals(smp_rest *rest, int forward)
{
    uint8_t numbers[64];
    bool    any = false;
    ssize_t n;

    while ((n = read(rest->pipe[0], numbers, sizeof(numbers))) > 0) {
        any = true;
        if (forward >= 0) {
            (void)!write(forward, numbers, (size_t)n); /* full: it is awake anyway */
        }
    }
    return any;
}

bool
smp_rest_wait(smp_rest *rest, int forward)
{
    struct pollfd fds[] = {{.fd = rest->given, .events = POLLIN},
                           {.fd = rest->pipe[0], .events = POLLIN}};
    uint64_t      count;

    for (;;) {
        bool interrupted;

        smp_jitter();
        interrupted = poll(fds, 2, -1) < 0 && errno == EINTR;

        if (take_signals(rest, forward) || interrupted) {
            return false;
        }
        if (read(rest->given, &count, sizeof(count)) == (ssize_t)sizeof(count)) {
            return true;
        }
    }
}
