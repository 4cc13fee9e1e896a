/* What happened that is nobody's error and explains others: lines on stderr.
 *
 * SMP_LOG in the environment is warn, info or debug: lines of that level and the graver
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
    SMP_LOG_INFO,  /* what was decided, once in a job or for a peer */
    SMP_LOG_DEBUG, /* for each tensor or message */
} smp_log_level;

/* Reads the environment again; else it is read when the first line may be written. */
void smp_log_init(void);

/* Whether lines of this level are written. */
bool smp_log_has(smp_log_level level);

/* Whose lines these are from now on; negative: the process's number stands for it. */
void smp_log_rank(int rank);

/* Leaves errno as it is; what goes beyond 1,000 bytes is cut. */
void smp_log(smp_log_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Room for one warning. */
#define SMP_WARNING_BYTES 512

/* A line of level warn, kept for the script as well: Python raises it as a warning the
 * next time that it looks.  While one waits, later ones are lines alone. */
void smp_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The warning that waits, which is taken; false: none. */
bool smp_warning_take(char text[SMP_WARNING_BYTES]);

#endif
