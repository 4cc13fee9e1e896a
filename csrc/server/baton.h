/* A seat: a thread's place to wait for the baton.
 *
 * One word, one waiter.  The giver writes once and wakes once; a spinning waiter is
 * given the baton without a system call.  Private to the process.
 */
#ifndef SMP_SERVER_BATON_H
#define SMP_SERVER_BATON_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    _Atomic uint32_t word; /* 0: not here; 1: given; 2: the waiter sleeps */
} smp_seat;

/* Waits until the baton is given, then takes it.  Spins for spin_us first. */
void smp_seat_wait(smp_seat *seat, int spin_us);

/* Gives the baton to the seat's present or next waiter. */
void smp_seat_give(smp_seat *seat);

#endif
