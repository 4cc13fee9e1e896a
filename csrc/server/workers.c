/* Lists of workers, and the hand-over of the baton between them. */
#include "server/workers.h"

#include <stdlib.h>

struct smp_workers {
    int spin_us;
    void (*run)(void *ctx, smp_worker *self);
    void       *ctx;   /* borrowed */
    smp_worker *first; /* owned: every worker there is, the newest first */
    smp_worker *idle;
    uint16_t    n;
};

static _Thread_local smp_worker *this_worker;

smp_status
smp_workers_create(int spin_us, void (*run)(void *ctx, smp_worker *self), void *ctx,
                   smp_workers **out)
{
    smp_workers *workers = calloc(1, sizeof(*workers));

    if (workers == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    workers->spin_us = spin_us;
    workers->run = run;
    workers->ctx = ctx;
    *out = workers;
    return SMP_OK;
}

void
smp_workers_destroy(smp_workers *workers)
{
    if (workers == NULL) {
        return;
    }
    for (smp_worker *w = workers->first; w != NULL;) {
        smp_worker *next = w->next;

        smp_workers_give(w, SMP_WHY_QUIT);
        pthread_join(w->thread, NULL);
        free(w);
        w = next;
    }
    free(workers);
}

smp_worker *
smp_workers_self(void)
{
    return this_worker;
}

smp_worker *
smp_workers_first(const smp_workers *workers)
{
    return workers->first;
}

size_t
smp_workers_count(const smp_workers *workers)
{
    return workers->n;
}

static void *
worker_main(void *arg)
{
    smp_worker *self = arg;

    this_worker = self;
    smp_seat_wait(&self->seat, 0);
    if (self->why != SMP_WHY_QUIT) {
        self->workers->run(self->workers->ctx, self);
    }
    return NULL;
}

smp_worker *
smp_workers_take_idle(smp_workers *workers)
{
    smp_worker *w = workers->idle;

    if (w != NULL) {
        workers->idle = w->next_idle;
        return w;
    }
    w = calloc(1, sizeof(*w));
    if (w == NULL) {
        return NULL;
    }
    w->workers = workers;
    w->number = workers->n;
    if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
        free(w);
        return NULL;
    }
    workers->n++;
    w->next = workers->first;
    workers->first = w;
    return w;
}

void
smp_workers_put_idle(smp_worker *self)
{
    self->next_idle = self->workers->idle;
    self->workers->idle = self;
}

void
smp_workers_give(smp_worker *to, smp_why why)
{
    to->why = why;
    smp_seat_give(&to->seat);
}

void
smp_workers_pass(smp_worker *self, smp_worker *to, smp_why why)
{
    if (to == self) {
        to->why = why;
        return;
    }
    if (self->state == SMP_WORKER_IDLE) {
        smp_workers_put_idle(self);
    }
    smp_workers_give(to, why);
    smp_seat_wait(&self->seat, self->workers->spin_us);
}

smp_worker *
smp_workers_number(const smp_workers *workers, size_t number)
{
    smp_worker *w = workers->first;

    while (w->number != number) {
        w = w->next;
    }
    return w;
}

smp_worker *
smp_workers_on_call(const smp_workers *workers, uint64_t call)
{
    for (smp_worker *w = workers->first; w != NULL; w = w->next) {
        if (call != 0 && w->state == SMP_WORKER_PENDING && w->call == call) {
            return w;
        }
    }
    return NULL;
}

smp_worker *
smp_workers_on_schedule(const smp_workers *workers, int32_t microbatch)
{
    for (smp_worker *w = workers->first; w != NULL; w = w->next) {
        if (w->state == SMP_WORKER_PENDING && w->wait.kind == SMP_WAIT_SCHEDULE &&
            w->microbatch == microbatch) {
            return w;
        }
    }
    return NULL;
}

smp_worker *
smp_workers_on_issue(const smp_workers *workers)
{
    for (smp_worker *w = workers->first; w != NULL; w = w->next) {
        if (w->state == SMP_WORKER_PENDING && w->wait.kind == SMP_WAIT_ISSUE) {
            return w;
        }
    }
    return NULL;
}

smp_worker *
smp_workers_pending(const smp_workers *workers)
{
    for (smp_worker *w = workers->first; w != NULL; w = w->next) {
        if (w->state == SMP_WORKER_PENDING) {
            return w;
        }
    }
    return NULL;
}
