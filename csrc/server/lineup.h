/* The order of the collectives of modules, the same on all ranks of a TP_GROUP.
 *
 * Each rank's server runs requests in an order of its own, and a collective needs one
 * order on all ranks.  So every collective has a key, known to each rank by itself.
 * tp_rank 0 issues in its program's order, and appends each key to a list, sent to the
 * others.  Another rank issues when the next key of the list is its own.
 *
 * Threads  None: the holder of the server's baton.
 */
#ifndef SMP_SERVER_LINEUP_H
#define SMP_SERVER_LINEUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "server/key.h"

typedef struct smp_lineup smp_lineup;

/* SMP_ERR_NO_MEMORY. */
smp_status smp_lineup_create(int tp_rank, smp_lineup **out);
void       smp_lineup_destroy(smp_lineup *lineup); /* takes NULL */

/* A step begins. */
void smp_lineup_begin(smp_lineup *lineup);

/* Whether this rank may issue the collective now. */
bool smp_lineup_may_issue(const smp_lineup *lineup, const smp_key *key);

/* This rank has issued it, as it might.  SMP_ERR_NO_MEMORY. */
smp_status smp_lineup_issue(smp_lineup *lineup, const smp_key *key);

/* tp_rank 0 has.  SMP_ERR_NO_MEMORY. */
smp_status smp_lineup_hear(smp_lineup *lineup, const smp_key *key);

/* In the place of the number of collectives issued by a rank: it makes more. */
#define SMP_LINEUP_GOES_ON UINT64_MAX

/* Evidence of different calls by now: one rank's collective, missing at another rank's
 * end.  issued: [tp_size], by ranks at their end.  wanted: this rank's collective,
 * called and not to be issued yet; NULL: none.  False: all is well so far. */
typedef struct {
    smp_key key;
    int     caller; /* tp_rank */
    int     other;
} smp_lineup_gap;

bool smp_lineup_find_gap(const smp_lineup *lineup, const uint64_t *issued, int tp_size,
                         const smp_key *wanted, smp_lineup_gap *gap);

#endif
