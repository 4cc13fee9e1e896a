/* The look-up of PyTorch's objects, once: the hot path follows no attribute chains. */
#include "python/values/torch_api.h"

smp_torch_api   smp_torch;
smp_names_table smp_names;

/* A new reference to root.a.b, for "a.b". */
static PyObject *
walk(PyObject *root, const char *dotted)
{
    PyObject *at = Py_NewRef(root);
    PyObject *parts = NULL;
    PyObject *text = PyUnicode_FromString(dotted);
    PyObject *dot = PyUnicode_FromString(".");

    if (text != NULL && dot != NULL) {
        parts = PyUnicode_Split(text, dot, -1);
    }
    Py_XDECREF(text);
    Py_XDECREF(dot);
    if (parts == NULL) {
        Py_DECREF(at);
        return NULL;
    }
    for (Py_ssize_t i = 0; at != NULL && i < PyList_GET_SIZE(parts); i++) {
        Py_SETREF(at, PyObject_GetAttr(at, PyList_GET_ITEM(parts, i)));
    }
    Py_DECREF(parts);
    return at;
}

static int
load_exchange(void)
{
    PyObject *capsule = PyObject_GetAttrString((PyObject *)smp_torch.tensor,
                                               "__dlpack_c_exchange_api__");

    if (capsule == NULL) {
        PyErr_SetString(PyExc_ImportError,
                        "smp needs PyTorch 2.10 or newer: torch.Tensor has no "
                        "__dlpack_c_exchange_api__");
        return -1;
    }
    smp_torch.dlpack = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (smp_torch.dlpack == NULL) {
        return -1;
    }
    if (smp_torch.dlpack->header.version.major != SMP_DLPACK_MAJOR) {
        PyErr_Format(PyExc_ImportError,
                     "smp speaks DLPack %d, this PyTorch offers version %u.%u",
                     SMP_DLPACK_MAJOR, smp_torch.dlpack->header.version.major,
                     smp_torch.dlpack->header.version.minor);
        return -1;
    }
    return 0;
}

static int
load_names(void)
{
    static const struct {
        PyObject  **slot;
        const char *name;
    } names[] = {
        {&smp_names.packed, "packed"},
        {&smp_names.fetch_all, "fetch_all"},
        {&smp_names.origin, "_smp_origin"},
        {&smp_names.values, "_smp_values"},
        {&smp_names.aliased, "aliased"},
        {&smp_names.requires_grad, "requires_grad"},
        {&smp_names.is_conj, "is_conj"},
        {&smp_names.is_neg, "is_neg"},
        {&smp_names.resolve_conj, "resolve_conj"},
        {&smp_names.resolve_neg, "resolve_neg"},
        {&smp_names._version, "_version"},
        {&smp_names.get_state, "get_state"},
        {&smp_names.set_state, "set_state"},
        {&smp_names.manual_seed, "manual_seed"},
        {&smp_names.random_, "random_"},
        {&smp_names.grad, "grad"},
        {&smp_names.dict, "__dict__"},
        {&smp_names.module, "__module__"},
        {&smp_names.qualname, "__qualname__"},
        {&smp_names.copy_, "copy_"},
        {&smp_names.grad_fn, "grad_fn"},
        {&smp_names._backward_hooks, "_backward_hooks"},
        {&smp_names.next_functions, "next_functions"},
        {&smp_names.output_nr, "output_nr"},
        {&smp_names.clone, "clone"},
        {&smp_names.add_, "add_"},
        {&smp_names.detach, "detach"},
        {&smp_names.view_as, "view_as"},
        {&smp_names.device, "device"},
        {&smp_names._fields, "_fields"},
        {&smp_names.default_factory, "default_factory"},
    };

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        *names[i].slot = PyUnicode_InternFromString(names[i].name);
        if (*names[i].slot == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
load_defaultdict(void)
{
    PyObject *collections = PyImport_ImportModule("collections");

    if (collections == NULL) {
        return -1;
    }
    smp_torch.defaultdict = (PyTypeObject *)walk(collections, "defaultdict");
    Py_DECREF(collections);
    return smp_torch.defaultdict == NULL ? -1 : 0;
}

int
smp_torch_load(void)
{
    PyObject *torch;
    struct {
        void      **slot;
        const char *path;
    } wanted[] = {
        {(void **)&smp_torch.tensor, "Tensor"},
        {(void **)&smp_torch.parameter, "nn.Parameter"},
        {(void **)&smp_torch.size, "Size"},
        {(void **)&smp_torch.dtype, "dtype"},
        {(void **)&smp_torch.device, "device"},
        {(void **)&smp_torch.module, "nn.Module"},
        {(void **)&smp_torch.is_grad_enabled, "is_grad_enabled"},
        {(void **)&smp_torch.set_grad_enabled, "_C._set_grad_enabled"},
        {(void **)&smp_torch.is_inference, "is_inference_mode_enabled"},
        {(void **)&smp_torch.run_backward,
         "autograd.Variable._execution_engine.run_backward"},
        {(void **)&smp_torch.sequence, "_C._autograd._get_sequence_nr"},
        {(void **)&smp_torch.get_gradient_edge, "autograd.graph.get_gradient_edge"},
        {(void **)&smp_torch.saved_hooks,
         "_C._autograd._top_saved_tensors_default_hooks"},
        {(void **)&smp_torch.generator, "default_generator"},
        {(void **)&smp_torch.set_multithreading, "_C._set_multithreading_enabled"},
        {(void **)&smp_torch.backend_error, "distributed.DistBackendError"},
    };

    if (smp_torch.torch != NULL) {
        return 0;
    }
    torch = PyImport_ImportModule("torch");
    if (torch == NULL) {
        return -1;
    }
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        PyObject *found = walk(torch, wanted[i].path);

        if (found == NULL) {
            Py_DECREF(torch);
            return -1;
        }
        *wanted[i].slot = found;
    }
    if (load_exchange() < 0 || load_names() < 0 || load_defaultdict() < 0) {
        Py_DECREF(torch);
        return -1;
    }
    smp_torch.torch = torch;
    return 0;
}

/* Takes result. */
static int
truth(PyObject *result)
{
    int is_true;

    if (result == NULL) {
        return -1;
    }
    is_true = result == Py_True ? 1 : result == Py_False ? 0 : PyObject_IsTrue(result);
    Py_DECREF(result);
    return is_true;
}

int
smp_torch_grad_enabled(void)
{
    return truth(PyObject_CallNoArgs(smp_torch.is_grad_enabled));
}

int
smp_torch_set_grad(bool enabled)
{
    PyObject *result =
        PyObject_CallOneArg(smp_torch.set_grad_enabled, enabled ? Py_True : Py_False);

    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int
smp_attr_true(PyObject *object, PyObject *interned_name)
{
    return truth(PyObject_GetAttr(object, interned_name));
}
