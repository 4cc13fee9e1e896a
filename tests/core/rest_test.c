/* The main thread's rest ends for the baton and for every signal, whoever it came to.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

#include "check.h"
#include "server/rest.h"

#define ROUNDS 2000

/* What Python's signal handler does with its wake-up descriptor. */
static _Atomic int wakeup_fd = -1;

static void
handler(int number)
{
    int     before = errno;
    uint8_t byte = (uint8_t)number;

    (void)!write(atomic_load(&wakeup_fd), &byte, 1);
    errno = before;
}

typedef struct {
    smp_rest    rest;
    int         forward;
    _Atomic int signals; /* waits that ended so */
    _Atomic int given;
} sleeper;

static void *
sleep_until_given(void *arg)
{
    sleeper *self = arg;

    while (!smp_rest_wait(&self->rest, self->forward)) {
        atomic_fetch_add(&self->signals, 1);
    }
    atomic_store(&self->given, 1);
    return NULL;
}

static void
listen_with(sleeper *s)
{
    struct sigaction act = {.sa_handler = handler, .sa_flags = SA_RESTART};

    CHECK(sigaction(SIGUSR1, &act, NULL) == 0);
    s->forward = -1;
    CHECK_OK(smp_rest_init(&s->rest));
    atomic_store(&wakeup_fd, s->rest.pipe[1]);
}

TEST(one_signal_to_another_thread_ends_the_wait)
{
    sleeper   s = {0};
    pthread_t thread;

    listen_with(&s);
    for (int i = 1; i <= ROUNDS; i++) {
        atomic_store(&s.given, 0);
        CHECK(pthread_create(&thread, NULL, sleep_until_given, &s) == 0);
        pthread_kill(pthread_self(), SIGUSR1); /* once: before, at or in the wait */
        while (atomic_load(&s.signals) < i) {
            sched_yield(); /* the runner's alarm is the deadline */
        }
        CHECK(atomic_load(&s.given) == 0);
        smp_rest_give(&s.rest);
        pthread_join(thread, NULL);
    }
    CHECK(atomic_load(&s.signals) == ROUNDS);
    smp_rest_fini(&s.rest);
}

TEST(a_signal_and_the_baton_at_once_lose_nothing)
{
    sleeper   s = {0};
    pthread_t thread;

    listen_with(&s);
    for (int i = 0; i < ROUNDS; i++) {
        CHECK(pthread_create(&thread, NULL, sleep_until_given, &s) == 0);
        if (i % 2 == 0) {
            pthread_kill(thread, SIGUSR1);
        }
        smp_rest_give(&s.rest);
        if (i % 2 == 1) {
            pthread_kill(thread, SIGUSR1);
        }
        pthread_join(thread, NULL);
    }
    smp_rest_fini(&s.rest);
}

TEST(what_another_listened_for_goes_on_to_it)
{
    sleeper   s = {0};
    pthread_t thread;
    int       others[2];
    uint8_t   byte = 0;

    listen_with(&s);
    CHECK(pipe2(others, O_NONBLOCK) == 0);
    s.forward = others[1];
    CHECK(pthread_create(&thread, NULL, sleep_until_given, &s) == 0);
    raise(SIGUSR1);
    while (atomic_load(&s.signals) == 0) {
        sched_yield();
    }
    CHECK(read(others[0], &byte, 1) == 1 && byte == SIGUSR1);
    smp_rest_give(&s.rest);
    pthread_join(thread, NULL);
    smp_rest_fini(&s.rest);
    close(others[0]);
    close(others[1]);
}

RUN_TESTS
