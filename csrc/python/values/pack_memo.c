/* Numbers in the place of objects. */
#include "python/values/pack_memo.h"

#include "python/values/pack_scalar.h"
#include "python/values/registry.h"

/* A parameter or buffer of another rank goes by number: its data is elsewhere. */
static int
put_parameter(smp_pack *pack, PyObject *tensor, bool *done)
{
    int64_t number = smp_registry_find(smp_registry.parameter_numbers, tensor);
    long    owner;

    *done = false;
    if (number < 0) {
        return 0;
    }
    owner = PyLong_AsLong(PyList_GET_ITEM(smp_registry.parameter_owners, number));
    if (owner != smp_registry.rank) {
        *done = true;
        return smp_pack_number(pack, TAG_PARAMETER, (size_t)number);
    }
    return 0;
}

/* An object in the list twice keeps the first number. */
static int
number_all(smp_ptrmap *numbers, PyObject *const *objects, size_t n)
{
    uint32_t number;

    for (size_t i = 0; i < n; i++) {
        if (objects[i] != NULL && !smp_ptrmap_get(numbers, objects[i], &number) &&
            !smp_ptrmap_add(numbers, objects[i], (uint32_t)i)) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return 0;
}

/* Before a look-up among the request's objects.  All of the request has been read by
 * now. */
static int
know_arguments(smp_pack *pack)
{
    const smp_unpack *request = pack->request;

    if (request == NULL || pack->knows_arguments) {
        return 0;
    }
    pack->knows_arguments = true;
    if (number_all(&pack->argument_tensors, request->tensors, request->ntensors) < 0) {
        return -1;
    }
    return number_all(&pack->argument_objects, request->objects, request->nobjects);
}

/* For an argument of the answered request, changed or not, the caller uses its own
 * tensor. */
static int
put_argument_tensor(smp_pack *pack, PyObject *tensor, bool *done)
{
    uint32_t number;

    *done = false;
    if (know_arguments(pack) < 0) {
        return -1;
    }
    if (!smp_ptrmap_get(&pack->argument_tensors, tensor, &number)) {
        return 0;
    }
    *done = true;
    return smp_pack_number(pack, TAG_ARGUMENT_TENSOR, number);
}
int
smp_pack_tensor_there(smp_pack *pack, PyObject *tensor, bool *done)
{
    *done = false;
    if (Py_TYPE(tensor) != smp_torch.tensor && smp_registry.parameter_numbers != NULL &&
        put_parameter(pack, tensor, done) < 0) {
        return -1;
    }
    return *done ? 0 : put_argument_tensor(pack, tensor, done);
}

int
smp_pack_module(smp_pack *pack, PyObject *module, bool *done)
{
    int64_t number = smp_registry_find(smp_registry.module_numbers, module);

    *done = number >= 0;
    return *done ? smp_pack_number(pack, TAG_MODULE, (size_t)number) : 0;
}

int
smp_pack_object_once(smp_pack *pack, PyObject *object, bool *done)
{
    uint32_t number;

    *done = true;
    if (smp_ptrmap_get(&pack->object_numbers, object, &number)) {
        return smp_pack_number(pack, TAG_SEEN, number);
    }
    if (know_arguments(pack) < 0) {
        return -1;
    }
    if (smp_ptrmap_get(&pack->argument_objects, object, &number)) {
        return smp_pack_number(pack, TAG_ARGUMENT_OBJECT, number);
    }
    *done = false;
    if (smp_array_reserve(&pack->objects, pack->nobjects, &pack->object_room) < 0) {
        return -1;
    }
    if (!smp_ptrmap_add(&pack->object_numbers, object, (uint32_t)pack->nobjects)) {
        PyErr_NoMemory();
        return -1;
    }
    pack->objects[pack->nobjects++] = Py_NewRef(object);
    return 0;
}
