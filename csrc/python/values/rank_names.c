#include "python/values/rank_names.h"

static PyObject    *kept;  /* owned: the tuple with the text of all names */
static const char **names; /* owned: by rank */

bool
smp_rank_names_keep(PyObject *tuple, int size)
{
    const char **its;

    if (PyTuple_GET_SIZE(tuple) != size) {
        PyErr_Format(PyExc_ValueError, "smp: open() needs the names of %d ranks", size);
        return false;
    }
    its = PyMem_Calloc((size_t)size, sizeof(*its));
    if (its == NULL) {
        (void)PyErr_NoMemory();
        return false;
    }
    for (int rank = 0; rank < size; rank++) {
        its[rank] = PyUnicode_AsUTF8(PyTuple_GET_ITEM(tuple, rank));
        if (its[rank] == NULL) {
            PyMem_Free(its);
            return false;
        }
    }
    PyMem_Free(names);
    names = its;
    Py_XSETREF(kept, Py_NewRef(tuple));
    return true;
}

const char *
smp_rank_name(int rank)
{
    return names[rank];
}

const char *const *
smp_rank_names(void)
{
    return names;
}
