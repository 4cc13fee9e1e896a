/* One generator, many streams.
 *
 * PyTorch has one default generator a process, and one for its accelerator.  The task
 * with the baton owns them; when another task runs, the first one's state is put aside,
 * and only then: a rank called again and again by one task copies no state at all.
 */
#include "python/modules/streams.h"

#include "python/modules/session.h"

/* The task with its stream in the generators; NULL: none. */
static smp_task *owner;

/* The accelerator's generator; NULL: there is none. */
static PyObject *
device_generator(void)
{
    PyObject *generator = smp_the_session.device_generator;

    return generator == Py_None ? NULL : generator;
}

/* The generators' state: the default one's, or both in a tuple. */
static PyObject *
get_state(void)
{
    PyObject *device = device_generator();
    PyObject *state =
        PyObject_CallMethodNoArgs(smp_torch.generator, smp_names.get_state);
    PyObject *its;
    PyObject *both;

    if (device == NULL || state == NULL) {
        return state;
    }
    its = PyObject_CallMethodNoArgs(device, smp_names.get_state);
    both = its == NULL ? NULL : PyTuple_Pack(2, state, its);
    Py_DECREF(state);
    Py_XDECREF(its);
    return both;
}

static int
call_with(PyObject *generator, PyObject *method, PyObject *argument)
{
    PyObject *done = PyObject_CallMethodOneArg(generator, method, argument);

    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Takes the state, as get_state() gave it. */
static int
set_state(PyObject *state)
{
    int failed;

    if (PyTuple_Check(state)) {
        failed = call_with(smp_torch.generator, smp_names.set_state,
                           PyTuple_GET_ITEM(state, 0)) < 0 ||
                 call_with(device_generator(), smp_names.set_state,
                           PyTuple_GET_ITEM(state, 1)) < 0;
    } else {
        failed = call_with(smp_torch.generator, smp_names.set_state, state) < 0;
    }
    Py_DECREF(state);
    return failed ? -1 : 0;
}

int
smp_stream_enter(smp_task *task)
{
    PyObject *state;

    if (owner == task) {
        return 0;
    }
    if (owner != NULL) {
        state = get_state();
        if (state == NULL) {
            return -1;
        }
        Py_XSETREF(owner->rng_state, state);
    }
    owner = task;
    state = task->rng_state;
    task->rng_state = NULL;
    return state == NULL ? 0 : set_state(state);
}

int
smp_stream_seed(smp_task *task, uint64_t seed)
{
    PyObject *number;
    int       failed;

    if (smp_stream_enter(task) < 0 ||
        (number = PyLong_FromUnsignedLongLong(seed)) == NULL) {
        return -1;
    }
    failed = call_with(smp_torch.generator, smp_names.manual_seed, number) < 0 ||
             (device_generator() != NULL &&
              call_with(device_generator(), smp_names.manual_seed, number) < 0);
    Py_DECREF(number);
    return failed ? -1 : 0;
}

void
smp_stream_leave(smp_task *task)
{
    if (owner == task) {
        owner = NULL;
    }
    Py_CLEAR(task->rng_state);
}

int
smp_stream_draw(uint64_t *seed)
{
    PyObject *drawn =
        PyObject_CallMethodNoArgs(smp_the_session.seed_tensor, smp_names.random_);

    if (drawn == NULL) {
        return -1;
    }
    Py_DECREF(drawn);
    *seed = (uint64_t)*smp_the_session.seed;
    return 0;
}

int
smp_stream_foresee(uint64_t *seeds, size_t n)
{
    PyObject *state =
        PyObject_CallMethodNoArgs(smp_torch.generator, smp_names.get_state);

    if (state == NULL) {
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        if (smp_stream_draw(&seeds[i]) < 0) {
            Py_DECREF(state);
            return -1;
        }
    }
    return set_state(state);
}
