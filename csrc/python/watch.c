/* The watchdog's report: who waits for whom, and Python's stacks, without the GIL. */
#define _GNU_SOURCE 1 /* as pyconfig.h of Python 3.10 has it */
#include "python/watch.h"

#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

#include "python/session.h"
#include "server/watchdog.h"

#define EXIT_STUCK 1

/* CPython's own, which faulthandler uses: needs no GIL.  Found at run time, because
 * newer versions hide it. */
typedef const char *(*dump_threads)(int fd, PyInterpreterState *interpreter,
                                    PyThreadState *thread);

typedef struct {
    smp_watchdog       *thread; /* owned */
    dump_threads        dump;   /* NULL: this Python hides it */
    PyInterpreterState *interpreter;
} watch;

static watch the_watch;

static void
print(const char *bytes, size_t n)
{
    while (n > 0) {
        ssize_t done = write(STDERR_FILENO, bytes, n);

        if (done <= 0) {
            return;
        }
        bytes += done;
        n -= (size_t)done;
    }
}

static void
report_stuck(void *ctx, const smp_standing *standing, bool ends)
{
    smp_session *session = &smp_the_session;
    char         said[8192];
    const char  *name = smp_session_own_name();
    size_t       used;
    double       still = (double)(standing->now_ns - standing->moved_ns) / 1e9;

    (void)ctx;
    used = (size_t)snprintf(
        said, sizeof(said),
        standing->in_step ? "smp: %s (process %d) has not moved for %.1f s, in "
                            "step %u\n"
                          : "smp: %s (process %d) has not moved for %.1f s, after "
                            "step %u\n",
        name, (int)getpid(), still, (unsigned)standing->step);
    used += smp_board_write(smp_server_board(session->server),
                            smp_session_rank_of_comm(session->rank), standing,
                            said + used, sizeof(said) - used);
    print(said, used);
    if (the_watch.dump != NULL) {
        (void)the_watch.dump(STDERR_FILENO, the_watch.interpreter, NULL);
    }
    if (ends) {
        used = (size_t)snprintf(said, sizeof(said),
                                "smp: %s ends the job (watchdog_end_s)\n", name);
        print(said, used);
        _exit(EXIT_STUCK);
    }
}

/* Limits beyond a human's patience are none: inf, and what an int64 cannot hold. */
static int64_t
limit_ns(double seconds)
{
    return seconds < 1e9 ? (int64_t)(seconds * 1e9) : 0;
}

smp_status
smp_watch_start(double report_s, double end_s)
{
    smp_watchdog_config config = {
        .report_ns = limit_ns(report_s),
        .end_ns = limit_ns(end_s),
        .report = report_stuck,
    };

    the_watch.interpreter = PyInterpreterState_Get();
    *(void **)&the_watch.dump = dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads");
    return smp_watchdog_create(smp_server_board(smp_the_session.server), &config,
                               &the_watch.thread);
}

/* place(text or None): the script waits for other ranks, outside a step. */
static PyObject *
py_place(PyObject *module, PyObject *what)
{
    const char *text = NULL;

    (void)module;
    if (what != Py_None && (text = PyUnicode_AsUTF8(what)) == NULL) {
        return NULL;
    }
    if (smp_the_session.server != NULL) {
        smp_board_place(smp_server_board(smp_the_session.server), text);
    }
    Py_RETURN_NONE;
}

void
smp_watch_stop(void)
{
    smp_watchdog_destroy(the_watch.thread);
    the_watch.thread = NULL;
}

static PyMethodDef functions[] = {
    {"place", py_place, METH_O,
     "place(text or None): the script waits for other ranks, outside a step"},
    {NULL, NULL, 0, NULL},
};

int
smp_watch_add_functions(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
