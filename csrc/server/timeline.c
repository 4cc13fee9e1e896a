/* The ring of a step's events. */
#define _POSIX_C_SOURCE 200809L
#include "server/timeline.h"

#include <time.h>

void
smp_timeline_add(smp_timeline *timeline, smp_event event)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    event.time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    timeline->events[timeline->count++ % SMP_TIMELINE_EVENTS] = event;
}
