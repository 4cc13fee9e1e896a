/* An array of messages, each with the number of its arrival. */
#include "server/backlog.h"

#include <stdlib.h>

#include "common/jitter.h"
#include "server/envelope.h"

#define FIRST_ROOM 32

typedef struct {
    smp_message *message;
    uint64_t     arrival;
} waiting;

struct smp_backlog {
    waiting *waiting; /* owned: n messages, in no order */
    size_t   n;
    size_t   room;
    uint64_t arrivals;
};

smp_status
smp_backlog_create(smp_backlog **out)
{
    smp_backlog *backlog = calloc(1, sizeof(*backlog));

    if (backlog == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    *out = backlog;
    return SMP_OK;
}

void
smp_backlog_destroy(smp_backlog *backlog)
{
    if (backlog != NULL) {
        smp_backlog_drop(backlog, UINT32_MAX);
        free(backlog->waiting);
        free(backlog);
    }
}

smp_status
smp_backlog_keep(smp_backlog *backlog, smp_message *message)
{
    smp_jitter();
    if (backlog->n == backlog->room) {
        const size_t room = backlog->room == 0 ? FIRST_ROOM : 2 * backlog->room;
        waiting     *more = realloc(backlog->waiting, room * sizeof(*more));

        if (more == NULL) {
            smp_message_free(message);
            return SMP_ERR_NO_MEMORY;
        }
        backlog->waiting = more;
        backlog->room = room;
    }
    backlog->waiting[backlog->n++] =
        (waiting){.message = message, .arrival = backlog->arrivals++};
    return SMP_OK;
}

size_t
smp_backlog_count(const smp_backlog *backlog)
{
    return backlog->n;
}

const smp_message *
smp_backlog_at(const smp_backlog *backlog, size_t i, uint64_t *arrival)
{
    *arrival = backlog->waiting[i].arrival;
    return backlog->waiting[i].message;
}

smp_message *
smp_backlog_take(smp_backlog *backlog, size_t i)
{
    smp_message *message = backlog->waiting[i].message;

    smp_jitter();
    backlog->waiting[i] = backlog->waiting[--backlog->n];
    return message;
}

smp_message *
smp_backlog_take_response(smp_backlog *backlog, uint64_t call)
{
    for (size_t i = 0; i < backlog->n; i++) {
        const smp_envelope *e = smp_message_envelope(backlog->waiting[i].message);

        if (e->kind == SMP_MSG_RESPONSE && e->call == call) {
            return smp_backlog_take(backlog, i);
        }
    }
    return NULL;
}

static int
by_arrival(const void *a, const void *b)
{
    const waiting *left = a;
    const waiting *right = b;

    return (left->arrival > right->arrival) - (left->arrival < right->arrival);
}

smp_message *
smp_backlog_take_all(smp_backlog *backlog)
{
    smp_message *first = NULL;

    if (backlog->n > 0) {
        qsort(backlog->waiting, backlog->n, sizeof(*backlog->waiting), by_arrival);
    }
    while (backlog->n > 0) {
        smp_message *last = backlog->waiting[--backlog->n].message;

        last->next = first;
        first = last;
    }
    return first;
}

void
smp_backlog_drop(smp_backlog *backlog, uint32_t step)
{
    for (size_t i = backlog->n; i-- > 0;) {
        if (smp_message_envelope(backlog->waiting[i].message)->step <= step) {
            smp_message_free(smp_backlog_take(backlog, i));
        }
    }
}
