/* Runs a few threads in every order that can make a difference.
 *
 * A scenario's threads are coroutines.  They stop at each scheduling point (points.h),
 * and the explorer says whose turn it is; then it runs the scenario again, from the
 * beginning, with another order, until there is none left.  Orders that differ only in
 * steps which do not touch the same word are one order (sleep sets: P. Godefroid,
 * Partial-Order Methods for the Verification of Concurrent Systems, 1996).  A word that
 * one thread alone uses, or that all only read, is not looked at: which ones these are
 * is found out by running, and the search begins again when one turns out to be shared.
 *
 * What it finds: a thread that sleeps for ever (a lost wake-up), one that only the
 * limit of its sleep wakes, and whatever the threads and check() look for.
 *
 * What it does not: everything here is sequentially consistent, so an access whose
 * memory order is too weak is the thread sanitizer's business.  A condition variable
 * wakes the one that has slept the longest, and none without reason.
 *
 * Threads  One, the caller's.
 */
#ifndef SMP_TESTS_EXPLORER_H
#define SMP_TESTS_EXPLORER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPLORE_THREADS 6

typedef struct {
    const char *name;
    void (*run)(void); /* NULL: what set_up() starts with pthread_create() */
    bool serves;       /* may sleep for ever */
} explore_thread;

typedef struct {
    void (*set_up)(void);                    /* before each run, without points */
    explore_thread threads[EXPLORE_THREADS]; /* up to the first without a name */
    void (*check)(void); /* after each run, without points: explore_wrong(); or NULL */
    bool timers;         /* the limit of a sleep may be what ends it */
} exploration;

typedef struct {
    uint64_t runs;       /* that differ from each other */
    uint64_t redundant;  /* that turned out not to */
    size_t   longest;    /* steps of a run */
    char     wrong[256]; /* the first thing that went wrong, or "" */
} explore_findings;

/* Stops at the first run that goes wrong; shows its steps on stderr if `show`. */
void explore(const exploration *what, bool show, explore_findings *out);

/* By a thread or check(): this run is wrong. */
void explore_wrong(const char *why);

/* By a thread: ends thread i where it stands, as a killed process does; at any moment
 * of its life. */
void explore_kill(int thread);

#endif
