/* Names and texts of the statuses, from the one list. */
#include "common/status.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#define TEXT_BYTES 160

static _Thread_local char refused[TEXT_BYTES]; /* empty: nothing noted */

const char *
smp_status_name(smp_status status)
{
    switch (status) {
#define X(name, text)                                                                  \
    case name:                                                                         \
        return #name;
        SMP_STATUS_LIST(X)
#undef X
    }
    return "SMP_ERR_UNKNOWN";
}

const char *
smp_status_text(smp_status status)
{
    if (status == SMP_ERR_SYSTEM && refused[0] != '\0') {
        return refused;
    }
    switch (status) {
#define X(name, text)                                                                  \
    case name:                                                                         \
        return text;
        SMP_STATUS_LIST(X)
#undef X
    }
    return "an unknown status";
}

smp_status
smp_status_refused(void)
{
    int           why = errno;
    struct rlimit limit;

    if (why == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        snprintf(refused, sizeof(refused),
                 "the system refused: %s (this process may have %llu: ulimit -n)",
                 strerror(why), (unsigned long long)limit.rlim_cur);
    } else {
        snprintf(refused, sizeof(refused), "the system refused: %s", strerror(why));
    }
    errno = why;
    return SMP_ERR_SYSTEM;
}

void
smp_status_forget(void)
{
    refused[0] = '\0';
}
