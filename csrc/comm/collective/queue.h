/* Operations of groups, in the order of their issue.
 *
 * A work item is a few calls of one group, over together.  Each group has a queue of
 * them.  A thread waiting for one carries out the queue up to there.  The carrier, one
 * thread for all groups of the process, does those without a waiter.  (It is not the
 * comm's progress thread: that thread answers other ranks within microseconds, and an
 * operation adds up megabytes for milliseconds.)
 *
 * Ownership  A work item and its calls are the caller's memory, borrowed from issue
 *            until it is over; an announced one until smp_carrier_finished() gives it.
 *            A queue borrows its group and its carrier: destroy it first.  Others may
 *            wait for its work items meanwhile; the carrier outlives those waits.
 * Threads    any.
 * Errors     A work item has its own: status and error.  In a forked child each is over
 *            at once, with SMP_ERR_CLOSED.
 */
#ifndef SMP_COMM_COLLECTIVE_QUEUE_H
#define SMP_COMM_COLLECTIVE_QUEUE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collective/group.h"
#include "common/status.h"

typedef struct smp_carrier smp_carrier;
typedef struct smp_queue   smp_queue;

typedef struct smp_work_item {
    const smp_call *calls; /* set before issue, as ncalls */
    size_t          ncalls;
    smp_status      status;   /* once it is over */
    char           *error;    /* owned: the text of smp_group_error(), or NULL */
    uint32_t        keys[2];  /* SMP_ERR_MISMATCH: as smp_group_keys() */
    uint64_t        sequence; /* of its last call in the group, once begun */

    _Atomic bool          over; /* the queue's own, like all below */
    bool                  announced;
    bool                  begun; /* call `at` is under way */
    size_t                at;
    smp_queue            *queue; /* may be gone once it is over */
    smp_carrier          *carrier;
    struct smp_work_item *next;
} smp_work_item;

/* SMP_ERR_NO_MEMORY, SMP_ERR_NO_THREAD. */
smp_status smp_carrier_create(smp_carrier **out);

/* Has every operation with so long a wait for other ranks reported on stderr, and again
 * after twice, four times as long ...; 0, at first: none.  `name` is this rank's
 * (smp_comm_name()).  Before the first queue. */
void smp_carrier_report_after(smp_carrier *carrier, int name, int64_t wait_ns);

/* The waits of operations since a while: lines for people, cut off at `bytes`; "":
 * none. */
void smp_carrier_describe(smp_carrier *carrier, char *out, size_t bytes);

/* Makes smp_carrier_finished() return. */
void smp_carrier_close(smp_carrier *carrier);

/* All queues are destroyed, and no thread waits in smp_carrier_finished().  Takes
 * NULL. */
void smp_carrier_destroy(smp_carrier *carrier);

/* The next announced work item that is over; waits for one.  SMP_ERR_CLOSED: the
 * carrier is closed, and has none. */
smp_status smp_carrier_finished(smp_carrier *carrier, smp_work_item **out);

/* SMP_ERR_NO_MEMORY. */
smp_status smp_queue_create(smp_carrier *carrier, smp_group *group, smp_queue **out);

/* Queued work items are over, with SMP_ERR_CLOSED.  Takes NULL. */
void smp_queue_destroy(smp_queue *queue);

/* The number of work items issued to it so far, begun or not. */
uint64_t smp_queue_issued(smp_queue *queue);

/* Puts a work item into the queue, all zero but for its calls.  Announced: the carrier
 * sees to it, and smp_carrier_finished() gives it when it is over.  Else a thread waits
 * for it. */
void smp_work_item_issue(smp_work_item *item, smp_queue *queue, bool announced);

/* Waits until it is over or until_ns (smp_clock_ns): true, it is. */
bool smp_work_item_wait(smp_work_item *item, int64_t until_ns);

/* Its wait, for people, cut off at `bytes`: "group 'a': barrier 3 waits for rank 1".
 * False: it is over, or its queue does not answer. */
bool smp_work_item_describe(smp_work_item *item, char *out, size_t bytes);

/* The work item's waiter gives up: from now on it is announced.  Its carrier still
 * exists; a finished work item need not be left. */
void smp_work_item_leave(smp_work_item *item);

static inline bool
smp_work_item_is_over(const smp_work_item *item)
{
    return atomic_load_explicit(&item->over, memory_order_acquire);
}

/* Frees the error. */
void smp_work_item_fini(smp_work_item *item);

#endif
