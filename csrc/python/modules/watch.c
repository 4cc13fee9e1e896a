/* The watchdog's report: the waits, and Python's stacks, also where the GIL is not to
 * be had. */
#define _GNU_SOURCE 1 /* as pyconfig.h of Python 3.10 has it */
#include "python/modules/watch.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/fork.h"
#include "common/lock.h"
#include "common/thread.h"
#include "server/watchdog.h"

#define EXIT_STUCK 1
#define STILL_NS (SMP_NS_PER_S / 2)

/* CPython's own, for faulthandler: needs no GIL, and crashes where frames change
 * meanwhile.  Found at run time, because newer versions hide it. */
typedef const char *(*dump_threads)(int fd, PyInterpreterState *interpreter,
                                    PyThreadState *thread);

typedef struct {
    smp_board    *board; /* borrowed, unless it is `own`; NULL: nothing is watched */
    smp_board    *own;   /* owned: of a rank without a server */
    int           rank;
    char          name[64];
    char          step[200];  /* the step's place; "": in none */
    smp_watchdog *thread;     /* owned */
    uint32_t      generation; /* smp_fork_generation() */
    dump_threads  dump;       /* NULL: this Python hides it */
    PyInterpreterState *interpreter;
} watch;

static watch the_watch;

/* The board; NULL in a forked child, too: its lock may be held there for ever. */
static smp_board *
own_board(void)
{
    return the_watch.generation == smp_fork_generation() ? the_watch.board : NULL;
}

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

/* --------------------------------------------------------------------- the stacks */

/* Python's threads stand still while one of them, of ours, holds the GIL. */
static struct {
    smp_lock       lock;    /* guards all below */
    pthread_cond_t changed; /* made with the first report */
    bool           is_made;
    bool           is_under_way; /* our thread has not ended */
    bool           is_wanted;
    bool           is_held;
} still = {.lock = SMP_LOCK_INIT(SMP_LOCK_STILL)};

static void *
hold_still(void *unused)
{
    PyGILState_STATE state = PyGILState_Ensure();

    smp_lock_acquire(&still.lock);
    still.is_held = still.is_wanted;
    pthread_cond_broadcast(&still.changed);
    while (still.is_wanted) {
        smp_cond_wait(&still.changed, &still.lock, SMP_NEVER);
    }
    still.is_held = false;
    still.is_under_way = false;
    smp_lock_release(&still.lock);
    PyGILState_Release(state);
    return unused;
}

/* Waits a moment for the GIL.  Whoever keeps it for longer is in C, and Python's frames
 * stand still, too. */
static void
begin_still(void)
{
    const int64_t limit_ns = smp_clock_ns() + STILL_NS;
    pthread_t     thread;

    smp_lock_acquire(&still.lock);
    if (!still.is_made) {
        smp_cond_init(&still.changed);
        still.is_made = true;
    }
    still.is_wanted = true;
    if (!still.is_under_way &&
        smp_thread_start(&thread, "smp-still", hold_still, NULL) == SMP_OK) {
        pthread_detach(thread);
        still.is_under_way = true;
    }
    while (still.is_under_way && !still.is_held && smp_clock_ns() < limit_ns) {
        smp_cond_wait(&still.changed, &still.lock, limit_ns);
    }
    smp_lock_release(&still.lock);
}

static void
end_still(void)
{
    smp_lock_acquire(&still.lock);
    still.is_wanted = false;
    pthread_cond_broadcast(&still.changed);
    smp_lock_release(&still.lock);
}

static void
report_stuck(void *ctx, const smp_standing *standing, bool ends)
{
    char   said[8192];
    size_t used;
    double still = (double)(standing->now_ns - standing->moved_ns) / 1e9;

    (void)ctx;
    used = (size_t)snprintf(said, sizeof(said),
                            "smp: %s (process %d) has not moved for %.1f s",
                            the_watch.name, (int)getpid(), still);
    if (the_watch.own == NULL) { /* the server counts steps */
        used += (size_t)snprintf(said + used, sizeof(said) - used, ", %s step %u",
                                 standing->in_step ? "in" : "after",
                                 (unsigned)standing->step);
    }
    said[used++] = '\n';
    used += smp_board_write(the_watch.board, the_watch.rank, standing, said + used,
                            sizeof(said) - used);
    used += smp_board_write_others(the_watch.board, said + used, sizeof(said) - used);
    print(said, used);
    if (the_watch.dump != NULL) {
        begin_still();
        (void)the_watch.dump(STDERR_FILENO, the_watch.interpreter, NULL);
        end_still();
    }
    if (ends) {
        used =
            (size_t)snprintf(said, sizeof(said),
                             "smp: %s ends the job (watchdog_end_s)\n", the_watch.name);
        print(said, used);
        _exit(EXIT_STUCK);
    }
}

/* Limits beyond a human's patience are none: inf, and numbers beyond an int64. */
static int64_t
limit_ns(double seconds)
{
    return seconds < 1e9 ? (int64_t)(seconds * 1e9) : 0;
}

smp_status
smp_watch_start(smp_board *board, int rank, const char *name, double report_s,
                double end_s)
{
    smp_status status;

    smp_watchdog_config config = {
        .report_ns = limit_ns(report_s),
        .end_ns = limit_ns(end_s),
        .report = report_stuck,
    };

    the_watch.rank = rank;
    snprintf(the_watch.name, sizeof(the_watch.name), "%s", name);
    the_watch.interpreter = PyInterpreterState_Get();
    *(void **)&the_watch.dump = dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads");
    status = smp_fork_init();
    if (status == SMP_OK) {
        status = smp_watchdog_create(board, &config, &the_watch.thread);
    }
    the_watch.generation = smp_fork_generation();
    the_watch.board = status == SMP_OK ? board : NULL;
    return status;
}

/* watch(name, report_s, end_s): a rank without a server, until unwatch() */
static PyObject *
py_watch(PyObject *module, PyObject *args)
{
    static const char *const names[] = {the_watch.name};
    const char              *name;
    double                   report_s;
    double                   end_s;
    smp_status               status;

    (void)module;
    if (!PyArg_ParseTuple(args, "sdd", &name, &report_s, &end_s)) {
        return NULL;
    }
    status = smp_board_create(0, 1, "", names, &the_watch.own);
    if (status == SMP_OK) {
        status = smp_watch_start(the_watch.own, 0, name, report_s, end_s);
    }
    if (status != SMP_OK) {
        smp_board_destroy(the_watch.own);
        the_watch.own = NULL;
        return PyErr_Format(PyExc_RuntimeError, "smp: starting the watchdog: %s [%s]",
                            smp_status_text(status), smp_status_name(status));
    }
    Py_RETURN_NONE;
}

/* unwatch(): ends watch(), if begun */
static PyObject *
py_unwatch(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (the_watch.own != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        smp_watch_stop();
        Py_END_ALLOW_THREADS;
        smp_board_destroy(the_watch.own);
        the_watch.own = NULL;
    }
    Py_RETURN_NONE;
}

/* standing() -> (seconds without a move, lines), or None: in no step and no call */
static PyObject *
py_standing(PyObject *module, PyObject *unused)
{
    smp_standing now;
    char         lines[SMP_BOARD_OTHERS];

    (void)module;
    (void)unused;
    if (own_board() == NULL) {
        Py_RETURN_NONE;
    }
    smp_board_read(the_watch.board, &now);
    if (!now.in_step && !now.outside) {
        Py_RETURN_NONE;
    }
    (void)smp_board_write(the_watch.board, the_watch.rank, &now, lines, sizeof(lines));
    return Py_BuildValue(
        "dN", (double)(now.now_ns - now.moved_ns) / 1e9,
        PyUnicode_DecodeUTF8(lines, (Py_ssize_t)strlen(lines), "replace"));
}

/* hear_of(lines): where other ranks stand, for the next reports */
static PyObject *
py_hear_of(PyObject *module, PyObject *lines)
{
    const char *text = PyUnicode_AsUTF8(lines);

    (void)module;
    if (text == NULL) {
        return NULL;
    }
    if (own_board() != NULL) {
        smp_board_hear(the_watch.board, text);
    }
    Py_RETURN_NONE;
}

/* place(call or None): the script waits for other ranks in it; None: not any more. */
static PyObject *
py_place(PyObject *module, PyObject *what)
{
    const char *call = NULL;
    char        text[256];

    (void)module;
    if (what != Py_None && (call = PyUnicode_AsUTF8(what)) == NULL) {
        return NULL;
    }
    snprintf(text, sizeof(text), "%s%s", call != NULL ? "waits in " : "is in ",
             call != NULL ? call : the_watch.step);
    if (own_board() != NULL) {
        smp_board_place(the_watch.board,
                        call == NULL && the_watch.step[0] == '\0' ? NULL : text);
    }
    Py_RETURN_NONE;
}

/* place_of_step(text or None): where the script is, until None, when it waits in no
 * call
 */
static PyObject *
py_place_of_step(PyObject *module, PyObject *what)
{
    const char *text = "";

    if (what != Py_None && (text = PyUnicode_AsUTF8(what)) == NULL) {
        return NULL;
    }
    snprintf(the_watch.step, sizeof(the_watch.step), "%s", text);
    return py_place(module, Py_None);
}

/* moved(): this rank goes on, where it was */
static PyObject *
py_moved(PyObject *module, PyObject *unused)
{
    (void)unused;
    return py_place(module, Py_None);
}

void
smp_watch_stop(void)
{
    smp_watchdog_destroy(the_watch.thread);
    the_watch.thread = NULL;
    the_watch.board = NULL;
}

static PyMethodDef functions[] = {
    {"watch", py_watch, METH_VARARGS,
     "watch(name, report_s, end_s): a rank without a server, until unwatch()"},
    {"unwatch", py_unwatch, METH_NOARGS, "unwatch(): what watch() began, if it did"},
    {"standing", py_standing, METH_NOARGS,
     "standing() -> (seconds without a move, lines), or None: in no step and no call"},
    {"hear_of", py_hear_of, METH_O,
     "hear_of(lines): where other ranks stand, for the next reports"},
    {"place", py_place, METH_O,
     "place(call or None): the script waits for other ranks in it; None: not any more"},
    {"place_of_step", py_place_of_step, METH_O,
     "place_of_step(text or None): where it is, until None, when it waits in no call"},
    {"moved", py_moved, METH_NOARGS, "moved(): this rank goes on, where it was"},
    {NULL, NULL, 0, NULL},
};

int
smp_watch_add_functions(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
