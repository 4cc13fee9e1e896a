/* smp._core.Order: calls of a group that are over together.  It keeps their tensors
 * until then, and for as long as a device still uses them.
 *
 * Threads  Made, used and given up under the GIL, which is released to wait.
 */
#ifndef SMP_PYTHON_COLLECTIVES_ORDER_H
#define SMP_PYTHON_COLLECTIVES_ORDER_H

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
    PyObject         *ins; /* tuple of tensors, or NULL; kept until the order is over */
    PyObject         *outs;
    PyObject         *owner; /* who hears that it is over, or NULL */
    smp_tensor_calls  host;  /* of tensors in host memory; else all zero */
    smp_order         order;
    bool              issued;

    smp_gathers      gathers; /* of tensors on devices; else all zero, like all below */
    smp_device_mark *mark;    /* borrowed from the group's exchange */
    void            *stream;  /* which the order was made on */
    bool             joined;  /* that one waits for the device */
} smp_order_object;

/* A new order, not yet issued, from what smp_tensor_calls_init() takes; or of
 * all-gathers of tensors on devices, with `offer` of the meeting before the first. NULL
 * with an exception. */
smp_order_object *smp_order_make(smp_group_object *group, PyObject *const *args,
                                 Py_ssize_t nargs);
smp_order_object *smp_order_make_gather(smp_group_object *group, PyObject *ins,
                                        PyObject *outs, double timeout_s,
                                        smp_device_offer *offer);

/* Issues an order and waits until it is over; takes the reference.  0, or -1 with an
 * exception. */
int smp_order_run(smp_order_object *order);

/* The same in steps: issue it, wait (1: it is over; 0: until_ns has come; -1 with a
 * signal handler's exception), and what came of it (0, or -1 with its error). */
void smp_order_begin(smp_order_object *self);
int  smp_order_wait_until(smp_order_object *self, int64_t until_ns);
int  smp_order_raise(const smp_order_object *self);

/* Nobody waits for it any more: it goes when it is over. */
void smp_order_abandon(smp_order_object *self);

/* What smp_carrier_finished() gave: takes the queue's reference.  A new reference to
 * its owner; NULL: it has none. */
PyObject *smp_order_owner(smp_order *order);

/* Adds the type.  0, or -1 with an exception. */
int smp_order_add(PyObject *module);

#endif
