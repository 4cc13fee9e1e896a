/* Forwards and backwards of Send and Recv. */
#include "python/modules/nodes.h"

#include <stdlib.h>

#include "comm/messaging/comm.h"
#include "python/modules/gradients.h"
#include "python/modules/passing_gradients.h"
#include "python/modules/placeholders.h"
#include "python/modules/reach.h"
#include "python/modules/session.h"
#include "python/modules/task.h"
#include "python/modules/wait.h"
#include "python/values/dlpack_abi.h"
#include "python/values/pack_scalar.h"
#include "python/values/pack_value.h"
#include "python/values/unpack_scalar.h"
#include "python/values/unpack_tensor.h"
#include "python/values/unpack_value.h"

static PyTypeObject *call_type;

smp_call_object *
smp_call_new(void)
{
    return (smp_call_object *)call_type->tp_alloc(call_type, 0);
}

bool
smp_call_is_of_this_step(const smp_call_object *self)
{
    const smp_session *session = &smp_the_session;

    return session->in_step && self->opened == session->opened &&
           self->step == session->step;
}

static void
release_at(const smp_call_object *self, int owner, uint64_t call)
{
    smp_session *session = &smp_the_session;
    smp_envelope envelope = {.kind = SMP_MSG_RELEASE,
                             .microbatch = self->microbatch,
                             .step = session->step,
                             .entry = self->entry,
                             .about = call};

    (void)smp_comm_send(session->comm, smp_session_rank_of_comm(owner), &envelope,
                        sizeof(envelope), NULL, 0);
}

void
smp_call_release(smp_call_object *self, size_t nstretches)
{
    if (!self->open || self->backward != 0 || !smp_call_is_of_this_step(self)) {
        return;
    }
    self->open = false;
    for (size_t i = 0; i < nstretches && self->stretches != NULL; i++) {
        release_at(self, self->stretches[i].owner, self->stretches[i].call);
    }
    if (self->stretches == NULL) {
        release_at(self, self->owner, self->call);
    }
}

static void
call_dealloc(PyObject *object)
{
    smp_call_object *self = (smp_call_object *)object;
    PyTypeObject    *type = Py_TYPE(object);

    smp_call_release(self, self->nstretches);
    free(self->stretches);
    Py_XDECREF(self->path);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->placeholders);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *name_call;
static PyObject *name_materialize;
static PyObject *name_save;
static PyObject *name_saved;
static PyObject *name_item;

/* ctx.call = call, and undefined gradients stay undefined. */
static int
remember(PyObject *ctx, PyObject *call)
{
    if (PyObject_SetAttr(ctx, name_call, call) < 0) {
        return -1;
    }
    return PyObject_SetAttr(ctx, name_materialize, Py_False);
}

/* The call's token between its two nodes, and in backward the gradient's, since Send
 * runs only for a defined one: a float32 tensor without elements. */
static PyObject *
make_token(void)
{
    static const int64_t         shape[1] = {0};
    static const int64_t         strides[1] = {1};
    static const smp_tensor_meta meta = {.dtype = {SMP_DL_FLOAT, 32, 1}, .ndim = 1};

    return smp_tensor_copy_of(&meta, shape, strides, NULL);
}

/* Send.forward(ctx, call, leaf, *tensors) -> token */
static PyObject *
send_forward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    (void)unused;
    if (nargs < 3 || remember(args[0], args[1]) < 0) {
        return NULL;
    }
    return make_token();
}

/* Has the node save a tensor with the call's number. */
static int
save_number(PyObject *ctx, uint64_t number)
{
    static const int64_t         shape[1] = {1};
    static const int64_t         strides[1] = {1};
    static const smp_tensor_meta meta = {
        .dtype = {SMP_DL_INT, 64, 1}, .ndim = 1, .bytes = sizeof(number)};
    PyObject *tensor = smp_tensor_copy_of(&meta, shape, strides, &number);
    PyObject *saved =
        tensor == NULL ? NULL : PyObject_CallMethodOneArg(ctx, name_save, tensor);

    Py_XDECREF(tensor);
    Py_XDECREF(saved);
    return saved == NULL ? -1 : 0;
}

/* Recv.forward(ctx, call, token) -> the response's tensors */
static PyObject *
recv_forward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    smp_call_object *self;

    (void)unused;
    if (nargs != 3 || remember(args[0], args[1]) < 0) {
        return NULL;
    }
    self = (smp_call_object *)args[1];
    if (self->checkpoint != 0 && save_number(args[0], self->call) < 0) {
        return NULL;
    }
    return PyList_AsTuple(self->outputs);
}

/* Keeps a checkpoint's second call for its number, until the task's end. */
static int
keep_again(smp_call_object *call)
{
    smp_task *task = smp_this_task;
    PyObject *number = PyLong_FromUnsignedLongLong(call->call);
    int       failed = -1;

    if (number != NULL && task->again == NULL) {
        task->again = PyDict_New();
    }
    if (number != NULL && task->again != NULL) {
        failed = PyDict_SetItem(task->again, number, (PyObject *)call);
    }
    Py_XDECREF(number);
    return failed;
}

/* Runs Send on the inputs, without the unreached. */
static PyObject *
apply_send(smp_call_object *call, PyObject *inputs, uint64_t unreached, bool last_first)
{
    const Py_ssize_t n = PyList_GET_SIZE(inputs);
    PyObject        *fixed[10];
    PyObject       **args = fixed;
    size_t           nargs = 2;
    PyObject        *token;

    if ((size_t)n + 2 > sizeof(fixed) / sizeof(fixed[0])) {
        args = PyMem_Malloc(((size_t)n + 2) * sizeof(*args));
        if (args == NULL) {
            return PyErr_NoMemory();
        }
    }
    args[0] = (PyObject *)call;
    args[1] = smp_the_session.leaf;
    for (Py_ssize_t i = 0; i < n; i++) {
        const Py_ssize_t input = last_first ? n - 1 - i : i;

        if (smp_is_reached(unreached, (size_t)input)) {
            args[nargs++] = PyList_GET_ITEM(inputs, input);
        }
    }
    token = PyObject_Vectorcall(smp_the_session.send_apply, args, nargs, NULL);
    if (args != fixed) {
        PyMem_Free(args);
    }
    return token;
}

PyObject *
smp_nodes_apply(smp_call_object *call, PyObject *inputs, uint64_t unreached,
                bool last_first)
{
    PyObject *token;
    PyObject *outputs;

    call->open = !(call->checkpoint & SMP_FLAG_FIRST);
    if ((call->checkpoint & SMP_FLAG_AGAIN) && keep_again(call) < 0) {
        return NULL;
    }
    token = apply_send(call, inputs, unreached, last_first);
    if (token == NULL) {
        return NULL;
    }
    outputs =
        PyObject_Vectorcall(smp_the_session.recv_apply,
                            (PyObject *const[]){(PyObject *)call, token}, 2, NULL);
    Py_DECREF(token);
    Py_CLEAR(call->outputs);
    return outputs;
}

static int
raise_for(const smp_call_object *self, const char *what)
{
    PyErr_Format(PyExc_RuntimeError, "smp: %s: module '%U' runs on pp_rank %d", what,
                 self->path, self->owner);
    return -1;
}

static int
check_backward(const smp_call_object *self)
{
    if (smp_this_task == NULL || smp_this_task->backward_depth == 0) {
        return raise_for(self,
                         "a backward reached a module of another rank, and "
                         "model.backward(loss) did not begin it; use model.backward "
                         "inside the step, not loss.backward() or autograd.grad");
    }
    if (!smp_call_is_of_this_step(self)) {
        return raise_for(self,
                         "a backward reached a call of a module of another rank that "
                         "an earlier step made; detach what is kept between steps");
    }
    if (self->backward != 0) {
        return raise_for(
            self, "a second backward through one call of a module of another rank "
                  "(retain_graph and double backward do not cross ranks)");
    }
    return 0;
}

/* The call with the graph on the owner (new): the node's own, or a checkpoint's second
 * one, which may be made now. */
static smp_call_object *
call_with_graph(PyObject *ctx, smp_call_object *self)
{
    PyObject        *saved;
    PyObject        *number;
    smp_call_object *call = NULL;

    if (self->checkpoint == 0) {
        return (smp_call_object *)Py_NewRef(self);
    }
    saved = PyObject_GetAttr(ctx, name_saved);
    if (saved == NULL) {
        return NULL;
    }
    number = PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(saved, 0), name_item);
    Py_DECREF(saved);
    if (number == NULL) {
        return NULL;
    }
    if (smp_this_task->again != NULL) {
        call = (smp_call_object *)Py_XNewRef(
            PyDict_GetItemWithError(smp_this_task->again, number));
    }
    if (call == NULL && !PyErr_Occurred()) {
        (void)raise_for(self,
                        "a checkpoint's second forward has not called a module of "
                        "another rank that its first one called");
    }
    if (call != NULL && PyDict_DelItem(smp_this_task->again, number) < 0) {
        Py_CLEAR(call);
    }
    Py_DECREF(number);
    return call;
}

/* Recv.backward(ctx, *gradients) -> None, token's gradient */
static PyObject *
recv_backward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    smp_session     *session = &smp_the_session;
    smp_call_object *self;
    smp_call_object *call;
    smp_envelope     envelope;
    smp_stretch      last;
    smp_pack         pack;
    PyObject        *state;
    PyObject        *token;
    PyObject        *kept = NULL; /* places */
    bool             keeps;
    int              failed = 0;

    (void)unused;
    self = (smp_call_object *)PyObject_GetAttr(args[0], name_call);
    if (self == NULL) {
        return NULL;
    }
    Py_DECREF(self); /* ctx keeps it */
    if (check_backward(self) < 0 ||
        (kept = smp_placeholders_missing(self->placeholders)) == NULL ||
        (call = call_with_graph(args[0], self)) == NULL) {
        Py_XDECREF(kept);
        return NULL;
    }
    keeps = PyList_GET_SIZE(kept) > 0;
    last = (smp_stretch){.owner = self->owner,
                         .call = call->call,
                         .number = call->number,
                         .noutputs = (size_t)nargs - 1};
    state = PyObject_CallNoArgs(session->capture_backward);
    if (state == NULL) {
        Py_DECREF(kept);
        Py_DECREF(call);
        return NULL;
    }
    if (self->nstretches > 0) {
        last = self->stretches[self->nstretches - 1];
    }
    smp_pack_init(&pack, session->comm, smp_session_rank_of_comm(last.owner), NULL);
    pack.graph = false;
    failed = smp_pack_u32(&pack, (uint32_t)last.noutputs);
    for (size_t i = (size_t)nargs - last.noutputs; failed == 0 && i < (size_t)nargs;
         i++) {
        failed = smp_pack_value(&pack, args[i]);
    }
    if (failed == 0 && state != Py_None) {
        failed = smp_pack_value(&pack, state);
    }
    if (failed == 0 && keeps) {
        failed = smp_pack_value(&pack, kept);
    }
    if (failed == 0 && self->nstretches > 0) {
        failed =
            smp_pass_pack_gradients(&pack, self->stretches, self->nstretches, args + 1);
    }
    self->backward = smp_server_next_call(session->server);
    envelope = (smp_envelope){
        .kind = SMP_MSG_BACKWARD,
        .phase = SMP_BACKWARD,
        .flags = (uint16_t)((state == Py_None ? 0 : SMP_FLAG_STATE) |
                            (self->nstretches > 0 ? SMP_FLAG_CHAIN : 0) |
                            (keeps ? SMP_FLAG_FETCH : 0) | smp_gradients_flags()),
        .microbatch = self->microbatch,
        .step = session->step,
        .entry = self->entry,
        .call = self->backward,
        .about = last.call,
        .seed = (uint64_t)smp_this_task->backwards,
        .number = smp_call_of_backward(last.number)};
    if (failed == 0) {
        failed = smp_pack_send(&pack, &envelope);
    }
    smp_pack_fini(&pack);
    Py_DECREF(state);
    Py_DECREF(kept);
    if (failed == 0) {
        call->open = keeps;
    }
    Py_DECREF(call);
    if (failed < 0) {
        return NULL;
    }
    token = make_token();
    return token == NULL ? NULL : Py_BuildValue("(ON)", Py_None, token);
}

/* Send.backward(ctx, token's gradient) -> None, None, one per tensor */
static PyObject *
send_backward(PyObject *unused, PyObject *const *args, Py_ssize_t nargs)
{
    smp_call_object *self;
    smp_message     *response;
    smp_unpack       unpack;
    PyObject        *result = NULL;
    uint32_t         count;

    (void)unused;
    (void)nargs;
    self = (smp_call_object *)PyObject_GetAttr(args[0], name_call);
    if (self == NULL) {
        return NULL;
    }
    Py_DECREF(self); /* ctx keeps it */
    response = smp_session_wait(self->backward, SMP_WAIT_GRADIENTS, self->entry);
    if (response == NULL) {
        return NULL;
    }
    smp_gradients_note(smp_message_envelope(response)->flags);
    if (smp_unpack_init(&unpack, smp_the_session.comm, response, NULL, false, false) ==
            0 &&
        smp_unpack_u32(&unpack, &count) == 0) {
        result = PyTuple_New(2 + (Py_ssize_t)count);
    }
    if (result != NULL) {
        PyTuple_SET_ITEM(result, 0, Py_NewRef(Py_None));
        PyTuple_SET_ITEM(result, 1, Py_NewRef(Py_None));
        for (uint32_t i = 0; i < count; i++) {
            PyObject *gradient = smp_unpack_value(&unpack);

            if (gradient == NULL) {
                Py_CLEAR(result);
                break;
            }
            PyTuple_SET_ITEM(result, 2 + (Py_ssize_t)i, gradient);
        }
    }
    smp_unpack_fini(&unpack);
    return result;
}

static PyMethodDef functions[] = {
    {"send_forward", __extension__(PyCFunction)(void (*)(void)) send_forward,
     METH_FASTCALL, "Send.forward(ctx, call, leaf, *tensors) -> token"},
    {"send_backward", __extension__(PyCFunction)(void (*)(void)) send_backward,
     METH_FASTCALL, "Send.backward(ctx, gradient) -> gradients"},
    {"recv_forward", __extension__(PyCFunction)(void (*)(void)) recv_forward,
     METH_FASTCALL, "Recv.forward(ctx, call, token) -> outputs"},
    {"recv_backward", __extension__(PyCFunction)(void (*)(void)) recv_backward,
     METH_FASTCALL, "Recv.backward(ctx, *gradients) -> the token's gradient"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot call_slots[] = {
    {Py_tp_dealloc, __extension__(void *) call_dealloc},
    {0, NULL},
};

static PyType_Spec call_spec = {
    .name = "smp._core.Call",
    .basicsize = sizeof(smp_call_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = call_slots,
};

int
smp_nodes_add(PyObject *module)
{
    name_call = PyUnicode_InternFromString("call");
    name_materialize = PyUnicode_InternFromString("materialize_grads");
    name_save = PyUnicode_InternFromString("save_for_backward");
    name_saved = PyUnicode_InternFromString("saved_tensors");
    name_item = PyUnicode_InternFromString("item");
    call_type = (PyTypeObject *)PyType_FromSpec(&call_spec);
    if (name_call == NULL || name_materialize == NULL || name_save == NULL ||
        name_saved == NULL || name_item == NULL || call_type == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
