/* The open ballots of a step, in no order: they are few. */
#include "server/ballots.h"

#include <stdlib.h>

typedef struct {
    smp_ballot_list list; /* the words alike so far */
    int             cast; /* lists */
    bool            closed;
} open_ballot;

struct smp_ballots {
    int          ranks;
    bool         left;
    open_ballot *open; /* owned */
    size_t       n;
    size_t       room;
};

smp_status
smp_ballots_create(int ranks, smp_ballots **out)
{
    smp_ballots *ballots = calloc(1, sizeof(*ballots));

    if (ballots == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    ballots->ranks = ranks;
    *out = ballots;
    return SMP_OK;
}

void
smp_ballots_destroy(smp_ballots *ballots)
{
    if (ballots != NULL) {
        free(ballots->open);
        free(ballots);
    }
}

void
smp_ballots_begin(smp_ballots *ballots)
{
    ballots->n = 0;
    ballots->left = false;
}

/* Room for one more. */
static smp_status
make_room(smp_ballots *ballots)
{
    const size_t room = ballots->room == 0 ? 8 : 2 * ballots->room;
    open_ballot *more;

    if (ballots->n < ballots->room) {
        return SMP_OK;
    }
    more = realloc(ballots->open, room * sizeof(*more));
    if (more == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    ballots->open = more;
    ballots->room = room;
    return SMP_OK;
}

static size_t
find(const smp_ballots *ballots, const smp_ballot *ballot)
{
    size_t at = 0;

    while (at < ballots->n &&
           (ballots->open[at].list.ballot.call != ballot->call ||
            ballots->open[at].list.ballot.subject != ballot->subject)) {
        at++;
    }
    return at;
}

/* All have cast, and this rank has read: nothing is asked about it again. */
static void
forget_if_done(smp_ballots *ballots, size_t at)
{
    if (ballots->open[at].closed && ballots->open[at].cast == ballots->ranks) {
        ballots->open[at] = ballots->open[--ballots->n];
    }
}

smp_status
smp_ballots_cast(smp_ballots *ballots, const smp_ballot_list *list)
{
    const size_t at = find(ballots, &list->ballot);
    open_ballot *open;
    uint32_t     same = 0;

    if (at == ballots->n) {
        if (make_room(ballots) != SMP_OK) {
            return SMP_ERR_NO_MEMORY;
        }
        ballots->open[ballots->n++] = (open_ballot){.list = *list, .cast = 1};
        return SMP_OK;
    }
    open = &ballots->open[at];
    while (same < list->n && same < open->list.n &&
           list->words[same] == open->list.words[same]) {
        same++;
    }
    open->list.n = same;
    open->cast++;
    forget_if_done(ballots, at);
    return SMP_OK;
}

void
smp_ballots_leave(smp_ballots *ballots)
{
    ballots->left = true;
}

bool
smp_ballots_are_left(const smp_ballots *ballots)
{
    return ballots->left;
}

bool
smp_ballots_read(const smp_ballots *ballots, const smp_ballot *ballot, size_t *outcome)
{
    const size_t at = find(ballots, ballot);

    *outcome = 0;
    if (at == ballots->n || ballots->open[at].list.n == 0) {
        return true;
    }
    if (ballots->open[at].cast == ballots->ranks) {
        *outcome = ballots->open[at].list.n;
        return true;
    }
    return ballots->left;
}

bool
smp_ballots_are_complete(const smp_ballots *ballots, const smp_ballot *ballot)
{
    const size_t at = find(ballots, ballot);

    return at < ballots->n && ballots->open[at].cast == ballots->ranks;
}

bool
smp_ballots_are_decided(const smp_ballots *ballots, const smp_ballot *ballot,
                        bool for_all)
{
    size_t outcome;

    return for_all ? ballots->left || smp_ballots_are_complete(ballots, ballot)
                   : smp_ballots_read(ballots, ballot, &outcome);
}

void
smp_ballots_close(smp_ballots *ballots, const smp_ballot *ballot)
{
    const size_t at = find(ballots, ballot);

    if (at < ballots->n) {
        ballots->open[at].closed = true;
        forget_if_done(ballots, at);
    }
}
