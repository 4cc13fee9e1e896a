/* A list of keys, and a place in it. */
#include "server/lineup.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_ROOM 64

struct smp_lineup {
    int      tp_rank;
    smp_key *keys; /* owned: tp_rank 0's collectives of this step, as far as known */
    size_t   nkeys;
    size_t   room;
    size_t   issued; /* by this rank: keys[0 .. issued) */
};

smp_status
smp_lineup_create(int tp_rank, smp_lineup **out)
{
    smp_lineup *lineup = calloc(1, sizeof(*lineup));

    if (lineup == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    lineup->tp_rank = tp_rank;
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
}

bool
smp_lineup_may_issue(const smp_lineup *lineup, const smp_key *key)
{
    return lineup->tp_rank == 0 || (lineup->issued < lineup->nkeys &&
                                    smp_key_equal(&lineup->keys[lineup->issued], key));
}

smp_status
smp_lineup_issue(smp_lineup *lineup, const smp_key *key)
{
    assert(smp_lineup_may_issue(lineup, key));
    if (lineup->tp_rank == 0) {
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

bool
smp_lineup_find_gap(const smp_lineup *lineup, const uint64_t *issued, int tp_size,
                    const smp_key *wanted, smp_lineup_gap *gap)
{
    for (int t = 0; t < tp_size; t++) {
        if (issued[t] < lineup->nkeys) {
            *gap = (smp_lineup_gap){
                .key = lineup->keys[issued[t]], .caller = 0, .other = t};
            return true;
        }
    }
    if (wanted != NULL && lineup->issued == issued[0]) {
        *gap = (smp_lineup_gap){.key = *wanted, .caller = lineup->tp_rank, .other = 0};
        return true;
    }
    return false;
}
