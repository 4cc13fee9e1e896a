/* The board: this rank's work and waits, for any thread to read.
 *
 * The server writes on it as it goes; the watchdog and the messages of failed steps
 * read it.  Module paths are on it too, because Python cannot be asked then.
 *
 * Threads  All functions: any.  No lock is held on return.
 */
#ifndef SMP_SERVER_BOARD_H
#define SMP_SERVER_BOARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "server/key.h"
#include "server/schedule.h"

typedef struct smp_board smp_board;

/* The awaited event of a task. */
typedef enum {
    SMP_WAIT_NOTHING = -1, /* it is over; not on the board */
    SMP_WAIT_OUTPUTS,      /* of module `wanted` on rank `asked` */
    SMP_WAIT_GRADIENTS,    /* the same, in backward */
    SMP_WAIT_SCHEDULE,     /* its turn to begin backward */
    SMP_WAIT_GATE,         /* earlier microbatches, at a module with buffers */
    SMP_WAIT_ISSUE,        /* its turn among the collectives: `key` is not the next */
    SMP_WAIT_COLLECTIVE,   /* the other ranks of the TP_GROUP, in `key` */
    SMP_WAIT_BALLOT,       /* ... before or after a call of module `wanted` */
} smp_wait_kind;

/* A request running here, or the step function of a microbatch. */
typedef struct {
    int32_t microbatch;
    int32_t entry; /* -1: the step function */
    int32_t phase; /* smp_phase */
} smp_work;

typedef struct {
    smp_work work;   /* the waiting task's */
    int32_t  kind;   /* smp_wait_kind */
    int32_t  wanted; /* entry; GATE: gate */
    int32_t  asked;
    int64_t  since_ns; /* smp_clock_ns() of this rank */
    uint64_t issued;   /* COLLECTIVE: how many this rank had issued before */
    smp_key  key;      /* ISSUE, COLLECTIVE */
} smp_wait;

/* The most waits shown by a board. */
#define SMP_STANDING_WAITS 16

/* A rank at one moment.  Travels between ranks as it is. */
typedef struct {
    int64_t  now_ns;   /* when it was read */
    int64_t  moved_ns; /* when anything changed */
    uint32_t step;
    int32_t  in_step;
    int32_t  works;   /* a task runs: work */
    smp_work work;    /* since moved_ns */
    int32_t  outside; /* of a step, at the place of smp_board_place() */
    int32_t  nwaits;  /* all */
    int32_t  nshown;  /* in waits[], the longest first */
    smp_wait waits[SMP_STANDING_WAITS];
} smp_standing;

/* rank, and those below: of the comm, pipeline * pp_size + pp_rank.  pipelines: the
 * word for a pipeline's number, "tp_rank" or "dp_rank"; names: the ranks', by rank;
 * both borrowed until destroy.  SMP_ERR_NO_MEMORY. */
smp_status smp_board_create(int rank, int pp_size, const char *pipelines,
                            const char *const *names, smp_board **out);
void       smp_board_destroy(smp_board *board);

/* Names entries 0 .. n-1; copied.  SMP_ERR_NO_MEMORY: the old names stay. */
smp_status smp_board_name(smp_board *board, const char *const *paths, size_t n);

void smp_board_begin(smp_board *board, uint32_t step);
void smp_board_end(smp_board *board);

/* The rank is somewhere outside a step: "waits in smp.barrier()"; NULL: not any more.
 */
void smp_board_place(smp_board *board, const char *what);

/* Other ranks' standings, as told by them: lines for smp_board_write_others(); "":
 * nowhere.  Copied, and cut off at SMP_BOARD_OTHERS - 1 bytes. */
#define SMP_BOARD_OTHERS 2048
void smp_board_hear(smp_board *board, const char *others);

/* A task runs; or nothing does. */
void smp_board_work(smp_board *board, smp_work work);
void smp_board_idle(smp_board *board);

/* A worker waits; since_ns is filled in.  Then it goes on. */
void smp_board_wait(smp_board *board, uint16_t worker, smp_wait wait);
void smp_board_go(smp_board *board, uint16_t worker);

void smp_board_read(smp_board *board, smp_standing *out);

/* Writes the work and the waits of `rank`, one line each, indented; at most `room`
 * bytes with the final NUL.  Returns the number of bytes without the NUL. */
size_t smp_board_write(smp_board *board, int rank, const smp_standing *standing,
                       char *out, size_t room);

/* The last standings of smp_board_hear(), likewise. */
size_t smp_board_write_others(smp_board *board, char *out, size_t room);

/* "microbatch 2, forward: module 'layers.3'", at most `room` bytes with the final NUL.
 */
void smp_board_write_work(smp_board *board, const smp_work *work, char *out,
                          size_t room);

/* One wait on `rank`, as in smp_board_write(), at most `room` bytes with the final
 * NUL. */
void smp_board_write_one(smp_board *board, int rank, const smp_wait *wait, char *out,
                         size_t room);

/* The longest wait for `rank`; the longest of all, if none is for that rank.  Empty
 * text: no waits. */
void smp_board_write_wait(smp_board *board, int rank, char *out, size_t room);

#endif
