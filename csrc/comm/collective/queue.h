/* Operations of groups, in the order in which they were issued.
 *
 * A work item is a few calls of one group that are over together.  Each group has a
 * queue of them.  Who waits for one carries out the queue up to there; what nobody
 * waits for is done by the carrier, one thread for all groups of the process.  (It is
 * not the comm's progress thread: that one answers other ranks within microseconds, and
 * an operation adds up megabytes for milliseconds.)
 *
 * Ownership  A work item and its calls are the caller's memory, borrowed from issue
 *            until it is over, and if it is announced until smp_carrier_finished()
 *            gives it.  A queue borrows its group and its carrier: destroy it first.
 *            Others may wait for its work items meanwhile; the carrier outlives those
 *            waits.
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
    char           *error;    /* owned: what smp_group_error() said, or NULL */
    uint32_t        keys[2];  /* SMP_ERR_MISMATCH: as smp_group_keys() */
    uint64_t        sequence; /* of its last call in the group, once that has begun */

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

/* Has every operation that has waited for so long for other ranks say so on stderr, and
 * again after twice, four times as long ...; 0, at first: none does.  `name` is this
 * rank's (smp_comm_name()).  Before the first queue. */
void smp_carrier_report_after(smp_carrier *carrier, int name, int64_t wait_ns);

/* What operations have waited for, for a while now: lines for people, cut off at
 * `bytes`; "": none has. */
void smp_carrier_describe(smp_carrier *carrier, char *out, size_t bytes);

/* Makes smp_carrier_finished() return. */
void smp_carrier_close(smp_carrier *carrier);

/* All queues are destroyed, and nobody waits in smp_carrier_finished().  Takes NULL. */
void smp_carrier_destroy(smp_carrier *carrier);

/* The next announced work item that is over; waits for one.  SMP_ERR_CLOSED: the
 * carrier is closed, and there is none. */
smp_status smp_carrier_finished(smp_carrier *carrier, smp_work_item **out);

/* SMP_ERR_NO_MEMORY. */
smp_status smp_queue_create(smp_carrier *carrier, smp_group *group, smp_queue **out);

/* What is still queued is over, with SMP_ERR_CLOSED.  Takes NULL. */
void smp_queue_destroy(smp_queue *queue);

/* How many work items have been issued to it so far, begun or not. */
uint64_t smp_queue_issued(smp_queue *queue);

/* Puts a work item into the queue, all zero but for its calls.  Announced: the carrier
 * sees to it, and smp_carrier_finished() gives it when it is over.  Else somebody waits
 * for it. */
void smp_work_item_issue(smp_work_item *item, smp_queue *queue, bool announced);

/* Waits until it is over or until_ns (smp_clock_ns): true, it is. */
bool smp_work_item_wait(smp_work_item *item, int64_t until_ns);

/* For what it waits, for people, cut off at `bytes`: "group 'a': barrier 3 waits for
 * rank 1".  False: it is over, or its queue does not answer. */
bool smp_work_item_describe(smp_work_item *item, char *out, size_t bytes);

/* Nobody waits for it any more: from now on it is announced.  Its carrier is still
 * there: one that is over need not be left. */
void smp_work_item_leave(smp_work_item *item);

static inline bool
smp_work_item_is_over(const smp_work_item *item)
{
    return atomic_load_explicit(&item->over, memory_order_acquire);
}

/* Frees the error. */
void smp_work_item_fini(smp_work_item *item);

#endif
