/* Depth first, along next_functions. */
#include "python/modules/reach.h"

typedef struct {
    PyObject *enters; /* borrowed; dict: node -> its first input */
    PyObject *seen;   /* owned; set of nodes: an address is a node's as long as the set
                         keeps that */
    PyObject *next;   /* owned; list of nodes yet to be looked at */
    uint64_t  unreached;
} walk;

/* The walk came along an edge to a node's `number`th output. */
static int
arrive(walk *w, PyObject *node, PyObject *number)
{
    PyObject *first;
    int       known;

    if (node == Py_None) {
        return 0;
    }
    first = PyDict_GetItemWithError(w->enters, node);
    if (first != NULL) {
        const size_t input = PyLong_AsSize_t(first) + PyLong_AsSize_t(number);

        if (input < 64) {
            w->unreached &= ~((uint64_t)1 << input);
        }
    }
    if (first != NULL || PyErr_Occurred()) {
        return PyErr_Occurred() == NULL ? 0 : -1;
    }
    known = PySet_Contains(w->seen, node);
    if (known != 0) {
        return known < 0 ? -1 : 0;
    }
    return PySet_Add(w->seen, node) < 0 ? -1 : PyList_Append(w->next, node);
}

/* From a tensor to its grad_fn. */
static int
arrive_at_output(walk *w, PyObject *output)
{
    PyObject *node = PyObject_GetAttr(output, smp_names.grad_fn);
    PyObject *number = PyObject_GetAttr(output, smp_names.output_nr);
    int       failed = node == NULL || number == NULL ? -1 : arrive(w, node, number);

    Py_XDECREF(node);
    Py_XDECREF(number);
    return failed;
}

/* From the last of w->next to the nodes of its inputs. */
static int
step_on(walk *w)
{
    Py_ssize_t last = PyList_GET_SIZE(w->next) - 1;
    PyObject  *edges =
        PyObject_GetAttr(PyList_GET_ITEM(w->next, last), smp_names.next_functions);
    int failed = edges == NULL ? -1 : PyList_SetSlice(w->next, last, last + 1, NULL);

    for (Py_ssize_t i = failed == 0 ? PyTuple_GET_SIZE(edges) - 1 : -1;
         i >= 0 && failed == 0; i--) { /* the first is the next to be looked at */
        PyObject *edge = PyTuple_GET_ITEM(edges, i);

        failed = arrive(w, PyTuple_GET_ITEM(edge, 0), PyTuple_GET_ITEM(edge, 1));
    }
    Py_XDECREF(edges);
    return failed;
}

int
smp_reach(PyObject *const *outputs, size_t noutputs, PyObject *enters, size_t ninputs,
          uint64_t *unreached)
{
    walk w = {.enters = enters,
              .unreached = ninputs >= 64 ? UINT64_MAX : ((uint64_t)1 << ninputs) - 1};
    int  failed;

    *unreached = 0;
    if (ninputs == 0) {
        return 0;
    }
    w.seen = PySet_New(NULL);
    w.next = PyList_New(0);
    failed = w.seen == NULL || w.next == NULL ? -1 : 0;
    for (size_t i = 0; i < noutputs && failed == 0 && w.unreached != 0; i++) {
        failed = arrive_at_output(&w, outputs[i]);
    }
    while (failed == 0 && w.unreached != 0 && PyList_GET_SIZE(w.next) > 0) {
        failed = step_on(&w);
    }
    Py_XDECREF(w.seen);
    Py_XDECREF(w.next);
    *unreached = w.unreached;
    return failed;
}
