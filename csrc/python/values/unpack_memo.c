/* Numbers back into objects. */
#include "python/values/unpack_memo.h"

#include <stdlib.h>

#include "python/values/buffer.h"
#include "python/values/registry.h"
#include "python/values/unpack_scalar.h"

/* A new reference to element `number` of an array. */
static PyObject *
element(PyObject *const *array, size_t count, uint32_t number)
{
    if (number >= count || array[number] == NULL) {
        (void)smp_malformed("a number that names nothing");
        return NULL;
    }
    return Py_NewRef(array[number]);
}

/* The same of a list; NULL: it has none. */
static PyObject *
item(PyObject *list, uint32_t number)
{
    if (list == NULL) {
        return element(NULL, 0, number);
    }
    return element(PySequence_Fast_ITEMS(list), (size_t)PyList_GET_SIZE(list), number);
}

/* A parameter of this rank; or a buffer, by its place in the list: the dict and the
 * name of the present tensor. */
static PyObject *
parameter(uint32_t number)
{
    PyObject *found = item(smp_registry.parameters, number);
    PyObject *buffer;

    if (found == NULL || !PyTuple_Check(found)) {
        return found;
    }
    buffer =
        PyDict_GetItemWithError(PyTuple_GET_ITEM(found, 0), PyTuple_GET_ITEM(found, 1));
    if (buffer == NULL && PyErr_Occurred() == NULL) {
        PyErr_Format(PyExc_AttributeError,
                     "smp: an argument is the buffer %R, which its module has removed",
                     PyTuple_GET_ITEM(found, 1));
    }
    Py_XINCREF(buffer);
    Py_DECREF(found);
    return buffer;
}

PyObject *
smp_unpack_by_number(smp_unpack *unpack, smp_tag tag)
{
    static const smp_arguments none = {0};
    const smp_arguments *request = unpack->request == NULL ? &none : unpack->request;
    uint32_t             number;

    if (smp_unpack_u32(unpack, &number) < 0) {
        return NULL;
    }
    switch ((int)tag) {
    case TAG_TENSOR:
        return element(unpack->tensors, unpack->ntensors, number);
    case TAG_SEEN:
        return element(unpack->objects, unpack->nobjects, number);
    case TAG_ARGUMENT_TENSOR:
        return element(request->tensors, request->ntensors, number);
    case TAG_ARGUMENT_OBJECT:
        return element(request->objects, request->nobjects, number);
    case TAG_MODULE:
        return item(smp_registry.modules, number);
    default:
        return parameter(number);
    }
}

int
smp_unpack_add_object(smp_unpack *unpack, PyObject *object, size_t *number)
{
    size_t     room = unpack->object_room;
    PyObject **moved;

    if (unpack->nobjects == room) {
        if (smp_array_reserve(&unpack->objects, unpack->nobjects, &room) < 0) {
            return -1;
        }
        moved = realloc(unpack->snapshots, room * sizeof(*moved));
        if (moved == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        unpack->snapshots = moved;
        unpack->object_room = room;
    }
    *number = unpack->nobjects;
    unpack->objects[*number] = Py_XNewRef(object);
    unpack->snapshots[*number] = NULL;
    unpack->nobjects += 1;
    return 0;
}
