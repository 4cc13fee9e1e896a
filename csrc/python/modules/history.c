#include "python/modules/history.h"

#include <stdlib.h>

#include "python/values/tensor.h"

/* The arguments of a call by the task. */
typedef struct {
    PyObject **weak;     /* owned, weak references, by number */
    long      *versions; /* owned */
    size_t     n;
    size_t     room;
} past_call;

/* The last calls of a task, whose arguments later ones may have again: masks, say. */
typedef struct smp_history {
    past_call calls[SMP_HISTORY_FARTHEST + 1]; /* by count, round and round */
    size_t    count;
    PyObject *args;   /* owned: the task's; NULL: none */
    PyObject *kwargs; /* owned; NULL: none */
} smp_history;

long
smp_history_version(PyObject *tensor)
{
    const long version = smp_tensor_version(tensor);

    PyErr_Clear();
    return version;
}

static void
forget_call(past_call *past)
{
    while (past->n > 0) {
        Py_DECREF(past->weak[--past->n]);
    }
}

void
smp_history_forget(smp_task *task)
{
    smp_history *history = task->history;

    for (size_t i = 0; history != NULL && i <= SMP_HISTORY_FARTHEST; i++) {
        forget_call(&history->calls[i]);
        free(history->calls[i].weak);
        free(history->calls[i].versions);
    }
    if (history != NULL) {
        Py_XDECREF(history->args);
        Py_XDECREF(history->kwargs);
    }
    free(history);
    task->history = NULL;
}

/* NULL with an exception. */
static smp_history *
history_of(smp_task *task)
{
    if (task->history == NULL) {
        task->history = calloc(1, sizeof(*task->history));
    }
    if (task->history == NULL) {
        PyErr_NoMemory();
    }
    return task->history;
}

int
smp_history_give(smp_task *task, PyObject *args, PyObject *kwargs)
{
    smp_history *history = history_of(task);

    if (history == NULL) {
        return -1;
    }
    Py_XSETREF(history->args, Py_NewRef(args));
    Py_XSETREF(history->kwargs, Py_XNewRef(kwargs));
    return 0;
}

/* Objects of the task's arguments that are looked at: not all of a list of numbers, and
 * an end for a list that contains itself. */
#define MOST_WALKED 1000

typedef struct {
    const PyObject *wanted; /* NULL: the tensor number `end` */
    size_t          end;
    size_t          number; /* of tensors so far */
    size_t          walked;
} walk;

/* Whether it has data in one piece of memory: neither sparse nor without data. */
static bool
has_data(PyObject *tensor)
{
    PyObject *at = PyObject_CallMethod(tensor, "data_ptr", NULL);
    const int has = at == NULL ? 0 : PyObject_IsTrue(at);

    Py_XDECREF(at);
    PyErr_Clear();
    return has == 1;
}

/* Whether it travels by value, and as it is. */
static bool
is_plain(PyObject *tensor)
{
    PyObject **dict = _PyObject_GetDictPtr(tensor);

    return Py_TYPE(tensor) == smp_torch.tensor &&
           (dict == NULL || *dict == NULL || PyDict_GET_SIZE(*dict) == 0) &&
           has_data(tensor);
}

/* The tensor of the walk in the value (borrowed), as they stand; NULL: it is not there.
 */
static PyObject *
walk_on(walk *w, PyObject *value)
{
    PyObject  *found = NULL;
    PyObject  *key;
    PyObject  *item;
    Py_ssize_t at = 0;

    if (value == NULL || w->walked++ >= MOST_WALKED) {
        return NULL;
    }
    if (smp_is_tensor(value)) {
        if (w->wanted == NULL ? w->number == w->end : value == w->wanted) {
            return value;
        }
        w->number++;
    } else if (PyTuple_CheckExact(value)) {
        for (; found == NULL && at < PyTuple_GET_SIZE(value); at++) {
            found = walk_on(w, PyTuple_GET_ITEM(value, at));
        }
    } else if (PyList_CheckExact(value)) {
        for (; found == NULL && at < PyList_GET_SIZE(value); at++) {
            found = walk_on(w, PyList_GET_ITEM(value, at));
        }
    } else if (PyDict_CheckExact(value)) {
        while (found == NULL && PyDict_Next(value, &at, &key, &item)) {
            found = walk_on(w, item);
        }
    }
    return found;
}

static PyObject *
find_given(const smp_history *history, walk *w)
{
    PyObject *found = NULL;

    if (history != NULL) {
        found = walk_on(w, history->args);
        found = found == NULL ? walk_on(w, history->kwargs) : found;
    }
    return found != NULL && is_plain(found) ? found : NULL;
}

/* The arguments of the call so many before the last one; NULL: none is known. */
static past_call *
past_at(smp_history *history, size_t back)
{
    if (history == NULL || back > SMP_HISTORY_FARTHEST || back >= history->count) {
        return NULL;
    }
    return &history->calls[(history->count - 1 - back) % (SMP_HISTORY_FARTHEST + 1)];
}

int
smp_history_add(smp_task *task, const smp_pack *pack)
{
    past_call *past;

    if (history_of(task) == NULL) {
        return -1;
    }
    task->history->count++;
    past = past_at(task->history, 0);
    forget_call(past);
    if (pack->ntensors > past->room) {
        PyObject **weak = realloc(past->weak, pack->ntensors * sizeof(*weak));
        long      *versions;

        past->weak = weak == NULL ? past->weak : weak;
        versions = realloc(past->versions, pack->ntensors * sizeof(*versions));
        past->versions = versions == NULL ? past->versions : versions;
        if (weak == NULL || versions == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        past->room = pack->ntensors;
    }
    while (past->n < pack->ntensors) {
        PyObject *weak = PyWeakref_NewRef(pack->tensors[past->n], NULL);

        if (weak == NULL) {
            return -1;
        }
        past->versions[past->n] = smp_history_version(pack->tensors[past->n]);
        past->weak[past->n++] = weak;
    }
    return 0;
}

/* An argument of an earlier call (borrowed); NULL: it is gone, or has changed. */
static PyObject *
past_tensor(const past_call *past, size_t number)
{
    PyObject *tensor;

    if (past == NULL || number >= past->n) {
        return NULL;
    }
    /* A call of a weak reference is the way to its object in every Python. */
    tensor = PyObject_CallNoArgs(past->weak[number]);
    if (tensor == NULL) {
        PyErr_Clear();
        return NULL;
    }
    Py_DECREF(tensor); /* the model or the caller has it */
    if (tensor == Py_None || past->versions[number] < 0 ||
        smp_history_version(tensor) != past->versions[number]) {
        return NULL;
    }
    return tensor;
}

PyObject *
smp_history_at(const smp_task *task, size_t back, size_t number)
{
    if (back == SMP_HISTORY_GIVEN) {
        return find_given(task->history, &(walk){.end = number});
    }
    return past_tensor(past_at(task->history, back), number);
}

bool
smp_history_find(const smp_task *task, const PyObject *tensor, size_t *back,
                 size_t *number)
{
    walk given = {.wanted = tensor};
    bool found;

    for (*back = 1; *back <= SMP_HISTORY_FARTHEST; ++*back) {
        const past_call *past = past_at(task->history, *back);

        for (*number = 0; past != NULL && *number < past->n; ++*number) {
            if (past_tensor(past, *number) == tensor) {
                return true;
            }
        }
    }
    found = find_given(task->history, &given) != NULL;
    *back = SMP_HISTORY_GIVEN;
    *number = given.number;
    return found;
}
