/* A list of keys, a place in it, and the other ranks' last words. */
#include "server/lineup.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/schedule.h"

#define FIRST_ROOM 64

typedef struct {
    bool     ended;
    uint64_t issued; /* then */
} last_word;

struct smp_lineup {
    int       tp_rank;
    int       tp_size;
    int       leader; /* the rank of the list */
    smp_key  *keys; /* owned: the leader's collectives of this step, as far as known */
    size_t    nkeys;
    size_t    room;
    uint64_t  issued; /* by this rank: keys[0 .. issued) */
    last_word of[];   /* by tp_rank */
};

smp_key
smp_key_of(const char *path)
{
    const size_t length = strlen(path);
    smp_key      key;

    memset(&key, 0, sizeof(key)); /* it is compared, and travels, with every byte */
    if (length < sizeof(key.path)) {
        memcpy(key.path, path, length);
    } else {
        memcpy(key.path, "...", 3);
        memcpy(key.path + 3, path + length - (sizeof(key.path) - 4),
               sizeof(key.path) - 4);
    }
    return key;
}

size_t
smp_key_write(const smp_key *key, char *out, size_t room)
{
    const int n =
        snprintf(out, room, "module '%.*s' (microbatch %d, %s, call %u, collective %u)",
                 (int)sizeof(key->path) - 1, key->path, (int)key->microbatch,
                 smp_phase_name((smp_phase)key->phase), (unsigned)key->time,
                 (unsigned)key->number);

    return n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;
}

bool
smp_key_equal(const smp_key *a, const smp_key *b)
{
    return a->call == b->call && a->number == b->number &&
           memcmp(a->path, b->path, sizeof(a->path)) == 0;
}

smp_status
smp_lineup_create(int tp_rank, int tp_size, bool in_sequence, smp_lineup **out)
{
    smp_lineup *lineup =
        calloc(1, sizeof(*lineup) + (size_t)tp_size * sizeof(lineup->of[0]));

    if (lineup == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    lineup->tp_rank = tp_rank;
    lineup->tp_size = tp_size;
    lineup->leader = in_sequence ? tp_rank : 0;
    *out = lineup;
    return SMP_OK;
}

void
smp_lineup_destroy(smp_lineup *lineup)
{
    if (lineup != NULL) {
        free(lineup->keys);
        free(lineup);
    }
}

void
smp_lineup_begin(smp_lineup *lineup)
{
    lineup->nkeys = 0;
    lineup->issued = 0;
    memset(lineup->of, 0, (size_t)lineup->tp_size * sizeof(lineup->of[0]));
}

bool
smp_lineup_may_issue(const smp_lineup *lineup, const smp_key *key)
{
    return lineup->tp_rank == lineup->leader ||
           (lineup->issued < lineup->nkeys &&
            smp_key_equal(&lineup->keys[lineup->issued], key));
}

smp_status
smp_lineup_issue(smp_lineup *lineup, const smp_key *key)
{
    assert(smp_lineup_may_issue(lineup, key));
    if (lineup->tp_rank == lineup->leader) {
        const smp_status status = smp_lineup_hear(lineup, key);

        if (status != SMP_OK) {
            return status;
        }
    }
    lineup->issued++;
    return SMP_OK;
}

smp_status
smp_lineup_hear(smp_lineup *lineup, const smp_key *key)
{
    if (lineup->nkeys == lineup->room) {
        const size_t room = lineup->room == 0 ? FIRST_ROOM : 2 * lineup->room;
        smp_key     *more = realloc(lineup->keys, room * sizeof(*more));

        if (more == NULL) {
            return SMP_ERR_NO_MEMORY;
        }
        lineup->keys = more;
        lineup->room = room;
    }
    lineup->keys[lineup->nkeys++] = *key;
    return SMP_OK;
}

void
smp_lineup_end(smp_lineup *lineup, int tp_rank, uint64_t issued)
{
    lineup->of[tp_rank] = (last_word){.ended = true, .issued = issued};
}

uint64_t
smp_lineup_issued(const smp_lineup *lineup)
{
    return lineup->issued;
}

bool
smp_lineup_has_ended(const smp_lineup *lineup, int tp_rank)
{
    return lineup->of[tp_rank].ended;
}

bool
smp_lineup_is_over(const smp_lineup *lineup)
{
    for (int t = 0; t < lineup->tp_size; t++) {
        if (!lineup->of[t].ended) {
            return false;
        }
    }
    return true;
}

void
smp_lineup_range(const smp_lineup *lineup, uint64_t *least, uint64_t *most)
{
    *least = UINT64_MAX;
    *most = 0;
    for (int t = 0; t < lineup->tp_size; t++) {
        const last_word *word = &lineup->of[t];

        if (word->ended) {
            *least = word->issued < *least ? word->issued : *least;
            *most = word->issued > *most ? word->issued : *most;
        }
    }
}

/* A rank at its end with fewer collectives than the leader's, as far as known. */
static bool
find_short(const smp_lineup *lineup, smp_lineup_gap *gap)
{
    for (int t = 0; t < lineup->tp_size; t++) {
        const last_word *word = &lineup->of[t];

        if (word->ended && word->issued < lineup->nkeys) {
            *gap = (smp_lineup_gap){.key = lineup->keys[word->issued],
                                    .caller = lineup->leader,
                                    .other = t};
            return true;
        }
    }
    return false;
}

bool
smp_lineup_find_gap(const smp_lineup *lineup, const smp_key *wanted,
                    smp_lineup_gap *gap)
{
    if (find_short(lineup, gap)) {
        return true;
    }
    if (wanted != NULL && lineup->of[0].ended &&
        lineup->issued == lineup->of[0].issued) {
        *gap = (smp_lineup_gap){.key = *wanted, .caller = lineup->tp_rank, .other = 0};
        return true;
    }
    return false;
}
