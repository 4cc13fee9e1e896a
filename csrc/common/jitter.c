/* A generator of random numbers for each thread, all from one seed. */
#define _GNU_SOURCE
#include "common/jitter.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "common/spin.h"

#define LONGEST_NS 200000u
#define MOST_PAUSES 256 /* some microseconds */

_Atomic bool smp_jitter_on;

static _Atomic uint64_t       seed;
static _Atomic uint64_t       threads; /* those with a draw so far */
static _Thread_local uint64_t state;   /* 0: this thread has not drawn */

/* xorshift64* [Vigna 2014]. */
static uint64_t
draw(void)
{
    if (state == 0) {
        uint64_t number = atomic_fetch_add(&threads, 1) + 1;

        state = (atomic_load(&seed) + number) * 0x9E3779B97F4A7C15u | 1;
    }
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545F4914F6CDD1Du >> 32;
}

void
smp_jitter_init(void)
{
    const char *text = getenv("SMP_JITTER");

    if (text != NULL && *text != '\0') {
        atomic_store(&seed, strtoull(text, NULL, 10));
    }
    atomic_store(&smp_jitter_on, text != NULL && *text != '\0');
}

void
smp_jitter_delay(void)
{
    uint64_t number = draw();
    int      error = errno;

    switch (number % 8) {
    case 0: {
        struct timespec delay = {.tv_nsec = (long)(number / 8 % LONGEST_NS)};

        nanosleep(&delay, NULL);
        break;
    }
    case 1:
    case 2:
    case 3:
        for (uint64_t n = number / 8 % MOST_PAUSES; n > 0; n--) {
            smp_spin_pause();
        }
        break;
    default:
        break;
    }
    errno = error;
}
