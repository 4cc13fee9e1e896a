/* Objects numbered alike on every rank: modules, parameters, and the codec's Python
 * functions for types unknown to C.
 *
 * Threads  The GIL is held.
 */
#ifndef SMP_PYTHON_VALUES_REGISTRY_H
#define SMP_PYTHON_VALUES_REGISTRY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int       rank;           /* this pp_rank */
    PyObject *modules;        /* list of modules, by number */
    PyObject *module_numbers; /* dict: module address -> number */
    PyObject *parameters; /* list of parameters, by number; then of changing buffers:
                             this rank's as (dict, name) */
    PyObject *parameter_owners;  /* list of pp_ranks, by number */
    PyObject *parameter_numbers; /* dict: parameter address -> number */
    PyObject *parameter_names;   /* list of paths, by number */
    PyObject *dumps;             /* value -> (bytes, [tensors]) */
    PyObject *loads;             /* bytes, [tensors] -> value */
    PyObject *dense;             /* tensor -> dense copy */
    PyObject *split_tensor;      /* class of this tp_rank's slices; NULL: none */
    PyObject *whole;             /* one of those -> whole tensor, by a collective */
    PyObject *unsendable;        /* tensor, PyTorch's error -> the message */
    PyObject
        *placeholder;     /* class of tensors with values on another rank; NULL: none */
    PyObject *hollow;     /* tensor of the dtype, on a device, shape, strides -> one */
    PyObject *stage_out;  /* tensor, host memory: begins to copy its span there */
    PyObject *stage_wait; /* waits for the copies of stage_out */
    PyObject *stage_in;   /* host memory, shape, strides -> tensor on the device */
    PyObject
        *stage_placed; /* elements in a row on a device, shape, strides -> tensor */
} smp_registry_table;

extern smp_registry_table smp_registry;

/* Gives the object a number in `numbers`, by its address: an object added twice has the
 * last.  0, or -1 with an exception. */
int smp_registry_add(PyObject *numbers, const void *address, Py_ssize_t number);

/* Whether the tensor's values are on another rank. */
static inline bool
smp_is_placeholder(PyObject *tensor)
{
    return (PyObject *)Py_TYPE(tensor) == smp_registry.placeholder;
}

/* The number of the object in `numbers`, or -1.  No exception is left. */
int64_t smp_registry_find(PyObject *numbers, const void *address);

#endif
