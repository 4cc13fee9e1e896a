/* Each worker's states during a step, for a trace in Perfetto.
 *
 * A ring of fixed size, written by the holder of the baton: one store a change of
 * state.  When a step has more events than the ring, the oldest are lost.
 */
#ifndef SMP_SERVER_TIMELINE_H
#define SMP_SERVER_TIMELINE_H

#include <stdint.h>

#include "common/status.h"
#include "server/schedule.h"

#define SMP_TIMELINE_EVENTS 65536

typedef enum {
    SMP_EVENT_BEGIN, /* a worker starts a task */
    SMP_EVENT_WAIT,  /* ... waits inside it */
    SMP_EVENT_GO,    /* ... goes on */
    SMP_EVENT_END,   /* ... has finished it */
    /* Within a task; `about` says more.  Their entry is the called one's. */
    SMP_EVENT_CHAIN, /* it calls a chain, of so many calls */
    SMP_EVENT_PASS,  /* it passes a chain on, to this pp_rank */
    SMP_EVENT_FETCH, /* it fetches so many outputs of a chain */
    SMP_EVENT_MISS,  /* it does not make a foreseen call: the reason */
} smp_event_kind;

typedef struct {
    uint64_t time_ns; /* CLOCK_MONOTONIC: comparable between ranks of one host */
    int32_t  microbatch;
    int32_t  entry;  /* remote entry; -1: the step function */
    uint16_t worker; /* number of the worker on its rank */
    uint8_t  kind;   /* smp_event_kind */
    uint8_t  phase;  /* smp_phase */
    int32_t  about;  /* see smp_event_kind; else 0 */
} smp_event;

typedef struct {
    uint64_t  count; /* events since the step began */
    smp_event events[SMP_TIMELINE_EVENTS];
} smp_timeline;

void smp_timeline_add(smp_timeline *timeline, smp_event event);

#endif
