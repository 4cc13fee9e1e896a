/* The ledger over PyTorch's .grad. */
#include "python/modules/gradients.h"

#include <stdlib.h>

#include "python/modules/task.h"
#include "python/values/torch_api.h"
#include "server/envelope.h"
#include "server/ledger.h"

static struct {
    smp_ledger *ledger;
    PyObject   *parameters;  /* list: the local parameters, by number */
    PyObject   *hooks;       /* list: their hooks' handles */
    PyObject   *all_hooks;   /* list: dicts of these hooks, and of the script's */
    PyObject  **base;        /* owned, by number: the gradient outside the ledger */
    bool       *had;         /* by number: there was a gradient when the step began */
    bool       *complete;    /* by number: .grad is base again */
    bool        leaves_out;  /* some may be zeros of outputs that no loss uses */
    PyObject   *on_complete; /* parameter number -> None; NULL: not asked for */
    PyObject   *mix_layouts; /* base, term -> sum, when one of them is sparse */
    bool        active;
} gradients;

/* -------------------------------------------------------------------- the ops */

/* *sum += term, as torch adds; takes term. */
static smp_status
add_tensors(PyObject **sum, PyObject *term)
{
    static PyObject *is_sparse;
    PyObject        *added;
    int              sparse;

    if (is_sparse == NULL) {
        is_sparse = PyUnicode_InternFromString("is_sparse");
    }
    sparse = smp_attr_true(*sum, is_sparse);
    if (sparse == 0) {
        sparse = smp_attr_true(term, is_sparse);
    }
    added = sparse < 0 ? NULL
            : sparse
                ? PyObject_CallFunctionObjArgs(gradients.mix_layouts, *sum, term, NULL)
                : PyObject_CallMethodOneArg(*sum, smp_names.add_, term);
    Py_DECREF(term);
    if (added == NULL) {
        return SMP_ERR_INVALID;
    }
    Py_SETREF(*sum, added);
    return SMP_OK;
}

static smp_status
op_add(void *ctx, void **sum, void *term)
{
    PyObject  *into = *sum;
    smp_status status = add_tensors(&into, term);

    (void)ctx;
    *sum = into;
    return status;
}

/* An unexpected contribution to a complete parameter: takes the gradient back, until
 * the end of the step. */
static int
reopen(int32_t i)
{
    PyObject *parameter = PyList_GET_ITEM(gradients.parameters, i);
    PyObject *grad = PyObject_GetAttr(parameter, smp_names.grad);

    if (grad == NULL) {
        return -1;
    }
    if (grad != Py_None) {
        Py_XSETREF(gradients.base[i], Py_NewRef(grad));
    }
    Py_DECREF(grad);
    gradients.complete[i] = false;
    return PyObject_SetAttr(parameter, smp_names.grad, Py_None);
}

static smp_status
op_fold(void *ctx, int32_t parameter, void *sum)
{
    (void)ctx;
    if (gradients.complete[parameter] && reopen(parameter) < 0) {
        Py_DECREF((PyObject *)sum);
        return SMP_ERR_INVALID;
    }
    if (gradients.base[parameter] == NULL) {
        gradients.base[parameter] = sum;
        return SMP_OK;
    }
    return add_tensors(&gradients.base[parameter], sum);
}

/* Gives the parameter its gradient back. */
static int
restore(Py_ssize_t i)
{
    PyObject *parameter = PyList_GET_ITEM(gradients.parameters, i);
    int       failed = 0;

    if (gradients.base[i] != NULL) {
        failed = PyObject_SetAttr(parameter, smp_names.grad, gradients.base[i]);
        Py_CLEAR(gradients.base[i]);
    }
    gradients.complete[i] = true;
    return failed;
}

static smp_status
op_complete(void *ctx, int32_t parameter)
{
    (void)ctx;
    if (restore(parameter) < 0) {
        return SMP_ERR_INVALID;
    }
    if (gradients.on_complete != NULL) {
        PyObject *done = PyObject_CallFunction(gradients.on_complete, "i", parameter);

        if (done == NULL) {
            return SMP_ERR_INVALID;
        }
        Py_DECREF(done);
    }
    return SMP_OK;
}

static void
op_drop(void *ctx, void *term)
{
    (void)ctx;
    Py_DECREF((PyObject *)term);
}

static const smp_ledger_ops ledger_ops = {op_add, op_fold, op_complete, op_drop};

static int
raise_unless_ok(smp_status status, const char *doing)
{
    if (status == SMP_OK) {
        return 0;
    }
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_RuntimeError, "smp: %s: %s [%s]", doing,
                     smp_status_text(status), smp_status_name(status));
    }
    return -1;
}

/* -------------------------------------------------------------------- the events */

bool
smp_gradients_share(int32_t entry, const int32_t *others, size_t nothers)
{
    return gradients.ledger != NULL &&
           smp_ledger_share(gradients.ledger, entry, others, nothers);
}

int
smp_gradients_open(int32_t microbatch, uint64_t order, int32_t entry)
{
    if (!gradients.active) {
        return 0;
    }
    return raise_unless_ok(smp_ledger_open(gradients.ledger, microbatch, order, entry),
                           "opening a request's gradients");
}

int
smp_gradients_close(int32_t microbatch, uint64_t order, int32_t entry)
{
    if (!gradients.active) {
        return 0;
    }
    return raise_unless_ok(smp_ledger_close(gradients.ledger, microbatch, order, entry),
                           "adding up gradients");
}

int
smp_gradients_promise(int32_t microbatch, uint64_t order, int32_t entry)
{
    if (!gradients.active) {
        return 0;
    }
    return raise_unless_ok(
        smp_ledger_promise(gradients.ledger, microbatch, order, entry),
        "noting a request of a checkpoint");
}

int
smp_gradients_suspect(int32_t microbatch, int32_t entry)
{
    if (!gradients.active) {
        return 0;
    }
    return raise_unless_ok(smp_ledger_suspect(gradients.ledger, microbatch, entry),
                           "noting a request without a graph");
}

int
smp_gradients_backward(int32_t microbatch, int32_t backward)
{
    if (!gradients.active) {
        return 0;
    }
    return raise_unless_ok(smp_ledger_backward(gradients.ledger, microbatch, backward),
                           "beginning a backward");
}

int
smp_gradients_done(int32_t microbatch)
{
    if (!gradients.active) {
        return 0;
    }
    return raise_unless_ok(smp_ledger_done(gradients.ledger, microbatch),
                           "adding up gradients");
}

/* The hook of parameter number `number`, right after the engine accumulated.  An
 * undefined gradient leaves none, as behind a remote module with a detached output.
 */
static PyObject *
accumulated(PyObject *number, PyObject *parameter)
{
    smp_task *task = smp_this_task;
    PyObject *term;

    if (!gradients.active || task == NULL) {
        Py_RETURN_NONE;
    }
    term = PyObject_GetAttr(parameter, smp_names.grad);
    if (term == Py_None) {
        return term;
    }
    if (term == NULL || PyObject_SetAttr(parameter, smp_names.grad, Py_None) < 0) {
        Py_XDECREF(term);
        return NULL;
    }
    if (raise_unless_ok(smp_ledger_add(gradients.ledger, task->microbatch,
                                       task->backwards, task->order,
                                       (int32_t)PyLong_AsLong(number), term),
                        "adding up gradients") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef accumulated_def = {
    "accumulated", accumulated, METH_O,
    "Takes a parameter's new gradient into the ledger."};

/* -------------------------------------------------------------------- the binding */

static void
forget(void)
{
    const Py_ssize_t n =
        gradients.parameters == NULL ? 0 : PyList_GET_SIZE(gradients.parameters);
    const Py_ssize_t hooked =
        gradients.hooks == NULL ? 0 : PyList_GET_SIZE(gradients.hooks);
    PyObject *type;
    PyObject *error;
    PyObject *traceback;

    PyErr_Fetch(&type, &error, &traceback);
    smp_ledger_destroy(gradients.ledger);
    gradients.ledger = NULL;
    for (Py_ssize_t i = 0; i < hooked; i++) {
        PyObject *removed =
            PyObject_CallMethod(PyList_GET_ITEM(gradients.hooks, i), "remove", NULL);

        if (removed == NULL) {
            PyErr_Clear();
        }
        Py_XDECREF(removed);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_XDECREF(gradients.base[i]);
    }
    PyErr_Restore(type, error, traceback);
    Py_CLEAR(gradients.parameters);
    Py_CLEAR(gradients.hooks);
    Py_CLEAR(gradients.all_hooks);
    free(gradients.base);
    free(gradients.had);
    free(gradients.complete);
    gradients.base = NULL;
    gradients.had = NULL;
    gradients.complete = NULL;
}

static int
add_hooks(PyObject *parameters)
{
    gradients.hooks = PyList_New(0);
    gradients.all_hooks = PyList_New(0);
    if (gradients.hooks == NULL || gradients.all_hooks == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters); i++) {
        PyObject *number = PyLong_FromSsize_t(i);
        PyObject *hook =
            number == NULL ? NULL : PyCFunction_New(&accumulated_def, number);
        PyObject *handle =
            hook == NULL
                ? NULL
                : PyObject_CallMethod(PyList_GET_ITEM(parameters, i),
                                      "register_post_accumulate_grad_hook", "O", hook);
        PyObject *all = handle == NULL || PyList_Append(gradients.hooks, handle) < 0
                            ? NULL
                            : PyObject_GetAttrString(PyList_GET_ITEM(parameters, i),
                                                     "_post_accumulate_grad_hooks");
        int       failed = all == NULL || PyList_Append(gradients.all_hooks, all) < 0;

        Py_XDECREF(number);
        Py_XDECREF(hook);
        Py_XDECREF(handle);
        Py_XDECREF(all);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

/* gradients_hooked() -> a parameter with a hook of the script's like the core's, or
 * None */
static PyObject *
py_hooked(PyObject *module, PyObject *unused)
{
    PyObject *all = gradients.all_hooks;

    (void)module;
    (void)unused;
    for (Py_ssize_t i = 0; all != NULL && i < PyList_GET_SIZE(all); i++) {
        const Py_ssize_t n = PyObject_Size(PyList_GET_ITEM(all, i));

        if (n < 0 || n > 1) {
            return n < 0 ? NULL : Py_NewRef(PyList_GET_ITEM(gradients.parameters, i));
        }
    }
    Py_RETURN_NONE;
}

/* gradients_setup(parameters, first, uses, mix_layouts): first and uses are int32
 * buffers as smp_ledger_create() takes them. */
static PyObject *
py_setup(PyObject *module, PyObject *args)
{
    PyObject  *parameters;
    Py_buffer  first;
    Py_buffer  uses;
    PyObject  *mix;
    smp_status status;
    size_t     n;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!y*y*O", &PyList_Type, &parameters, &first, &uses,
                          &mix)) {
        return NULL;
    }
    forget();
    n = (size_t)PyList_GET_SIZE(parameters);
    gradients.base = calloc(n + 1, sizeof(PyObject *));
    gradients.had = calloc(n + 1, sizeof(bool));
    gradients.complete = calloc(n + 1, sizeof(bool));
    Py_XSETREF(gradients.mix_layouts, Py_NewRef(mix));
    status = smp_ledger_create((int32_t)n, (int32_t)(first.len / 4) - 1, first.buf,
                               uses.buf, &ledger_ops, NULL, &gradients.ledger);
    PyBuffer_Release(&first);
    PyBuffer_Release(&uses);
    if (gradients.base == NULL || gradients.had == NULL || gradients.complete == NULL) {
        return PyErr_NoMemory();
    }
    if (raise_unless_ok(status, "preparing the gradients") < 0) {
        return NULL;
    }
    gradients.parameters = PyList_GetSlice(parameters, 0, PyList_GET_SIZE(parameters));
    if (gradients.parameters == NULL || add_hooks(parameters) < 0) {
        forget();
        return NULL;
    }
    Py_RETURN_NONE;
}

/* gradients_begin(microbatches, backwards, on_complete): a step begins. */
static PyObject *
py_begin(PyObject *module, PyObject *args)
{
    int       microbatches;
    int       backwards;
    PyObject *on_complete;

    (void)module;
    if (!PyArg_ParseTuple(args, "iiO", &microbatches, &backwards, &on_complete)) {
        return NULL;
    }
    gradients.leaves_out = false;
    if (gradients.ledger == NULL) {
        Py_RETURN_NONE;
    }
    if (raise_unless_ok(smp_ledger_begin(gradients.ledger, microbatches, backwards),
                        "beginning a step") < 0) {
        return NULL;
    }
    Py_CLEAR(gradients.on_complete);
    if (on_complete != Py_None) {
        gradients.on_complete = Py_NewRef(on_complete);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(gradients.parameters); i++) {
        PyObject *parameter = PyList_GET_ITEM(gradients.parameters, i);
        PyObject *grad = PyObject_GetAttr(parameter, smp_names.grad);

        if (grad == NULL) {
            return NULL;
        }
        gradients.complete[i] = false;
        gradients.had[i] = grad != Py_None;
        if (grad == Py_None) {
            Py_DECREF(grad);
            continue;
        }
        Py_XSETREF(gradients.base[i], grad);
        if (PyObject_SetAttr(parameter, smp_names.grad, Py_None) < 0) {
            return NULL;
        }
    }
    gradients.active = true;
    Py_RETURN_NONE;
}

/* gradients_end(failed): every .grad is back; after a failure a former None is None
 * again. */
static PyObject *
py_end(PyObject *module, PyObject *failed)
{
    int lost = PyObject_IsTrue(failed);

    (void)module;
    if (!gradients.active) {
        Py_RETURN_NONE;
    }
    if (lost) {
        smp_ledger_abandon(gradients.ledger);
    } else if (raise_unless_ok(smp_ledger_end(gradients.ledger),
                               "adding up gradients") < 0) {
        return NULL;
    }
    gradients.active = false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(gradients.parameters); i++) {
        PyObject *parameter = PyList_GET_ITEM(gradients.parameters, i);

        if (lost && !gradients.had[i]) {
            Py_CLEAR(gradients.base[i]);
            if (PyObject_SetAttr(parameter, smp_names.grad, Py_None) < 0) {
                return NULL;
            }
        }
        if (gradients.complete[i]) {
            continue;
        }
        if (lost ? restore(i) < 0 : op_complete(NULL, (int32_t)i) != SMP_OK) {
            return NULL;
        }
    }
    Py_CLEAR(gradients.on_complete);
    Py_RETURN_NONE;
}

void
smp_gradients_note(uint16_t flags)
{
    gradients.leaves_out = gradients.leaves_out || (flags & SMP_FLAG_UNUSED) != 0;
}

uint16_t
smp_gradients_flags(void)
{
    return gradients.leaves_out ? SMP_FLAG_UNUSED : 0;
}

static PyObject *
py_leave_out(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    gradients.leaves_out = true;
    Py_RETURN_NONE;
}

static PyObject *
py_leaves_out(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(gradients.leaves_out);
}

static smp_status
append_to(void *list, void *term)
{
    return PyList_Append(list, term) < 0 ? SMP_ERR_INVALID : SMP_OK;
}

/* The gradients hidden from .grad while a step runs. */
static PyObject *
py_taken(PyObject *module, PyObject *unused)
{
    PyObject *list = PyList_New(0);
    int       failed = list == NULL;

    (void)module;
    (void)unused;
    if (gradients.ledger == NULL) {
        return list;
    }
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(gradients.parameters); i++) {
        failed =
            gradients.base[i] != NULL && PyList_Append(list, gradients.base[i]) < 0;
    }
    if (failed || smp_ledger_visit(gradients.ledger, append_to, list) != SMP_OK) {
        Py_XDECREF(list);
        return NULL;
    }
    return list;
}

static PyObject *
py_held(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromSize_t(
        gradients.ledger == NULL ? 0 : smp_ledger_held(gradients.ledger));
}

static PyMethodDef functions[] = {
    {"gradients_setup", py_setup, METH_VARARGS,
     "gradients_setup(parameters, first, uses, mix_layouts)"},
    {"gradients_begin", py_begin, METH_VARARGS,
     "gradients_begin(microbatches, backwards, on_complete)"},
    {"gradients_leave_out", py_leave_out, METH_NOARGS,
     "gradients_leave_out(): some of the step may be zeros of what no loss uses"},
    {"gradients_leaves_out", py_leaves_out, METH_NOARGS,
     "gradients_leaves_out() -> whether that was said here, or on a rank that sent "
     "some"},
    {"gradients_hooked", py_hooked, METH_NOARGS,
     "gradients_hooked() -> a parameter with another hook on its sum, or None"},
    {"gradients_end", py_end, METH_O, "gradients_end(failed)"},
    {"gradients_taken", py_taken, METH_NOARGS,
     "gradients_taken() -> [gradients and terms of this step that no .grad has]"},
    {"gradients_held", py_held, METH_NOARGS, "Terms that wait for their turn."},
    {NULL, NULL, 0, NULL},
};

int
smp_gradients_add_functions(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
