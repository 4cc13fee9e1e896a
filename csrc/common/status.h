/* The status returned by a call of the core.
 *
 * A fallible function of the core returns an smp_status.  Outputs are written only on
 * SMP_OK.  Only the function first to decide on an error logs it.  A broken internal
 * rule is an assert, never a status.
 */
#ifndef SMP_COMMON_STATUS_H
#define SMP_COMMON_STATUS_H

#define SMP_STATUS_LIST(X)                                                             \
    X(SMP_OK, "ok")                                                                    \
    X(SMP_ERR_NO_MEMORY, "out of memory")                                              \
    X(SMP_ERR_NO_THREAD, "cannot start a thread")                                      \
    X(SMP_ERR_CLOSED, "closed")                                                        \
    X(SMP_ERR_TIMED_OUT, "timed out")                                                  \
    X(SMP_ERR_INTERRUPTED, "interrupted")                                              \
    X(SMP_ERR_PEER_LOST, "a peer rank is gone")                                        \
    X(SMP_ERR_DEADLOCK, "every rank waits")                                            \
    X(SMP_ERR_MALFORMED, "bytes that no rank of this job wrote")                       \
    X(SMP_ERR_INVALID, "invalid argument")                                             \
    X(SMP_ERR_MISMATCH, "the ranks do not call the same")                              \
    X(SMP_ERR_SIZES, "the ranks assume other sizes")                                   \
    X(SMP_ERR_UNREACHABLE, "no transport reaches that rank")                           \
    X(SMP_ERR_LIMIT, "no more at a time")                                              \
    X(SMP_ERR_SYSTEM, "the system refused")

typedef enum {
#define X(name, text) name,
    SMP_STATUS_LIST(X)
#undef X
} smp_status;

/* "SMP_ERR_CLOSED"; static storage. */
const char *smp_status_name(smp_status status);

/* "closed"; static storage.  For SMP_ERR_SYSTEM with the reason last noted by
 * smp_status_refused() on this thread. */
const char *smp_status_text(smp_status status);

/* Notes errno's reason, after a refused system call.  SMP_ERR_SYSTEM. */
smp_status smp_status_refused(void);

/* Drops the noted reason: it belongs to an earlier operation. */
void smp_status_forget(void);

#endif
