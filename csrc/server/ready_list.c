/* Messages, workers and turns ready to run. */
#include "server/ready_list.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "server/calls.h"
#include "server/envelope.h"

/* Room for every message, worker and turn. */
static smp_status
make_room(smp_ready_list *list, const smp_ready_sources *sources)
{
    const size_t room = smp_backlog_count(sources->backlog) +
                        smp_workers_count(sources->workers) + SMP_PHASES;
    smp_ready *more;

    if (room <= list->room) {
        return SMP_OK;
    }
    more = realloc(list->ready, 2 * room * sizeof(*more));
    if (more == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    list->ready = more;
    list->room = 2 * room;
    return SMP_OK;
}

/* The messages of this step.  A response without a waiting worker stays: its worker
 * will ask. */
static void
add_messages(smp_ready_list *list, const smp_ready_sources *sources)
{
    const size_t count = smp_backlog_count(sources->backlog);

    for (size_t i = 0; i < count; i++) {
        uint64_t            arrival;
        const smp_message  *message = smp_backlog_at(sources->backlog, i, &arrival);
        const smp_envelope *e = smp_message_envelope(message);
        const bool          response = e->kind == SMP_MSG_RESPONSE;
        const smp_worker   *w =
            response ? smp_workers_on_call(sources->workers, e->call) : NULL;

        if (e->step == sources->step && (!response || w != NULL)) {
            list->ready[list->n++] =
                (smp_ready){.kind = response ? SMP_READY_RESPONSE : SMP_READY_REQUEST,
                            .phase = (smp_phase)e->phase,
                            .microbatch = e->microbatch,
                            .entry = response ? w->entry : e->entry,
                            .source = message->source,
                            .call = response ? w->task : e->number,
                            .arrival = arrival,
                            .index = i};
        }
    }
}

/* Whether the worker's wait is over, where no message says so. */
static bool
may_go_on(const smp_ready_sources *sources, const smp_worker *w, smp_ready_kind *kind)
{
    if (w->state != SMP_WORKER_PENDING) {
        return false;
    }
    switch ((smp_wait_kind)w->wait.kind) {
    case SMP_WAIT_GATE:
        *kind = SMP_READY_GATE;
        return sources->turns != NULL &&
               smp_turns_may_enter(sources->turns, w->gate, w->microbatch);
    case SMP_WAIT_ISSUE:
        *kind = SMP_READY_ISSUE;
        return smp_lineup_may_issue(sources->lineup, &w->wait.key);
    case SMP_WAIT_COLLECTIVE:
        *kind = SMP_READY_OVER;
        return atomic_load(w->over);
    case SMP_WAIT_BALLOT:
        *kind = SMP_READY_BALLOT;
        return smp_ballots_are_decided(sources->ballots, &w->ballot, w->for_all);
    default:
        return false;
    }
}

static void
add_workers(smp_ready_list *list, const smp_ready_sources *sources)
{
    smp_ready_kind kind;

    for (const smp_worker *w = smp_workers_first(sources->workers); w != NULL;
         w = w->next) {
        if (may_go_on(sources, w, &kind)) {
            list->ready[list->n++] = (smp_ready){.kind = kind,
                                                 .phase = w->phase,
                                                 .microbatch = w->microbatch,
                                                 .entry = w->entry,
                                                 .source = -1,
                                                 .call = w->task,
                                                 .index = w->number};
        }
    }
}

static void
add_turns(smp_ready_list *list, const smp_ready_sources *sources)
{
    for (int phase = 0; sources->schedule != NULL && phase < SMP_PHASES; phase++) {
        smp_ready turn = {.kind = SMP_READY_TURN,
                          .phase = (smp_phase)phase,
                          .entry = -1,
                          .source = -1};

        if (smp_schedule_next(sources->schedule, turn.phase, &turn.microbatch)) {
            turn.call = smp_call_of_root(turn.microbatch);
            list->ready[list->n++] = turn;
        }
    }
}

smp_status
smp_ready_list_fill(smp_ready_list *list, const smp_ready_sources *sources)
{
    const smp_status status = make_room(list, sources);

    list->n = 0;
    if (status == SMP_OK) {
        add_messages(list, sources);
        add_workers(list, sources);
        add_turns(list, sources);
    }
    return status;
}

void
smp_ready_list_fini(smp_ready_list *list)
{
    free(list->ready);
    *list = (smp_ready_list){0};
}
