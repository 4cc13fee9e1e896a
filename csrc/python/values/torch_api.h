/* PyTorch's objects for the binding, looked up once.
 *
 * Threads  Written by smp_torch_load() under the GIL; read with the GIL held.
 */
#ifndef SMP_PYTHON_VALUES_TORCH_API_H
#define SMP_PYTHON_VALUES_TORCH_API_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "python/values/dlpack_abi.h"

typedef struct {
    const dl_exchange *dlpack;
    PyTypeObject      *tensor;
    PyTypeObject      *parameter;
    PyTypeObject      *size;        /* torch.Size */
    PyTypeObject      *dtype;       /* type(torch.float32) */
    PyTypeObject      *device;      /* torch.device */
    PyTypeObject      *module;      /* torch.nn.Module */
    PyTypeObject      *defaultdict; /* collections.defaultdict */
    PyObject          *torch;
    PyObject          *is_grad_enabled;
    PyObject          *set_grad_enabled;
    PyObject          *is_inference;
    PyObject          *run_backward; /* the engine's */
    PyObject          *sequence;     /* -> the count of nodes that autograd made here */
    PyObject          *get_gradient_edge;
    PyObject          *saved_hooks; /* the thread's innermost, or None */
    PyObject          *generator;   /* the default CPU generator */
    PyObject          *set_multithreading;
    PyObject          *backend_error; /* torch.distributed.DistBackendError */
} smp_torch_api;

extern smp_torch_api smp_torch;

/* Imports torch.  0, or -1 with an exception. */
int smp_torch_load(void);

/* 1, 0; -1 with an exception. */
int smp_torch_grad_enabled(void);
int smp_torch_set_grad(bool enabled);

/* The attribute as a truth value; -1 with an exception. */
int smp_attr_true(PyObject *object, PyObject *interned_name);

/* Whether it is a tensor, of any subclass. */
static inline bool
smp_is_tensor(PyObject *object)
{
    return PyObject_TypeCheck(object, smp_torch.tensor);
}

/* Attribute and method names, interned once. */
typedef struct {
    PyObject *requires_grad, *is_conj, *is_neg, *resolve_conj, *resolve_neg, *_version,
        *get_state, *set_state, *manual_seed, *random_, *grad, *dict, *module,
        *qualname, *copy_, *grad_fn, *clone, *add_, *detach, *device, *_fields,
        *default_factory, *_backward_hooks, *next_functions, *output_nr, *packed,
        *fetch_all, *aliased, *view_as, *origin, *values;
} smp_names_table;

extern smp_names_table smp_names;

#endif
