/* The schedule: the order of forwards and backwards started by pp_rank 0.
 *
 * pp_rank 0 runs the step function once a microbatch.  Each run pauses at
 * model.backward and goes on when the schedule says so: a schedule is an order of
 * (microbatch, phase) pairs and nothing else.  [paper, section 4.3]
 *
 *     WAITING --> FORWARD --> READY --> BACKWARD --> DONE
 *                    |                                ^
 *                    +--------------------------------+   no model.backward
 *
 * Threads  None: the holder of the server's baton.
 */
#ifndef SMP_SERVER_SCHEDULE_H
#define SMP_SERVER_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

typedef enum { SMP_FORWARD = 0, SMP_BACKWARD = 1, SMP_PHASES } smp_phase;

/* "forward"; static storage. */
const char *smp_phase_name(smp_phase phase);

typedef enum {
    SMP_SCHEDULE_SIMPLE,      /* all forwards, then all backwards */
    SMP_SCHEDULE_INTERLEAVED, /* a READY backward, else the next forward */
    SMP_SCHEDULE_LISTED,      /* the user's order, followed strictly */
} smp_schedule_kind;

typedef struct {
    int32_t   microbatch;
    smp_phase phase;
} smp_turn;

typedef struct smp_schedule smp_schedule;

/* active: the most microbatches between the start of their forward and the end of
 * their backward; SIMPLE needs all.  turns (LISTED only) is copied; it must name each
 * microbatch's forward once and before its backward, else SMP_ERR_INVALID.
 * SMP_ERR_NO_MEMORY. */
smp_status smp_schedule_create(smp_schedule_kind kind, int32_t microbatches,
                               int32_t active, const smp_turn *turns, int32_t nturns,
                               smp_schedule **out);
void       smp_schedule_destroy(smp_schedule *schedule);

/* Their number in the step. */
int32_t smp_schedule_microbatches(const smp_schedule *schedule);

/* The microbatch to start now in this phase; false: only waiting can help.  No visible
 * change. */
bool smp_schedule_next(smp_schedule *schedule, smp_phase phase, int32_t *microbatch);

/* Starts the microbatch of smp_schedule_next(). */
void smp_schedule_start(smp_schedule *schedule, smp_phase phase, int32_t microbatch);

/* The run of `microbatch` reached model.backward. */
void smp_schedule_ready(smp_schedule *schedule, int32_t microbatch);

/* The run of `microbatch` returned. */
void smp_schedule_done(smp_schedule *schedule, int32_t microbatch);

/* Every microbatch is done. */
bool smp_schedule_finished(const smp_schedule *schedule);

#endif
