/* The structs of the objects of collectives: smp._core.Comm, a rank's end of a set of
 * ranks, and smp._core.Group, some of them with collectives of tensors together.  Their
 * exceptions, too.
 *
 * Threads  Under the GIL.
 */
#ifndef SMP_PYTHON_COLLECTIVES_OBJECTS_H
#define SMP_PYTHON_COLLECTIVES_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "comm/collective/group.h"
#include "comm/collective/mailbox.h"
#include "comm/collective/queue.h"
#include "comm/messaging/comm.h"
#include "common/clock.h"
#include "python/collectives/gathers.h"

typedef struct {
    PyObject     ob_base;
    smp_comm    *comm;       /* owned; NULL once closed */
    smp_carrier *carrier;    /* owned, until no thread is inside, like the mailbox */
    smp_mailbox *mailbox;    /* owned */
    Py_ssize_t   groups;     /* open ones */
    Py_ssize_t   users;      /* threads inside, without the GIL */
    uint32_t     generation; /* smp_fork_generation(): a child has no such threads */
    int          rank;
    int          size;
    int         *names; /* owned: [size], as smp_comm_name() */
} smp_comm_object;

typedef struct {
    PyObject         ob_base;
    smp_comm_object *comm;  /* owned */
    smp_group       *group; /* owned; NULL once closed */
    smp_queue       *queue; /* owned */
    uint64_t         id;
    int              size;
    int              member;
    smp_device_offer offer;   /* of the meeting */
    PyObject        *meeting; /* owned: its work item, until it is over, or NULL */
    bool             left;    /* no thread waits for it */
    smp_held        *held;    /* owned: tensors of freed work items */
    bool             closing; /* devices may still use theirs */
    bool             stuck;   /* ... for ever */
    char             name[64];
} smp_group_object;

extern PyTypeObject *smp_comm_type;

/* 0, or -1 with an exception: it is closed. */
int smp_comm_check_open(const smp_comm_object *comm);

/* The name of `rank` in errors, also once the comm is closed. */
int smp_comm_object_name(const smp_comm_object *comm, int rank);

/* Raises the status's exception: "smp: `what`: `why`, or else the status's own text
 * [name]".  NULL. */
PyObject *smp_comm_raise(smp_status status, const char *what, const char *why);

/* So many seconds from now; SMP_NEVER for 0 and for times beyond all waits; -1 with an
 * exception. */
int64_t smp_python_deadline(PyObject *timeout_s);

extern PyTypeObject *smp_group_type;

/* 0, or -1 with an exception: it was closed. */
int smp_group_check_open(const smp_group_object *group);

#endif
