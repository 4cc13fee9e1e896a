/* The hand-over of the baton, by futex. */
#define _GNU_SOURCE
#include "server/baton.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/jitter.h"

enum { AWAY = 0, GIVEN = 1, ASLEEP = 2 };

static uint64_t
now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

static bool
take(smp_seat *seat)
{
    uint32_t given = GIVEN;

    return atomic_compare_exchange_strong_explicit(
        &seat->word, &given, AWAY, memory_order_acquire, memory_order_relaxed);
}

/* May return early. */
static void
sleep_once(smp_seat *seat)
{
    uint32_t away = AWAY;

    atomic_compare_exchange_strong(&seat->word, &away, ASLEEP);
    smp_jitter();
    if (atomic_load(&seat->word) == ASLEEP) {
        syscall(SYS_futex, &seat->word, FUTEX_WAIT_PRIVATE, ASLEEP, NULL, NULL, 0);
    }
}

void
smp_seat_wait(smp_seat *seat, int spin_us)
{
    smp_jitter();
    if (spin_us > 0) {
        uint64_t until = now_us() + (uint64_t)spin_us;

        do {
            for (int i = 0; i < 64; i++) {
                if (take(seat)) {
                    return;
                }
            }
        } while (now_us() < until);
    }
    while (!take(seat)) {
        sleep_once(seat);
    }
}

void
smp_seat_give(smp_seat *seat)
{
    smp_jitter();
    if (atomic_exchange_explicit(&seat->word, GIVEN, memory_order_release) == ASLEEP) {
        syscall(SYS_futex, &seat->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}
