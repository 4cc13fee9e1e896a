/* Random numbers that depend on the microbatch and the call, not on the timing.
 *
 * PyTorch has one default generator a process.  The task that has the baton owns it;
 * when another task runs, the first one's state is put aside, and only then: a rank
 * that is called again and again by one task copies no state at all.
 */
#include "python/session.h"

/* Whose stream is in the default generator; NULL: nobody's. */
static smp_task *owner;

uint64_t
smp_stream_mix(uint64_t a, uint64_t b)
{
    uint64_t h = a + 0x9E3779B97F4A7C15u * (b + 1);

    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    h ^= h >> 31;
    return h & 0x7FFFFFFFFFFFFFFFu;
}

int
smp_stream_enter(smp_task *task)
{
    PyObject *done;

    if (owner == task) {
        return 0;
    }
    if (owner != NULL) {
        PyObject *state =
            PyObject_CallMethodNoArgs(smp_torch.generator, smp_names.get_state);

        if (state == NULL) {
            return -1;
        }
        Py_XSETREF(owner->rng_state, state);
    }
    owner = task;
    if (task->rng_state == NULL) {
        return 0;
    }
    done = PyObject_CallMethodOneArg(smp_torch.generator, smp_names.set_state,
                                     task->rng_state);
    Py_CLEAR(task->rng_state);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
smp_stream_seed(smp_task *task, uint64_t seed)
{
    PyObject *number;
    PyObject *done;

    if (smp_stream_enter(task) < 0 ||
        (number = PyLong_FromUnsignedLongLong(seed)) == NULL) {
        return -1;
    }
    done =
        PyObject_CallMethodOneArg(smp_torch.generator, smp_names.manual_seed, number);
    Py_DECREF(number);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
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
