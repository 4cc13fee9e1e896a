/* Lines on stderr: events that are no errors, but explain them.
 *
 * SMP_LOG in the environment is warn, info or debug: lines of this level and of graver
 * ones.  Without it nothing is written.  A line has the time of day, in UTC, and the
 * rank:
 *
 *     smp 12:03:55.204 rank 3 info: transport shm is passed over: the system refused
 *
 * Threads  any, also with locks held; a line is one write().
 */
#ifndef SMP_COMMON_LOG_H
#define SMP_COMMON_LOG_H

#include <stdbool.h>

typedef enum {
    SMP_LOG_OFF,
    SMP_LOG_WARN,  /* something works worse than it could */
    SMP_LOG_INFO,  /* decisions, once in a job or for a peer */
    SMP_LOG_DEBUG, /* for each tensor or message */
} smp_log_level;

/* Reads the environment again; else it is read when the first line may be written. */
void smp_log_init(void);

/* Whether lines of this level are written. */
bool smp_log_has(smp_log_level level);

/* The rank in all lines from now on; negative: the process's number instead. */
void smp_log_rank(int rank);

/* Leaves errno as it is; cuts a text at 1,000 bytes. */
void smp_log(smp_log_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Room for one warning. */
#define SMP_WARNING_BYTES 512

/* A line of level warn, kept for the script as well: Python raises it as a warning at
 * its next look.  Until then, later warnings are lines alone. */
void smp_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Takes the kept warning; false: none. */
bool smp_warning_take(char text[SMP_WARNING_BYTES]);

#endif
