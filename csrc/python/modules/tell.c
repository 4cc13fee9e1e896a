/* Notes to other ranks. */
#include "python/modules/tell.h"

#include "comm/messaging/neighbour.h"
#include "python/modules/session.h"
#include "python/values/pack_value.h"

int
smp_session_send_to_one(int rank, const smp_envelope *envelope, PyObject *value)
{
    smp_pack pack;
    int      failed;

    smp_pack_init(&pack, smp_the_session.comm, rank, NULL);
    pack.graph = false;
    failed = smp_pack_value(&pack, value) < 0 || smp_pack_send(&pack, envelope) < 0;
    smp_pack_fini(&pack);
    return failed ? -1 : 0;
}

int
smp_session_send_to_all(smp_msg_kind kind, PyObject *value)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = {.kind = (uint8_t)kind, .step = session->step};
    PyObject    *type = NULL; /* the first exception, kept while others are told */
    PyObject    *error = NULL;
    PyObject    *traceback = NULL;
    const bool   abort = kind == SMP_MSG_ABORT;
    const int    first = abort ? 0 : smp_session_rank_of_comm(0);
    const int    last = abort ? smp_comm_size(session->comm) : first + session->size;
    const int    own = smp_session_rank_of_comm(session->rank);

    if (!abort) {
        const smp_replay_verdict verdict = smp_server_verdict(session->server);

        envelope.about = verdict.best;
        envelope.seed = verdict.recorded;
        envelope.number = (uint64_t)verdict.left;
    }
    for (int rank = first; rank < last; rank++) {
        if (rank == own || smp_session_send_to_one(rank, &envelope, value) == 0) {
            continue;
        }
        if (!abort) {
            return -1;
        }
        if (type == NULL && !smp_comm_gone(session->comm, rank)) {
            PyErr_Fetch(&type, &error, &traceback);
        } else {
            PyErr_Clear(); /* a departed rank needs no message any more */
        }
    }
    if (type != NULL) {
        PyErr_Restore(type, error, traceback);
        return -1;
    }
    return 0;
}

void
smp_session_tell_others(const smp_envelope *envelope)
{
    smp_session *session = &smp_the_session;

    for (int rank = 0; rank < session->size; rank++) {
        if (rank != session->rank) {
            (void)smp_comm_send(session->comm, smp_session_rank_of_comm(rank), envelope,
                                sizeof(*envelope), NULL, 0);
        }
    }
}
