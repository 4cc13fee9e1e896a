/* The objects of collectives: their names and deadlines, and their exceptions. */
#include "python/collectives/objects.h"

#include "python/values/error.h"

PyTypeObject *smp_comm_type;
PyTypeObject *smp_group_type;

PyObject *
smp_comm_raise(smp_status status, const char *what, const char *why)
{
    why = why != NULL ? why : smp_status_text(status);
    if (status == SMP_ERR_NO_MEMORY || status == SMP_ERR_INVALID) {
        return PyErr_Format(status == SMP_ERR_INVALID ? PyExc_ValueError
                                                      : PyExc_MemoryError,
                            "smp: %s: %s [%s]", what, why, smp_status_name(status));
    }
    return smp_error_raise(smp_error_of_group, status, NULL, "smp: %s: %s", what, why);
}

int64_t
smp_python_deadline(PyObject *timeout_s)
{
    double seconds = PyFloat_AsDouble(timeout_s);

    if (seconds == -1 && PyErr_Occurred() != NULL) {
        return -1;
    }
    return seconds <= 0 || seconds > 1e9 ? SMP_NEVER
                                         : smp_clock_ns() + (int64_t)(seconds * 1e9);
}

int
smp_comm_check_open(const smp_comm_object *comm)
{
    if (comm->comm == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "smp: these ranks have been left");
        return -1;
    }
    return 0;
}

int
smp_comm_object_name(const smp_comm_object *comm, int rank)
{
    return rank >= 0 && rank < comm->size ? comm->names[rank] : rank;
}

int
smp_group_check_open(const smp_group_object *group)
{
    if (group->group == NULL) {
        PyErr_Format(smp_error_of_group, "smp: group '%s' was destroyed", group->name);
        return -1;
    }
    return 0;
}
