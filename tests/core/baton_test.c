/* Two threads hand one baton back and forth. */
#define _GNU_SOURCE
#include <pthread.h>
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
} player;

static void *
play(void *arg)
{
    player *self = arg;
    game   *g = self->game;

    for (int i = 0; i < TURNS; i++) {
        smp_seat_wait(&g->seats[self->seat], g->spin_us);
        g->counter++;
        smp_seat_give(&g->seats[1 - self->seat]);
    }
    return NULL;
}

static void
play_with(int spin_us)
{
    game      g = {.spin_us = spin_us};
    player    players[2] = {{&g, 0}, {&g, 1}};
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
}

TEST(two_threads_hand_over_without_loss)
{
    play_with(0);
    play_with(20);
}

RUN_TESTS
