/* Two threads hand one baton back and forth; a signal wakes a waiter without it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "server/baton.h"

#define TURNS 100000

typedef struct {
    smp_seat seats[2];
    int      spin_us;
    long     counter; /* the baton's holder only: no atomic, so that a race is seen */
} game;

typedef struct {
    game *game;
    int   seat;
    bool  by_signal_wait;
} player;

static void *
play(void *arg)
{
    player *self = arg;
    game   *g = self->game;

    for (int i = 0; i < TURNS; i++) {
        if (self->by_signal_wait) {
            while (!smp_seat_wait_signal(&g->seats[self->seat])) {
            }
        } else {
            smp_seat_wait(&g->seats[self->seat], g->spin_us);
        }
        g->counter++;
        smp_seat_give(&g->seats[1 - self->seat]);
    }
    return NULL;
}

static int
play_with(int spin_us, bool by_signal_wait)
{
    game      g = {.spin_us = spin_us};
    player    players[2] = {{&g, 0, false}, {&g, 1, by_signal_wait}};
    pthread_t threads[2];

    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, play, &players[i]) == 0);
    }
    smp_seat_give(&g.seats[0]);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    CHECK(g.counter == 2L * TURNS);
    smp_seat_wait(&g.seats[0], 0); /* the last give lies there */
    CHECK(atomic_load(&g.seats[0].word) == 0 && atomic_load(&g.seats[1].word) == 0);
    return 0;
}

TEST(two_threads_hand_over_without_loss)
{
    return play_with(0, false) || play_with(20, false);
}

TEST(a_waiter_that_listens_to_signals_loses_no_baton)
{
    return play_with(0, true);
}

static _Atomic int heard;

static void
hear(int number)
{
    (void)number;
    atomic_fetch_add(&heard, 1);
}

typedef struct {
    smp_seat    seat;
    _Atomic int withdrawn; /* waits that ended by a signal */
    _Atomic int ended;
} listener;

static void *
listen_for_signals(void *arg)
{
    listener *self = arg;

    while (!smp_seat_wait_signal(&self->seat)) {
        atomic_fetch_add(&self->withdrawn, 1);
    }
    atomic_store(&self->ended, 1);
    return NULL;
}

TEST(a_signal_ends_the_wait_and_the_baton_still_arrives)
{
    struct sigaction act = {.sa_handler = hear};
    listener         l = {0};
    pthread_t        thread;

    sigaction(SIGUSR1, &act, NULL);
    CHECK(pthread_create(&thread, NULL, listen_for_signals, &l) == 0);
    while (atomic_load(&l.withdrawn) < 100) { /* the runner's alarm is the deadline */
        pthread_kill(thread, SIGUSR1);
        sched_yield();
    }
    CHECK(atomic_load(&l.ended) == 0);
    smp_seat_give(&l.seat);
    pthread_join(thread, NULL);
    CHECK(atomic_load(&heard) >= 100);
    CHECK(atomic_load(&l.seat.word) == 0);
    return 0;
}

TEST(a_signal_and_the_baton_at_once_lose_nothing)
{
    struct sigaction act = {.sa_handler = hear};

    sigaction(SIGUSR1, &act, NULL);
    for (int i = 0; i < 2000; i++) {
        listener  l = {0};
        pthread_t thread;

        CHECK(pthread_create(&thread, NULL, listen_for_signals, &l) == 0);
        if (i % 2 == 0) {
            pthread_kill(thread, SIGUSR1);
        }
        smp_seat_give(&l.seat);
        if (i % 2 == 1) {
            pthread_kill(thread, SIGUSR1);
        }
        pthread_join(thread, NULL);
        CHECK(atomic_load(&l.seat.word) == 0);
    }
    return 0;
}

int
main(int argc, char **argv)
{
    static const smp_test tests[] = {
        {"hand_over", two_threads_hand_over_without_loss},
        {"hand_over_signal", a_waiter_that_listens_to_signals_loses_no_baton},
        {"signal", a_signal_ends_the_wait_and_the_baton_still_arrives},
        {"signal_race", a_signal_and_the_baton_at_once_lose_nothing},
    };

    alarm(240);
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
