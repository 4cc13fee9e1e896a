/* One heap for threads working one at a time.
 *
 * glibc gives each new thread a heap of its own, up to eight for each core, so that
 * threads do not wait for each other.  Ours do not allocate at the same time.  But a
 * tensor made by one worker and freed by another would leave its memory with the first,
 * unused: a rank then holds twice its need (benchmarks/memory.py).
 *
 * The heap keeps its pages.  Left to itself glibc gives them back when a backward has
 * freed enough and takes them again in the next forward: 7,500 page faults a step, 5 %
 * of its time, in benchmarks/pipeline.py.
 *
 * MKL keeps scratch memory for each thread with a product, 5 to 10 MiB in each worker.
 * Taking it anew has no measurable cost.
 */
#define _GNU_SOURCE 1 /* RTLD_NOLOAD; 1 as in pyconfig.h of Python 3.10 */
#include "python/process/heap.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#    include <malloc.h>
#endif

/* Larger blocks have pages of their own, always fresh; the maximum of glibc.
 */
#define MMAP_THRESHOLD (32 << 20)

static void (*give_scratch)(void); /* NULL: PyTorch is built without MKL */

void
smp_heap_give_scratch(void)
{
    if (give_scratch != NULL) {
        give_scratch();
    }
}

/* mkl_thread_free_buffers() of the MKL inside the loaded libtorch. */
static void
find_scratch(void)
{
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    void *found = torch == NULL ? NULL : dlsym(torch, "mkl_serv_thread_free_buffers");

    memcpy(&give_scratch, &found, sizeof(found)); /* ISO C has no cast for this */
}

/* share_heap(): all threads with their first allocation from here on share one heap,
 * which keeps its pages.  The user's choice (MALLOC_ARENA_MAX and others) stays, and
 * another C library's way. */
static PyObject *
py_share_heap(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
#ifdef __GLIBC__
    if (getenv("MALLOC_ARENA_MAX") == NULL) {
        (void)mallopt(M_ARENA_MAX, 1);
    }
    if (getenv("MALLOC_MMAP_THRESHOLD_") == NULL &&
        getenv("MALLOC_TRIM_THRESHOLD_") == NULL && getenv("MALLOC_TOP_PAD_") == NULL) {
        (void)mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD);
        (void)mallopt(M_TRIM_THRESHOLD, -1); /* never */
    }
#endif
    find_scratch();
    Py_RETURN_NONE;
}

/* trim_heap(): gives empty pages back to the system. */
static PyObject *
py_trim_heap(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    smp_heap_give_scratch();
#ifdef __GLIBC__
    Py_BEGIN_ALLOW_THREADS;
    (void)malloc_trim(0);
    Py_END_ALLOW_THREADS;
#endif
    Py_RETURN_NONE;
}

/* heap_holes(): bytes of the heap without a block. */
static PyObject *
py_heap_holes(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
    return PyLong_FromSize_t(mallinfo2().fordblks);
#else
    return PyLong_FromLong(0);
#endif
}

static PyMethodDef functions[] = {
    {"share_heap", py_share_heap, METH_NOARGS,
     "All threads that begin to allocate from here on share one heap, which keeps its "
     "pages."},
    {"trim_heap", py_trim_heap, METH_NOARGS,
     "Give the system back the pages of the heap that hold nothing."},
    {"heap_holes", py_heap_holes, METH_NOARGS,
     "Bytes of the heap without a block; 0 where glibc before 2.33 does not tell."},
    {NULL, NULL, 0, NULL},
};

int
smp_heap_add_functions(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
