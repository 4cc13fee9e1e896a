/* A task without the baton, until its response is here. */
#include "python/modules/wait.h"

#include <string.h>

#include "python/modules/session.h"
#include "python/modules/streams.h"
#include "python/modules/task.h"
#include "python/process/heap.h"

smp_message *
smp_session_wait(uint64_t call, smp_wait_kind kind, int32_t entry)
{
    smp_message *response;
    smp_status   status;

    smp_heap_give_scratch();
    Py_BEGIN_ALLOW_THREADS;
    status = smp_server_wait(smp_the_session.server, call, kind, entry,
                             smp_the_session.entries[entry].owner, &response);
    Py_END_ALLOW_THREADS;
    if (status != SMP_OK) {
        PyErr_SetNone(smp_the_session.aborted);
        return NULL;
    }
    if (smp_stream_enter(smp_this_task) < 0) {
        smp_message_free(response);
        return NULL;
    }
    return response;
}

int
smp_session_agree(const smp_ballot *ballot, const uint32_t *words, size_t n,
                  bool *complete)
{
    smp_ballot_list list = {.ballot = *ballot, .n = (uint32_t)n};
    smp_agreement   agreement;
    smp_status      status;

    memcpy(list.words, words, n * sizeof(*words));
    smp_heap_give_scratch();
    Py_BEGIN_ALLOW_THREADS;
    status =
        smp_server_agree(smp_the_session.server, &list, complete != NULL, &agreement);
    Py_END_ALLOW_THREADS;
    if (status == SMP_ERR_CLOSED) {
        PyErr_SetNone(smp_the_session.aborted);
        return -1;
    }
    if (status != SMP_OK) {
        smp_session_raise(status, "agreeing on a chain of calls");
        return -1;
    }
    if (complete != NULL) {
        *complete = agreement.complete;
    }
    return smp_stream_enter(smp_this_task) < 0 ? -1 : (int)agreement.outcome;
}
