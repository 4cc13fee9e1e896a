/* smp._core.WorkItem: calls of a group, over together.  It keeps their tensors until
 * then, and for as long as a device still uses them.
 *
 * Threads  Made, used and given up under the GIL, released to wait.
 */
#ifndef SMP_PYTHON_COLLECTIVES_WORK_ITEM_H
#define SMP_PYTHON_COLLECTIVES_WORK_ITEM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "comm/collective/queue.h"
#include "python/collectives/call.h"
#include "python/collectives/gathers.h"
#include "python/collectives/objects.h"

typedef struct {
    PyObject          ob_base;
    smp_group_object *group; /* owned, like all below */
    PyObject *ins; /* tuple of tensors, or NULL; kept until the work item is over */
    PyObject *outs;
    PyObject *owner;       /* the owner told of its end, or NULL */
    smp_tensor_calls host; /* of tensors in host memory; else all zero */
    smp_work_item    item;
    bool             issued;

    smp_gathers      gathers; /* of tensors on devices; else all zero, like all below */
    smp_device_mark *mark;    /* borrowed from the group's exchange */
    void            *stream;  /* current at the work item's making */
    bool             joined;  /* that stream waits for the device */
} smp_work_item_object;

/* A new work item, not yet issued, from the arguments of smp_tensor_calls_init().  The
 * second: of all-gathers of tensors on devices, with `offer` of the meeting before the
 * first. NULL with an exception. */
smp_work_item_object *smp_work_item_make(smp_group_object *group, PyObject *const *args,
                                         Py_ssize_t nargs);
smp_work_item_object *smp_work_item_make_gather(smp_group_object *group, PyObject *ins,
                                                PyObject *outs, double timeout_s,
                                                smp_device_offer *offer);

/* Issues a work item and waits until it is over; takes the reference.  0, or -1 with an
 * exception. */
int smp_work_item_run(smp_work_item_object *item);

/* The same in steps: issue it, wait (1: it is over; 0: until_ns has come; -1 with a
 * signal handler's exception), and the outcome (0, or -1 with its error). */
void smp_work_item_begin(smp_work_item_object *self);
int  smp_work_item_wait_until(smp_work_item_object *self, int64_t until_ns);
int  smp_work_item_raise(const smp_work_item_object *self);

/* No thread waits for it any more: it goes when it is over. */
void smp_work_item_abandon(smp_work_item_object *self);

/* Takes the queue's reference, for an item from smp_carrier_finished().  Returns a new
 * reference to its owner; NULL: it has none. */
PyObject *smp_work_item_owner(smp_work_item *item);

/* Adds the type.  0, or -1 with an exception. */
int smp_work_item_add(PyObject *module);

#endif
