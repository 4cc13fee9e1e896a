/* The level is read once; a line is made on the stack and written at once. */
#define _GNU_SOURCE
#include "common/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 1024
#define TEXT_BYTES 1000
#define UNREAD (-1)

static const char *const names[] = {"off", "warn", "info", "debug"};

static _Atomic int asked = UNREAD; /* an smp_log_level */
static _Atomic int number = -1;    /* of this rank */

/* The warning kept for the script.  NONE -> WRITING -> WAITING -> READING -> NONE */
enum { NONE, WRITING, WAITING, READING };
static _Atomic int warning_state = NONE;
static char        warning[SMP_WARNING_BYTES]; /* of the thread WRITING or READING it */

/* Another text is taken for warn, with a line of its own. */
void
smp_log_init(void)
{
    const char *text = getenv("SMP_LOG");
    int         level = SMP_LOG_OFF;

    if (text != NULL && *text != '\0') {
        while (level <= SMP_LOG_DEBUG && strcmp(text, names[level]) != 0) {
            level++;
        }
    }
    atomic_store(&asked, level <= SMP_LOG_DEBUG ? level : SMP_LOG_WARN);
    if (level > SMP_LOG_DEBUG) {
        smp_log(SMP_LOG_WARN, "SMP_LOG=%s: must be off, warn, info or debug", text);
    }
}

bool
smp_log_has(smp_log_level level)
{
    if (atomic_load_explicit(&asked, memory_order_relaxed) == UNREAD) {
        smp_log_init();
    }
    return (int)level <= atomic_load_explicit(&asked, memory_order_relaxed);
}

void
smp_log_rank(int rank)
{
    atomic_store(&number, rank);
}

void
smp_log(smp_log_level level, const char *format, ...)
{
    char            line[LINE_BYTES];
    struct timespec now;
    struct tm       day;
    va_list         values;
    int             error = errno;
    int             rank = atomic_load(&number);
    int             at;
    int             more;

    if (!smp_log_has(level)) {
        return;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &day);
    at = snprintf(line, TEXT_BYTES, "smp %02d:%02d:%02d.%03d %s %d %s: ", day.tm_hour,
                  day.tm_min, day.tm_sec, (int)(now.tv_nsec / 1000000),
                  rank < 0 ? "process" : "rank", rank < 0 ? (int)getpid() : rank,
                  names[level]);
    va_start(values, format);
    more = vsnprintf(line + at, (size_t)(TEXT_BYTES - at), format, values);
    va_end(values);
    at = more < 0 ? at : at + more;
    at = at < TEXT_BYTES ? at : TEXT_BYTES - 1;
    line[at++] = '\n';
    if (write(STDERR_FILENO, line, (size_t)at) < 0) {
        atomic_store(&asked, SMP_LOG_OFF); /* no reader */
    }
    errno = error;
}

void
smp_warn(const char *format, ...)
{
    char    text[SMP_WARNING_BYTES];
    int     none = NONE;
    va_list values;

    va_start(values, format);
    vsnprintf(text, sizeof(text), format, values);
    va_end(values);
    smp_log(SMP_LOG_WARN, "%s", text);
    if (atomic_compare_exchange_strong(&warning_state, &none, WRITING)) {
        memcpy(warning, text, sizeof(warning));
        atomic_store(&warning_state, WAITING);
    }
}

bool
smp_warning_take(char text[SMP_WARNING_BYTES])
{
    int waiting = WAITING;

    if (!atomic_compare_exchange_strong(&warning_state, &waiting, READING)) {
        return false;
    }
    memcpy(text, warning, sizeof(warning));
    atomic_store(&warning_state, NONE);
    return true;
}
