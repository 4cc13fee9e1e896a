/* Buffers in, bytes out: the arrays of smp_partition_decide() are array.array's,
 * numpy's or other memory on the way in, and bytes on the way out. */
#define PY_SSIZE_T_CLEAN
#include "python/partition_binding.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "partition/partition.h"

/* The arrays of a call, in the order of its arguments. */
enum {
    EDGE_PARENT,
    EDGE_CHILD,
    PARAMETER_BYTES,
    USE_MODULE,
    USE_PARAMETER,
    FIRST_RUN,
    ACTIVATION_BYTES,
    SECONDS,
    CHAIN,
    PIN,
    NARRAYS
};

typedef struct {
    const char *name;
    const char *formats; /* accepted struct codes of the element */
    Py_ssize_t  itemsize;
    bool        per_module; /* one element for each module, or None */
} array_kind;

static const array_kind kinds[NARRAYS] = {
    [EDGE_PARENT] = {"edge_parent", "il", 4, false},
    [EDGE_CHILD] = {"edge_child", "il", 4, false},
    [PARAMETER_BYTES] = {"parameter_bytes", "lq", 8, false},
    [USE_MODULE] = {"use_module", "il", 4, false},
    [USE_PARAMETER] = {"use_parameter", "il", 4, false},
    [FIRST_RUN] = {"first_run", "lq", 8, true},
    [ACTIVATION_BYTES] = {"activation_bytes", "lq", 8, true},
    [SECONDS] = {"seconds", "d", 8, true},
    [CHAIN] = {"chain", "bB?", 1, true},
    [PIN] = {"pin", "il", 4, true},
};

/* Borrows the memory of `object` into view; leaves view->obj NULL for None. */
static int
borrow_array(PyObject *object, const array_kind *kind, Py_ssize_t nmodules,
             Py_buffer *view)
{
    const char *format;

    if (object == Py_None && kind->per_module) {
        return 0;
    }
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT) < 0) {
        return -1;
    }
    format = view->format == NULL ? "B" : view->format;
    format += *format == '@' || *format == '=';
    if (view->ndim != 1 || view->itemsize != kind->itemsize || format[0] == '\0' ||
        format[1] != '\0' || strchr(kind->formats, format[0]) == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "%s: one dimension of %zd-byte elements of type '%s', got %d of "
                     "%zd-byte '%s'",
                     kind->name, kind->itemsize, kind->formats, view->ndim,
                     view->itemsize, format);
        return -1;
    }
    if (kind->per_module && view->shape[0] != nmodules) {
        PyErr_Format(PyExc_ValueError, "%s: %zd elements for %zd modules", kind->name,
                     view->shape[0], nmodules);
        return -1;
    }
    if (view->shape[0] > INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%s: %zd elements", kind->name,
                     view->shape[0]);
        return -1;
    }
    return 0;
}

static bool
same_length(const Py_buffer *views, int a, int b)
{
    if (views[a].shape[0] == views[b].shape[0]) {
        return true;
    }
    PyErr_Format(PyExc_ValueError, "%s has %zd elements, %s %zd", kinds[a].name,
                 views[a].shape[0], kinds[b].name, views[b].shape[0]);
    return false;
}

/* Sets the exception for a refused decision. */
static void
raise_refusal(PyObject *module, smp_status status, const int32_t conflict[2])
{
    if (status == SMP_ERR_NO_MEMORY) {
        PyErr_NoMemory();
    } else if (conflict[0] < 0) {
        PyErr_Format(PyExc_ValueError,
                     "partition: an index or number out of range: %s [%s]",
                     smp_status_text(status), smp_status_name(status));
    } else {
        PyObject *type = PyObject_GetAttrString(module, "PartitionConflict");
        PyObject *args =
            type == NULL ? NULL : Py_BuildValue("(ii)", conflict[0], conflict[1]);

        if (args != NULL) {
            PyErr_SetObject(type, args);
            Py_DECREF(args);
        }
        Py_XDECREF(type);
    }
}

/* Decides and returns (device, node, own_cost, cost) as bytes. */
static PyObject *
decide(PyObject *module, const smp_partition_input *input)
{
    Py_ssize_t           n = input->nmodules;
    size_t               need = smp_partition_scratch_bytes(input);
    smp_partition_output output;
    smp_status           status;
    int32_t              conflict[2];
    void                *scratch;
    PyObject            *device;
    PyObject            *node;
    PyObject            *own_cost;
    PyObject            *cost;
    PyObject            *result = NULL;

    if (need == 0) {
        PyErr_Format(PyExc_ValueError,
                     "partition: devices must be 1 to %d and memory_weight in [0, 1], "
                     "got %d and default_device %d",
                     SMP_PARTITION_MAX_DEVICES, input->devices, input->default_device);
        return NULL;
    }
    scratch = PyMem_Malloc(need);
    device = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(int32_t));
    node = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(int32_t));
    own_cost = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(double));
    cost = PyBytes_FromStringAndSize(NULL, input->devices * (Py_ssize_t)sizeof(double));
    if (scratch == NULL || device == NULL || node == NULL || own_cost == NULL ||
        cost == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    output.device = (int32_t *)(void *)PyBytes_AS_STRING(device);
    output.node = (int32_t *)(void *)PyBytes_AS_STRING(node);
    output.own_cost = (double *)(void *)PyBytes_AS_STRING(own_cost);
    output.cost = (double *)(void *)PyBytes_AS_STRING(cost);
    status = smp_partition_decide(input, scratch, need, &output, conflict);
    if (status == SMP_OK) {
        result = PyTuple_Pack(4, device, node, own_cost, cost);
    } else {
        raise_refusal(module, status, conflict);
    }
done:
    Py_XDECREF(cost);
    Py_XDECREF(own_cost);
    Py_XDECREF(node);
    Py_XDECREF(device);
    PyMem_Free(scratch);
    return result;
}

PyDoc_STRVAR(
    partition_doc,
    "partition(devices, memory_weight, default_device, nmodules, edge_parent,\n"
    "          edge_child, parameter_bytes, use_module, use_parameter,\n"
    "          first_run=None, activation_bytes=None, seconds=None,\n"
    "          chain=None, pin=None)\n"
    "--\n\n"
    "Which device each module sits on; see csrc/partition/partition.h.\n\n"
    "Arrays are buffers: int32 for indices and pins, int64 for bytes and\n"
    "positions, float64 for seconds, int8 for chain.  Returns four bytes\n"
    "objects: device and node (int32 by module), own_cost (float64 by\n"
    "module), cost (float64 by device).  Raises ValueError, and\n"
    "PartitionConflict(a, b) when modules a and b share a parameter and are\n"
    "pinned to different devices.");

static PyObject *
partition(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char        *names[] = {"devices",
                                   "memory_weight",
                                   "default_device",
                                   "nmodules",
                                   "edge_parent",
                                   "edge_child",
                                   "parameter_bytes",
                                   "use_module",
                                   "use_parameter",
                                   "first_run",
                                   "activation_bytes",
                                   "seconds",
                                   "chain",
                                   "pin",
                                   NULL};
    smp_partition_input input;
    Py_buffer           views[NARRAYS];
    PyObject           *arrays[NARRAYS];
    PyObject           *result = NULL;

    memset(&input, 0, sizeof(input));
    memset(views, 0, sizeof(views));
    for (int i = 0; i < NARRAYS; i++) {
        arrays[i] = Py_None;
    }
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "idiiOOOOO|OOOOO:partition", names, &input.devices,
            &input.memory_weight, &input.default_device, &input.nmodules, &arrays[0],
            &arrays[1], &arrays[2], &arrays[3], &arrays[4], &arrays[5], &arrays[6],
            &arrays[7], &arrays[8], &arrays[9])) {
        return NULL;
    }
    for (int i = 0; i < NARRAYS; i++) {
        if (borrow_array(arrays[i], &kinds[i], input.nmodules, &views[i]) < 0) {
            goto done;
        }
    }
    if (!same_length(views, EDGE_PARENT, EDGE_CHILD) ||
        !same_length(views, USE_MODULE, USE_PARAMETER)) {
        goto done;
    }
    input.nedges = (int32_t)views[EDGE_PARENT].shape[0];
    input.edge_parent = views[EDGE_PARENT].buf;
    input.edge_child = views[EDGE_CHILD].buf;
    input.nparameters = (int32_t)views[PARAMETER_BYTES].shape[0];
    input.parameter_bytes = views[PARAMETER_BYTES].buf;
    input.nuses = (int32_t)views[USE_MODULE].shape[0];
    input.use_module = views[USE_MODULE].buf;
    input.use_parameter = views[USE_PARAMETER].buf;
    input.first_run = views[FIRST_RUN].buf;
    input.activation_bytes = views[ACTIVATION_BYTES].buf;
    input.seconds = views[SECONDS].buf;
    input.chain = views[CHAIN].buf;
    input.pin = views[PIN].buf;
    result = decide(module, &input);
done:
    for (int i = 0; i < NARRAYS; i++) {
        PyBuffer_Release(&views[i]); /* does nothing where none was borrowed */
    }
    return result;
}

PyDoc_STRVAR(partition_hash_doc,
             "partition_hash(device, names)\n"
             "--\n\n"
             "A number for the ranks to compare: of the int32 buffer `device` and the\n"
             "bytes `names`, an int of 64 bits.");

static PyObject *
partition_hash(PyObject *module, PyObject *args)
{
    static const array_kind kind = {"device", "il", 4, false};
    PyObject               *object;
    Py_buffer               device = {0};
    Py_buffer               names = {0};
    PyObject               *result = NULL;

    (void)module;
    if (!PyArg_ParseTuple(args, "Oy*:partition_hash", &object, &names)) {
        return NULL;
    }
    if (borrow_array(object, &kind, 0, &device) == 0) {
        result = PyLong_FromUnsignedLongLong(smp_partition_hash(
            device.buf, (int32_t)device.shape[0], names.buf, (size_t)names.len));
    }
    PyBuffer_Release(&device);
    PyBuffer_Release(&names);
    return result;
}

static PyMethodDef functions[] = {
    {"partition", __extension__(PyCFunction)(void (*)(void)) partition,
     METH_VARARGS | METH_KEYWORDS, partition_doc},
    {"partition_hash", partition_hash, METH_VARARGS, partition_hash_doc},
    {NULL, NULL, 0, NULL},
};

int
smp_python_add_partition(PyObject *module)
{
    PyObject *conflict =
        PyErr_NewException("smp._core.PartitionConflict", PyExc_ValueError, NULL);

    if (conflict == NULL) {
        return -1;
    }
    if (PyModule_AddObject(module, "PartitionConflict", conflict) < 0) {
        Py_DECREF(conflict);
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
