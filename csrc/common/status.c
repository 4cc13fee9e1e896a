/* Names and texts of the statuses, from the one list. */
#include "common/status.h"

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
    switch (status) {
#define X(name, text)                                                                  \
    case name:                                                                         \
        return text;
        SMP_STATUS_LIST(X)
#undef X
    }
    return "an unknown status";
}
