/* Waits of the C core, ended by a raising Python signal handler (Ctrl-C). */
#ifndef SMP_PYTHON_PROCESS_SIGNALS_H
#define SMP_PYTHON_PROCESS_SIGNALS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "common/deadline.h"

/* The interval of looks at Python's signals in a wait without the GIL. */
#define SMP_SIGNALS_NS (50 * SMP_NS_PER_MS)

typedef struct {
    PyThreadState *thread;
    int64_t        next_ns;
    bool           raised;
} smp_signal_asker;

/* Releases the GIL for a wait until deadline_ns, or until a handler raises: then with
 * SMP_ERR_INTERRUPTED, and the exception is set.  `asker` is borrowed until
 * smp_signals_end(): it takes the GIL again, on the same thread. */
smp_deadline smp_signals_begin(smp_signal_asker *asker, int64_t deadline_ns);
void         smp_signals_end(smp_signal_asker *asker);

#endif
