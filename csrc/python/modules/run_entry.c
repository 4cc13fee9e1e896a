/* One call of a module on its owner, in its caller's modes. */
#include "python/modules/run_entry.h"

#include "python/modules/history.h"
#include "python/modules/hooks.h"

/* The thread's gradient mode is on again; an error, if the module has left another one
 * than it was called in: its caller does not see that.  Takes the value. */
static PyObject *
leave_grad_mode(const smp_entry *entry, bool wanted, PyObject *value)
{
    PyObject *type;
    PyObject *error;
    PyObject *traceback;
    int       left;

    PyErr_Fetch(&type, &error, &traceback); /* the module's exception comes first */
    left = smp_torch_grad_enabled();
    if (left == 0 && smp_torch_set_grad(true) < 0) {
        left = -1;
    }
    if (value != NULL && left >= 0 && left != wanted) {
        PyErr_Format(
            PyExc_RuntimeError,
            "smp: module '%U' has left torch's gradient mode %s, and was called "
            "with it %s: its caller on another rank goes on as before; restore "
            "it, as `with torch.set_grad_enabled(...)` does, or put module and "
            "caller on one rank with smp.set_partition",
            entry->path, left ? "on" : "off", wanted ? "on" : "off");
        left = -1;
    }
    if (left < 0) {
        Py_CLEAR(value);
    }
    if (type != NULL) {
        PyErr_Restore(type, error, traceback);
    }
    return value;
}

PyObject *
smp_run_entry(const smp_entry *entry, uint16_t flags, PyObject *state, PyObject *args,
              PyObject *kwargs)
{
    PyObject *function = entry->callable;
    PyObject *given = Py_NewRef(args);
    PyObject *named = kwargs == NULL ? Py_None : kwargs;
    PyObject *value;

    if (smp_this_task != NULL && smp_history_give(smp_this_task, args, kwargs) < 0) {
        Py_DECREF(given);
        return NULL;
    }
    if ((flags & (SMP_FLAG_BARE | SMP_FLAG_INPUTS)) || smp_has_hooks(entry->module)) {
        Py_SETREF(given, PyTuple_Pack(5, entry->module, given, named,
                                      flags & SMP_FLAG_BARE ? Py_True : Py_False,
                                      flags & SMP_FLAG_INPUTS ? Py_True : Py_False));
        function = smp_the_session.serve_hooked;
        named = Py_None;
    }
    if (state != NULL && given != NULL) {
        Py_SETREF(given, PyTuple_Pack(4, state, function, given, named));
        function = smp_the_session.with_state;
        named = Py_None;
    }
    if ((flags & SMP_FLAG_FIRST) && given != NULL) {
        Py_SETREF(given, PyTuple_Pack(3, function, given, named));
        function = smp_the_session.run_first;
        named = Py_None;
    }
    if (function == entry->callable && smp_the_session.serve != NULL && given != NULL) {
        Py_SETREF(given, PyTuple_Pack(3, function, given, named));
        function = smp_the_session.serve;
        named = Py_None;
    }
    if (given == NULL || (!(flags & SMP_FLAG_GRAD) && smp_torch_set_grad(false) < 0)) {
        Py_XDECREF(given);
        return NULL;
    }
    value = PyObject_Call(function, given, named == Py_None ? NULL : named);
    Py_DECREF(given);
    return leave_grad_mode(entry, (flags & SMP_FLAG_GRAD) != 0, value);
}

/* Whether code has called register_hook on the tensor; -1 with an exception. */
static int
is_hooked(PyObject *tensor)
{
    PyObject *hooks = PyObject_GetAttr(tensor, smp_names._backward_hooks);

    if (hooks == NULL) {
        return -1;
    }
    Py_DECREF(hooks);
    return hooks != Py_None;
}

int
smp_warn_of_hooks(const smp_unpack *unpack, const smp_pack *pack,
                  const smp_entry *entry)
{
    int       got = 0;
    int       returned = 0;
    PyObject *done;

    for (size_t i = 0; i < unpack->ntensors && got == 0; i++) {
        got = unpack->requires_grad[i] ? is_hooked(unpack->tensors[i]) : 0;
    }
    for (size_t i = 0; i < pack->ntensors && got == 0 && returned == 0; i++) {
        returned = pack->in_graph[i] ? is_hooked(pack->tensors[i]) : 0;
    }
    if (got == 0 && returned == 0) {
        return 0;
    }
    if (got < 0 || returned < 0) {
        return -1;
    }
    done = PyObject_CallFunctionObjArgs(smp_the_session.warn_of_hook, entry->path,
                                        returned ? Py_True : Py_False, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}
