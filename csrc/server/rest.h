/* The main thread's place of rest during a step: it wakes for the baton and for
 * signals.
 *
 * Python writes a byte for each handled signal to a descriptor of the caller's choice
 * (signal.set_wakeup_fd), on any thread.  The byte stays, so no signal is missed, even
 * just before the wait.
 *
 * Threads  give: any, once a wait.  wait: one.
 */
#ifndef SMP_SERVER_REST_H
#define SMP_SERVER_REST_H

#include <stdbool.h>

#include "common/status.h"

typedef struct {
    int given;   /* eventfd */
    int pipe[2]; /* signals: read and write end; both without waiting */
} smp_rest;

/* SMP_ERR_SYSTEM: no descriptors. */
smp_status smp_rest_init(smp_rest *rest);
void       smp_rest_fini(smp_rest *rest);

void smp_rest_give(smp_rest *rest);

/* True: given.  False: signals came; their numbers went on to `forward`, a descriptor
 * or -1. */
bool smp_rest_wait(smp_rest *rest, int forward);

#endif
