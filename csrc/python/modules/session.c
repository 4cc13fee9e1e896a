/* The session's own name, errors and warnings. */
#include "python/modules/session.h"

#include "comm/messaging/neighbour.h"
#include "python/values/error.h"
#include "python/values/rank_names.h"

smp_session smp_the_session;

const char *
smp_entry_path(const smp_entry *entry)
{
    const char *path = PyUnicode_AsUTF8(entry->path);

    return path == NULL ? "?" : path;
}

const char *
smp_session_own_name(void)
{
    return smp_rank_name(smp_session_rank_of_comm(smp_the_session.rank));
}

PyObject *
smp_session_raise(smp_status status, const char *doing)
{
    smp_session *session = &smp_the_session;

    if (status == SMP_ERR_PEER_LOST) {
        const char *awaited =
            session->server == NULL ? "" : smp_server_awaited(session->server);

        return smp_error_raise(
            smp_error_of_peer, status, NULL,
            "smp: %s: %s is gone (its process ended or was killed); on "
            "%s: %s",
            doing, smp_rank_name(smp_comm_lost(session->comm)), smp_session_own_name(),
            awaited[0] == '\0' ? "no task waited, it served the others" : awaited);
    } else if (status == SMP_ERR_UNREACHABLE) {
        return smp_error_raise(smp_error_of_peer, status, NULL,
                               "smp: %s: %s has left the job in order, and %s is in "
                               "step %u: all ranks must make the same number of steps",
                               doing, smp_rank_name(smp_server_left(session->server)),
                               smp_session_own_name(), (unsigned)session->step);
    } else if (status == SMP_ERR_MISMATCH && session->server != NULL) {
        return smp_error_raise(
            smp_error_of_step, status, NULL,
            "smp: %s: the ranks of a %s: %s.  A model that chooses modules by its data "
            "must choose alike on them",
            doing,
            session->in_sequence
                ? "DP_GROUP do not run the same, as deterministic_server needs"
                : "TP_GROUP do not make the same calls of distributed modules",
            smp_server_mismatch(session->server));
    } else if (status == SMP_ERR_DEADLOCK) {
        char waits[8192];

        (void)smp_server_write_deadlock(session->server, waits, sizeof(waits));
        return smp_error_raise(
            smp_error_of_step, status, NULL,
            "smp: %s: a deadlock: no rank has anything to run, and no message is "
            "under way\n%s",
            doing, waits);
    } else {
        PyErr_Format(status == SMP_ERR_NO_MEMORY   ? PyExc_MemoryError
                     : status == SMP_ERR_TIMED_OUT ? PyExc_TimeoutError
                     : status == SMP_ERR_INVALID   ? PyExc_ValueError
                                                   : PyExc_RuntimeError,
                     "smp: %s: %s [%s]", doing, smp_status_text(status),
                     smp_status_name(status));
    }
    return NULL;
}

int
smp_session_warn_if_laden(PyObject *laden, const smp_entry *entry)
{
    PyObject *done;

    if (laden == NULL) {
        return 0;
    }
    done = PyObject_CallFunctionObjArgs(smp_the_session.warn_of_tensor, entry->path,
                                        laden, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}
