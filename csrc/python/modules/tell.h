/* A rank's messages beside requests and responses.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_MODULES_TELL_H
#define SMP_PYTHON_MODULES_TELL_H

#include "python/values/torch_api.h"
#include "server/envelope.h"

/* A value behind the envelope, to one rank of the comm.  0, or -1 with an exception. */
int smp_session_send_to_one(int rank, const smp_envelope *envelope, PyObject *value);

/* To every other rank of the pipeline: a value; 0, or -1 with the first exception.  An
 * ABORT goes to other pipelines, too, to all present ranks, also after a failure on the
 * way to one of them. */
int smp_session_send_to_all(smp_msg_kind kind, PyObject *value);

/* To every other rank of the pipeline: an envelope alone. */
void smp_session_tell_others(const smp_envelope *envelope);

#endif
