/* An epoll set with an eventfd in it. */
#define _GNU_SOURCE
#include "comm/messaging/loop.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/fork.h"

/* Descriptors served in one round. */
#define EVENTS 64

smp_status
smp_loop_init(smp_loop *loop)
{
    struct epoll_event kicked = {.events = EPOLLIN, .data.ptr = NULL};

    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (loop->epoll_fd < 0) {
        return smp_status_refused();
    }
    loop->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (loop->kick_fd < 0) {
        goto err_close_epoll;
    }
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->kick_fd, &kicked) != 0 ||
        smp_fork_close_in_child(loop->epoll_fd) != SMP_OK) {
        goto err_close_kick;
    }
    if (smp_fork_close_in_child(loop->kick_fd) != SMP_OK) {
        goto err_forget_epoll;
    }
    return SMP_OK;

err_forget_epoll:
    smp_fork_forget_fd(loop->epoll_fd);
err_close_kick:
    close(loop->kick_fd);
err_close_epoll:
    close(loop->epoll_fd);
    return smp_status_refused();
}

void
smp_loop_fini(smp_loop *loop)
{
    smp_fork_forget_fd(loop->kick_fd);
    smp_fork_forget_fd(loop->epoll_fd);
    close(loop->kick_fd);
    close(loop->epoll_fd);
}

void
smp_loop_kick(smp_loop *loop)
{
    const uint64_t one = 1;

    /* It fails only when it is full, and then it is readable all the same. */
    (void)!write(loop->kick_fd, &one, sizeof(one));
}

smp_status
smp_loop_watch(smp_loop *loop, int fd, uint32_t events, smp_watch *watch)
{
    struct epoll_event event = {.events = events, .data.ptr = watch};

    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ||
        (errno == EEXIST &&
         epoll_ctl(loop->epoll_fd, EPOLL_CTL_MOD, fd, &event) == 0)) {
        return SMP_OK;
    }
    return smp_status_refused();
}

void
smp_loop_unwatch(smp_loop *loop, int fd)
{
    epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

void
smp_loop_wait(smp_loop *loop, int64_t wait_ns)
{
    struct epoll_event events[EVENTS];
    struct pollfd      any = {.fd = loop->epoll_fd, .events = POLLIN};
    struct timespec    limit = smp_timespec(wait_ns);
    int                n;

    /* ppoll, because epoll_wait counts in milliseconds. */
    if (ppoll(&any, 1, wait_ns < 0 ? NULL : &limit, NULL) <= 0) {
        return;
    }
    n = epoll_wait(loop->epoll_fd, events, EVENTS, 0);
    for (int i = 0; i < n; i++) {
        smp_watch *watch = events[i].data.ptr;

        if (watch == NULL) {
            uint64_t count;

            (void)!read(loop->kick_fd, &count, sizeof(count));
        } else {
            watch->ready(watch->arg, events[i].events);
        }
    }
}
