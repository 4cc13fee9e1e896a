/* One heap for the threads of which one works at a time.
 *
 * glibc gives each new thread a heap of its own, up to eight for each core, so that
 * threads do not wait for each other.  Ours do not allocate at the same time; but a
 * tensor that one worker makes and another frees would leave its memory with the first,
 * unused: a rank then holds twice what it needs (benchmarks/memory.py).
 */
#include "python/heap.h"

#include <stdlib.h>
#ifdef __GLIBC__
#    include <malloc.h>
#endif

/* share_heap(): all threads that begin to allocate from here on share one heap.  A
 * number that the user chose (MALLOC_ARENA_MAX) stays, and so does another C library's
 * way. */
static PyObject *
py_share_heap(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
#ifdef __GLIBC__
    if (getenv("MALLOC_ARENA_MAX") == NULL) {
        (void)mallopt(M_ARENA_MAX, 1);
    }
#endif
    Py_RETURN_NONE;
}

/* trim_heap(): gives the system back the pages that hold nothing. */
static PyObject *
py_trim_heap(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
#ifdef __GLIBC__
    Py_BEGIN_ALLOW_THREADS;
    (void)malloc_trim(0);
    Py_END_ALLOW_THREADS;
#endif
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"share_heap", py_share_heap, METH_NOARGS,
     "All threads that begin to allocate from here on share one heap."},
    {"trim_heap", py_trim_heap, METH_NOARGS,
     "Give the system back the pages of the heap that hold nothing."},
    {NULL, NULL, 0, NULL},
};

int
smp_heap_add_functions(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
