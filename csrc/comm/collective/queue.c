/* Queues, their drivers, and the news of a finished work item. */
#define _GNU_SOURCE
#include "comm/collective/queue.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/fork.h"
#include "common/lock.h"
#include "common/thread.h"

/* The carrier's stay with one group with missing members: alone, and when other groups
 * have work items too. */
#define STAY_NS (1 * SMP_NS_PER_MS)
#define SHARE_NS (100 * SMP_NS_PER_US)

/* The interval of a driving waiter's look for the queue's close. */
#define LOOK_NS (20 * SMP_NS_PER_MS)

/* When a wait is told to smp_carrier_describe(). */
#define TELL_NS (200 * SMP_NS_PER_MS)

/* The time of a question's wait for the driver of a queue. */
#define ANSWER_NS (1 * SMP_NS_PER_S)

struct smp_queue {
    smp_carrier *carrier; /* borrowed */
    smp_group   *group;   /* borrowed; used by the queue's driver */

    /* Guarded by the carrier's lock. */
    bool driven; /* a thread carries out the head, and it alone takes it off */
    bool closing;
    smp_work_item *head;
    smp_work_item *tail;
    smp_queue     *next;    /* of the carrier's queues */
    bool           carried; /* driven by the carrier */
    uint64_t       issued;  /* work items, so far */
    char          *waits;   /* owned: the head's wait, or NULL; written by the driver */

    int64_t report_ns; /* the driver's own: the wait until its next report */
};

/* A question for a work item's wait. */
typedef struct question {
    const smp_work_item *item;
    char                *out;
    size_t               bytes;
    bool                 answered;
    struct question     *next;
} question;

struct smp_carrier {
    uint32_t  generation; /* smp_fork_generation() */
    pthread_t thread;     /* owned: joined by destroy */
    int       name;       /* of this rank; set before the first queue, as report_ns */
    int64_t   report_ns;

    smp_lock       lock;    /* guards all below, and the queues */
    pthread_cond_t work;    /* a queue has work items and no driver, or ending */
    pthread_cond_t changed; /* a work item is over, or a queue is not driven any more */
    pthread_cond_t news;    /* finished, closed */
    int            waiters; /* for changed */
    bool           ending;
    bool           closed;
    uint64_t       issued; /* work items, so far */
    question      *questions;
    smp_queue     *queues;
    smp_work_item *finished;       /* announced finished work items, */
    smp_work_item **finished_last; /* and where the next goes */
};

static bool
is_child(const smp_carrier *carrier)
{
    return carrier->generation != smp_fork_generation();
}

/* ------------------------------------------------------- by the driver of a queue */

/* Reports the group's wait on stderr, after a long one. */
static void
report(smp_queue *queue, int64_t waited_ns)
{
    char what[SMP_GROUP_TEXT];
    char line[SMP_GROUP_TEXT + 64];
    int  n;

    if (queue->report_ns == 0 || waited_ns < queue->report_ns) {
        return;
    }
    queue->report_ns = 2 * waited_ns;
    smp_group_describe(queue->group, NULL, 0, what, sizeof(what));
    n = snprintf(line, sizeof(line), "smp: rank %d: %s; for %.1f s so far\n",
                 queue->carrier->name, what, (double)waited_ns / (double)SMP_NS_PER_S);
    if (n > 0 && write(STDERR_FILENO, line, (size_t)n) < 0) {
        queue->report_ns = 0; /* no reader */
    }
}

/* Gives the group's wait to smp_carrier_describe(), after a while. */
static void
tell(smp_queue *queue, int64_t waited_ns)
{
    char what[SMP_GROUP_TEXT];

    if (waited_ns < TELL_NS || queue->waits != NULL) {
        return;
    }
    smp_group_describe(queue->group, NULL, 0, what, sizeof(what));
    smp_lock_acquire(&queue->carrier->lock);
    queue->waits = strdup(what);
    smp_lock_release(&queue->carrier->lock);
}

/* The wait is over. */
static void
forget_wait(smp_queue *queue)
{
    free(queue->waits);
    queue->waits = NULL;
}

/* Moves the work item on until it is done or until_ns: true, it is. */
static bool
carry_out(smp_work_item *item, int64_t until_ns)
{
    smp_queue *queue = item->queue;
    smp_group *group = queue->group;

    while (item->at < item->ncalls) {
        bool over = false;

        if (!item->begun) {
            item->status = smp_group_start(group, &item->calls[item->at]);
            item->begun = true;
            item->sequence = smp_group_sequence(group);
            queue->report_ns = queue->carrier->report_ns;
        } else {
            const int64_t waited_ns = smp_group_waited_ns(group);

            report(queue, waited_ns);
            tell(queue, waited_ns);
        }
        if (item->status == SMP_OK) {
            item->status = smp_group_wait(group, until_ns, &over);
        }
        if (item->status != SMP_OK) {
            item->error = strdup(smp_group_error(group));
            if (item->status == SMP_ERR_MISMATCH) {
                smp_group_keys(group, item->keys);
            }
            return true;
        }
        if (!over) {
            return false;
        }
        item->begun = false;
        item->at++;
        if (queue->waits != NULL) {
            smp_lock_acquire(&queue->carrier->lock);
            forget_wait(queue);
            smp_lock_release(&queue->carrier->lock);
        }
    }
    return true;
}

/* Hands a finished work item to smp_carrier_finished(); the lock is held. */
static void
announce(smp_carrier *carrier, smp_work_item *item)
{
    *carrier->finished_last = item;
    carrier->finished_last = &item->next;
    pthread_cond_signal(&carrier->news);
}

/* A work item's wait.  The carrier's lock is held, by the driver of its queue or while
 * it has none. */
static void
describe(const smp_work_item *item, char *out, size_t bytes)
{
    const smp_queue *queue = item->queue;
    uint64_t         ahead = 0;

    for (const smp_work_item *o = queue->head; o != item; o = o->next) {
        ahead += o->ncalls - o->at - o->begun;
    }
    if (item->begun || item->at == item->ncalls) {
        smp_group_describe(queue->group, NULL, 0, out, bytes);
    } else {
        smp_group_describe(queue->group, &item->calls[item->at], ahead + 1, out, bytes);
    }
}

/* Answers the questions about the queue's work items.  The carrier's lock is held, by
 * the driver.
 */
static void
answer(const smp_queue *queue)
{
    bool any = false;

    for (question *q = queue->carrier->questions; q != NULL; q = q->next) {
        /* The queue of a finished one may be gone. */
        if (!q->answered && !smp_work_item_is_over(q->item) &&
            q->item->queue == queue) {
            describe(q->item, q->out, q->bytes);
            q->answered = any = true;
        }
    }
    if (any) {
        pthread_cond_broadcast(&queue->carrier->changed);
    }
}

/* Takes the finished head off its queue.  The carrier's lock is held; the work item may
 * be gone when the lock is released. */
static void
finish_head(smp_queue *queue)
{
    smp_carrier   *carrier = queue->carrier;
    smp_work_item *item = queue->head;

    queue->head = item->next;
    item->next = NULL;
    forget_wait(queue);
    if (item->announced) {
        announce(carrier, item);
    }
    atomic_store_explicit(&item->over, true, memory_order_release);
    if (carrier->waiters > 0) {
        pthread_cond_broadcast(&carrier->changed);
    }
}

/* The queue is free for others.  The carrier's lock is held. */
static void
stop_driving(smp_queue *queue)
{
    smp_carrier *carrier = queue->carrier;

    queue->driven = false;
    if (queue->head != NULL) {
        pthread_cond_signal(&carrier->work);
    }
    if (carrier->waiters > 0) {
        pthread_cond_broadcast(&carrier->changed);
    }
}

/* Drives the work item's queue until the work item is over, the queue closes, or
 * until_ns.  The lock is held, and the queue has no driver. */
static void
drive(smp_work_item *item, int64_t until_ns)
{
    smp_queue *queue = item->queue;
    smp_lock  *lock = &queue->carrier->lock;
    int64_t    now = smp_clock_ns();

    queue->driven = true;
    do {
        smp_work_item *head = queue->head;
        bool           done;

        smp_lock_release(lock);
        done = carry_out(head, until_ns - now < LOOK_NS ? until_ns : now + LOOK_NS);
        smp_lock_acquire(lock);
        if (done) {
            finish_head(queue);
        }
        answer(queue);
    } while (!smp_work_item_is_over(item) && !queue->closing &&
             (now = smp_clock_ns()) < until_ns);
    stop_driving(queue);
}

/* ------------------------------------------------------------- the carrier's thread */

/* Takes the queues without a driver, gives back the finished ones.  Returns the number
 * of taken ones; the lock is held. */
static int
choose_queues(smp_carrier *carrier)
{
    int n = 0;

    for (smp_queue *queue = carrier->queues; queue != NULL; queue = queue->next) {
        if (queue->carried && (queue->head == NULL || queue->closing)) {
            queue->carried = false;
            stop_driving(queue);
        } else if (!queue->driven && queue->head != NULL && !queue->closing) {
            queue->carried = queue->driven = true;
        }
        n += queue->carried;
    }
    return n;
}

static void *
carrier_main(void *arg)
{
    smp_carrier *carrier = arg;

    smp_lock_acquire(&carrier->lock);
    for (;;) {
        int n = choose_queues(carrier);

        if (n == 0 && carrier->ending) {
            break;
        }
        if (n == 0) {
            smp_cond_wait(&carrier->work, &carrier->lock, SMP_NEVER);
            continue;
        }
        /* A carried one stays in the list: destroy waits for its driver. */
        for (smp_queue *queue = carrier->queues; queue != NULL; queue = queue->next) {
            bool done;

            if (!queue->carried || queue->head == NULL) {
                continue;
            }
            smp_lock_release(&carrier->lock);
            done =
                carry_out(queue->head, smp_clock_ns() + (n > 1 ? SHARE_NS : STAY_NS));
            smp_lock_acquire(&carrier->lock);
            if (done) {
                finish_head(queue);
            }
            answer(queue);
        }
    }
    smp_lock_release(&carrier->lock);
    return NULL;
}

/* --------------------------------------------------------------------------- public */

smp_status
smp_carrier_create(smp_carrier **out)
{
    smp_carrier *carrier = calloc(1, sizeof(*carrier));
    smp_status   status;

    if (carrier == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    carrier->generation = smp_fork_generation();
    carrier->finished_last = &carrier->finished;
    smp_lock_init(&carrier->lock, SMP_LOCK_QUEUES);
    smp_cond_init(&carrier->work);
    smp_cond_init(&carrier->changed);
    smp_cond_init(&carrier->news);
    status = smp_thread_start(&carrier->thread, "smp-carrier", carrier_main, carrier);
    if (status != SMP_OK) {
        smp_lock_fini(&carrier->lock);
        free(carrier);
        return status;
    }
    *out = carrier;
    return SMP_OK;
}

void
smp_carrier_report_after(smp_carrier *carrier, int name, int64_t wait_ns)
{
    carrier->name = name;
    carrier->report_ns = wait_ns;
}

void
smp_carrier_describe(smp_carrier *carrier, char *out, size_t bytes)
{
    size_t used = 0;

    out[0] = '\0';
    if (is_child(carrier)) {
        return;
    }
    smp_lock_acquire(&carrier->lock);
    for (const smp_queue *q = carrier->queues; q != NULL && used < bytes; q = q->next) {
        if (q->waits != NULL) {
            const int n = snprintf(out + used, bytes - used, "%s\n", q->waits);

            used += n > 0 ? (size_t)n : 0;
        }
    }
    smp_lock_release(&carrier->lock);
}

void
smp_carrier_close(smp_carrier *carrier)
{
    if (is_child(carrier)) {
        return;
    }
    smp_lock_acquire(&carrier->lock);
    carrier->closed = true;
    pthread_cond_broadcast(&carrier->news);
    smp_lock_release(&carrier->lock);
}

void
smp_carrier_destroy(smp_carrier *carrier)
{
    if (carrier == NULL || is_child(carrier)) {
        return; /* the child has no such thread, and may not trust the lock */
    }
    smp_lock_acquire(&carrier->lock); /* 1. wake it */
    carrier->ending = true;
    pthread_cond_signal(&carrier->work);
    smp_lock_release(&carrier->lock);
    pthread_join(carrier->thread, NULL); /* 2. no other user now */
    pthread_cond_destroy(&carrier->work);
    pthread_cond_destroy(&carrier->changed);
    pthread_cond_destroy(&carrier->news);
    smp_lock_fini(&carrier->lock);
    free(carrier);
}

smp_status
smp_carrier_finished(smp_carrier *carrier, smp_work_item **out)
{
    smp_status status = SMP_ERR_CLOSED;

    if (is_child(carrier)) {
        return status;
    }
    smp_lock_acquire(&carrier->lock);
    while (carrier->finished == NULL && !carrier->closed) {
        smp_cond_wait(&carrier->news, &carrier->lock, SMP_NEVER);
    }
    if (carrier->finished != NULL) {
        *out = carrier->finished;
        carrier->finished = (*out)->next;
        if (carrier->finished == NULL) {
            carrier->finished_last = &carrier->finished;
        }
        status = SMP_OK;
    }
    smp_lock_release(&carrier->lock);
    return status;
}

smp_status
smp_queue_create(smp_carrier *carrier, smp_group *group, smp_queue **out)
{
    smp_queue *queue = calloc(1, sizeof(*queue));

    if (queue == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    queue->carrier = carrier;
    queue->group = group;
    smp_lock_acquire(&carrier->lock);
    queue->next = carrier->queues;
    carrier->queues = queue;
    smp_lock_release(&carrier->lock);
    *out = queue;
    return SMP_OK;
}

void
smp_queue_destroy(smp_queue *queue)
{
    smp_carrier *carrier;
    smp_queue  **at;

    if (queue == NULL || is_child(queue->carrier)) {
        return;
    }
    carrier = queue->carrier;
    smp_lock_acquire(&carrier->lock);
    queue->closing = true;
    while (queue->driven) {
        carrier->waiters++;
        smp_cond_wait(&carrier->changed, &carrier->lock, SMP_NEVER);
        carrier->waiters--;
    }
    while (queue->head != NULL) {
        queue->head->status = SMP_ERR_CLOSED;
        finish_head(queue);
    }
    for (at = &carrier->queues; *at != queue; at = &(*at)->next) {
    }
    *at = queue->next;
    smp_lock_release(&carrier->lock);
    free(queue);
}

void
smp_work_item_issue(smp_work_item *item, smp_queue *queue, bool announced)
{
    smp_carrier *carrier = queue->carrier;

    item->queue = queue;
    item->carrier = carrier;
    item->announced = announced;
    if (is_child(carrier)) {
        item->status = SMP_ERR_CLOSED;
        atomic_store(&item->over, true);
        return;
    }
    smp_lock_acquire(&carrier->lock);
    if (queue->head == NULL) {
        queue->head = item;
    } else {
        queue->tail->next = item;
    }
    queue->tail = item;
    queue->issued++;
    if (announced && !queue->driven) {
        pthread_cond_signal(&carrier->work);
    }
    smp_lock_release(&carrier->lock);
}

uint64_t
smp_queue_issued(smp_queue *queue)
{
    uint64_t issued;

    smp_lock_acquire(&queue->carrier->lock);
    issued = queue->issued;
    smp_lock_release(&queue->carrier->lock);
    return issued;
}

bool
smp_work_item_wait(smp_work_item *item, int64_t until_ns)
{
    smp_carrier *carrier = item->carrier;

    if (smp_work_item_is_over(item)) {
        return true;
    }
    if (is_child(carrier)) {
        item->status = SMP_ERR_CLOSED;
        return true;
    }
    smp_lock_acquire(&carrier->lock);
    while (!smp_work_item_is_over(item)) { /* its queue still exists */
        if (!item->queue->driven && !item->queue->closing) {
            drive(item, until_ns);
        } else {
            carrier->waiters++;
            smp_cond_wait(&carrier->changed, &carrier->lock, until_ns);
            carrier->waiters--;
        }
        if (until_ns != SMP_NEVER && smp_clock_ns() >= until_ns) {
            break;
        }
    }
    smp_lock_release(&carrier->lock);
    return smp_work_item_is_over(item);
}

bool
smp_work_item_describe(smp_work_item *item, char *out, size_t bytes)
{
    smp_carrier *carrier = item->carrier;
    int64_t      until_ns = smp_clock_ns() + ANSWER_NS;
    question     asked = {.item = item, .out = out, .bytes = bytes};
    question   **at = &carrier->questions;

    if (is_child(carrier)) {
        return false;
    }
    smp_lock_acquire(&carrier->lock);
    asked.next = carrier->questions;
    carrier->questions = &asked;
    carrier->waiters++;
    while (!asked.answered && !smp_work_item_is_over(item) &&
           smp_clock_ns() < until_ns) {
        if (item->queue->driven) {
            smp_cond_wait(&carrier->changed, &carrier->lock, until_ns);
        } else {
            answer(item->queue);
        }
    }
    carrier->waiters--;
    while (*at != &asked) {
        at = &(*at)->next;
    }
    *at = asked.next;
    smp_lock_release(&carrier->lock);
    return asked.answered;
}

void
smp_work_item_leave(smp_work_item *item)
{
    smp_carrier *carrier = item->carrier;

    if (is_child(carrier)) {
        return;
    }
    smp_lock_acquire(&carrier->lock);
    item->announced = true;
    if (smp_work_item_is_over(item)) {
        announce(carrier, item);
    } else if (!item->queue->driven) {
        pthread_cond_signal(&carrier->work);
    }
    smp_lock_release(&carrier->lock);
}

void
smp_work_item_fini(smp_work_item *item)
{
    free(item->error);
    item->error = NULL;
}
