/* The progress thread's sleep: on descriptors, a kick, a time.
 *
 * Threads  kick: any, also other processes through kick_fd.  watch, unwatch: before
 *          the thread starts, or on it.  wait: the progress thread.
 */
#ifndef SMP_COMM_MESSAGING_LOOP_H
#define SMP_COMM_MESSAGING_LOOP_H

#include <stdint.h>

#include "comm/transport/transport.h"
#include "common/status.h"

typedef struct {
    int epoll_fd; /* owned */
    int kick_fd;  /* owned: an eventfd */
} smp_loop;

/* SMP_ERR_SYSTEM, SMP_ERR_NO_MEMORY. */
smp_status smp_loop_init(smp_loop *loop);
void       smp_loop_fini(smp_loop *loop);

/* Makes the present or next wait return.  Async-signal-safe. */
void smp_loop_kick(smp_loop *loop);

/* See smp_host in comm/transport/transport.h. */
smp_status smp_loop_watch(smp_loop *loop, int fd, uint32_t events, smp_watch *watch);
void       smp_loop_unwatch(smp_loop *loop, int fd);

/* Waits for a kick or a descriptor, at most wait_ns (-1: no limit), then runs the ready
 * ones. */
void smp_loop_wait(smp_loop *loop, int64_t wait_ns);

#endif
