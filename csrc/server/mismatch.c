/* Different calls, in words. */
#include "server/mismatch.h"

#include <stdio.h>

/* A collective called by one rank and not by others; key NULL: none. */
typedef struct {
    int            rank; /* of the comm */
    const smp_key *key;
} lone_call;

void
smp_mismatch_write_gap(const smp_grid *grid, const char *const *names,
                       const smp_lineup_gap *gap, char *out, size_t room)
{
    char called[2 * SMP_KEY_PATH];

    (void)smp_key_write(&gap->key, called, sizeof(called));
    snprintf(out, room, "%s has called %s, and %s has ended the step without",
             names[smp_grid_in_stage(grid, gap->caller)], called,
             names[smp_grid_in_stage(grid, gap->other)]);
}

void
smp_mismatch_write_rests(const smp_grid *grid, const char *const *names,
                         smp_board *board, const smp_sequence_gap *gap, char *out,
                         size_t room)
{
    const int leader = smp_grid_in_stage(grid, 0);
    const int own = smp_grid_in_stage(grid, grid->pipeline);
    char      its[SMP_MISMATCH_BYTES / 2];
    char      ours[SMP_MISMATCH_BYTES / 2];

    smp_board_write_one(board, leader, &gap->leader, its, sizeof(its));
    smp_board_write_one(board, own, &gap->own, ours, sizeof(ours));
    snprintf(out, room, "%s: %.500s; %s: %.500s", names[leader], its, names[own], ours);
}

/* Waits shown by a board: 0 .. most_shown() - 1. */
static int32_t
most_shown(const smp_standing *standing)
{
    return standing->nshown < SMP_STANDING_WAITS ? standing->nshown
                                                 : SMP_STANDING_WAITS;
}

/* Tries the calls of tp_rank 0 missing on this rank, of another tp_rank, beside `own`.
 * Two calls of one microbatch, one on each side, are the difference: a microbatch is at
 * one place at a time.  True: *left is such a call; else perhaps some call. */
static bool
find_other_call(const smp_grid *grid, const smp_still *of, int tp_rank,
                const smp_key *own, lone_call *left)
{
    for (int p = 0; p < grid->pp_size; p++) {
        const smp_standing *its = &of[p].standing;
        const uint64_t      issued = of[smp_grid_rank(grid, tp_rank, p)].issued;

        for (int32_t i = 0; i < most_shown(its); i++) {
            const smp_wait *wait = &its->waits[i];

            if (wait->kind != SMP_WAIT_COLLECTIVE || wait->issued < issued) {
                continue;
            }
            if (own == NULL || (wait->key.microbatch == own->microbatch &&
                                !smp_key_equal(&wait->key, own))) {
                *left = (lone_call){p, &wait->key};
                return true;
            }
        }
    }
    return false;
}

/* The calls of this tp_rank and of tp_rank 0 in the same microbatch, each alone; else
 * one rank's.  False: none. */
static bool
find_lone_calls(const smp_grid *grid, const smp_still *of, int tp_rank, lone_call *left,
                lone_call *right)
{
    for (int p = 0; p < grid->pp_size; p++) {
        const int           rank = smp_grid_rank(grid, tp_rank, p);
        const smp_standing *its = &of[rank].standing;

        for (int32_t i = 0; i < most_shown(its); i++) {
            if (its->waits[i].kind == SMP_WAIT_ISSUE) {
                *right = (lone_call){rank, &its->waits[i].key};
                if (find_other_call(grid, of, tp_rank, right->key, left)) {
                    return true;
                }
            }
        }
    }
    return (right->key == NULL && find_other_call(grid, of, tp_rank, NULL, left)) ||
           right->key != NULL;
}

bool
smp_mismatch_write_calls(const smp_grid *grid, const char *const *names,
                         const smp_still *of, char *out, size_t room)
{
    for (int t = 1; t < grid->pipelines; t++) {
        lone_call left = {.rank = 0};
        lone_call right = {.rank = smp_grid_rank(grid, t, 0)};
        char      its[2 * SMP_KEY_PATH] = "nothing";
        char      own[2 * SMP_KEY_PATH] = "nothing";

        if (!find_lone_calls(grid, of, t, &left, &right)) {
            continue;
        }
        if (left.key != NULL) {
            (void)smp_key_write(left.key, its, sizeof(its));
        } else {
            left.rank = smp_grid_pp_rank_of(grid, right.rank);
        }
        if (right.key != NULL) {
            (void)smp_key_write(right.key, own, sizeof(own));
        } else {
            right.rank = smp_grid_rank(grid, t, left.rank);
        }
        snprintf(out, room, "%s has called %s, and %s has called %s", names[left.rank],
                 its, names[right.rank], own);
        return true;
    }
    return false;
}
