/* Handlers run on the main thread alone; elsewhere nothing is ever raised. */
#include "python/process/signals.h"

/* Whether a signal's handler has raised, asked without the GIL by a waiting thread. */
static bool
has_raised(void *arg)
{
    smp_signal_asker *asker = arg;

    if (asker->raised || smp_clock_ns() < asker->next_ns) {
        return asker->raised;
    }
    PyEval_RestoreThread(asker->thread);
    asker->raised = PyErr_CheckSignals() < 0;
    asker->thread = PyEval_SaveThread();
    asker->next_ns = smp_clock_ns() + SMP_SIGNALS_NS;
    return asker->raised;
}

smp_deadline
smp_signals_begin(smp_signal_asker *asker, int64_t deadline_ns)
{
    *asker = (smp_signal_asker){.next_ns = smp_clock_ns() + SMP_SIGNALS_NS};
    asker->thread = PyEval_SaveThread();
    return (smp_deadline){deadline_ns, has_raised, asker};
}

void
smp_signals_end(smp_signal_asker *asker)
{
    PyEval_RestoreThread(asker->thread);
}
