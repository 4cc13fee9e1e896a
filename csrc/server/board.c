/* One record under one lock. */
#define _GNU_SOURCE
#include "server/board.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/lock.h"

/* Workers with a higher number are counted, and not shown. */
#define SEATS 256
#define PLACE_BYTES 200

typedef struct {
    bool     taken;
    smp_wait wait;
} seat;

struct smp_board {
    int                rank;
    int                pp_size;
    const char        *pipelines; /* borrowed: the word for a pipeline's number */
    const char *const *ranks;     /* borrowed: the ranks' names */
    smp_lock           lock;      /* guards all below */
    char             **names;     /* owned, by entry */
    size_t             nnames;
    int64_t            moved_ns;
    uint32_t           step;
    bool               in_step;
    bool               works;
    smp_work           work;
    bool               outside;
    char               place[PLACE_BYTES];
    char               others[SMP_BOARD_OTHERS];
    int32_t            nwaits;
    size_t             top; /* seats from here on are free */
    seat               seats[SEATS];
};

/* A text of a limited size. */
typedef struct {
    char  *at;
    size_t room;
    size_t used;
} text;

static void add(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void
add(text *t, const char *format, ...)
{
    va_list arguments;
    int     n;

    va_start(arguments, format);
    n = vsnprintf(t->at + t->used, t->room - t->used, format, arguments);
    va_end(arguments);
    if (n > 0) {
        t->used += (size_t)n;
        if (t->used >= t->room) {
            t->used = t->room - 1;
        }
    }
}

static void
free_names(char **names, size_t n)
{
    for (size_t i = 0; names != NULL && i < n; i++) {
        free(names[i]);
    }
    free(names);
}

/* Caller holds the lock, as in all below. */
static const char *
name_of(const smp_board *board, int32_t entry)
{
    return entry >= 0 && (size_t)entry < board->nnames ? board->names[entry] : "?";
}

static void
add_work(text *t, const smp_board *board, const smp_work *work)
{
    add(t, "microbatch %d, %s: ", (int)work->microbatch,
        smp_phase_name((smp_phase)work->phase));
    if (work->entry < 0) {
        add(t, "the step function");
    } else {
        add(t, "module '%s'", name_of(board, work->entry));
    }
}

static void
add_key(text *t, const smp_key *key)
{
    t->used += smp_key_write(key, t->at + t->used, t->room - t->used);
}

/* The name of the rank asked by a task of `rank`. */
static const char *
name_of_asked(const smp_board *board, int rank, int32_t asked)
{
    const int first = rank - rank % board->pp_size; /* of its pipeline */

    return asked >= 0 && asked < board->pp_size ? board->ranks[first + asked] : "?";
}

static void
add_wait(text *t, const smp_board *board, int rank, const smp_wait *wait)
{
    add_work(t, board, &wait->work);
    switch ((smp_wait_kind)wait->kind) {
    case SMP_WAIT_NOTHING:
        add(t, " has come to its end");
        break;
    case SMP_WAIT_OUTPUTS:
        add(t, " waits for module '%s' on %s", name_of(board, wait->wanted),
            name_of_asked(board, rank, wait->asked));
        break;
    case SMP_WAIT_GRADIENTS:
        add(t, " waits for the backward of module '%s' on %s",
            name_of(board, wait->wanted), name_of_asked(board, rank, wait->asked));
        break;
    case SMP_WAIT_SCHEDULE:
        add(t, " waits for its turn to begin backward");
        break;
    case SMP_WAIT_GATE:
        add(t, " waits for earlier microbatches to pass this module, which changes its "
               "buffers or attributes");
        break;
    case SMP_WAIT_ISSUE:
        add(t, " waits for tp_rank 0 to call ");
        add_key(t, &wait->key);
        break;
    case SMP_WAIT_COLLECTIVE:
        add(t, " waits for the other %ss in ", board->pipelines);
        add_key(t, &wait->key);
        break;
    case SMP_WAIT_BALLOT:
        add(t, " waits for the other %ss to call module '%s'", board->pipelines,
            name_of(board, wait->wanted));
        break;
    }
}

static double
seconds(int64_t from_ns, int64_t to_ns)
{
    return (double)(to_ns - from_ns) / (double)SMP_NS_PER_S;
}

/* Into waits[], in order. */
static void
show(smp_standing *standing, const smp_wait *wait)
{
    int32_t at = standing->nshown;

    while (at > 0 && standing->waits[at - 1].since_ns > wait->since_ns) {
        at--;
    }
    if (at == SMP_STANDING_WAITS) {
        return;
    }
    if (standing->nshown < SMP_STANDING_WAITS) {
        standing->nshown++;
    }
    memmove(&standing->waits[at + 1], &standing->waits[at],
            (size_t)(standing->nshown - 1 - at) * sizeof(*wait));
    standing->waits[at] = *wait;
}

static void
read_locked(const smp_board *board, smp_standing *out)
{
    memset(out, 0, sizeof(*out)); /* it travels: no byte is left over */
    out->now_ns = smp_clock_ns();
    out->moved_ns = board->moved_ns;
    out->step = board->step;
    out->in_step = board->in_step;
    out->works = board->works;
    out->work = board->work;
    out->outside = board->outside;
    out->nwaits = board->nwaits;
    for (size_t i = 0; i < board->top; i++) {
        if (board->seats[i].taken) {
            show(out, &board->seats[i].wait);
        }
    }
}

smp_status
smp_board_create(int rank, int pp_size, const char *pipelines, const char *const *names,
                 smp_board **out)
{
    smp_board *board = calloc(1, sizeof(*board));

    if (board == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    board->rank = rank;
    board->pp_size = pp_size;
    board->pipelines = pipelines;
    board->ranks = names;
    smp_lock_init(&board->lock, SMP_LOCK_BOARD);
    *out = board;
    return SMP_OK;
}

void
smp_board_destroy(smp_board *board)
{
    if (board == NULL) {
        return;
    }
    smp_lock_fini(&board->lock);
    free_names(board->names, board->nnames);
    free(board);
}

smp_status
smp_board_name(smp_board *board, const char *const *paths, size_t n)
{
    char **names = calloc(n + 1, sizeof(*names));
    char **before;
    size_t nbefore;

    for (size_t i = 0; names != NULL && i < n; i++) {
        names[i] = strdup(paths[i]);
        if (names[i] == NULL) {
            free_names(names, i);
            names = NULL;
        }
    }
    if (names == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    smp_lock_acquire(&board->lock);
    before = board->names;
    nbefore = board->nnames;
    board->names = names;
    board->nnames = n;
    smp_lock_release(&board->lock);
    free_names(before, nbefore);
    return SMP_OK;
}

void
smp_board_begin(smp_board *board, uint32_t step)
{
    smp_lock_acquire(&board->lock);
    board->step = step;
    board->in_step = true;
    board->works = false;
    board->moved_ns = smp_clock_ns();
    smp_lock_release(&board->lock);
}

void
smp_board_end(smp_board *board)
{
    smp_lock_acquire(&board->lock);
    board->in_step = false;
    board->works = false;
    board->moved_ns = smp_clock_ns();
    smp_lock_release(&board->lock);
}

void
smp_board_place(smp_board *board, const char *what)
{
    smp_lock_acquire(&board->lock);
    board->outside = what != NULL;
    snprintf(board->place, sizeof(board->place), "%s", what == NULL ? "" : what);
    board->moved_ns = smp_clock_ns();
    smp_lock_release(&board->lock);
}

void
smp_board_hear(smp_board *board, const char *others)
{
    smp_lock_acquire(&board->lock);
    snprintf(board->others, sizeof(board->others), "%s", others);
    smp_lock_release(&board->lock);
}

void
smp_board_work(smp_board *board, smp_work work)
{
    smp_lock_acquire(&board->lock);
    board->works = true;
    board->work = work;
    board->moved_ns = smp_clock_ns();
    smp_lock_release(&board->lock);
}

void
smp_board_idle(smp_board *board)
{
    smp_lock_acquire(&board->lock);
    if (board->works) {
        board->works = false;
        board->moved_ns = smp_clock_ns();
    }
    smp_lock_release(&board->lock);
}

void
smp_board_wait(smp_board *board, uint16_t worker, smp_wait wait)
{
    wait.since_ns = smp_clock_ns();
    smp_lock_acquire(&board->lock);
    board->nwaits++;
    board->works = false;
    board->moved_ns = wait.since_ns;
    if (worker < SEATS) {
        board->seats[worker] = (seat){.taken = true, .wait = wait};
        board->top = worker >= board->top ? (size_t)worker + 1 : board->top;
    }
    smp_lock_release(&board->lock);
}

void
smp_board_go(smp_board *board, uint16_t worker)
{
    smp_lock_acquire(&board->lock);
    board->nwaits--;
    board->works = true;
    board->moved_ns = smp_clock_ns();
    if (worker < SEATS) {
        board->seats[worker].taken = false;
        board->work = board->seats[worker].wait.work;
    }
    smp_lock_release(&board->lock);
}

void
smp_board_read(smp_board *board, smp_standing *out)
{
    smp_lock_acquire(&board->lock);
    read_locked(board, out);
    smp_lock_release(&board->lock);
}

static void
begin_line(text *t, const smp_board *board, int rank)
{
    add(t, "  %s", board->ranks[rank]);
}

size_t
smp_board_write(smp_board *board, int rank, const smp_standing *standing, char *out,
                size_t room)
{
    text t = {.at = out, .room = room};

    out[0] = '\0';
    smp_lock_acquire(&board->lock);
    if (standing->works) {
        begin_line(&t, board, rank);
        add(&t, ": ");
        add_work(&t, board, &standing->work);
        add(&t, " runs, since %.1f s\n", seconds(standing->moved_ns, standing->now_ns));
    } else if (standing->in_step) {
        begin_line(&t, board, rank);
        add(&t, " has nothing to run, since %.1f s\n",
            seconds(standing->moved_ns, standing->now_ns));
    } else if (standing->outside && rank == board->rank) {
        begin_line(&t, board, rank);
        add(&t, " %s, since %.1f s\n", board->place,
            seconds(standing->moved_ns, standing->now_ns));
    }
    for (int32_t i = 0; i < standing->nshown && i < SMP_STANDING_WAITS; i++) {
        begin_line(&t, board, rank);
        add(&t, ": ");
        add_wait(&t, board, rank, &standing->waits[i]);
        add(&t, ", since %.1f s\n",
            seconds(standing->waits[i].since_ns, standing->now_ns));
    }
    if (standing->nwaits > standing->nshown) {
        begin_line(&t, board, rank);
        add(&t, ": %d more wait\n", (int)(standing->nwaits - standing->nshown));
    }
    smp_lock_release(&board->lock);
    return t.used;
}

size_t
smp_board_write_others(smp_board *board, char *out, size_t room)
{
    text t = {.at = out, .room = room};

    out[0] = '\0';
    smp_lock_acquire(&board->lock);
    add(&t, "%s", board->others);
    smp_lock_release(&board->lock);
    return t.used;
}

void
smp_board_write_work(smp_board *board, const smp_work *work, char *out, size_t room)
{
    text t = {.at = out, .room = room};

    out[0] = '\0';
    smp_lock_acquire(&board->lock);
    add_work(&t, board, work);
    smp_lock_release(&board->lock);
}

void
smp_board_write_one(smp_board *board, int rank, const smp_wait *wait, char *out,
                    size_t room)
{
    text t = {.at = out, .room = room};

    out[0] = '\0';
    smp_lock_acquire(&board->lock);
    add_wait(&t, board, rank, wait);
    smp_lock_release(&board->lock);
}

/* Whether the wait is for that rank of the comm. */
static bool
is_for(const smp_board *board, const smp_wait *wait, int rank)
{
    if (rank / board->pp_size == board->rank / board->pp_size) {
        return wait->kind <= SMP_WAIT_GRADIENTS && wait->asked == rank % board->pp_size;
    }
    return wait->kind >= SMP_WAIT_ISSUE &&
           rank % board->pp_size == board->rank % board->pp_size;
}

void
smp_board_write_wait(smp_board *board, int rank, char *out, size_t room)
{
    text         t = {.at = out, .room = room};
    smp_standing standing;
    int32_t      best = 0;

    out[0] = '\0';
    smp_lock_acquire(&board->lock);
    read_locked(board, &standing);
    for (int32_t i = standing.nshown; i-- > 0;) {
        if (is_for(board, &standing.waits[i], rank)) {
            best = i;
        }
    }
    if (standing.nshown > 0) {
        add_wait(&t, board, board->rank, &standing.waits[best]);
    }
    smp_lock_release(&board->lock);
}
