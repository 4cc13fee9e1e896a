/* smp._core.Group: ranks that do collectives of torch's tensors together.
 *
 * A Group makes Orders (collective_order.h), which keep their tensors until they are
 * over.
 *
 * Threads  Made, used and given up under the GIL, which is released to wait.
 */
#ifndef SMP_PYTHON_COLLECTIVE_GROUP_H
#define SMP_PYTHON_COLLECTIVE_GROUP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "comm/collective/group.h"
#include "comm/collective/queue.h"
#include "python/collective_comm.h"
#include "python/collective_device.h"

typedef struct {
    PyObject         ob_base;
    smp_comm_object *comm;  /* owned */
    smp_group       *group; /* owned; NULL once closed */
    smp_queue       *queue; /* owned */
    uint64_t         id;
    int              size;
    int              member;
    smp_device_offer offer;   /* of the meeting */
    PyObject        *meeting; /* owned: its order, until it is over, or NULL */
    bool             left;    /* nobody waits for it */
    smp_held        *held;    /* owned: tensors of orders that are gone */
    bool             closing; /* devices may still use theirs */
    bool             stuck;   /* ... for ever */
    char             name[64];
} smp_group_object;

extern PyTypeObject *smp_group_type;

/* 0, or -1 with an exception: it was closed. */
int smp_group_check_open(const smp_group_object *group);

/* Adds the types, and the numbers of operations and reductions.  0, or -1 with an
 * exception. */
int smp_group_add(PyObject *module);

#endif
