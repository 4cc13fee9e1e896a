/* The text of errors about different calls of the ranks.
 *
 * Three places find these: the line-up of collectives (server/lineup.h), the sequence
 * of runs (server/sequence.h), and the answers of ranks in a deadlock
 * (server/detection.h).
 *
 * names: the ranks' in errors, by rank of the comm.  A text has at most `room` bytes
 * with the final NUL.
 *
 * Threads  any: nothing is kept.
 */
#ifndef SMP_SERVER_MISMATCH_H
#define SMP_SERVER_MISMATCH_H

#include <stdbool.h>
#include <stddef.h>

#include "server/board.h"
#include "server/detection.h"
#include "server/grid.h"
#include "server/lineup.h"
#include "server/sequence.h"

/* Room for the longest of the texts. */
#define SMP_MISMATCH_BYTES 1280

/* One rank of the stage has called a collective, and another has ended without. */
void smp_mismatch_write_gap(const smp_grid *grid, const char *const *names,
                            const smp_lineup_gap *gap, char *out, size_t room);

/* A run of this rank came to rest otherwise than the leader's. */
void smp_mismatch_write_rests(const smp_grid *grid, const char *const *names,
                              smp_board *board, const smp_sequence_gap *gap, char *out,
                              size_t room);

/* All ranks wait; of: their answers, by rank of the comm.  Whether the cause is
 * different calls by tp_rank 0 and another one. */
bool smp_mismatch_write_calls(const smp_grid *grid, const char *const *names,
                              const smp_still *of, char *out, size_t room);

#endif
