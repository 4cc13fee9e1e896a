/* Events as tuples, and the words for their numbers. */
#include "python/modules/timeline_binding.h"

#include "python/modules/misses.h"
#include "python/modules/session.h"

/* timeline() -> [(time_ns, worker, kind, phase, microbatch, entry, about), ...] of the
 * last step, oldest first */
static PyObject *
py_timeline(PyObject *module, PyObject *unused)
{
    const smp_timeline *timeline;
    PyObject           *events = PyList_New(0);
    uint64_t            first;

    (void)module;
    (void)unused;
    if (events == NULL || smp_the_session.server == NULL) {
        return events;
    }
    timeline = smp_server_timeline(smp_the_session.server);
    first = timeline->count > SMP_TIMELINE_EVENTS
                ? timeline->count - SMP_TIMELINE_EVENTS
                : 0;
    for (uint64_t i = first; i < timeline->count; i++) {
        const smp_event *e = &timeline->events[i % SMP_TIMELINE_EVENTS];
        PyObject        *event = Py_BuildValue("(Kiiiiii)", e->time_ns, (int)e->worker,
                                               (int)e->kind, (int)e->phase, (int)e->microbatch,
                                               (int)e->entry, (int)e->about);
        int              failed = event == NULL || PyList_Append(events, event) < 0;

        Py_XDECREF(event);
        if (failed) {
            Py_DECREF(events);
            return NULL;
        }
    }
    return events;
}

static PyMethodDef functions[] = {
    {"timeline", py_timeline, METH_NOARGS,
     "-> [(time_ns, worker, kind, phase, microbatch, entry, about), ...]"},
    {NULL, NULL, 0, NULL},
};

static const char *
phase_in_words(int phase)
{
    return smp_phase_name((smp_phase)phase);
}

static const char *
miss_in_words(int miss)
{
    return smp_miss_in_words((smp_miss)miss);
}

/* Adds a tuple of words by number. */
static int
add_words(PyObject *module, const char *name, const char *(*in_words)(int), int n)
{
    PyObject *words = PyTuple_New(n);
    int       failed;

    for (int i = 0; words != NULL && i < n; i++) {
        PyObject *text = PyUnicode_FromString(in_words(i));

        if (text == NULL) {
            Py_CLEAR(words);
        } else {
            PyTuple_SET_ITEM(words, i, text);
        }
    }
    failed = words == NULL || PyModule_AddObjectRef(module, name, words) < 0;
    Py_XDECREF(words);
    return failed ? -1 : 0;
}

int
smp_timeline_binding_add(PyObject *module)
{
    return add_words(module, "phases", phase_in_words, SMP_PHASES) < 0 ||
                   add_words(module, "misses", miss_in_words, SMP_MISSES) < 0
               ? -1
               : PyModule_AddFunctions(module, functions);
}
