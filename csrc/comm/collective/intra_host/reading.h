/* Reading the memory of another process of this host by a system call.
 *
 * It needs no preparation and no memory in common.  But the kernel walks through the
 * pages and copies in its own way: faster than two copies through a slot on some
 * machines, slower on others.
 *
 * Threads  any.
 */
#ifndef SMP_COMM_COLLECTIVE_INTRA_HOST_READING_H
#define SMP_COMM_COLLECTIVE_INTRA_HOST_READING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Whether members of a group read each other's memory so. */
typedef enum {
    SMP_READ_WHERE_FASTER, /* ... than through slots, and each has a core to itself */
    SMP_READ_ALWAYS,       /* where they can */
    SMP_READ_NEVER,
} smp_reading;

/* Copies from the memory of a process.  0, or an errno: ESRCH also for an ended one, or
 * pid 0, of a process without a pid here. */
int smp_read_process(pid_t pid, void *to, uint64_t from, size_t bytes);

/* Whether reading is faster here than going through slots.  The first call of a process
 * measures this for some milliseconds. */
bool smp_reading_pays(void);

#endif
