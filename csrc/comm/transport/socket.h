/* Sockets to other ranks, read and written by the progress thread without waiting.
 *
 * Threads  one at a time.
 */
#ifndef SMP_COMM_TRANSPORT_SOCKET_H
#define SMP_COMM_TRANSPORT_SOCKET_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>

#include "comm/transport/transport.h"
#include "common/status.h"

/* The outcome of one read or write. */
typedef enum {
    SMP_SOCKET_IDLE,      /* nothing more to read or write now */
    SMP_SOCKET_MORE,      /* stopped at the limit of one call */
    SMP_SOCKET_BLOCKED,   /* writing waits for the other side */
    SMP_SOCKET_ENDED,     /* the other side ended in order */
    SMP_SOCKET_HUNG_UP,   /* the other side is gone without a goodbye */
    SMP_SOCKET_BROKEN,    /* it sent bytes of no rank */
    SMP_SOCKET_NO_MEMORY, /* no memory for its message here */
} smp_socket_event;

/* The reason of a final event, for the host's ended(); SMP_OK: more may come.
 */
static inline smp_status
smp_socket_end(smp_socket_event event)
{
    switch (event) {
    case SMP_SOCKET_ENDED:
        return SMP_ERR_CLOSED;
    case SMP_SOCKET_HUNG_UP:
        return SMP_ERR_PEER_LOST;
    case SMP_SOCKET_BROKEN:
        return SMP_ERR_MALFORMED;
    case SMP_SOCKET_NO_MEMORY:
        return SMP_ERR_NO_MEMORY;
    case SMP_SOCKET_IDLE:
    case SMP_SOCKET_MORE:
    case SMP_SOCKET_BLOCKED:
        break;
    }
    return SMP_OK;
}

/* From now on `watch`, of a watched socket, hears of room for bytes, or no more;
 * *is_wanted: the state until now. */
static inline void
smp_socket_want_room(const smp_host *host, int fd, smp_watch *watch, bool wanted,
                     bool *is_wanted)
{
    if (wanted != *is_wanted) {
        uint32_t events = EPOLLIN | (wanted ? (uint32_t)EPOLLOUT : 0);

        /* Changing the events of a watched descriptor does not fail. */
        (void)host->watch(host->comm, fd, events, watch);
        *is_wanted = wanted;
    }
}

#endif
